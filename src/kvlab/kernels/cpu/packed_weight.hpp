// A packed weight, and the product that it is a part of.
//
// Panels of LANES outputs, in a panel one vector for each pair of inputs, or two in float32, so that a panel is read from
// its first byte to its last.
#pragma once

#include "int8.hpp"

#include <algorithm>

namespace {

// How a pair of inputs of a panel is stored: BYTES, read as a vector with a pair for each output (`pairs`), or as a vector
// of float32 for the first (`input` 0) or the second (1) of the pair.

struct Float32 {
    static constexpr int BYTES = 8 * LANES;

    INLINE Floats input(const char* at, int which) { return load(reinterpret_cast<const float*>(at) + which * LANES); }
};

struct BFloat16 {
    static constexpr int BYTES = 4 * LANES;

    INLINE Words pairs(const char* at) { return load_words(at); }

    INLINE Floats input(const char* at, int which) {
        const Words both = load_words(at);
        return as_floats(which ? both & 0xffff0000u : both << 16);
    }
};

struct Int8 {
    static constexpr int BYTES = 2 * LANES;

    // Exact: bfloat16 has eight digits.
    INLINE Words pairs(const char* at) {
#if defined(__AVX512BF16__)
        return bfloat16_of(reinterpret_cast<const int8_t*>(at));
#else
        return as_words(input(at, 0)) >> 16 | as_words(input(at, 1));
#endif
    }

    INLINE Floats input(const char* at, int which) {
        const Words both = int8_pairs(reinterpret_cast<const int8_t*>(at));
        return which ? odd_int8(both) : even_int8(both);
    }
};

// Four inputs of each output together, as linear_in_int8.hpp multiplies them.
struct Int8Quads {
    static constexpr int BYTES = 4 * LANES;
    static constexpr int ZERO = 128;  // is added to what is stored, unsigned
};

// 12 bits a number, see compact_weight.hpp. Vectors are read behind unpacking.
struct Compact {
    static constexpr int BYTES = 3 * LANES;  // on average
};

// Whether the first half of the outputs are gates of the second; `out` then has half as many.
enum class Gate { NONE, SILU, GELU };

// What belongs to a row of x in int8.
struct Int8Row {
    float scale;
    int32_t sum;    // of its numbers
    int32_t rests;  // see linear_in_int8.hpp

    // From sums of its products with Int8Quads.
    Floats scaled(Ints sums) const { return __builtin_convertvector(sums - Int8Quads::ZERO * sum, Floats) * scale; }
};

// Element of x, outputs and bias.
template <class Element>
struct ProductOf {
    const char* weights;  // packed
    const float* scales;  // of each output of int8 weights, else null
    const Element* bias;
    Element* out;  // null: only the largest output of each row is wanted
    int rows, outputs, pairs;
    Gate gate = Gate::NONE;
    bool out_in_tiles = false;  // of gated outputs: see tiles.hpp
    bool out_in_float32 = false;  // `out` has floats: logits, of which ties are not to be made by rounding
    const Int8Row* x_rows = nullptr;  // of x in int8: sums are in int32

    int panels() const { return (outputs + LANES - 1) / LANES; }
};

using Product = ProductOf<uint16_t>;

// From a vector to the one that is prefetched with it, where so many panels are read side by side, `at` bytes from their
// beginnings: further on in its panel, or as far behind the beginning of the panel that comes next in its place.
template <int PANELS_AT_ONCE>
INLINE int64_t bytes_ahead(int64_t at, int64_t panel_size) {
    constexpr int AHEAD = 8192;
    return at + AHEAD < panel_size ? AHEAD : AHEAD + (PANELS_AT_ONCE - 1) * panel_size;
}

// Lines of weights are prefetched into the first cache where it is as large as that of a Zen 5. One of 32 KB has no room for
// two panels' 8 KB beside rows of x: there they wait in the second, and few rows read more panels side by side.
#if defined(KVLAB_FIRST_CACHE_KB) && KVLAB_FIRST_CACHE_KB < 48
constexpr bool INTO_SECOND_CACHE = true;
#else
constexpr bool INTO_SECOND_CACHE = false;
#endif

// How many panels so many rows read side by side: the sums of all fit the registers.
template <int ROWS>
constexpr int side_by_side() {
    return !INTO_SECOND_CACHE || ROWS > 2 ? 2 : std::min(8, LANES / ROWS);
}

INLINE uint16_t to_bfloat16(float x) { return uint16_t(rounded_to_bfloat16(all(x))[0] >> 16); }

// The outputs of a row and a panel, in float32. WHOLE: none is cut off.
template <bool WHOLE = false, class Element>
INLINE Floats finished(const ProductOf<Element>& product, int panel, Floats sums) {
    const int first = panel * LANES, lanes = WHOLE ? LANES : std::min(LANES, product.outputs - first);
    if (product.scales) sums *= widen_some(product.scales + first, lanes);
    if (product.bias) sums += widen_some(product.bias + first, lanes);
    return sums;
}

// Write the outputs of a row and a panel.
template <class Element>
void store_outputs(const ProductOf<Element>& product, int row, int panel, Floats sums) {
    const int first = panel * LANES, lanes = std::min(LANES, product.outputs - first);
    const int64_t at = int64_t(row) * product.outputs + first;
    const Floats outputs = finished(product, panel, sums);
    if (product.out_in_float32)
        narrow_some(reinterpret_cast<float*>(product.out) + at, outputs, lanes);
    else
        narrow_some(product.out + at, outputs, lanes);
}

}  // namespace
