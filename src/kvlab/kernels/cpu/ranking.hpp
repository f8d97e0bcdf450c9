// The order of numbers with their places, in which the choice of a token looks for the largest: NaN is larger than any
// number, as it is for PyTorch, so that it shows. Of equals (0 and -0, and NaNs, are) the first comes first.
#pragma once

#include "simd.hpp"

namespace {

// Larger for what comes earlier: the number, in an order that integers have too, above the place.
INLINE uint64_t key_of(float x, int64_t place) {
    uint32_t bits = 0xffffffffu;
    if (x == x) {
        x += 0.0f;  // -0 becomes 0
        std::memcpy(&bits, &x, sizeof bits);
        bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    }
    return uint64_t(bits) << 32 | (0xffffffffu - uint32_t(place));
}

INLINE int64_t place_of(uint64_t key) { return 0xffffffffu - uint32_t(key); }

// The number of a key: NaN, or one that is not -0.
INLINE float number_of(uint64_t key) {
    uint32_t bits = uint32_t(key >> 32);
    bits = bits >> 31 ? bits & 0x7fffffffu : ~bits;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

}  // namespace
