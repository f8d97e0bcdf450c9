// y = x W^T in vectors. Each call packs x in blocks of rows, the rows of a pair of inputs side by side. The
// product of a block and a panel keeps its sums in registers from beginning to end: with many rows one vector of
// outputs each, with one or two rows two, so that there are enough sums to hide the latency of an addition.
#pragma once

#include "buffer.hpp"
#include "compact_weight.hpp"
#include "interface.hpp"
#include "packed_weight.hpp"

#include <memory>
#include <type_traits>

namespace {

constexpr int ROWS = LANES == 16 ? 24 : 12;  // of a block: its sums and one vector of weights fit the registers
constexpr int PANELS = 4;                    // that share a block of rows while it is in the cache
constexpr int AHEAD = 8192;                  // bytes between prefetch and use

INLINE float from_bfloat16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// How a pair of inputs is multiplied, and packed: PER_PAIR numbers for each row.

#if defined(KVLAB_PAIRS)
// Both by one instruction.
struct InPairs {
    static constexpr int PER_PAIR = 1;

    template <class Weight>
    INLINE Words load_weights(const char* at) { return Weight::pairs(at); }

    INLINE Floats add(const float* x, Words weights, Floats sum) { return add_products(sum, weights, as_words(all(*x))); }

    INLINE void pack(Words pairs, int count, float* to) { std::memcpy(to, &pairs, count * sizeof to[0]); }
};
#endif

// Each as float32; the second first, as `add_products` has it.
struct AsFloats {
    static constexpr int PER_PAIR = 2;

    template <class Weight>
    INLINE Widened load_weights(const char* at) { return Weight::widened(at); }

    INLINE Floats add(const float* x, const Widened& weights, Floats sum) {
        return all(x[0]) * weights.first + (all(x[1]) * weights.second + sum);
    }

    INLINE void pack(Words pairs, int count, float* to) {
        for (int i = 0; i < count; ++i) {
            to[2 * i] = from_bfloat16(uint16_t(pairs[i]));
            to[2 * i + 1] = from_bfloat16(uint16_t(pairs[i] >> 16));
        }
    }
};

struct VectorProduct : Product {
    const float* x;  // packed: [blocks, pairs, ROWS * Arithmetic::PER_PAIR]
    int first_panel = 0;  // at `weights`
};

// COUNT rows of a block, from `first` on, against VECTORS panels.
template <class Weight, class Arithmetic, int COUNT, int VECTORS>
void multiply_block(const VectorProduct& product, int block, int first, int panel) {
    constexpr int PER_PAIR = Arithmetic::PER_PAIR;
    const int64_t panel_size = int64_t(product.pairs) * Weight::BYTES;
    const float* x = product.x + (int64_t(block) * product.pairs * ROWS + first) * PER_PAIR;
    const char* weights = product.weights + (panel - product.first_panel) * panel_size;
    Floats sums[COUNT][VECTORS] = {};
    for (int pair = 0; pair < product.pairs; ++pair, x += ROWS * PER_PAIR, weights += Weight::BYTES) {
        decltype(Arithmetic::template load_weights<Weight>(weights)) right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            right[v] = Arithmetic::template load_weights<Weight>(weights + v * panel_size);
            __builtin_prefetch(weights + v * panel_size + AHEAD);
        }
#pragma GCC unroll 24
        for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v)
                sums[row][v] = Arithmetic::add(x + row * PER_PAIR, right[v], sums[row][v]);
    }
    for (int v = 0; v < VECTORS; ++v)
        for (int row = 0; row < COUNT && block * ROWS + first + row < product.rows; ++row)
            store_outputs(product, block * ROWS + first + row, panel + v, sums[row][v]);
}

// PARTS times COUNT rows of a block.
template <class Weight, class Arithmetic, int COUNT, int VECTORS, int PARTS = 1>
void multiply_panels(const VectorProduct& product, int block, int begin, int end) {
    int panel = begin;
    for (; panel + VECTORS <= end; panel += VECTORS)
        for (int part = 0; part < PARTS; ++part)
            multiply_block<Weight, Arithmetic, COUNT, VECTORS>(product, block, part * COUNT, panel);
    if constexpr (VECTORS > 1)
        if (panel < end) multiply_panels<Weight, Arithmetic, COUNT, 1, PARTS>(product, block, panel, end);
}

template <class Weight, class Arithmetic>
void multiply(const VectorProduct& product, int block, int first, int last) {
    const int rows = std::min(ROWS, product.rows - block * ROWS);
    if (rows <= 1) return multiply_panels<Weight, Arithmetic, 1, 2>(product, block, first, last);
    if (rows <= 2) return multiply_panels<Weight, Arithmetic, 2, 2>(product, block, first, last);
    if (rows <= 4) return multiply_panels<Weight, Arithmetic, 4, 1>(product, block, first, last);
    if (rows <= 8) return multiply_panels<Weight, Arithmetic, 8, LANES == 16 ? 2 : 1>(product, block, first, last);
    if constexpr (ROWS > 12) {
        if (rows <= 12) return multiply_panels<Weight, Arithmetic, 12, 2>(product, block, first, last);
        if (rows <= 16) return multiply_panels<Weight, Arithmetic, 8, 2, 2>(product, block, first, last);
        if (rows <= 20) return multiply_panels<Weight, Arithmetic, 10, 2, 2>(product, block, first, last);
        return multiply_panels<Weight, Arithmetic, 12, 2, 2>(product, block, first, last);
    }
    multiply_panels<Weight, Arithmetic, 12, 1>(product, block, first, last);
}

// Rows beyond the last are zero.
template <class Arithmetic>
void pack_rows(const uint16_t* x, int64_t stride, int rows, int inputs, int block, float* out) {
    const int first = block * ROWS, count = std::min(ROWS, rows - first), pairs = (inputs + 1) / 2;
    const auto pair_of = [&](int row, int pair) {
        uint32_t both = 0;
        std::memcpy(&both, x + (first + row) * stride + 2 * pair, std::min(2, inputs - 2 * pair) * sizeof x[0]);
        return both;
    };
    out += int64_t(block) * pairs * ROWS * Arithmetic::PER_PAIR;
    for (int pair = 0; pair < pairs; pair += LANES) {
        const int width = std::min(LANES, pairs - pair);
        for (int row = 0; row < ROWS; row += LANES) {
            Words tile[LANES];
            for (int i = 0; i < LANES; ++i) {
                tile[i] = Words{};
                if (row + i >= count) continue;
                const uint16_t* at = x + (first + row + i) * stride + 2 * pair;
                if (2 * (pair + LANES) <= inputs)
                    tile[i] = load_words(at);
                else
                    for (int k = 0; k < width; ++k) tile[i][k] = pair_of(row + i, pair + k);
            }
            transpose(tile);
            for (int k = 0; k < width; ++k)
                Arithmetic::pack(tile[k], std::min(LANES, ROWS - row),
                                 out + (int64_t(pair + k) * ROWS + row) * Arithmetic::PER_PAIR);
        }
    }
}

#if defined(KVLAB_COMPACT)
thread_local Buffer unpacked_panels;

// The same product, its panels [first, last) in bfloat16.
VectorProduct unpacked(VectorProduct product, int first, int last) {
    const int steps = product.pairs / TILE_SIDE;
    const CompactWeight from{const_cast<char*>(product.weights), product.panels(), steps};
    const int64_t step_bytes = TILE_SIDE * BFloat16::BYTES;
    char* to = unpacked_panels.at_least((last - first) * steps * step_bytes);
    product.weights = to;
    product.first_panel = first;
    for (int index = first; index < last; ++index) {
        CompactPanel panel(from, index, 0);
        for (int step = 0; step < steps; ++step, to += step_bytes)
            for (int part = 0; part < CompactPanel::PARTS; ++part) panel.unpack(part, to);
    }
    return product;
}
#endif

template <class Weight, class Arithmetic>
void linear_in_vectors(const Product& whole, const uint16_t* x, int64_t x_stride, int inputs, int threads) {
    const int rows = whole.rows, blocks = (rows + ROWS - 1) / ROWS;
    constexpr int PER_PAIR = Arithmetic::PER_PAIR;
    const std::unique_ptr<float[]> packed_x(new float[int64_t(blocks) * whole.pairs * ROWS * PER_PAIR]);
    const VectorProduct product{whole, packed_x.get()};
    const int panels = product.panels(), groups = (panels + PANELS - 1) / PANELS;
    const int at_once = std::max(1, groups / (threads * 16));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int block = 0; block < blocks; ++block)
            pack_rows<Arithmetic>(x, x_stride, rows, inputs, block, packed_x.get());
#pragma omp for schedule(dynamic, at_once)
        for (int group = 0; group < groups; ++group) {
            const int first = group * PANELS, last = std::min(first + PANELS, panels);
            const auto multiply_all = [&](auto format, const VectorProduct& part) {
                for (int block = 0; block < blocks; ++block)
                    multiply<decltype(format), Arithmetic>(part, block, first, last);
            };
#if defined(KVLAB_COMPACT)
            if constexpr (std::is_same_v<Weight, Compact>)
                multiply_all(BFloat16{}, unpacked(product, first, last));
            else
#endif
                multiply_all(Weight{}, product);
        }
    }
}

}  // namespace
