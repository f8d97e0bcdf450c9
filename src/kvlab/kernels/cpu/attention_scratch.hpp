// The memory in which attention in matrix tiles keeps what an item works on.
#pragma once

#include "attention.hpp"
#include "buffer.hpp"
#include "tiles.hpp"

#include <type_traits>

namespace {

constexpr int TILED_FROM = 8;     // rows from which tiles are faster than vectors
constexpr int TILED_KEYS = 256;   // per iteration: the more, the less often sums are loaded and stored
constexpr int TILED_ROWS = 1024;  // of an item, unless one group has more

#if defined(KVLAB_TILES) && defined(__AVX512BF16__)
constexpr float LOG2_E = 1.44269504f;
constexpr int PAIR_ROWS = 2 * TILE_SIDE, TILED_STEPS = TILED_KEYS / TILE_INPUTS, STEP_SCORES = TILE_INPUTS * PAIR_ROWS;

// Permutation of 32 halves that interleaves two vectors of 16.
alignas(64) constexpr uint16_t INTERLEAVED[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// The upper half of each word, in the lower one: bytes of a lane of 16.
alignas(16) constexpr uint8_t UPPER_HALVES[] = {2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15};

// How far two tiles of rows are. Their sums are not set before something is added.
enum State : uint8_t { NOTHING_ADDED, ADDED, FINISHED };

// Buffers of a thread, reused by every call. Rows and keys are padded to whole tiles.
struct TiledScratch {
    Words *queries;    // [row tiles, chunks, 16 pairs of channels, 16 rows]
    uint16_t *keys;    // [TILED_KEYS, channels]: copies of keys that tiles cannot load from the cache
    Words *values;     // [channels / 16, TILED_KEYS / 32, 16 channels, 16 pairs of keys]
    float *scores;     // [2, 32 keys, PAIR_ROWS]: of two steps of keys in turn
    Words *weights;    // [2, TILED_KEYS / 32, 16 pairs of keys, 16 rows]
    float *sums;       // [pairs of row tiles, channels, PAIR_ROWS]
    float *most, *total;  // [rows]: of weights: the base, and the sum
    State *states;        // [pairs of row tiles]
    int32_t *first_seen, *last_seen;  // [rows]: keys that a row sees
    Buffer memory;

    void fit(int rows, int channels) {
        constexpr size_t keys_at_once = TILED_KEYS;
        uintptr_t at = 0;
        const auto take = [&](auto*& buffer, size_t count) {
            buffer = reinterpret_cast<std::decay_t<decltype(buffer)>>(at);
            at += (count * sizeof *buffer + 63) / 64 * 64;
        };
        const auto lay_out = [&](uintptr_t begin) {
            at = begin;
            take(queries, size_t(rows) * channels / 32);
            take(keys, keys_at_once * channels);
            take(values, keys_at_once / 2 * channels / LANES);
            take(scores, 2 * STEP_SCORES);
            take(weights, keys_at_once / 2 * PAIR_ROWS);
            take(sums, size_t(rows + TILE_SIDE) * channels);
            take(most, rows);
            take(total, rows);
            take(states, rows / PAIR_ROWS + 1);
            take(first_seen, rows);
            take(last_seen, rows);
            return at - begin;
        };
        lay_out(reinterpret_cast<uintptr_t>(memory.at_least(lay_out(0))));
    }
};

thread_local TiledScratch tiled_scratch;
#endif

}  // namespace
