// Products of few rows with keys and values as they lie in the cache: packing them would cost more than it saves. Each
// line that is read prefetches a line of the tile that comes next.
#pragma once

#include "attention.hpp"

constexpr int TILE_KEYS = 64;     // keys of a tile
constexpr int UNPACKED_ROWS = 4;  // rows up to which packing costs more than it saves

// Addresses of the keys or values of a tile. Entries beyond the tile's keys repeat a valid address.
using Rows = const char* [TILE_KEYS];

// `sum` plus the product of a unit of either side.
template <class Type>
INLINE Floats multiply_add(Floats left, Floats right, Floats sum) {
#if defined(__AVX512BF16__)
    if constexpr (Type::PER_UNIT == 2)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#endif
    return left * right + sum;
}

template <int ROWS>
struct Column {
    Floats row[ROWS];
};

// Columns of a result in tiles.
constexpr int tile_columns(int rows) { return rows == 3 ? 4 : rows; }

// One of `rows` queries as a column of the right side of a product in tiles: [pairs of channels, columns].
INLINE void pack_query_for_tiles(const void* query, int row, int rows, int head_dim, float* out) {
    for (int pair = 0; pair < head_dim / 2; ++pair)
        std::memcpy(out + pair * tile_columns(rows) + row, static_cast<const char*>(query) + pair * sizeof *out, sizeof *out);
}

// Scores of ROWS query rows against KEYS keys, one lane per key. The lanes of the dot products are added in a tree: each
// level halves the number of vectors. Two keys share each load of a query.
template <class Type, class Number, int ROWS, int KEYS>
INLINE Column<ROWS> dot_keys(const float* queries, const char* const* rows, const char* const* ahead,
                             const Shape<Type>& shape) {
    Column<ROWS> low = {}, high = {};
    if constexpr (KEYS > 2) {
        low = dot_keys<Type, Number, ROWS, KEYS / 2>(queries, rows, ahead, shape);
        high = dot_keys<Type, Number, ROWS, KEYS / 2>(queries, rows + KEYS / 2, ahead + KEYS / 2, shape);
    } else {
        const auto add = [&](int chunk, Words first, Words second) {
            for (int i = 0; i < 2; ++i) prefetch(ahead[i] + bytes_of<Number>(chunk * Type::CHUNK));
            Words units[2][2];
            const int vectors = units_of_chunk<Type, Number>(first, units[0]);
            units_of_chunk<Type, Number>(second, units[1]);
            for (int v = 0; v < vectors; ++v)
                for (int r = 0; r < ROWS; ++r) {
                    const Floats query = load(queries + r * shape.steps + (chunk * vectors + v) * LANES);
                    low.row[r] = multiply_add<Type>(query, as_floats(units[0][v]), low.row[r]);
                    high.row[r] = multiply_add<Type>(query, as_floats(units[1][v]), high.row[r]);
                }
        };
#pragma GCC unroll 2
        for (int chunk = 0; chunk < shape.whole_chunks; ++chunk)
            add(chunk, load_chunk<Type, Number, true>(rows[0], chunk, 0), load_chunk<Type, Number, true>(rows[1], chunk, 0));
        if (const int last = shape.whole_chunks; last < shape.chunks)
            add(last, load_chunk<Type, Number>(rows[0], last, shape.head_dim),
                load_chunk<Type, Number>(rows[1], last, shape.head_dim));
    }
    Column<ROWS> sums;
    for (int r = 0; r < ROWS; ++r) sums.row[r] = add_halves<KEYS / 2>(low.row[r], high.row[r]);
    return sums;
}

// Scores of ROWS rows against a tile's keys.
template <class Type, class Number, int ROWS>
void score_few(const float* queries, const Rows& rows, const Rows& ahead, int count,
               const Shape<Type>& shape, float* scores) {
    for (int key = 0; key < count; key += LANES) {
        const Column<ROWS> column = dot_keys<Type, Number, ROWS, LANES>(queries, rows + key, ahead + key, shape);
        for (int r = 0; r < ROWS; ++r) store(scores + r * TILE_KEYS + key, column.row[r]);
    }
}

#if defined(KVLAB_TILES) && defined(__AVX512BF16__)
// The same in matrix tiles. Keys are the left side as they lie in the cache; the right side has a column for each row of
// queries, of which there are 1, 2 or 4. One instruction does what 32 do for two rows in vectors, and no sums across lanes
// are left.
// Row `row` of a result [16 keys, COLUMNS].
template <int COLUMNS>
INLINE Floats column_of(const float* result, int row) {
    Ints from, later;
    for (int lane = 0; lane < LANES; ++lane) from[lane] = (lane * COLUMNS + row) % (2 * LANES);
    if constexpr (COLUMNS == 1) return load(result);
    const Floats first = __builtin_shuffle(load(result), load(result + LANES), from);
    if constexpr (COLUMNS == 2) return first;
    for (int lane = 0; lane < LANES; ++lane) later[lane] = lane < LANES / 2 ? lane : LANES + lane;
    return __builtin_shuffle(first, __builtin_shuffle(load(result + 2 * LANES), load(result + 3 * LANES), from), later);
}

// `keys` are consecutive in memory from each multiple of 16 on; those behind `count` may be read.
template <int ROWS>
void score_few_in_tiles(const float* queries, const Rows& keys, const Rows& ahead, int count, int head_dim,
                        float* scores) {
    constexpr int COLUMNS = tile_columns(ROWS);
    const int64_t key_bytes = head_dim * sizeof(uint16_t);
    alignas(64) float results[2][TILE_SIDE * COLUMNS];
    for (int key = 0; key < count; key += 2 * TILE_SIDE) {
        const bool both = key + TILE_SIDE < count;
        asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
        _tile_zero(0);
        _tile_zero(1);
        for (int chunk = 0; chunk < head_dim / TILE_INPUTS; ++chunk) {
            const auto prefetch_lines = [&](const char* rows) {
#pragma GCC unroll 16
                for (int i = 0; i < TILE_SIDE; ++i) prefetch(rows + (chunk * TILE_SIDE + i) * TILE_BYTES);
            };
            _tile_loadd(6, queries + chunk * TILE_SIDE * COLUMNS, COLUMNS * sizeof(float));
            prefetch_lines(ahead[key]);
            _tile_loadd(4, keys[key] + chunk * TILE_BYTES, key_bytes);
            _tile_dpbf16ps(0, 4, 6);
            if (!both) continue;
            prefetch_lines(ahead[key + TILE_SIDE]);
            _tile_loadd(5, keys[key + TILE_SIDE] + chunk * TILE_BYTES, key_bytes);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, results[0], COLUMNS * sizeof(float));
        if (both) _tile_stored(1, results[1], COLUMNS * sizeof(float));
        for (int r = 0; r < ROWS; ++r)
            for (int i = 0; i < 1 + both; ++i)
                store(scores + r * TILE_KEYS + key + i * TILE_SIDE, column_of<COLUMNS>(results[i], r));
    }
}
#endif

template <class Type, class Number, int ROWS, int CHUNKS, bool WHOLE>
INLINE void add_chunks(const float* weights, const Rows& rows, const Rows& ahead, int count, int chunk,
                       const Shape<Type>& shape, float* sums) {
    constexpr int VECTORS = Type::CHUNK / LANES;
    Floats total[ROWS][CHUNKS * VECTORS];
    float* at = sums + chunk * Type::CHUNK;
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < CHUNKS * VECTORS; ++v) total[r][v] = load(at + r * shape.channels + v * LANES);
    for (int key = 0; key < count; key += Type::PER_UNIT) {
        Words values[CHUNKS * VECTORS];
#pragma GCC unroll 16
        for (int c = 0; c < CHUNKS; ++c) {
            Words second{};
            if constexpr (Type::PER_UNIT == 2) {
                prefetch(ahead[key + 1] + bytes_of<Number>((chunk + c) * Type::CHUNK));
                if (key + 1 < count) second = load_chunk<Type, Number, WHOLE>(rows[key + 1], chunk + c, shape.head_dim);
            }
            prefetch(ahead[key] + bytes_of<Number>((chunk + c) * Type::CHUNK));
            const Words first = load_chunk<Type, Number, WHOLE>(rows[key], chunk + c, shape.head_dim);
            units_of_values<Type, Number>(first, second, values + c * VECTORS);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            const Floats weight = all(weights[r * TILE_KEYS + key / Type::PER_UNIT]);
#pragma GCC unroll 16
            for (int v = 0; v < CHUNKS * VECTORS; ++v)
                total[r][v] = multiply_add<Type>(weight, as_floats(values[v]), total[r][v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 16
        for (int v = 0; v < CHUNKS * VECTORS; ++v) store(at + r * shape.channels + v * LANES, total[r][v]);
}

template <class Type, class Number, int ROWS>
void add_values_few(const float* weights, const Rows& rows, const Rows& ahead, int count,
                    const Shape<Type>& shape, float* sums) {
    constexpr int REGISTERS = LANES == 16 ? 16 : 8, VECTORS = Type::CHUNK / LANES;
    constexpr int CHUNKS = std::max(1, std::min(4, REGISTERS / (ROWS * VECTORS)));
    int chunk = 0;
    for (; chunk + CHUNKS <= shape.whole_chunks; chunk += CHUNKS)
        add_chunks<Type, Number, ROWS, CHUNKS, true>(weights, rows, ahead, count, chunk, shape, sums);
    for (; chunk < shape.chunks; ++chunk)
        add_chunks<Type, Number, ROWS, 1, false>(weights, rows, ahead, count, chunk, shape, sums);
}
