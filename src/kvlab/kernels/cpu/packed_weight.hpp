// A packed weight, bfloat16 or int8, and the product that it is a part of.
//
// Panels of LANES outputs, in a panel one vector for each pair of inputs, so that a panel is read from its first
// byte to its last.
#pragma once

#include "int8.hpp"

#include <algorithm>

namespace {

// A pair of inputs of a panel: a vector with a pair for each output, or a vector of float32 for each of the two.
struct Widened {
    Floats first, second;
};

struct BFloat16 {
    static constexpr int BYTES = 4 * LANES;  // of a vector of pairs

    INLINE Words pairs(const char* at) { return load_words(at); }

    INLINE Widened widened(const char* at) {
        const Words both = load_words(at);
        return {as_floats(both << 16), as_floats(both & 0xffff0000u)};
    }
};

struct Int8 {
    static constexpr int BYTES = 2 * LANES;

    // Exact: bfloat16 has eight digits.
    INLINE Words pairs(const char* at) {
#if defined(__AVX512BF16__)
        return bfloat16_of(reinterpret_cast<const int8_t*>(at));
#else
        const Widened both = widened(at);
        return as_words(both.first) >> 16 | as_words(both.second);
#endif
    }

    INLINE Widened widened(const char* at) {
        const Words both = int8_pairs(reinterpret_cast<const int8_t*>(at));
        return {even_int8(both), odd_int8(both)};
    }
};

// 12 bits a number, see compact_weight.hpp. Vectors are read behind unpacking.
struct Compact {
    static constexpr int BYTES = 3 * LANES;  // on average
};

// Whether the first half of the outputs are gates of the second; `out` then has half as many.
enum class Gate { NONE, SILU, GELU };

struct Product {
    const char* weights;  // packed
    const float* scales;  // of each output of int8 weights, else null
    const uint16_t* bias;
    uint16_t* out;  // null: only the largest output of each row is wanted
    int rows, outputs, pairs;
    Gate gate = Gate::NONE;
    bool out_in_tiles = false;  // of gated outputs: see tiles.hpp

    int panels() const { return (outputs + LANES - 1) / LANES; }
};

INLINE uint16_t to_bfloat16(float x) { return uint16_t(rounded_to_bfloat16(all(x))[0] >> 16); }

// The outputs of a row and a panel, in float32.
INLINE Floats finished(const Product& product, int panel, Floats sums) {
    const int first = panel * LANES, lanes = std::min(LANES, product.outputs - first);
    if (product.scales) sums *= widen_some(product.scales + first, lanes);
    if (product.bias) sums += widen_some(product.bias + first, lanes);
    return sums;
}

// Write the outputs of a row and a panel.
inline void store_outputs(const Product& product, int row, int panel, Floats sums) {
    const int first = panel * LANES, lanes = std::min(LANES, product.outputs - first);
    const Halves narrow = narrowed(finished(product, panel, sums));
    uint16_t* out = product.out + int64_t(row) * product.outputs + first;
    if (lanes == LANES)
        std::memcpy(out, &narrow, sizeof narrow);
    else
        std::memcpy(out, &narrow, lanes * sizeof out[0]);
}

}  // namespace
