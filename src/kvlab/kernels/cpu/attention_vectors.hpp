// Attention in vectors.
//
// Keys are taken TILE_KEYS at a time from the sequence's blocks, packed, and used in two products with an online softmax
// between them:
//
//     scores [rows, keys]      = queries [rows, head_dim] * keys^T
//     sums   [rows, head_dim] += weights [rows, keys] * values
//
// Both products are `multiply`: the left side is read one unit at a time, the right side one vector at a time. A
// unit is a float, or two bfloat16 where the processor multiplies pairs. Scores and sums are float32.
#pragma once

#include "attention_few.hpp"

#include <optional>

constexpr int SMALL_PAGE = 4096;   // which a virtual machine's memory may consist of, even where it says otherwise
constexpr int TOUCHED_AHEAD = 4;  // tiles
constexpr int ROWS_AT_ONCE = 96;  // query rows that share a packed tile, unless one group has more

// A group with more rows is not divided.
INLINE int rows_in_vectors(const Problem& problem) { return std::max(ROWS_AT_ONCE, problem.num_heads); }

// Buffers of a thread, reused by every call.
struct Scratch {
    float *queries, *keys, *values, *scores, *weights, *sums, *most, *total;
    std::vector<float> memory;

    template <class Type>
    void fit(const Shape<Type>& shape, size_t rows) {
        const size_t row = shape.channels, tile = TILE_KEYS;
        const size_t sizes[] = {rows * row, tile * row, tile * row, rows * tile, rows * tile, rows * row, rows, rows * LANES};
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
    for (; column < columns; column += LANES)
        multiply_tile<Type, ROWS, 1>(a, a_stride, b + column, b_stride, steps, c + column, c_stride, add);
}

// c [rows, columns] (+)= a [rows, steps] * b [steps, columns], in units; columns a multiple of LANES.
template <class Type>
void multiply(const float* a, int a_stride, const float* b, int b_stride, int steps, float* c, int c_stride, int rows,
              int columns, bool add) {
    int row = 0;
    for (; row + TILE_ROWS <= rows; row += TILE_ROWS)
        multiply_rows<Type, TILE_ROWS>(a + row * a_stride, a_stride, b, b_stride, steps, c + row * c_stride, c_stride,
                                       columns, add);
    a += row * a_stride;
    c += row * c_stride;
    switch (rows - row) {
        case 5: if constexpr (TILE_ROWS > 5) multiply_rows<Type, 5>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
        case 4: if constexpr (TILE_ROWS > 4) multiply_rows<Type, 4>(a, a_stride, b, b_stride, steps, c, c_stride, columns, add); break;
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

// Whether few rows read such numbers unpacked. Not in float32 where they are in a format: it is rare, and doubles what is
// compiled.
template <class Type, class Number>
constexpr bool MAY_BE_FEW = IS_PLAIN<Number> || (Type::PER_UNIT == 1 && !std::is_same_v<Type, Float32>);
// Whether there may be more: rows of Widened are few.
template <class Type>
constexpr bool MAY_BE_MANY = !std::is_same_v<Type, Widened>;

// Scores of all rows against a tile's keys.
template <class Type, class Number>
void score(const Rows& keys, const Rows& ahead, int count, int rows, const Shape<Type>& shape, const float* queries,
           Scratch& scratch) {
    float* scores = scratch.scores;
    if constexpr (MAY_BE_FEW<Type, Number>) switch (rows) {
        case 1: return score_few<Type, Number, 1>(queries, keys, ahead, count, shape, scores);
        case 2: return score_few<Type, Number, 2>(queries, keys, ahead, count, shape, scores);
        case 3: return score_few<Type, Number, 3>(queries, keys, ahead, count, shape, scores);
        case 4: return score_few<Type, Number, 4>(queries, keys, ahead, count, shape, scores);
        default: break;
    }
    if constexpr (MAY_BE_MANY<Type>) {
        pack_keys<Type, Number>(keys, ahead, count, shape, scratch.keys);
        multiply<Type>(queries, shape.steps, scratch.keys, TILE_KEYS, shape.steps, scores, TILE_KEYS, rows,
                       (count + LANES - 1) / LANES * LANES, false);
    }
}

// Whether few rows have their scores in matrix tiles.
template <class Type>
bool scores_in_tiles(const Problem& problem) {
#if defined(KVLAB_TILES) && defined(__AVX512BF16__)
    return std::is_same_v<Type, Widened> && problem.key_format == PLAIN && problem.head_dim % TILE_INPUTS == 0 &&
           problem.block_size % TILE_SIDE == 0 && has_tiles();
#else
    return false;
#endif
}

// As `score`, where `scores_in_tiles` says so.
template <class Type>
void score_in_tiles(const Rows& keys, const Rows& ahead, int count, int rows, const Shape<Type>& shape,
                    const float* queries, Scratch& scratch) {
#if defined(KVLAB_TILES) && defined(__AVX512BF16__)
    switch (rows) {
        case 1: return score_few_in_tiles<1>(queries, keys, ahead, count, shape.head_dim, scratch.scores);
        case 2: return score_few_in_tiles<2>(queries, keys, ahead, count, shape.head_dim, scratch.scores);
        case 3: return score_few_in_tiles<3>(queries, keys, ahead, count, shape.head_dim, scratch.scores);
        default: return score_few_in_tiles<4>(queries, keys, ahead, count, shape.head_dim, scratch.scores);
    }
#endif
}

// The tile's values, weighted, added to all rows' sums.
template <class Type, class Number>
void add_values(const Rows& values, const Rows& ahead, int count, int rows, const Shape<Type>& shape, float* sums,
                Scratch& scratch) {
    const float* weights = scratch.weights;
    if constexpr (MAY_BE_FEW<Type, Number>) switch (rows) {
        case 1: return add_values_few<Type, Number, 1>(weights, values, ahead, count, shape, sums);
        case 2: return add_values_few<Type, Number, 2>(weights, values, ahead, count, shape, sums);
        case 3: return add_values_few<Type, Number, 3>(weights, values, ahead, count, shape, sums);
        case 4: return add_values_few<Type, Number, 4>(weights, values, ahead, count, shape, sums);
        default: break;
    }
    if constexpr (MAY_BE_MANY<Type>) {
        pack_values<Type, Number>(values, ahead, count, shape, scratch.values);
        const int steps = (count + Type::PER_UNIT - 1) / Type::PER_UNIT;
        multiply<Type>(weights, TILE_KEYS, scratch.values, shape.channels, steps, sums, shape.channels, rows,
                       shape.channels, true);
    }
}

// Each format takes as long to compile as the rest: attention_formats.cpp, compiled beside attention.cpp, has those that
// are not plain.
#if !defined(KVLAB_FORMATS)
#define KVLAB_ELSEWHERE(Type, Number)                                                                         \
    extern template void score<Type, Number>(const Rows&, const Rows&, int, int, const Shape<Type>&, const float*, \
                                             Scratch&);                                                       \
    extern template void add_values<Type, Number>(const Rows&, const Rows&, int, int, const Shape<Type>&, float*, \
                                                  Scratch&);
KVLAB_ELSEWHERE(Float32, int8_t)
KVLAB_ELSEWHERE(Float32, E4M3)
KVLAB_ELSEWHERE(Float32, E5M2)
KVLAB_ELSEWHERE(Float32, Int4)
KVLAB_ELSEWHERE(BFloat16, int8_t)
KVLAB_ELSEWHERE(BFloat16, E4M3)
KVLAB_ELSEWHERE(BFloat16, E5M2)
KVLAB_ELSEWHERE(BFloat16, Int4)
KVLAB_ELSEWHERE(Widened, int8_t)
KVLAB_ELSEWHERE(Widened, E4M3)
KVLAB_ELSEWHERE(Widened, E5M2)
KVLAB_ELSEWHERE(Widened, Int4)
#endif

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

// Turn the scores of one row into weights, and update its running maximum, total and sums. `state` is the row's index
// among the rows of all heads. The row sees keys [first, last) of the tile, which may be none.
template <class Type>
void soften(const Problem& problem, const Shape<Type>& shape, const Scales& scales, float score_factor,
            float weight_factor, int row, int state, int first, int last) {
    constexpr int VECTORS = TILE_KEYS / LANES;
    const float* scores = scratch.scores + row * TILE_KEYS;
    float* weights = scratch.weights + row * TILE_KEYS;
    const float before = scratch.most[state];
    Floats x[VECTORS], top = all(before);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
        x[v] = load(scores + v * LANES) * score_factor;
        if (problem.key_scales) x[v] *= load(scales.keys + v * LANES);
        if (problem.soft_cap > 0) x[v] = hyperbolic_tangent(x[v] / problem.soft_cap) * problem.soft_cap;
        const Ints key = lane_numbers() + v * LANES;
        x[v] = (key >= first) & (key < last) ? x[v] : all(HIDDEN);
        top = larger(x[v], top);
    }
    // The sums are scaled whether the maximum rose or not: a branch that is foretold wrong costs more.
    const float now = largest(top), base = now == HIDDEN ? 0 : now;  // minus infinity less itself is NaN
    const Floats shrink = exponential(all(before - base));
    scratch.most[state] = now;
    float* sums = scratch.sums + state * shape.channels;
    for (int channel = 0; channel < shape.channels; channel += LANES)
        store(sums + channel, load(sums + channel) * shrink);
    Floats total = load(scratch.total + state * LANES) * shrink;
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
        x[v] = exponential(x[v] - base);
        total += x[v];
        if (problem.value_scales) x[v] *= load(scales.values + v * LANES) * weight_factor;
        store_weights<Type>(weights, v * LANES, x[v]);
    }
    store(scratch.total + state * LANES, total);
}

// A tile of keys of one head: where an item is, or will be soon.
struct Cursor {
    const Item *item, *next;  // `next`: the item behind it, or null
    int first, head;          // the tile's first key, which may be before the item's, and its KV head

    Cursor(const Item& item, const Item* next) : item(&item), next(next), first(item.first_key), head(item.first_head) {}

    // To the next tile: keys in order and, inside a tile, the heads, which is the order of memory. Stays at the end.
    void advance() {
        if (++head < item->last_head) return;
        if (first + TILE_KEYS < item->last_key) {
            first += TILE_KEYS;
            head = item->first_head;
        } else if (next) {
            *this = Cursor(*next, nullptr);
        } else {
            --head;
        }
    }
};

// Compute an item. `next`: the item that the thread will probably compute next, whose first tiles are prefetched; or null.
template <class Type>
void attend(const Problem& problem, const Shape<Type>& shape, const Item& item, const Item* next, float* partials) {
    using Element = typename Type::Element;
    const auto* keys = static_cast<const char*>(problem.keys);
    const auto* values = static_cast<const char*>(problem.values);
    const int key_bytes = row_bytes(problem.key_format, problem.head_dim, sizeof(Element));
    const int value_bytes = row_bytes(problem.value_format, problem.head_dim, sizeof(Element));
    const PairFactors of_keys = factors_of<Type>(problem.key_format), of_values = factors_of<Type>(problem.value_format);
    const float score_factor = problem.scale * of_keys.after;
    const bool in_tiles = scores_in_tiles<Type>(problem);
    const auto score_of = in_tiles ? &score_in_tiles<Type> : with_format<Element>(problem.key_format, [](auto n) {
        return &score<Type, decltype(n)>;
    });
    const auto add_of = with_format<Element>(problem.value_format, [](auto n) { return &add_values<Type, decltype(n)>; });
    const int group = problem.group(), head_dim = problem.head_dim, block_size = problem.block_size;
    const int start = problem.query_start[item.sequence];
    const int new_tokens = problem.query_start[item.sequence + 1] - start;
    const int first_position = problem.seq_lens[item.sequence] - new_tokens;
    const int heads = item.last_head - item.first_head;
    const int rows = (item.last_query - item.first_query) * group;  // of one KV head

    // Index of a row's head in `queries` and `out`, both [T, num_heads, head_dim].
    const auto token_of = [&](int row) { return int64_t(start + item.first_query + row / group); };
    const auto head_of = [&](int head, int row) { return (item.first_head + head) * group + row % group; };
    const auto* queries = static_cast<const Element*>(problem.queries);
    for (int head = 0; head < heads; ++head)
        for (int row = 0; row < rows; ++row) {
            const Element* query = queries + token_of(row) * problem.query_stride + head_of(head, row) * head_dim;
            float* packed = scratch.queries + head * rows * shape.steps;
            if (in_tiles) pack_query_for_tiles(query, row, rows, head_dim, packed);
            else pack_query<Type>(query, shape, of_keys.before, packed + row * shape.steps);
        }
    std::fill_n(scratch.sums, heads * rows * shape.channels, 0.0f);
    std::fill_n(scratch.most, heads * rows, HIDDEN);
    std::fill_n(scratch.total, heads * rows * LANES, 0.0f);

    struct Tile {
        Rows keys, values;
        Scales scales;
        int first, count, head;
    } ring[3];

    // body(key, count, row): `count` keys of a tile, from `key` on, are consecutive rows of the cache from `row` on.
    const auto for_each_run = [&](const Cursor& at, auto body) {
        const int32_t* table = problem.block_tables + int64_t(at.item->sequence) * problem.table_width;
        const int last = std::min(at.first + TILE_KEYS, at.item->last_key);
        for (int key = std::max(at.first, at.item->first_key), run; key < last; key += run) {
            const int block = key / block_size, offset = key % block_size;
            run = std::min(block_size - offset, last - key);
            body(key - at.first, run, (int64_t(table[block]) * problem.num_kv_heads + at.head) * block_size + offset);
        }
        return last - at.first;
    };
    const auto locate = [&](const Cursor& at, Tile& tile) {
        auto &k = tile.keys, &v = tile.values;
        tile.first = at.first;
        tile.head = at.head - item.first_head;
        tile.count = for_each_run(at, [&](int key, int count, int64_t row) {
            if (problem.key_scales) std::copy_n(problem.key_scales + row, count, tile.scales.keys + key);
            if (problem.value_scales) std::copy_n(problem.value_scales + row, count, tile.scales.values + key);
            for (int i = 0; i < count; ++i) {
                k[key + i] = keys + (row + i) * key_bytes;
                v[key + i] = values + (row + i) * value_bytes;
            }
        });
        for (int key = std::max(0, at.item->first_key - at.first); key > 0; --key) {  // keys before the item's
            k[key - 1] = k[key] - key_bytes;
            v[key - 1] = v[key];
            tile.scales.keys[key - 1] = tile.scales.values[key - 1] = 0;
        }
        for (int key = tile.count; key < TILE_KEYS; ++key) {
            k[key] = k[key - 1];
            v[key] = v[key - 1];
        }
        std::fill(tile.scales.keys + tile.count, std::end(tile.scales.keys), 0.0f);
        std::fill(tile.scales.values + tile.count, std::end(tile.scales.values), 0.0f);
    };
    // Looking up the address of a page takes so long that it is done well ahead of reading it.
    const auto touch = [&](const Cursor& at) {
        for_each_run(at, [&](int, int count, int64_t row) {
            for (int byte = 0; byte < count * key_bytes; byte += SMALL_PAGE) prefetch(keys + row * key_bytes + byte);
            for (int byte = 0; byte < count * value_bytes; byte += SMALL_PAGE) prefetch(values + row * value_bytes + byte);
        });
    };
    const auto score_tile = [&](const Tile& tile, const Tile& ahead) {
        score_of(tile.keys, ahead.keys, tile.count, rows, shape, scratch.queries + tile.head * rows * shape.steps, scratch);
    };
    const auto soften_tile = [&](const Tile& tile) {
        for (int row = 0; row < rows; ++row) {
            const int position = first_position + item.first_query + row / group - tile.first;
            const int begin = problem.window > 0 ? position - problem.window + 1 : 0;
            soften<Type>(problem, shape, tile.scales, score_factor, of_values.before, row, tile.head * rows + row,
                         std::max(begin, item.first_key - tile.first), std::min(position + 1, tile.count));
        }
    };

#if defined(KVLAB_TILES)
    std::optional<Tiles> in_use;
    if (in_tiles) in_use.emplace(tile_columns(rows));
#endif
    Cursor ahead(item, next);
    if (in_tiles) ahead.first -= ahead.first % TILE_SIDE;
    const int visits = (item.last_key - ahead.first + TILE_KEYS - 1) / TILE_KEYS * heads;
    Cursor far = ahead;
    for (int visit = 0; visit < TOUCHED_AHEAD; ++visit) far.advance();
    for (int visit = 0; visit < 2; ++visit, ahead.advance()) locate(ahead, ring[visit]);
    score_tile(ring[0], ring[1]);
    soften_tile(ring[0]);
    // A tile's scores are computed before the values of the one before it are added: the processor then has work while it
    // waits for the results of either.
    for (int visit = 0; visit < visits; ++visit, ahead.advance(), far.advance()) {
        const Tile &tile = ring[visit % 3], &second = ring[(visit + 1) % 3];
        touch(far);
        locate(ahead, ring[(visit + 2) % 3]);
        if (visit + 1 < visits) score_tile(second, ring[(visit + 2) % 3]);
        add_of(tile.values, second.values, tile.count, rows, shape, scratch.sums + tile.head * rows * shape.channels,
               scratch);
        if (visit + 1 < visits) soften_tile(second);
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

