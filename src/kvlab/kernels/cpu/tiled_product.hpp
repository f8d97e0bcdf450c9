// A product in tiles, a part at a time: some rows of x, packed, by a stripe, which is two panels of the weights or,
// for few rows, four, over a piece of the inputs.
//
// Memory should never be idle: every step prefetches some of the weights that are needed next, and the outputs of a block
// are written while the next one is computed.
#pragma once

#include "block_weights.hpp"
#include "buffer.hpp"
#include "linear_outputs.hpp"
#include "runs.hpp"

#include <algorithm>
#include <type_traits>

#if defined(KVLAB_TILES)
namespace {

thread_local Buffer unpacked_weights;

template <class Weight>
constexpr bool IN_INTEGERS = std::is_same_v<Weight, Int8Quads>;
template <class Weight>
constexpr int STEP_INPUTS = tile_inputs(IN_INTEGERS<Weight>);

// The weights that are needed next, prefetched into the L2 cache in equal shares.
struct Ahead {
    Panels weights;
    int panels, lines;  // lines of each panel, of a share

    INLINE_MEMBER void prefetch() {
        for (int panel = 0; panel < panels; ++panel)
            for (int line = 0; line < lines; ++line) __builtin_prefetch(weights[panel] + line * 64, 0, 2);
        weights.at += lines * 64;
    }
};

// Rows [first_row, last_row) and inputs [begin, end), in steps of STEP_INPUTS. Between two pieces of the inputs, sums are
// stored in `sums` [stripes, tiles of rows, 16, outputs of a stripe].
struct Part {
    int first_row, last_row, begin, end;
    float* sums;
    bool first, last;  // piece of the inputs

    int steps() const { return end - begin; }
    int tiles() const { return (last_row - first_row + TILE_SIDE - 1) / TILE_SIDE; }
};

// A block of ROWS tiles of rows by COLUMNS panels. Weights that several blocks read are prefetched during the blocks of the
// previous stripe, stored sums by the previous block. A processor that has stored no tile for about 1 µs takes 0.25 µs for
// the next one, so some are stored in between; not where outputs are written in each step, which hold such stores up.
template <int ROWS, int COLUMNS, bool INTEGERS, class Weights>
__attribute__((noinline)) void multiply_block(const Part& part, const TileRows& left, const Weights& source, float* sums,
                                              Ahead& ahead, PendingOutputs& pending) {
    constexpr int SUMS = ROWS * COLUMNS * TILE_SIDE;  // lines of them
    const int count = part.steps(), share = (pending.left() + count - 1) / count;
    const int sums_share = part.first ? 0 : (SUMS + count - 1) / count;
    const char* next_sums = part.first ? nullptr : reinterpret_cast<const char*>(sums + SUMS * LANES);
    Weights weights = source;  // in registers, as far as they go
    // GCC does not know that loading a tile reads memory: keep earlier writes before it.
    asm volatile("" ::: "memory");
    if (part.first)
        zero_sums();
    else
        load_sums<ROWS, COLUMNS>(sums);
    for (int step = 0; step < count; ++step) {
        ahead.prefetch();
        pending.finish<!INTEGERS>(share);
        if (share < 2 && step % 4 == 3) _tile_stored(0, pending.unused(), TILE_BYTES);
        for (int line = 0; line < sums_share; ++line, next_sums += 64) __builtin_prefetch(next_sums, 1, 2);
        weights.begin(step);
        multiply_step<ROWS, COLUMNS, INTEGERS>(
            left.at + step * TILE, left.below, weights.tiles, weights.offset(step),
            [&](auto product) { weights.template between<decltype(product)::value, ROWS * COLUMNS>(); });
    }
    pending.finish<!INTEGERS>(pending.left());
    store_sums<ROWS, COLUMNS>(part.last ? pending.sums() : sums);
}

template <class Weight>
class TiledProduct {
public:
    // `x`: packed, [rows / 16, inputs / STEP_INPUTS] tiles.
    TiledProduct(const Product& product, const char* x)
        : product(product), x(x), steps(2 * product.pairs / STEP_INPUTS<Weight>), panels(product.panels()),
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
        for (int stripe; (stripe = run.take()) < run.end;)
            multiply(part, stripe, std::min(stripe + 1, run.end - 1), pending);
    }

private:
    struct Stripe {
        int panel, panels;  // the first one, and how many. Where some are gates of others: of the gates; of both
        Panels weights;
    };

    using Panel = std::conditional_t<std::is_same_v<Weight, Compact>, CompactPanel, Int8Panel>;

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
        constexpr bool PLAIN_WEIGHT = std::is_same_v<Weight, BFloat16> || IN_INTEGERS<Weight>;
        const int tiles = part.tiles(), blocks = (tiles + MOST_TILES - 1) / MOST_TILES;
        const int shares = blocks * part.steps(), lines = part.steps() * STEP_BYTES / 64;
        const Stripe stripe = stripe_of(index);
        const Panels weights = from_step(stripe.weights, part.begin);
        const Panels next_weights = from_step(stripe_of(next).weights, part.begin);
        Ahead ahead{next_weights, stripe.panels, blocks == 1 ? 0 : (lines + shares - 1) / shares};
        Panels cached = weights;
        const int room = blocks == 1 ? 2 : part.steps();
        if constexpr (!PLAIN_WEIGHT) {
            const int64_t size = room * TILE;
            cached = {unpacked_weights.at_least(width * size), size, 2 * size};
        }
        for (int block = 0, tile = 0; block < blocks; ++block) {
            const int taken = (tiles - tile + blocks - block - 1) / (blocks - block);
            const int row = part.first_row + tile * TILE_SIDE;
            const TileRows left{x + (int64_t(row / TILE_SIDE) * steps + part.begin) * TILE, steps * TILE};
            float* sums = part.sums ? part.sums + (int64_t(index) * tiles + tile) * waiting_sums() : nullptr;
            in_shape(taken, stripe.panels, [&](auto rows, auto columns) {
                constexpr int ROWS = decltype(rows)::value, COLUMNS = decltype(columns)::value;
                const auto multiply_from = [&](const auto& source) {
                    multiply_block<ROWS, COLUMNS, IN_INTEGERS<Weight>>(part, left, source, sums, ahead, pending);
                };
                const Stream<COLUMNS, STEP_BYTES> stream{weights, next_weights, part.steps()};
                if constexpr (PLAIN_WEIGHT) {
                    if (blocks == 1) return multiply_from(StreamedWeights<COLUMNS>{weights, stream});
                } else if (block == 0) {
                    UnpackedWeights<COLUMNS, Panel> unpacked{cached, stream, {}, room};
                    for (int column = 0; column < COLUMNS; ++column)
                        unpacked.panels[column] = panel_of(stripe, column, weights[column], part.begin);
                    return multiply_from(unpacked);
                }
                if constexpr (ROWS > 1) multiply_from(CachedWeights{cached});  // else there is no second block
            });
            if (part.last)
                pending.begin(row, std::min(part.last_row - row, taken * TILE_SIDE), stripe.panel, stripe.panels);
            tile += taken;
        }
    }

    static Panels from_step(Panels weights, int step) {
        weights.at += int64_t(step) * STEP_BYTES;
        return weights;
    }

    // The panel in a column of a stripe, from a step on.
    Panel panel_of(const Stripe& stripe, int column, const char* weights, int step) const {
        if constexpr (std::is_same_v<Weight, Compact>) {
            const int half = stripe.panels / 2;
            const int index = !gates()         ? stripe.panel + column
                              : column < half ? stripe.panel + column
                                              : gates() + stripe.panel + column - half;
            return {{const_cast<char*>(product.weights), panels, steps}, index, step};
        } else {
            return Panel(weights);
        }
    }

    // `work` for a number of tiles of rows and of panels, both as constants.
    template <class Work>
    static void in_shape(int tiles, int panels, Work work) {
        if (tiles == 3) return panels == 1 ? work(Constant<3>(), Constant<1>()) : work(Constant<3>(), Constant<2>());
        if (tiles == 2) return panels == 1 ? work(Constant<2>(), Constant<1>()) : work(Constant<2>(), Constant<2>());
        if (panels > 2) return panels == 3 ? work(Constant<1>(), Constant<3>()) : work(Constant<1>(), Constant<4>());
        panels == 1 ? work(Constant<1>(), Constant<1>()) : work(Constant<1>(), Constant<2>());
    }
};

}  // namespace
#endif
