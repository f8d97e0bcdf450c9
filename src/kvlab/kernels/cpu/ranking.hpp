// A number and its index as one integer key, whose order is that of top-k: the larger number first, and of equal ones (0
// and -0, and all NaN, are equal) the lower index. NaN is larger than any number, as for PyTorch, so that it is noticed.
#pragma once

#include "simd.hpp"

namespace {

// The key: the number, mapped to an integer of the same order, above the complement of the index.
INLINE uint64_t key_of(float x, int64_t index) {
    uint32_t bits = 0xffffffffu;
    if (x == x) {
        x += 0.0f;  // -0 becomes 0
        std::memcpy(&bits, &x, sizeof bits);
        bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(index));
}

INLINE int64_t index_of(uint64_t key) { return 0xffffffffu - uint32_t(key); }

// The number of a key: NaN, or one that is not -0.
INLINE float number_of(uint64_t key) {
    uint32_t bits = uint32_t(key >> 32);
    bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

}  // namespace
