// Blocks of a matrix product in tiles: up to 48 rows by 32 outputs, or 16 by 64. With many rows the L2
// cache is the limit, not the arithmetic: three tiles of rows by two of outputs load five tiles for six products, two by
// two load four for four. Storing and loading sums costs as much as some twenty products, and is done seldom.
#pragma once

#include "tiles.hpp"

#if defined(KVLAB_TILES)

constexpr int64_t TILE = TILE_SIDE * TILE_BYTES;
constexpr int MOST_TILES = 3;  // of rows, of a block

// The left side of a block: up to three rows of tiles, `below` bytes apart. The tiles of a row are consecutive.
struct TileRows {
    const char* at;
    int64_t below;
};

// The right side: up to four panels, whose tiles are consecutive too.
struct Panels {
    const char* at;
    int64_t beside, far;  // bytes to the second panel from the first, and to the fourth from the third; to the third

    const char* operator[](int panel) const { return at + panel % 2 * beside + panel / 2 * far; }
};

// 32 inputs of a block: its sums in tiles 0 to 5, row by row.
template <int ROWS, int COLUMNS>
INLINE void multiply_step(const TileRows& rows, const Panels& panels, int64_t offset) {
    const char *left = rows.at + offset, *right = panels.at + offset;
    const int64_t below = rows.below, beside = panels.beside;
    if constexpr (ROWS == 1) {
        _tile_loadd(7, left, TILE_BYTES);
        _tile_loadd(6, right, TILE_BYTES);
        _tile_dpbf16ps(0, 7, 6);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(5, right + beside, TILE_BYTES);
            _tile_dpbf16ps(1, 7, 5);
        }
        if constexpr (COLUMNS > 2) {
            _tile_loadd(6, right + panels.far, TILE_BYTES);
            _tile_dpbf16ps(2, 7, 6);
        }
        if constexpr (COLUMNS > 3) {
            _tile_loadd(5, right + panels.far + beside, TILE_BYTES);
            _tile_dpbf16ps(3, 7, 5);
        }
    } else if constexpr (ROWS == 2) {
        _tile_loadd(4, left, TILE_BYTES);
        _tile_loadd(6, right, TILE_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, left + below, TILE_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(7, right + beside, TILE_BYTES);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    } else {  // the rows down, then up again: the third is loaded once, the others are near when they come again
        _tile_loadd(6, right, TILE_BYTES);
        _tile_loadd(7, left, TILE_BYTES);
        _tile_dpbf16ps(0, 7, 6);
        _tile_loadd(7, left + below, TILE_BYTES);
        _tile_dpbf16ps(2, 7, 6);
        _tile_loadd(7, left + 2 * below, TILE_BYTES);
        _tile_dpbf16ps(4, 7, 6);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(6, right + beside, TILE_BYTES);
            _tile_dpbf16ps(5, 7, 6);
            _tile_loadd(7, left + below, TILE_BYTES);
            _tile_dpbf16ps(3, 7, 6);
            _tile_loadd(7, left, TILE_BYTES);
            _tile_dpbf16ps(1, 7, 6);
        }
    }
}

INLINE void zero_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
}

// From sums [16 ROWS, 16 COLUMNS]. (A tile's number is part of the instruction's name: what loads cannot store.)
template <int ROWS, int COLUMNS>
INLINE void load_sums(const float* sums) {
    constexpr int64_t stride = COLUMNS * TILE_SIDE, bytes = stride * sizeof(float);
    _tile_loadd(0, sums, bytes);
    if constexpr (ROWS == 1) {
        if constexpr (COLUMNS > 1) _tile_loadd(1, sums + TILE_SIDE, bytes);
        if constexpr (COLUMNS > 2) _tile_loadd(2, sums + 2 * TILE_SIDE, bytes);
        if constexpr (COLUMNS > 3) _tile_loadd(3, sums + 3 * TILE_SIDE, bytes);
    } else {
        if constexpr (COLUMNS > 1) _tile_loadd(1, sums + TILE_SIDE, bytes);
        _tile_loadd(2, sums + TILE_SIDE * stride, bytes);
        if constexpr (COLUMNS > 1) _tile_loadd(3, sums + TILE_SIDE * stride + TILE_SIDE, bytes);
        if constexpr (ROWS > 2) {
            _tile_loadd(4, sums + 2 * TILE_SIDE * stride, bytes);
            if constexpr (COLUMNS > 1) _tile_loadd(5, sums + 2 * TILE_SIDE * stride + TILE_SIDE, bytes);
        }
    }
}

// To sums [16 ROWS, 16 COLUMNS].
template <int ROWS, int COLUMNS>
INLINE void store_sums(float* sums) {
    constexpr int64_t stride = COLUMNS * TILE_SIDE, bytes = stride * sizeof(float);
    _tile_stored(0, sums, bytes);
    if constexpr (ROWS == 1) {
        if constexpr (COLUMNS > 1) _tile_stored(1, sums + TILE_SIDE, bytes);
        if constexpr (COLUMNS > 2) _tile_stored(2, sums + 2 * TILE_SIDE, bytes);
        if constexpr (COLUMNS > 3) _tile_stored(3, sums + 3 * TILE_SIDE, bytes);
    } else {
        if constexpr (COLUMNS > 1) _tile_stored(1, sums + TILE_SIDE, bytes);
        _tile_stored(2, sums + TILE_SIDE * stride, bytes);
        if constexpr (COLUMNS > 1) _tile_stored(3, sums + TILE_SIDE * stride + TILE_SIDE, bytes);
        if constexpr (ROWS > 2) {
            _tile_stored(4, sums + 2 * TILE_SIDE * stride, bytes);
            if constexpr (COLUMNS > 1) _tile_stored(5, sums + 2 * TILE_SIDE * stride + TILE_SIDE, bytes);
        }
    }
}

// The product of a block over `steps` times 32 inputs, added to the tiles of sums; `meanwhile(step)` is done in each.
template <int ROWS, int COLUMNS, class Meanwhile>
INLINE void multiply_block_of_tiles(const TileRows& left, const Panels& right, int steps, Meanwhile meanwhile) {
    for (int step = 0; step < steps; ++step) {
        meanwhile(step);
        multiply_step<ROWS, COLUMNS>(left, right, step * TILE);
    }
}
#endif
