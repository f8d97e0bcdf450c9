// Blocks of a matrix product in tiles: up to 48 rows by 32 outputs, or 16 by 64. With many rows the L2
// cache is the limit, not the arithmetic: three tiles of rows by two of outputs load five tiles for six products, two by
// two load four for four. Storing and loading sums costs as much as some twenty products, and is done seldom.
#pragma once

#include "tiles.hpp"

#include <type_traits>

#if defined(KVLAB_TILES)

constexpr int64_t TILE = TILE_SIDE * TILE_BYTES;
constexpr int MOST_TILES = 3;  // of rows, of a block

template <int VALUE>
using Constant = std::integral_constant<int, VALUE>;

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

// 32 inputs of a block: its sums in tiles 0 to 5, row by row. `between(i)`, with i a constant, follows product i.
// INTEGERS: 64 inputs in int8, on the right without a sign; their sums are in int32, wherever sums are said to be float.
template <int ROWS, int COLUMNS, bool INTEGERS, class Between>
INLINE void multiply_step(const char* left, int64_t below, const Panels& right, int64_t offset, Between between) {
    const char* const first = right.at + offset;
    if constexpr (ROWS == 1) {
        _tile_loadd(7, left, TILE_BYTES);
        _tile_loadd(6, first, TILE_BYTES);
        KVLAB_MULTIPLY_TILES(0, 7, 6);
        between(Constant<0>());
        if constexpr (COLUMNS > 1) {
            _tile_loadd(5, first + right.beside, TILE_BYTES);
            KVLAB_MULTIPLY_TILES(1, 7, 5);
            between(Constant<1>());
        }
        if constexpr (COLUMNS > 2) {
            _tile_loadd(6, first + right.far, TILE_BYTES);
            KVLAB_MULTIPLY_TILES(2, 7, 6);
            between(Constant<2>());
        }
        if constexpr (COLUMNS > 3) {
            _tile_loadd(5, first + right.far + right.beside, TILE_BYTES);
            KVLAB_MULTIPLY_TILES(3, 7, 5);
            between(Constant<3>());
        }
    } else if constexpr (ROWS == 2) {
        _tile_loadd(4, left, TILE_BYTES);
        _tile_loadd(6, first, TILE_BYTES);
        KVLAB_MULTIPLY_TILES(0, 4, 6);
        between(Constant<0>());
        _tile_loadd(5, left + below, TILE_BYTES);
        KVLAB_MULTIPLY_TILES(2, 5, 6);
        between(Constant<1>());
        if constexpr (COLUMNS > 1) {
            _tile_loadd(7, first + right.beside, TILE_BYTES);
            KVLAB_MULTIPLY_TILES(1, 4, 7);
            between(Constant<2>());
            KVLAB_MULTIPLY_TILES(3, 5, 7);
            between(Constant<3>());
        }
    } else {  // the rows down, then up again: the third is loaded once, the others are near when they come again
        _tile_loadd(6, first, TILE_BYTES);
        _tile_loadd(7, left, TILE_BYTES);
        KVLAB_MULTIPLY_TILES(0, 7, 6);
        between(Constant<0>());
        _tile_loadd(7, left + below, TILE_BYTES);
        KVLAB_MULTIPLY_TILES(2, 7, 6);
        between(Constant<1>());
        _tile_loadd(7, left + 2 * below, TILE_BYTES);
        KVLAB_MULTIPLY_TILES(4, 7, 6);
        between(Constant<2>());
        if constexpr (COLUMNS > 1) {
            _tile_loadd(6, first + right.beside, TILE_BYTES);
            KVLAB_MULTIPLY_TILES(5, 7, 6);
            between(Constant<3>());
            _tile_loadd(7, left + below, TILE_BYTES);
            KVLAB_MULTIPLY_TILES(3, 7, 6);
            between(Constant<4>());
            _tile_loadd(7, left, TILE_BYTES);
            KVLAB_MULTIPLY_TILES(1, 7, 6);
            between(Constant<5>());
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

#endif
