// A product in tiles, a part at a time: some rows of x, packed, by a stripe, which is two panels of the weights or,
// for few rows, four, over a piece of the inputs.
//
// Memory should never be idle: every step prefetches some of the weights that are needed next, and the outputs of a block
// are written while the next one is computed.
#pragma once

#include "buffer.hpp"
#include "linear_outputs.hpp"
#include "linear_tiles.hpp"
#include "packed_weight.hpp"

#include <algorithm>
#include <atomic>

#if defined(KVLAB_TILES)
namespace {

thread_local Buffer wide_weights;

// Prefetch a cache line of weights into the L2 cache, and with every fourth one a line further ahead. This starts the
// processor's own prefetcher there, which has more requests in flight than prefetch instructions can have.
INLINE void prefetch_line(const char* at, int line) {
    constexpr int FAR = 16;
    __builtin_prefetch(at, 0, 2);
    if (line % 4 == 0) __builtin_prefetch(at + FAR * 64, 0, 2);
}

// The weights that are needed next, prefetched into the L2 cache in equal shares.
struct Ahead {
    Panels weights;
    int panels, lines;  // lines of each panel, of a share

    __attribute__((always_inline)) void prefetch() {
        for (int panel = 0; panel < panels; ++panel)
            for (int line = 0; line < lines; ++line) __builtin_prefetch(weights[panel] + line * 64, 0, 2);
        weights.at += lines * 64;
    }
};

// Rows [first_row, last_row) and inputs [begin, end), in steps of 32. Between two pieces of the inputs, sums are stored
// in `sums` [stripes, tiles of rows, 16, outputs of a stripe].
struct Part {
    int first_row, last_row, begin, end;
    float* sums;
    bool first, last;  // piece of the inputs

    int steps() const { return end - begin; }
    int tiles() const { return (last_row - first_row + TILE_SIDE - 1) / TILE_SIDE; }
};

// Consecutive stripes for one thread. A thread that has finished its own takes stripes of the others.
struct alignas(64) Run {
    std::atomic<int> next;
    int end;
};

template <class Weight>
class TiledProduct {
public:
    // `x`: packed, [rows / 16, inputs / 32] tiles.
    TiledProduct(const Product& product, const char* x)
        : product(product), x(x), steps(product.pairs / TILE_SIDE), panels(product.panels()),
          width(product.rows <= TILE_SIDE ? 4 : 2) {}

    int stripes() const {
        const int wide = gates() ? width / 2 : width;
        return ((gates() ? gates() : panels) + wide - 1) / wide;
    }

    // Number of floats that 16 rows of sums take, of a stripe.
    int waiting_sums() const { return TILE_SIDE * width * LANES; }

    // Prefetch the beginning of a stripe.
    void prefetch_stripe(int index) const {
        if (index >= stripes()) return;
        const Stripe stripe = stripe_of(index);
        for (int panel = 0; panel < std::min(2, stripe.panels); ++panel)
            for (int64_t at = 0; at < std::min<int64_t>(panel_bytes(), 1 << 15); at += 64)
                __builtin_prefetch(stripe.weights[panel] + at, 0, 2);
    }

    // Multiply a part by the stripes that are left of a run.
    void multiply(const Part& part, Run& run, PendingOutputs& pending) const {
        for (int stripe; (stripe = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;)
            multiply(part, stripe, std::min(stripe + 1, run.end - 1), pending);
    }

private:
    struct Stripe {
        int panel, panels;  // the first one, and how many. Where some are gates of others: of the gates; of both
        Panels weights;
    };

    const Product& product;
    const char* x;
    const int steps, panels, width;

    static constexpr int STEP_BYTES = TILE_SIDE * Weight::BYTES;  // of a panel

    int64_t panel_bytes() const { return int64_t(steps) * STEP_BYTES; }
    int gates() const { return product.gate == Gate::NONE ? 0 : panels / 2; }  // panels of them

    Stripe stripe_of(int index) const {
        const int64_t panel = panel_bytes();
        const auto from = [&](int first) { return product.weights + first * panel; };
        if (!gates()) {
            const int first = width * index;
            return {first, std::min(width, panels - first), {from(first), panel, 2 * panel}};
        }
        const int first = width / 2 * index, count = std::min(width / 2, gates() - first);
        const int64_t half = gates() * panel;
        return {first, 2 * count, {from(first), count == 1 ? half : panel, half}};
    }

    // In blocks of up to three tiles of rows. A block of one tile would use each weight once only: instead of 3 + 1 tiles
    // there are blocks of 2 + 2.
    void multiply(const Part& part, int index, int next, PendingOutputs& pending) const {
        const int tiles = part.tiles(), blocks = (tiles + MOST_TILES - 1) / MOST_TILES;
        const int shares = blocks * part.steps(), lines = part.steps() * STEP_BYTES / 64;
        const bool once = blocks == 1 && Weight::BYTES == BFloat16::BYTES;
        const Stripe stripe = stripe_of(index);
        Ahead ahead{stripe_of(next).weights, stripe.panels, (lines + shares - 1) / shares};
        ahead.weights.at += int64_t(part.begin) * STEP_BYTES;
        const Panels right = widened(stripe, part);
        for (int block = 0, tile = 0; block < blocks; ++block) {
            const int taken = (tiles - tile + blocks - block - 1) / (blocks - block);
            const int row = part.first_row + tile * TILE_SIDE;
            const TileRows left{x + (int64_t(row / TILE_SIDE) * steps + part.begin) * TILE, steps * TILE};
            float* sums = part.sums ? part.sums + (int64_t(index) * tiles + tile) * waiting_sums() : nullptr;
            once ? multiply_rows<true>(taken, stripe.panels, part, left, right, sums, ahead, pending)
                 : multiply_rows<false>(taken, stripe.panels, part, left, right, sums, ahead, pending);
            if (part.last)
                pending.begin(row, std::min(part.last_row - row, taken * TILE_SIDE), stripe.panel, stripe.panels);
            tile += taken;
        }
    }

    template <bool ONCE, class... Arguments>
    void multiply_rows(int tiles, int panels, Arguments&... arguments) const {
        if (tiles == 3)
            panels == 1 ? multiply_block<3, 1, ONCE>(arguments...) : multiply_block<3, 2, ONCE>(arguments...);
        else if (tiles == 2)
            panels == 1 ? multiply_block<2, 1, ONCE>(arguments...) : multiply_block<2, 2, ONCE>(arguments...);
        else if (panels > 2)
            panels == 3 ? multiply_block<1, 3, ONCE>(arguments...) : multiply_block<1, 4, ONCE>(arguments...);
        else
            panels == 1 ? multiply_block<1, 1, ONCE>(arguments...) : multiply_block<1, 2, ONCE>(arguments...);
    }

    // Weights that only this block reads (ONCE) are prefetched one step before they are used, which is fastest. Weights
    // that several blocks read from the L2 cache are prefetched during the blocks of the previous stripe. Stored sums
    // are prefetched by the previous block. A processor that has stored no tile for about 1 µs takes 0.25 µs for the next
    // one, so some are stored in between; not where outputs are written in each step, which hold such stores up.
    template <int ROWS, int COLUMNS, bool ONCE>
    __attribute__((noinline)) void multiply_block(const Part& part, const TileRows& left, const Panels& right,
                                                  float* sums, Ahead& ahead, PendingOutputs& pending) const {
        constexpr int SUMS = ROWS * COLUMNS * TILE_SIDE;  // lines of them
        const int count = part.steps(), share = (pending.left() + count - 1) / count;
        const int sums_share = part.first ? 0 : (SUMS + count - 1) / count;
        const char* next_sums = part.first ? nullptr : reinterpret_cast<const char*>(sums + SUMS * LANES);
        Panels near = right;
        near.at += TILE;
        // GCC does not know that loading a tile reads memory: keep earlier writes before it.
        asm volatile("" ::: "memory");
        if (part.first)
            zero_sums();
        else
            load_sums<ROWS, COLUMNS>(sums);
        multiply_block_of_tiles<ROWS, COLUMNS>(left, right, count, [&](int step) {
            if constexpr (ONCE) {
                if (step == count - 1) near.at = ahead.weights.at;
#pragma GCC unroll 4
                for (int column = 0; column < COLUMNS; ++column)
#pragma GCC unroll 16
                    for (int line = 0; line < TILE_SIDE; ++line)
                        prefetch_line(near[column] + line * 64, line);
                near.at += TILE;
            } else {
                ahead.prefetch();
            }
            pending.finish(share);
            if (share < 2 && step % 4 == 3) _tile_stored(0, pending.unused(), TILE_BYTES);
            for (int line = 0; line < sums_share; ++line, next_sums += 64) __builtin_prefetch(next_sums, 1, 2);
        });
        pending.finish(pending.left());
        store_sums<ROWS, COLUMNS>(part.last ? pending.sums() : sums);
    }

    // The weights of a stripe for a part. int8 is widened into the thread's buffer.
    Panels widened(const Stripe& stripe, const Part& part) const {
        Panels from = stripe.weights;
        from.at += int64_t(part.begin) * STEP_BYTES;
        if constexpr (Weight::BYTES == BFloat16::BYTES) {
            return from;
        } else {
            const int64_t size = part.steps() * TILE;
            char* to = wide_weights.at_least(width * size);
            const Panels wide{to, size, 2 * size};
            for (int panel = 0; panel < stripe.panels; ++panel)
                for (int pair = 0; pair < part.steps() * TILE_SIDE; ++pair, to += BFloat16::BYTES)
                    store_words(to, Weight::pairs(from[panel] + pair * Weight::BYTES));
            return wide;
        }
    }
};

}  // namespace
#endif
