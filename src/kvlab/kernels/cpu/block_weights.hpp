// Where the weights of a block of tiles come from: from the second cache, from memory, or out of another format. In each step
// `begin(step)` is called before its products, and `between` behind each of them; the step's weights are at `tiles`,
// `offset(step)` bytes further.
#pragma once

#include "compact_weight.hpp"
#include "linear_tiles.hpp"
#include "packed_weight.hpp"

#if defined(KVLAB_TILES)
namespace {

// In the second cache: an earlier block has read or unpacked them.
struct CachedWeights {
    Panels tiles;

    int64_t offset(int step) const { return step * TILE; }
    void begin(int) {}
    template <int PRODUCT, int PRODUCTS>
    void between() {}
};

// A piece of the inputs of a stripe, and of the one that comes next: what is to be prefetched.
template <int COLUMNS, int STEP_BYTES>
struct Stream {
    Panels weights, next;
    int steps;

    INLINE_MEMBER const char* at(int step, int column) const {
        return step < steps ? weights[column] + int64_t(step) * STEP_BYTES : next[column] + int64_t(step - steps) * STEP_BYTES;
    }
};

// In memory, for this block alone. Each line is prefetched into the second cache one step before it is used, and with every
// fourth one a line further ahead: this starts the processor's own prefetcher there, which has more requests in flight than
// prefetch instructions can have.
template <int COLUMNS>
struct StreamedWeights {
    Panels tiles;
    Stream<COLUMNS, TILE> stream;

    int64_t offset(int step) const { return step * TILE; }

    INLINE_MEMBER void begin(int step) {
#pragma GCC unroll 4
        for (int column = 0; column < COLUMNS; ++column) {
            const char* const near = stream.at(step + 1, column);
#pragma GCC unroll 16
            for (int line = 0; line < TILE_SIDE; ++line) {
                __builtin_prefetch(near + line * 64, 0, 2);
                if (line % 4 == 0) __builtin_prefetch(near + TILE + line * 64, 0, 2);
            }
        }
    }

    template <int PRODUCT, int PRODUCTS>
    void between() {}
};

// In another format. Between the products of a step the weights of the next one are unpacked, a part at a time: then both
// go on at once.
template <int COLUMNS, class Panel>
struct UnpackedWeights {
    Panels tiles;  // with room for `room` steps of each panel
    Stream<COLUMNS, Panel::STEP_BYTES> stream;
    Panel panels[COLUMNS];
    int room;
    const char* wanted[COLUMNS] = {};
    char* to = nullptr;  // null: there is no next step

    int64_t offset(int step) const { return step % room * TILE; }

    INLINE_MEMBER void begin(int step) {
        if (step == 0) {
            prepare(0);
            unpack<0, PARTS>();
        }
        // GCC does not know that loading a tile reads memory: keep earlier writes before it.
        asm volatile("" ::: "memory");
        prepare(step + 1);
    }

    template <int PRODUCT, int PRODUCTS>
    INLINE_MEMBER void between() {
        if (to) unpack<PRODUCT * PARTS / PRODUCTS, (PRODUCT + 1) * PARTS / PRODUCTS>();
    }

private:
    static constexpr int PARTS = COLUMNS * Panel::PARTS, AHEAD = 3;

    INLINE_MEMBER void prepare(int step) {
        to = step < stream.steps ? const_cast<char*>(tiles.at) + offset(step) : nullptr;
#pragma GCC unroll 4
        for (int column = 0; column < COLUMNS; ++column) wanted[column] = stream.at(step + AHEAD, column);
    }

    template <int BEGIN, int END>
    INLINE_MEMBER void unpack() {
        constexpr int LINES = Panel::STEP_BYTES / Panel::PARTS / 64;
#pragma GCC unroll 16
        for (int i = BEGIN; i < END; ++i) {
            const int column = i / Panel::PARTS, part = i % Panel::PARTS;
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line)
                __builtin_prefetch(wanted[column] + (part * LINES + line) * 64, 0, 3);
            panels[column].unpack(part, to + column * room * TILE);
        }
    }
};

// Unpacks a panel of int8 as CompactPanel does one of 12 bits: exactly, since bfloat16 has eight digits.
class Int8Panel {
public:
    static constexpr int PARTS = 4, STEP_BYTES = TILE_SIDE * Int8::BYTES;

    Int8Panel() = default;
    explicit Int8Panel(const char* at) : at(at) {}

    INLINE_MEMBER void unpack(int part, char* to) {
        constexpr int PAIRS = TILE_SIDE / PARTS;
#pragma GCC unroll 4
        for (int pair = part * PAIRS; pair < (part + 1) * PAIRS; ++pair)
            store_words(to + pair * BFloat16::BYTES, Int8::pairs(at + pair * Int8::BYTES));
        if (part == PARTS - 1) at += STEP_BYTES;
    }

private:
    const char* at = nullptr;
};

}  // namespace
#endif
