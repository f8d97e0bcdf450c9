// y = x W^T in tiles. The rows of x, packed, stay in the second cache while the weights pass, a few panels (a
// stripe) at a time; rows that do not fit are taken in a pass of their own.
//
// Memory is never to be idle: weights are asked for before they are needed, a part with every step, and the outputs
// of a block are written while the next one is summed.
#pragma once

#include "buffer.hpp"
#include "linear_outputs.hpp"
#include "linear_tiles.hpp"
#include "packed_weight.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>

#if defined(KVLAB_TILES)
namespace {

constexpr int64_t PASS_BYTES = 5 << 18;  // of packed x: with two stripes they fit the second cache

thread_local Buffer packed_rows, wide_weights;  // each thread its own

// Steps [begin, end) of 16 rows of x from `first`, in tiles: [inputs / 32, 16, 32]; rows beyond the last are zero.
void pack_tiles(const uint16_t* x, int64_t stride, int rows, int first, int begin, int end, char* out) {
    for (int row = 0; row < TILE_SIDE; ++row) {
        char* to = out + row * TILE_BYTES + begin * TILE;
        const uint16_t* from = x + int64_t(first + row) * stride + begin * TILE_INPUTS;
        for (int step = begin; step < end; ++step, to += TILE, from += TILE_INPUTS)
            store_words(to, first + row < rows ? load_words(from) : Words{});
    }
}

// Ask for a line of weights, into the second cache. Every fourth time one far behind it is asked for, too: the
// processor then begins to read there by itself. It can do so much more at once than what was asked for line by
// line.
template <int FAR>
INLINE void ask_for_line(const char* at, int line) {
    __builtin_prefetch(at, 0, 2);
    if (line % 4 == 0) __builtin_prefetch(at + FAR * 64, 0, 2);
}

// Weights that will be needed, asked for in equal shares.
struct Ahead {
    const char* at;
    int lines;  // of a share

    __attribute__((always_inline)) void ask() {
        for (int line = 0; line < lines; ++line, at += 64) ask_for_line<64>(at, line);
    }
};

// Stripes one behind the other, for one thread; who has done its own helps with the others'.
struct alignas(64) Run {
    std::atomic<int> next;
    int end;
};

template <class Weight>
class TiledProduct {
public:
    const int width, stripes;  // panels of a stripe

    TiledProduct(const Product& product, const char* x)
        : width(product.rows <= TILE_SIDE ? 4 : 2), stripes((product.panels() + width - 1) / width),
          product(product), x(x), steps(product.pairs / TILE_SIDE) {}

    // Ask for the beginning of a stripe.
    void ask_for(int stripe) const {
        if (stripe >= stripes) return;
        const int64_t size = std::min<int64_t>(2 * panel_bytes(), 1 << 16);
        for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(stripe_of(stripe) + at, 0, 2);
    }

    // Rows [first, last) by the stripes that are left of a run.
    void multiply(int first, int last, Run& run, PendingOutputs& pending) const {
        for (int stripe; (stripe = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;)
            multiply(first, last, stripe, std::min(stripe + 1, run.end - 1), pending);
    }

private:
    const Product& product;
    const char* x;
    const int steps;

    int64_t panel_bytes() const { return int64_t(product.pairs) * Weight::BYTES; }
    int panels_of(int stripe) const { return std::min(width, product.panels() - width * stripe); }
    const char* stripe_of(int stripe) const { return product.weights + width * stripe * panel_bytes(); }

    // In blocks of up to three tiles of rows. One alone would make little of the weights: where one would be left
    // over, two blocks have two.
    void multiply(int first, int last, int stripe, int next, PendingOutputs& pending) const {
        const int panels = panels_of(stripe), tiles = (last - first + TILE_SIDE - 1) / TILE_SIDE;
        const int blocks = (tiles + MOST_TILES - 1) / MOST_TILES, shares = blocks * steps;
        const bool once = blocks == 1 && Weight::BYTES == BFloat16::BYTES;
        Ahead ahead{stripe_of(next), int((panels * panel_bytes() / 64 + shares - 1) / shares)};
        const TileRows right{widened(stripe), steps * TILE};
        for (int block = 0, tile = 0; block < blocks; ++block) {
            const int taken = (tiles - tile + blocks - block - 1) / (blocks - block);
            const int row = first + tile * TILE_SIDE;
            const TileRows left{x + row / TILE_SIDE * steps * TILE, steps * TILE};
            once ? multiply_rows<true>(taken, panels, left, right, ahead, pending)
                 : multiply_rows<false>(taken, panels, left, right, ahead, pending);
            pending.begin(row, std::min(last - row, taken * TILE_SIDE), width * stripe, panels);
            tile += taken;
        }
    }

    template <bool ONCE>
    void multiply_rows(int tiles, int panels, const TileRows& left, const TileRows& right, Ahead& ahead,
                       PendingOutputs& pending) const {
        if (tiles == 3)
            panels == 1 ? multiply_block<3, 1, ONCE>(left, right, ahead, pending)
                        : multiply_block<3, 2, ONCE>(left, right, ahead, pending);
        else if (tiles == 2)
            panels == 1 ? multiply_block<2, 1, ONCE>(left, right, ahead, pending)
                        : multiply_block<2, 2, ONCE>(left, right, ahead, pending);
        else if (panels > 2)
            panels == 3 ? multiply_block<1, 3, ONCE>(left, right, ahead, pending)
                        : multiply_block<1, 4, ONCE>(left, right, ahead, pending);
        else
            panels == 1 ? multiply_block<1, 1, ONCE>(left, right, ahead, pending)
                        : multiply_block<1, 2, ONCE>(left, right, ahead, pending);
    }

    // Weights that are read ONCE, by this block, are asked for one step before they are used, which reads fastest;
    // others, which more blocks read from the second cache, with the blocks of the stripe before.
    template <int ROWS, int COLUMNS, bool ONCE>
    __attribute__((noinline)) void multiply_block(const TileRows& left, const TileRows& right, Ahead& ahead,
                                                  PendingOutputs& pending) const {
        const int share = (pending.left() + steps - 1) / steps;
        const char* near = right.at + TILE;
        multiply_block_of_tiles<ROWS, COLUMNS>(left, right, steps, [&](int step) {
            if constexpr (ONCE) {
                if (step == steps - 1) near = ahead.at;
#pragma GCC unroll 4
                for (int column = 0; column < COLUMNS; ++column)
#pragma GCC unroll 16
                    for (int line = 0; line < TILE_SIDE; ++line)
                        ask_for_line<16>(near + column * right.next + line * 64, line);
                near += TILE;
            } else {
                ahead.ask();
            }
            pending.finish(share);
        });
        pending.finish(pending.left());
        store_sums<ROWS, COLUMNS>(pending.sums());
    }

    // A stripe's weights as they are multiplied; int8 are widened, into the thread's buffer.
    const char* widened(int stripe) const {
        const char* from = stripe_of(stripe);
        if constexpr (Weight::BYTES == BFloat16::BYTES) {
            return from;
        } else {
            char* to = wide_weights.at_least(width * steps * TILE);
            const int64_t pairs = int64_t(panels_of(stripe)) * product.pairs;
            for (int64_t pair = 0; pair < pairs; ++pair, from += Weight::BYTES)
                store_words(to + pair * BFloat16::BYTES, Weight::load(from).both);
            return to;
        }
    }
};

template <class Weight>
void linear_in_tiles(const Product& product, const uint16_t* x, int64_t x_stride, int inputs, int threads) {
    const int rows = product.rows, tiles = (rows + TILE_SIDE - 1) / TILE_SIDE;
    const int64_t tile_row = int64_t(product.pairs) * TILE_BYTES;
    char* packed = packed_rows.at_least(tiles * tile_row);
    const TiledProduct<Weight> tiled(product, packed);
    const int stripes = tiled.stripes;
    const int steps = inputs / TILE_INPUTS, parts = std::max(1, threads / tiles);
    const int passes = std::min(tiles, int((tiles * tile_row + PASS_BYTES - 1) / PASS_BYTES));
    const std::unique_ptr<Run[]> runs(new Run[passes * threads]);
    for (int i = 0; i < passes * threads; ++i) {
        const int thread = i % threads;
        runs[i].next = int(int64_t(stripes) * thread / threads);
        runs[i].end = int(int64_t(stripes) * (thread + 1) / threads);
    }
#pragma omp parallel num_threads(threads)
    {
        const Tiles in_use;
        const int me = omp_get_thread_num();
        tiled.ask_for(runs[me].next);
#pragma omp for collapse(2) schedule(static)
        for (int tile = 0; tile < tiles; ++tile)
            for (int part = 0; part < parts; ++part)
                pack_tiles(x, x_stride, rows, tile * TILE_SIDE, steps * part / parts, steps * (part + 1) / parts,
                           packed + tile * tile_row);
        PendingOutputs pending(product);
        for (int pass = 0; pass < passes; ++pass) {
            const int first = int(int64_t(tiles) * pass / passes) * TILE_SIDE;
            const int last = std::min(rows, int(int64_t(tiles) * (pass + 1) / passes) * TILE_SIDE);
            for (int i = 0; i < threads; ++i)
                tiled.multiply(first, last, runs[pass * threads + (me + i) % threads], pending);
        }
        pending.finish(pending.left());
    }
}

}  // namespace
#endif
