// Where the elements of a row lie: in a row of its own; or in tiles of 16 rows by 32 elements, tile behind tile, which
// is how products in tiles read the rows that they multiply. Who makes such rows writes them so, and spares a pass.
#pragma once

#include <cstdint>

namespace {

constexpr int64_t IN_TILES = -1;  // says so where else there are elements from one row to the next

struct RowPlace {
    static constexpr int ROWS = 16, ELEMENTS = 32;  // of a tile

    int64_t first, step;  // the first element; elements to the next tile's

    RowPlace(int64_t row, int64_t size, bool in_tiles)
        : first(in_tiles ? row / ROWS * ROWS * size + row % ROWS * ELEMENTS : row * size),
          step(in_tiles ? ROWS * ELEMENTS : ELEMENTS) {}

    int64_t of(int element) const { return first + element / ELEMENTS * step + element % ELEMENTS; }
};

}  // namespace
