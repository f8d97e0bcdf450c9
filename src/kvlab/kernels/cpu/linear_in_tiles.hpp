// y = x W^T in tiles. The packed rows of x stay in the L2 cache while the weights are read once, a stripe (a few panels)
// at a time. Rows that do not fit the cache are computed in further passes, and inputs in pieces. Products in integers
// round x to int8 as they pack it.
#pragma once

#include "buffer.hpp"
#include "int8_quads.hpp"
#include "tiled_product.hpp"

#include <omp.h>

#include <algorithm>
#include <memory>

#if defined(KVLAB_TILES)
namespace {

// Of packed x. Together with two stripes this is half of the L2 cache. Of a virtual machine's pages, however large, the
// host may have some that conflict in the cache, so that more would not fit.
constexpr int64_t PASS_BYTES = 3 << 18;
constexpr int MOST_STEPS = 96;   // of a piece of the inputs, for the same reason
constexpr int LEAST_STEPS = 32;  // fewer are not worth storing and loading sums

thread_local Buffer packed_rows, waiting_sums;

// Rearrange steps [begin, end) of 16 rows of x, from `first` on, into tiles [inputs / 32, 16, 32]. Rows beyond the last
// are zero.
void pack_tiles(const uint16_t* x, int64_t stride, int rows, int first, int begin, int end, char* out) {
    for (int row = 0; row < TILE_SIDE; ++row) {
        char* to = out + row * TILE_BYTES + begin * TILE;
        const uint16_t* from = x + int64_t(first + row) * stride + begin * TILE_INPUTS;
        for (int step = begin; step < end; ++step, to += TILE, from += TILE_INPUTS)
            store_words(to, first + row < rows ? load_words(from) : Words{});
    }
}

// Round row `row` of x to int8, into tiles [inputs / 64, 16, 64]. A row beyond the last is zero.
void quantize_into_tiles(const uint16_t* x, int64_t stride, int rows, int row, int steps, char* out, Int8Row* facts) {
    auto* const to = reinterpret_cast<int8_t*>(out) + row % TILE_SIDE * TILE_BYTES;
    if (row >= rows) {
        for (int step = 0; step < steps; ++step) std::memset(to + step * TILE, 0, TILE_BYTES);
        return;
    }
    const auto place = [&](int i) { return to + i / TILE_BYTES * TILE + i % TILE_BYTES; };
    facts[row].scale = quantize(x + row * stride, steps * TILE_BYTES, place);
    Ints sums{};
    for (int step = 0; step < steps; ++step) sums = add_quads(sums, 0x01010101u - Words{}, load_words(to + step * TILE));
    facts[row].sum = sum(sums);
}

// The number of passes over the rows, and of pieces of the inputs in each pass.
struct Cut {
    int passes, pieces;
};

// The cut that moves the fewest bytes per output: weights, once in each pass, and sums stored between pieces. Rows that
// fit one block use each weight once, and are not cut.
Cut cut_for(int tiles, int steps) {
    if (tiles <= MOST_TILES) return {1, 1};
    Cut best{};
    int64_t fewest = 0;
    const int least = (steps + MOST_STEPS - 1) / MOST_STEPS;
    for (int pieces = least; pieces == least || pieces * LEAST_STEPS <= steps; ++pieces) {
        const int64_t piece_bytes = tiles * steps * TILE / pieces;
        const int passes = std::min(tiles, int((piece_bytes + PASS_BYTES - 1) / PASS_BYTES));
        const int64_t bytes = int64_t(passes) * steps * TILE_BYTES + int64_t(pieces - 1) * tiles * TILE_SIDE * 12;
        if (best.pieces == 0 || bytes < fewest) {
            best = {passes, pieces};
            fewest = bytes;
        }
    }
    return best;
}

// `x_stride`: elements between rows of x, or IN_TILES.
// `best` [threads, rows]: null, or receives the key of the largest output of each row that each thread found (0: none).
template <class Weight>
void linear_in_tiles(Product product, const uint16_t* x, int64_t x_stride, int inputs, int threads,
                     uint64_t* best = nullptr) {
    const int rows = product.rows, tiles = (rows + TILE_SIDE - 1) / TILE_SIDE, steps = inputs / STEP_INPUTS<Weight>;
    const int64_t tile_row = steps * TILE, facts = IN_INTEGERS<Weight> ? rows * sizeof(Int8Row) : 0;
    char* packed = x_stride == IN_TILES ? nullptr : packed_rows.at_least(tiles * tile_row + facts);
    auto* const x_rows = facts ? reinterpret_cast<Int8Row*>(packed + tiles * tile_row) : nullptr;
    product.x_rows = x_rows;
    const TiledProduct<Weight> tiled(product, packed ? packed : reinterpret_cast<const char*>(x));
    const int stripes = tiled.stripes(), shares = (4 * threads + tiles - 1) / tiles;  // of packing a tile of rows
    const Cut cut = cut_for(tiles, steps);
    float* sums = nullptr;
    if (cut.pieces > 1) {
        const int64_t most_tiles = (tiles + cut.passes - 1) / cut.passes;
        const int64_t size = most_tiles * stripes * tiled.waiting_sums() * sizeof(float);
        sums = reinterpret_cast<float*>(waiting_sums.at_least(size));
    }
    const int parts = cut.passes * cut.pieces;
    const std::unique_ptr<Run[]> runs(new Run[parts * threads]);
    for (int i = 0; i < parts * threads; ++i) {
        const int thread = i % threads;
        runs[i].next = int(int64_t(stripes) * thread / threads);
        runs[i].end = int(int64_t(stripes) * (thread + 1) / threads);
    }
#pragma omp parallel num_threads(threads)
    {
        const Tiles in_use;
        const int me = omp_get_thread_num();
        tiled.prefetch_stripe(runs[me].next);
        if constexpr (IN_INTEGERS<Weight>) {
#pragma omp for schedule(static)
            for (int row = 0; row < tiles * TILE_SIDE; ++row)
                quantize_into_tiles(x, x_stride, rows, row, steps, packed + row / TILE_SIDE * tile_row, x_rows);
        } else if (packed) {
#pragma omp for collapse(2) schedule(static)
            for (int tile = 0; tile < tiles; ++tile)
                for (int share = 0; share < shares; ++share)
                    pack_tiles(x, x_stride, rows, tile * TILE_SIDE, steps * share / shares,
                               steps * (share + 1) / shares, packed + tile * tile_row);
        }
        PendingOutputs pending(product, best ? best + int64_t(me) * rows : nullptr);
        for (int i = 0; i < parts; ++i) {
            const int pass = i / cut.pieces, piece = i % cut.pieces;
            const int first = int(int64_t(tiles) * pass / cut.passes);
            const int last = int(int64_t(tiles) * (pass + 1) / cut.passes);
            const int begin = steps * piece / cut.pieces, end = steps * (piece + 1) / cut.pieces;
            const Part part{first * TILE_SIDE, std::min(rows, last * TILE_SIDE), begin, end,
                            sums,              piece == 0,                       piece == cut.pieces - 1};
            for (int other = 0; other < threads; ++other)
                tiled.multiply(part, runs[i * threads + (me + other) % threads], pending);
            if (cut.pieces > 1) {
#pragma omp barrier  // another thread may continue these sums
            }
        }
        pending.finish();
    }
}

}  // namespace
#endif
