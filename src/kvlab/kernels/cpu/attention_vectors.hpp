// Attention in vectors.
//
// Keys are taken TILE_KEYS at a time from the sequence's blocks, packed, and used in two products with an online softmax
// between them:
//
//     scores [rows, keys]      = queries [rows, head_dim] * keys^T
//     sums   [rows, head_dim] += weights [rows, keys] * values
//
// Both products are `multiply`: the left side is read one unit at a time, the right side one vector at a time. A
// unit is a float, or two bfloat16 where the processor multiplies pairs. Scores and sums are float32. TILE_ROWS rows go
// through all three before the next ones do: what they share is in the first cache, and so are their scores and weights.
#pragma once

#include "attention.hpp"

constexpr int TILE_KEYS = 64;     // keys packed at once
constexpr int ROWS_AT_ONCE = 512; // query rows that share a packed tile, unless one group has more
constexpr int FEW_KEYS = 32;      // with few rows, the least: fewer tiles, but less in the order of memory
constexpr int UNPACKED_ROWS = 4;       // rows up to which packing keys and values costs more than it saves

// A group with more rows is not divided.
INLINE int rows_in_vectors(const Problem& problem) { return std::max(ROWS_AT_ONCE, problem.num_heads); }

// Buffers of a thread, reused by every call.
struct Scratch {
    float *queries, *keys, *values, *scores, *weights, *sums, *most, *total;
    std::vector<float> memory;

    template <class Type>
    void fit(const Shape<Type>& shape, size_t rows) {
        const size_t row = shape.channels, tile = TILE_KEYS, block = std::max(TILE_ROWS, UNPACKED_ROWS) * tile;
        const size_t sizes[] = {rows * row, tile * row, tile * row, block, block, rows * row, rows, rows * LANES};
        size_t all_of_them = 16;
        for (size_t size : sizes) all_of_them += (size + 15) / 16 * 16;
        if (memory.size() < all_of_them) memory.resize(all_of_them);
        float* at = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
        float** buffers[] = {&queries, &keys, &values, &scores, &weights, &sums, &most, &total};
        for (int i = 0; i < 8; ++i) {
            *buffers[i] = at;
            at += (sizes[i] + 15) / 16 * 16;
        }
    }
};

static thread_local Scratch scratch;

// `sum` plus the product of a unit of either side.
template <class Type>
INLINE Floats multiply_add(Floats left, Floats right, Floats sum) {
#if defined(__AVX512BF16__)
    if constexpr (Type::PER_UNIT == 2)
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)left, (__m512bh)right);
#endif
    return left * right + sum;
}

// c [ROWS, VECTORS * LANES] (+)= a [ROWS, steps] * b [steps, VECTORS * LANES], in units.
template <class Type, int ROWS, int VECTORS>
void multiply_tile(const float* a, int a_stride, const float* b, int b_stride, int steps, float* c, int c_stride,
                   bool add) {
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[row][v] = add ? load(c + row * c_stride + v * LANES) : Floats{};
    for (int step = 0; step < steps; ++step, b += b_stride) {
        Floats right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) right[v] = load(b + v * LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; ++row) {
            const Floats left = all(a[row * a_stride + step]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = multiply_add<Type>(left, right[v], sums[row][v]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store(c + row * c_stride + v * LANES, sums[row][v]);
}

template <class Type, int ROWS>
void multiply_rows(const float* a, int a_stride, const float* b, int b_stride, int steps, float* c, int c_stride,
                   int columns, bool add) {
    int column = 0;
    for (; column + TILE_VECTORS * LANES <= columns; column += TILE_VECTORS * LANES)
        multiply_tile<Type, ROWS, TILE_VECTORS>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, add);
    if constexpr (TILE_VECTORS > 2 && ROWS == TILE_ROWS) {  // one vector alone waits for each sum
        if (columns - column == 3 * LANES)
            return multiply_tile<Type, ROWS, 3>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, add);
        if (columns - column == 2 * LANES)
            return multiply_tile<Type, ROWS, 2>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, add);
    }
    for (; column < columns; column += LANES)
        multiply_tile<Type, ROWS, 1>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, add);
}

// c [rows, columns] (+)= a [rows, steps] * b [steps, columns], in units; up to TILE_ROWS rows, columns a multiple of LANES.
template <class Type>
void multiply(const float* a, int a_stride, const float* b, int b_stride, int steps, float* c, int c_stride, int rows,
              int columns, bool add) {
    switch (rows) {
        case 6: if constexpr (TILE_ROWS > 4) multiply_rows<Type, 6>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
        case 5: if constexpr (TILE_ROWS > 4) multiply_rows<Type, 5>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
        case 4: multiply_rows<Type, 4>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
        case 3: multiply_rows<Type, 3>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
        case 2: multiply_rows<Type, 2>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
        case 1: multiply_rows<Type, 1>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
        default: break;
    }
}

// Whether bytes are read as pairs, whose numbers come as multiples.
template <class Type>
constexpr bool WIDENS_PAIRS = Type::CHUNK == 2 * LANES && Type::PER_UNIT == 1;

template <class Type>
PairFactors factors_of(int format) {
    if constexpr (!WIDENS_PAIRS<Type>) return {};
    else return with_format<typename Type::Element>(format, [](auto n) { return pair_factors<decltype(n)>(); });
}

template <class Type>
void pack_query(const typename Type::Element* row, const Shape<Type>& shape, float factor, float* out) {
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
        Words units[2];
        using Element = typename Type::Element;
        const Words loaded = load_chunk<Type, Element>(row, chunk, shape.head_dim);
        const int count = units_of_chunk<Type, Element>(loaded, units);
        for (int i = 0; i < count; ++i) {
            if constexpr (WIDENS_PAIRS<Type>) units[i] = as_words(as_floats(units[i]) * factor);
            store_words(out + (chunk * count + i) * LANES, units[i]);
        }
    }
}

// Addresses of the keys or values of a tile. Entries beyond the tile's keys repeat a valid address.
using Rows = const char* [TILE_KEYS];

// The scales of a tile, where rows have scales; zeros beyond its keys.
struct Scales {
    float keys[TILE_KEYS], values[TILE_KEYS];
};

// Transpose keys: out [steps, TILE_KEYS]; scores of keys beyond `count` are not used. Each read of a cache line
// prefetches the same line of `ahead`, which spreads the requests to memory evenly.
template <class Type, class Number>
void pack_keys(const Rows& rows, const Rows& ahead, int count, const Shape<Type>& shape, float* out) {
    for (int key = 0; key < count; key += LANES)
        for (int chunk = 0; chunk < shape.chunks; ++chunk) {
            Words units[2][LANES];
            int vectors = 1;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; ++i) {
                Words of_key[2];
                prefetch(ahead[key + i] + bytes_of<Number>(chunk * Type::CHUNK));
                const Words loaded = load_chunk<Type, Number>(rows[key + i], chunk, shape.head_dim);
                vectors = units_of_chunk<Type, Number>(loaded, of_key);
                for (int v = 0; v < vectors; ++v) units[v][i] = of_key[v];
            }
            for (int v = 0; v < vectors; ++v) {
                transpose(units[v]);
                for (int i = 0; i < LANES; ++i)
                    store_words(out + ((chunk * vectors + v) * LANES + i) * TILE_KEYS + key, units[v][i]);
            }
        }
}

// Pack values: out [keys / PER_UNIT, channels]. The missing partner of an odd last key counts as zero.
template <class Type, class Number>
void pack_values(const Rows& rows, const Rows& ahead, int count, const Shape<Type>& shape, float* out) {
    for (int key = 0; key < count; key += Type::PER_UNIT, out += shape.channels)
        for (int chunk = 0; chunk < shape.chunks; ++chunk) {
            for (int i = 0; i < Type::PER_UNIT; ++i) prefetch(ahead[key + i] + bytes_of<Number>(chunk * Type::CHUNK));
            const Words first = load_chunk<Type, Number>(rows[key], chunk, shape.head_dim);
            float* at = out + chunk * Type::CHUNK;
            Words second{}, units[2];
            if (Type::PER_UNIT == 2 && key + 1 < count)
                second = load_chunk<Type, Number>(rows[key + 1], chunk, shape.head_dim);
            units_of_values<Type, Number>(first, second, units);
            for (int v = 0; v < Type::CHUNK / LANES; ++v) store_words(at + v * LANES, units[v]);
        }
}

template <int ROWS>
struct Column {
    Floats row[ROWS];
};

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

// Products for few rows read keys and values straight from the cache, without packing them.
template <class Type, class Number, int ROWS>
void score_few(const float* queries, const Rows& rows, const Rows& ahead, int count,
               const Shape<Type>& shape, float* scores) {
    for (int key = 0; key < count; key += LANES) {
        const Column<ROWS> column = dot_keys<Type, Number, ROWS, LANES>(queries, rows + key, ahead + key, shape);
        for (int r = 0; r < ROWS; ++r) store(scores + r * TILE_KEYS + key, column.row[r]);
    }
}

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

// Whether few rows read such numbers unpacked. Not in float32 where they are in a format: it is rare, and doubles what is
// compiled.
template <class Type>
constexpr bool may_be_few(bool plain) {
    return plain || (Type::PER_UNIT == 1 && !std::is_same_v<Type, Float32>);
}
// Whether there may be more: rows of Widened are few.
template <class Type>
constexpr bool MAY_BE_MANY = !std::is_same_v<Type, Widened>;

// Scores of few rows against a tile's keys. For more rows the keys are packed.
template <class Type, class Number>
void read_keys(const Rows& keys, const Rows& ahead, int count, int rows, const Shape<Type>& shape, const float* queries,
               Scratch& scratch) {
    float* scores = scratch.scores;
    if constexpr (may_be_few<Type>(IS_PLAIN<Number>)) switch (rows) {
        case 1: return score_few<Type, Number, 1>(queries, keys, ahead, count, shape, scores);
        case 2: return score_few<Type, Number, 2>(queries, keys, ahead, count, shape, scores);
        case 3: return score_few<Type, Number, 3>(queries, keys, ahead, count, shape, scores);
        case 4: return score_few<Type, Number, 4>(queries, keys, ahead, count, shape, scores);
        default: break;
    }
    if constexpr (MAY_BE_MANY<Type>) pack_keys<Type, Number>(keys, ahead, count, shape, scratch.keys);
}

// The tile's values, weighted, added to few rows' sums. For more rows the values are packed.
template <class Type, class Number>
void read_values(const Rows& values, const Rows& ahead, int count, int rows, const Shape<Type>& shape, float* sums,
                 Scratch& scratch) {
    const float* weights = scratch.weights;
    if constexpr (may_be_few<Type>(IS_PLAIN<Number>)) switch (rows) {
        case 1: return add_values_few<Type, Number, 1>(weights, values, ahead, count, shape, sums);
        case 2: return add_values_few<Type, Number, 2>(weights, values, ahead, count, shape, sums);
        case 3: return add_values_few<Type, Number, 3>(weights, values, ahead, count, shape, sums);
        case 4: return add_values_few<Type, Number, 4>(weights, values, ahead, count, shape, sums);
        default: break;
    }
    if constexpr (MAY_BE_MANY<Type>) pack_values<Type, Number>(values, ahead, count, shape, scratch.values);
}

// The readers of formats take several seconds to compile. They are a library of their own
// (attention_formats.cpp), which is compiled and loaded when a cache has formats, and hands over its functions.
template <class Type>
struct Readers {
    decltype(&read_keys<Type, typename Type::Element>) read_keys[INT4];  // by format, from INT8 on
    decltype(&read_values<Type, typename Type::Element>) read_values[INT4];
};
struct FormatReaders {
    Readers<Float32> floats;
    Readers<BFloat16> halves;
    Readers<Widened> widened;

    const Readers<Float32>& of(Float32) const { return floats; }
    const Readers<BFloat16>& of(BFloat16) const { return halves; }
    const Readers<Widened>& of(Widened) const { return widened; }
};
inline const FormatReaders* format_readers = nullptr;

// The weights of a tile as the left side of the second product.
template <class Type>
INLINE void store_weights(float* at, int key, Floats weights) {
#if defined(__AVX512BF16__)
    if constexpr (Type::PER_UNIT == 2) {
        const __m256bh narrow = _mm512_cvtneps_pbh((__m512)weights);
        std::memcpy(reinterpret_cast<uint16_t*>(at) + key, &narrow, sizeof narrow);
        return;
    }
#endif
    store(at + key, weights);
}

// e^(x - most). What is rounded to bfloat16 at once needs no better than the rough function.
template <class Type>
INLINE Floats weight_of(Floats x, Floats most) {
#if defined(__AVX512BF16__)
    if constexpr (Type::PER_UNIT == 2) {
        constexpr float LOG2_E = 1.44269504f;
        return (Floats)rough_power_of_two((__m512)(x * LOG2_E - most * LOG2_E));
    }
#endif
    return exponential(x - most);
}

// By how much a score may exceed the running maximum before that is raised. A weight in bfloat16 is as precise whatever its size, and
// raising it costs the row's sums a pass.
template <class Type>
constexpr float SLACK = Type::PER_UNIT == 2 ? 8.0f : 0.0f;

// Turn the first `width` scores of one row into weights, and update its running maximum, total and sums. `row` is where its
// scores are, `state` its index among the rows of all heads. It sees keys [first, last) of the tile, which may be none.
template <class Type>
void soften(const Problem& problem, const Shape<Type>& shape, Scratch& scratch, const Scales& scales, float score_factor,
            float weight_factor, int row, int state, int first, int last, int width) {
    constexpr int VECTORS = TILE_KEYS / LANES;
    const float* scores = scratch.scores + row * TILE_KEYS;
    float* weights = scratch.weights + row * TILE_KEYS;
    const float before = scratch.most[state];
    Floats x[VECTORS], most = all(before);
    Ints raised{};
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        const int key = v * LANES;
        if (key >= width) break;
        x[v] = load(scores + key) * score_factor;
        if (problem.key_scales) x[v] *= load(scales.keys + key);
        if (problem.soft_cap > 0) x[v] = hyperbolic_tangent(x[v] / problem.soft_cap) * problem.soft_cap;
        if (key < first || key + LANES > last) {
            const Ints at = lane_numbers() + key;
            x[v] = (at >= first) & (at < last) ? x[v] : all(HIDDEN);
        }
        raised |= x[v] > most + SLACK<Type>;
    }
    if (any(raised)) {
        Floats top = most;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
            if (v * LANES < width) top = larger(top, x[v]);
        const float now = largest(top);
        if (before != HIDDEN) {
            const float shrink = exponential(all(before - now))[0];
            float* sums = scratch.sums + state * shape.channels;
            for (int channel = 0; channel < shape.channels; channel += LANES)
                store(sums + channel, load(sums + channel) * shrink);
            store(scratch.total + state * LANES, load(scratch.total + state * LANES) * shrink);
        }
        scratch.most[state] = now;
        most = all(now);
    } else if (before == HIDDEN) {  // no key seen yet: minus infinity minus minus infinity is NaN
        most = Floats{};
    }
    Floats total = load(scratch.total + state * LANES);
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
        const int key = v * LANES;
        if (key >= width) break;
        const Floats weight = weight_of<Type>(x[v], most);
        total += weight;
        store_weights<Type>(weights, key, problem.value_scales ? weight * (load(scales.values + key) * weight_factor) : weight);
    }
    store(scratch.total + state * LANES, total);
}

template <class Type>
void attend(const Problem& problem, const Shape<Type>& shape, const Item& item, float* partials) {
    using Element = typename Type::Element;
    Scratch& scratch = ::scratch;
    const auto* keys = static_cast<const char*>(problem.keys);
    const auto* values = static_cast<const char*>(problem.values);
    const int key_bytes = row_bytes(problem.key_format, problem.head_dim, sizeof(Element));
    const int value_bytes = row_bytes(problem.value_format, problem.head_dim, sizeof(Element));
    const PairFactors of_keys = factors_of<Type>(problem.key_format), of_values = factors_of<Type>(problem.value_format);
    const float score_factor = problem.scale * of_keys.after;
    const auto read_keys_of = problem.key_format == PLAIN
        ? &read_keys<Type, Element> : format_readers->of(Type{}).read_keys[problem.key_format - INT8];
    const auto read_values_of = problem.value_format == PLAIN
        ? &read_values<Type, Element> : format_readers->of(Type{}).read_values[problem.value_format - INT8];
    const int group = problem.group(), head_dim = problem.head_dim, block_size = problem.block_size;
    const int start = problem.query_start[item.sequence];
    const int new_tokens = problem.query_start[item.sequence + 1] - start;
    const int first_position = problem.seq_lens[item.sequence] - new_tokens;
    const int heads = item.last_head - item.first_head;
    const int rows = (item.last_query - item.first_query) * group;  // of one KV head
    const int32_t* table = problem.block_tables + int64_t(item.sequence) * problem.table_width;

    // Index of a row's head in `queries` and `out`, both [T, num_heads, head_dim].
    const auto token_of = [&](int row) { return int64_t(start + item.first_query + row / group); };
    const auto head_of = [&](int head, int row) { return (item.first_head + head) * group + row % group; };
    const auto query_of = [&](int head, int row) {
        return static_cast<const Element*>(problem.queries) + token_of(row) * problem.query_stride + head_of(head, row) * head_dim;
    };
    constexpr int QUERIES_AHEAD = 12;
    for (int head = 0; head < heads; ++head)
        for (int row = 0; row < rows; ++row) {
            if (row + QUERIES_AHEAD < rows)  // tokens are far apart
                for (int i = 0; i < head_dim; i += 64 / int(sizeof(Element))) prefetch(query_of(head, row + QUERIES_AHEAD) + i);
            pack_query<Type>(query_of(head, row), shape, of_keys.before, scratch.queries + (head * rows + row) * shape.steps);
        }
    std::fill_n(scratch.sums, heads * rows * shape.channels, 0.0f);
    std::fill_n(scratch.most, heads * rows, HIDDEN);
    std::fill_n(scratch.total, heads * rows * LANES, 0.0f);

    // Tiles of keys in order and, inside a tile, the heads: the order of memory.
    const int tile_keys = rows <= UNPACKED_ROWS ? std::clamp(block_size / LANES * LANES, FEW_KEYS, TILE_KEYS) : TILE_KEYS;
    const int tiles = (item.last_key - item.first_key + tile_keys - 1) / tile_keys, visits = tiles * heads;
    Rows key_rows[2], value_rows[2];
    Scales scales[2];
    const auto locate = [&](int visit) {
        auto &k = key_rows[visit % 2], &v = value_rows[visit % 2];
        const int first = item.first_key + visit / heads * tile_keys;
        const int count = std::min(tile_keys, item.last_key - first);
        const int head = item.first_head + visit % heads;
        int key = 0;
        while (key < count) {
            const int position = first + key, offset = position % block_size;
            const int run = std::min(block_size - offset, count - key);
            const int64_t block = table[position / block_size];
            const int64_t row = (block * problem.num_kv_heads + head) * block_size + offset;
            if (problem.key_scales) std::copy_n(problem.key_scales + row, run, scales[visit % 2].keys + key);
            if (problem.value_scales) std::copy_n(problem.value_scales + row, run, scales[visit % 2].values + key);
            for (int i = 0; i < run; ++i, ++key) {
                k[key] = keys + (row + i) * key_bytes;
                v[key] = values + (row + i) * value_bytes;
            }
        }
        std::fill(scales[visit % 2].keys + count, scales[visit % 2].keys + tile_keys, 0.0f);
        std::fill(scales[visit % 2].values + count, scales[visit % 2].values + tile_keys, 0.0f);
        for (; key < tile_keys; ++key) {
            k[key] = k[key - 1];
            v[key] = v[key - 1];
        }
    };

    locate(0);
    for (int visit = 0; visit < visits; ++visit) {
        const int first = item.first_key + visit / heads * tile_keys, head = visit % heads;
        const int count = std::min(tile_keys, item.last_key - first);
        locate(std::min(visit + 1, visits - 1));
        const int now = visit % 2, next = std::min(visit + 1, visits - 1) % 2;
        // Rows see keys up to their own and, with a window, from its begin on. What sees none of the tile is left out, but
        // never so many rows that the others would be few, whose products add in another order.
        const int offset = first - first_position - item.first_query;  // of the tile, in queries
        const int last_seen = problem.window > 0 ? (offset + count + problem.window - 1) * group : rows;
        const int last_row = std::clamp(last_seen, std::min(rows, UNPACKED_ROWS + 1), rows);
        const int first_row = std::clamp(offset * group, 0, std::max(0, last_row - UNPACKED_ROWS - 1));
        const int state = head * rows + first_row;
        const int seen_by = last_row - first_row;
        const bool few = seen_by <= UNPACKED_ROWS;
        const bool scored = few && may_be_few<Type>(problem.key_format == PLAIN);
        const bool added = few && may_be_few<Type>(problem.value_format == PLAIN);
        float* const queries_now = scratch.queries + state * shape.steps;
        float* const sums = scratch.sums + state * shape.channels;
        const auto read = [&] { read_values_of(value_rows[now], value_rows[next], count, seen_by, shape, sums, scratch); };
        read_keys_of(key_rows[now], key_rows[next], count, seen_by, shape, queries_now, scratch);
        if (!added) read();
        for (int row = 0; row < seen_by; row += TILE_ROWS) {
            const int block = std::min(TILE_ROWS, seen_by - row);
            // Keys that the last of these rows sees, and the others at most.
            const int reach = few ? count : std::clamp((first_row + row + block - 1) / group - offset + 1, 0, count);
            const int width = (reach + LANES - 1) / LANES * LANES;
            if (!scored)
                multiply<Type>(queries_now + row * shape.steps, shape.steps, scratch.keys, TILE_KEYS, shape.steps, scratch.scores,
                               TILE_KEYS, block, width, false);
            for (int i = 0; i < block; ++i) {
                const int position = (first_row + row + i) / group - offset;  // in the tile
                const int begin = problem.window > 0 ? position - problem.window + 1 : 0;
                soften<Type>(problem, shape, scratch, scales[now], score_factor, of_values.before, i, state + row + i, begin,
                             std::min(position + 1, count), width);
            }
            if (!added)
                multiply<Type>(scratch.weights, TILE_KEYS, scratch.values, shape.channels,
                               (reach + Type::PER_UNIT - 1) / Type::PER_UNIT, sums + row * shape.channels, shape.channels, block,
                               shape.channels, true);
        }
        if (added) read();
    }

    float* partial = partials + int64_t(item.partial) * (shape.channels + 2);
    for (int head = 0; head < heads; ++head)
        for (int row = 0; row < rows; ++row) {
            const int state = head * rows + row;
            const float* sums = scratch.sums + state * shape.channels;
            const float total = sum(load(scratch.total + state * LANES));
            if (item.partial < 0) {
                store_output<Type>(problem, shape, token_of(row), head_of(head, row), sums, total / of_values.after);
                continue;
            }
            float* to = partial + state * (shape.channels + 2);
            to[0] = scratch.most[state];
            to[1] = total;
            for (int channel = 0; channel < shape.channels; channel += LANES)
                store(to + 2 + channel, load(sums + channel) * of_values.after);
        }
}

