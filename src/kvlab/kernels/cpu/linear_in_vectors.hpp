// y = x W^T in vectors. Each call packs x in blocks of rows, the rows of a pair of inputs side by side. The product of some
// rows of a block and some panels keeps its sums in registers: one vector of outputs for each row and panel, and enough of
// them to hide the latency of an addition. Two panels share what is read of x. Where the registers have no room for all
// rows of a block, the block is computed in parts, a piece of the inputs after another: the pieces of the panels stay in the
// first cache from one part to the next. Behind the first block panels are in the second cache, and a part takes all inputs
// at once: its sums never wait in memory.
#pragma once

#include "buffer.hpp"
#include "compact_weight.hpp"
#include "interface.hpp"
#include "packed_weight.hpp"
#include "ranking.hpp"
#include "runs.hpp"

#include <omp.h>

#include <type_traits>

namespace {

thread_local Buffer packed_blocks, unpacked_panels;

constexpr int ROWS = LANES == 16 ? 24 : 12;  // of a block: its sums and one vector of weights fit the registers
constexpr int PANELS = 8;                    // that share a block of rows while it is in the cache
constexpr int PIECE = 128;                   // pairs, at most, of what is packed, or computed in parts, at once
constexpr int ROWS_AHEAD = 128;              // pairs from one of x to the one that is prefetched with it

INLINE float from_bfloat16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// How a pair of inputs is multiplied, and packed: PER_PAIR numbers for each row, one for each step.

#if defined(KVLAB_PAIRS)
// Both by one instruction.
struct InPairs {
    static constexpr int PER_PAIR = 1;

    template <class Weight>
    INLINE Words weights(const char* at, int) { return Weight::pairs(at); }

    INLINE Floats add(float x, Words weights, Floats sum) { return add_products(sum, weights, as_words(all(x))); }
};
#endif

// Each as float32; the second first, as `add_products` has it.
struct AsFloats {
    static constexpr int PER_PAIR = 2;

    template <class Weight>
    INLINE Floats weights(const char* at, int input) { return Weight::input(at, input); }

    INLINE Floats add(float x, Floats weights, Floats sum) { return all(x) * weights + sum; }
};

template <class Element>
struct VectorProduct : ProductOf<Element> {
    const float* x;  // packed: [blocks, pairs, ROWS * Arithmetic::PER_PAIR]
    int first_panel = 0;  // at `weights`
    char* unpacked = nullptr;  // where weights in 12 bits are unpacked to: of each of PANELS panels
    int room = 0;              // so many pairs, a piece's or all
    uint64_t* best = nullptr;  // keys of each row's largest output so far, which are wanted instead of all outputs
};

// VECTORS panels from `panel` on, `stride` bytes apart. They are read in pieces, one after another: the first panel's pairs
// [begin, end) are at(begin, end).
template <class Weight, int VECTORS>
struct PanelsOf {
    using Read = Weight;
    static constexpr int UNIT = 1;  // pairs, of which a piece has a multiple

    const char* weights;
    int64_t stride;

    template <class Element>
    PanelsOf(const VectorProduct<Element>& product, int panel)
        : weights(product.weights + (panel - product.first_panel) * int64_t(product.pairs) * Weight::BYTES),
          stride(int64_t(product.pairs) * Weight::BYTES) {}

    INLINE_MEMBER const char* at(int begin, int) { return weights + int64_t(begin) * Weight::BYTES; }
};

#if defined(KVLAB_COMPACT)
// A piece is unpacked before it is read, to where it stays in the first cache.
template <int VECTORS>
struct PanelsOf<Compact, VECTORS> {
    using Read = BFloat16;
    static constexpr int UNIT = CompactWeight::STEP_INPUTS / 2;

    CompactPanel panels[VECTORS];
    char* to;
    bool whole;
    int64_t stride;

    template <class Element>
    PanelsOf(const VectorProduct<Element>& product, int panel)
        : to(product.unpacked), whole(product.room == product.pairs), stride(int64_t(product.room) * Read::BYTES) {
        const CompactWeight from{const_cast<char*>(product.weights), product.panels(), product.pairs / UNIT};
        if (whole) to += panel % PANELS * stride;
        for (int v = 0; v < VECTORS; ++v) {
            panels[v] = CompactPanel(from, panel + v, 0);
            __builtin_prefetch(from.table(panel + v + VECTORS));
            __builtin_prefetch(from.exceptions(panel + v + VECTORS));
        }
    }

    INLINE_MEMBER const char* at(int begin, int end) {
        char* const first = to + (whole ? int64_t(begin) * Read::BYTES : 0);
        for (int v = 0; v < VECTORS; ++v)
            for (int pair = 0; pair < end - begin; pair += UNIT)
                for (int part = 0; part < CompactPanel::PARTS; ++part)
                    panels[v].unpack(part, first + v * stride + int64_t(pair) * Read::BYTES);
        return first;
    }
};
#endif

// Add the products of pairs [begin, end), which are at `weights` and in panels `stride` bytes apart: COUNT rows of a block, its
// part number `part`, by VECTORS panels. Each part prefetches its share of what is stored next, and of x, which is more than the
// first cache holds, and with many rows more than the second.
template <class Weight, class Arithmetic, int COUNT, int VECTORS, int PARTS, class Element>
INLINE void multiply_pairs(const VectorProduct<Element>& product, int block, int part, int panel, int begin, int end,
                           const char* weights, int64_t stride, Floats (&sums)[COUNT][VECTORS]) {
    using Read = typename PanelsOf<Weight, VECTORS>::Read;
    constexpr int PER_PAIR = Arithmetic::PER_PAIR;
    const int64_t panel_size = int64_t(product.pairs) * Weight::BYTES;
    const float* x = product.x + ((int64_t(block) * product.pairs + begin) * ROWS + part * COUNT) * PER_PAIR;
    const char* stored = product.weights + (panel - product.first_panel) * panel_size + int64_t(begin) * Weight::BYTES;
    for (int pair = begin; pair < end; ++pair, x += ROWS * PER_PAIR, weights += Read::BYTES, stored += Weight::BYTES) {
        const int64_t ahead = bytes_ahead<VECTORS>(int64_t(pair) * Weight::BYTES, panel_size);
        if constexpr (PARTS > 1) __builtin_prefetch(x + ROWS_AHEAD * ROWS * PER_PAIR);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v += PARTS)
            for (int line = 0; line < Weight::BYTES; line += 64)
                __builtin_prefetch(stored + (v + part) * panel_size + line + ahead, 0, INTO_SECOND_CACHE ? 2 : 3);
#pragma GCC unroll 2
        for (int input = PER_PAIR - 1; input >= 0; --input) {
            decltype(Arithmetic::template weights<Read>(weights, input)) right[VECTORS];
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                right[v] = Arithmetic::template weights<Read>(weights + v * stride, input);
#pragma GCC unroll 24
            for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v)
                    sums[row][v] = Arithmetic::add(x[row * PER_PAIR + input], right[v], sums[row][v]);
        }
    }
}

// Keep the largest of a row and VECTORS panels. Of equal ones the first counts, whichever comes later.
template <int VECTORS, class Element>
void keep_largest(const VectorProduct<Element>& product, int row, int panel, const Floats (&sums)[VECTORS]) {
    uint64_t& best = product.best[row];
    for (int v = 0; v < VECTORS; ++v) {
        const int first = (panel + v) * LANES, lanes = std::min(LANES, product.outputs - first);
        const Floats outputs = finished(product, panel + v, sums[v]);
        if (!any(~(outputs < all(number_of(best))))) continue;  // a NaN is not less, nor is anything less than one
        for (int lane = 0; lane < lanes; ++lane) best = std::max(best, key_of(outputs[lane], first + lane));
    }
}

// Write the outputs of a row and VECTORS panels: two are a cache line.
template <int VECTORS, class Element>
INLINE void store_panels(const VectorProduct<Element>& product, int row, int panel, const Floats (&sums)[VECTORS]) {
    if (product.best) return keep_largest(product, row, panel, sums);
#if defined(__AVX512BF16__)
    if constexpr (VECTORS == 2 && sizeof(Element) == 2)
        if (!product.out_in_float32 && (panel + VECTORS) * LANES <= product.outputs) {
            const auto of = [&](int v) { return (__m512)finished<true>(product, panel + v, sums[v]); };
            const __m512bh both = _mm512_cvtne2ps_pbh(of(1), of(0));
            std::memcpy(product.out + int64_t(row) * product.outputs + panel * LANES, &both, sizeof both);
            return;
        }
#endif
    for (int v = 0; v < VECTORS; ++v) store_outputs(product, row, panel + v, sums[v]);
}

// PARTS times COUNT rows of a block against VECTORS panels. Inlined, it would share registers with its caller, and sums be spilled.
template <class Weight, class Arithmetic, int COUNT, int VECTORS, int PARTS, class Element>
__attribute__((noinline)) void multiply_block(const VectorProduct<Element>& product, int block, int panel) {
    alignas(64) float waiting[PARTS][COUNT][VECTORS][LANES];  // sums
    using Panels = PanelsOf<Weight, VECTORS>;
    Panels panels(product, panel);
    constexpr int UNIT = Panels::UNIT;
    const int pieces = UNIT == 1 && (PARTS == 1 || block > 0) ? 1 : (product.pairs + PIECE - 1) / PIECE;
    for (int piece = 0; piece < pieces; ++piece) {
        const int64_t units = product.pairs / UNIT;
        const int begin = int(units * piece / pieces) * UNIT, end = int(units * (piece + 1) / pieces) * UNIT;
        const char* const weights = panels.at(begin, end);
#pragma GCC unroll 1
        for (int part = 0; part < PARTS; ++part) {
            Floats sums[COUNT][VECTORS];
#pragma GCC unroll 24
            for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 8
                for (int v = 0; v < VECTORS; ++v) sums[row][v] = piece ? load(waiting[part][row][v]) : Floats{};
            multiply_pairs<Weight, Arithmetic, COUNT, VECTORS, PARTS>(product, block, part, panel, begin, end, weights,
                                                                      panels.stride, sums);
            if (piece + 1 < pieces) {
#pragma GCC unroll 24
                for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 8
                    for (int v = 0; v < VECTORS; ++v) store(waiting[part][row][v], sums[row][v]);
                continue;
            }
            for (int row = 0, at = block * ROWS + part * COUNT; row < COUNT && at < product.rows; ++row, ++at)
                store_panels(product, at, panel, sums[row]);
        }
    }
}

template <class Weight, class Arithmetic, int COUNT, int VECTORS, int PARTS = 1, class Element>
void multiply_panels(const VectorProduct<Element>& product, int block, int panel, int end) {
    for (; panel + VECTORS <= end; panel += VECTORS)
        multiply_block<Weight, Arithmetic, COUNT, VECTORS, PARTS>(product, block, panel);
    if constexpr (VECTORS > 1)
        if (panel < end) multiply_panels<Weight, Arithmetic, COUNT, 1, PARTS>(product, block, panel, end);
}

template <class Weight, class Arithmetic, class Element>
void multiply(const VectorProduct<Element>& product, int block, int first, int last) {
    const int rows = std::min(ROWS, product.rows - block * ROWS);
    if (rows <= 1) return multiply_panels<Weight, Arithmetic, 1, side_by_side<1>()>(product, block, first, last);
    if (rows <= 2) return multiply_panels<Weight, Arithmetic, 2, side_by_side<2>()>(product, block, first, last);
    if (rows <= 4) return multiply_panels<Weight, Arithmetic, 4, LANES == 8 ? 2 : 1>(product, block, first, last);
    if constexpr (LANES == 16) {
        if (rows <= 8) return multiply_panels<Weight, Arithmetic, 8, 2>(product, block, first, last);
        if (rows <= 12) return multiply_panels<Weight, Arithmetic, 12, 2>(product, block, first, last);
        if (rows <= 16) return multiply_panels<Weight, Arithmetic, 8, 2, 2>(product, block, first, last);
        if (rows <= 20) return multiply_panels<Weight, Arithmetic, 10, 2, 2>(product, block, first, last);
        return multiply_panels<Weight, Arithmetic, 12, 2, 2>(product, block, first, last);
    }
    if constexpr (LANES == 8) {
        if (rows <= 6) return multiply_panels<Weight, Arithmetic, 6, 2>(product, block, first, last);
        if (rows <= 8) return multiply_panels<Weight, Arithmetic, 4, 2, 2>(product, block, first, last);
        return multiply_panels<Weight, Arithmetic, 6, 2, 2>(product, block, first, last);
    }
    if (rows <= 8) return multiply_panels<Weight, Arithmetic, 8, 1>(product, block, first, last);
    multiply_panels<Weight, Arithmetic, 12, 1>(product, block, first, last);
}

// What follows packs pairs [begin, end) of a block of x; `begin` is a multiple of LANES. Rows beyond the last are
// zero as far as they are multiplied.

void pack_rows(const float* x, int64_t stride, int rows, int inputs, int block, int begin, int end, float* out) {
    const int first = block * ROWS, pairs = (inputs + 1) / 2;
    out += int64_t(block) * pairs * ROWS * 2;
    for (int row = 0; row < ROWS; ++row) {
        const float* from = x + (first + row) * stride;
        const int count = first + row < rows ? inputs : 0;
        float* to = out + (int64_t(begin) * ROWS + row) * 2;
        int pair = begin;
        for (; pair < end && 2 * pair + 1 < count; ++pair, to += ROWS * 2) std::memcpy(to, from + 2 * pair, 2 * sizeof to[0]);
        for (; pair < end; ++pair, to += ROWS * 2) {
            to[0] = 2 * pair < count ? from[2 * pair] : 0.0f;
            to[1] = 0.0f;
        }
    }
}

template <int PER_PAIR>
INLINE void store_pairs(Words pairs, int count, float* to) {
    if constexpr (PER_PAIR == 1) {
        if (count == LANES)
            store_words(to, pairs);
        else  // a size that the compiler knows: another one would be a call
            std::memcpy(to, &pairs, ROWS % LANES * sizeof to[0]);
    } else {
        for (int i = 0; i < count; ++i) {
            to[2 * i] = from_bfloat16(uint16_t(pairs[i]));
            to[2 * i + 1] = from_bfloat16(uint16_t(pairs[i] >> 16));
        }
    }
}

template <int PER_PAIR>
void pack_rows(const uint16_t* x, int64_t stride, int rows, int inputs, int block, int begin, int end, float* out) {
    const int first = block * ROWS, count = std::min(ROWS, rows - first), pairs = (inputs + 1) / 2;
    const auto pair_of = [&](int row, int pair) {
        uint32_t both = 0;
        std::memcpy(&both, x + (first + row) * stride + 2 * pair, std::min(2, inputs - 2 * pair) * sizeof x[0]);
        return both;
    };
    out += int64_t(block) * pairs * ROWS * PER_PAIR;
    for (int pair = begin; pair < end; pair += LANES) {
        const int width = std::min(LANES, end - pair);
        for (int row = 0; row < count; row += LANES) {
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
                store_pairs<PER_PAIR>(tile[k], std::min(LANES, ROWS - row),
                                      out + (int64_t(pair + k) * ROWS + row) * PER_PAIR);
        }
    }
}

// `best` [threads, rows]: null, or receives the key of the largest output of each row that each thread found (0: none).
template <class Weight, class Arithmetic, class Element>
void linear_in_vectors(const ProductOf<Element>& whole, const Element* x, int64_t x_stride, int inputs, int threads,
                       uint64_t* best) {
    const int rows = whole.rows, blocks = (rows + ROWS - 1) / ROWS;
    constexpr int PER_PAIR = Arithmetic::PER_PAIR;
    const int64_t packed_bytes = int64_t(blocks) * whole.pairs * ROWS * PER_PAIR * sizeof(float);
    float* const packed_x = reinterpret_cast<float*>(packed_blocks.at_least(packed_bytes));
    const VectorProduct<Element> product{whole, packed_x};
    const int panels = product.panels();
    Runs runs((panels + PANELS - 1) / PANELS, threads);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) collapse(2)
        for (int block = 0; block < blocks; ++block)
            for (int begin = 0; begin < whole.pairs; begin += PIECE) {
                const int end = std::min(begin + PIECE, whole.pairs);
                if constexpr (sizeof(Element) == 4)
                    pack_rows(x, x_stride, rows, inputs, block, begin, end, packed_x);
                else
                    pack_rows<PER_PAIR>(x, x_stride, rows, inputs, block, begin, end, packed_x);
            }
        const int thread = omp_get_thread_num();
        runs.each(thread, [&](int group) {
            const int first = group * PANELS, last = std::min(first + PANELS, panels);
            VectorProduct<Element> part = product;
            part.best = best ? best + int64_t(thread) * rows : nullptr;
            int block = 0;
#if defined(KVLAB_COMPACT)
            if constexpr (std::is_same_v<Weight, Compact>) {  // the first block unpacks for the others
                part.room = blocks > 1 ? product.pairs : PIECE;
                part.unpacked = unpacked_panels.at_least(int64_t(PANELS) * part.room * BFloat16::BYTES);
                multiply<Compact, Arithmetic>(part, block++, first, last);
                part.weights = part.unpacked;
                part.first_panel = first;
            }
#endif
            using Read = typename PanelsOf<Weight, 1>::Read;
            for (; block < blocks; ++block) multiply<Read, Arithmetic>(part, block, first, last);
        });
    }
}

}  // namespace
