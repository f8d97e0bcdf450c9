// Attention in matrix tiles (AMX) of several rows of one KV head; bfloat16, and int8 widened to it.
//
//     scores [keys, rows]      = keys [keys, head_dim] * queries^T
//     sums   [rows, head_dim] += weights [rows, keys] * values
//
// Keys are the left side of the first product just as they lie in memory. Its result has a row in each lane, so that
// the softmax of 16 rows needs no sum or maximum across lanes. Weights are then transposed, 32 keys at a time, which
// costs less than transposing keys. Values are taken in pairs of keys, the layout of a product's right side.
#pragma once

#include "attention.hpp"
#include "buffer.hpp"
#include "tiles.hpp"

#include <type_traits>

namespace {

constexpr int TILED_FROM = 8;    // rows from which tiles are faster than vectors
constexpr int TILED_KEYS = 256;  // per iteration: the more, the less often sums are loaded and stored
constexpr int TILED_ROWS = 512;  // of an item, unless one group has more

#if defined(KVLAB_TILES) && defined(__AVX512BF16__)
constexpr int PAIR_ROWS = 2 * TILE_SIDE;

// Permutation of 32 halves that interleaves two vectors of 16.
alignas(64) constexpr uint16_t INTERLEAVED[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};

// Buffers of a thread, reused by every call. Rows and keys are padded to whole tiles.
struct TiledScratch {
    Words *queries;    // [row tiles, chunks, 16 pairs of channels, 16 rows]
    uint16_t *keys;    // [TILED_KEYS, channels]: copies of keys that tiles cannot load from the cache
    Words *values;     // [TILED_KEYS / 32, channels / 16, 16 pairs of keys, 16 channels]
    float *scores;     // [TILED_KEYS, PAIR_ROWS]
    uint16_t *weights; // [PAIR_ROWS, TILED_KEYS]
    float *sums;       // [rows, channels]
    float *most, *total;  // [rows]
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
            take(scores, keys_at_once * PAIR_ROWS);
            take(weights, keys_at_once * PAIR_ROWS);
            take(sums, size_t(rows) * channels);
            take(most, rows);
            take(total, rows);
            take(first_seen, rows);
            take(last_seen, rows);
            return at - begin;
        };
        lay_out(reinterpret_cast<uintptr_t>(memory.at_least(lay_out(0))));
    }
};

thread_local TiledScratch tiled_scratch;

template <class Type>
class TiledItem {
public:
    // `next`: the item that the thread will probably compute next, whose data is prefetched; or null.
    TiledItem(const Problem& problem, const Shape<Type>& shape, const Item& item, const Item* next)
        : problem(problem),
          shape(shape),
          item(item),
          scratch(tiled_scratch),
          group(problem.group()),
          rows((item.last_query - item.first_query) * group),
          row_tiles((rows + TILE_SIDE - 1) / TILE_SIDE),
          start(problem.query_start[item.sequence] + item.first_query),
          first_key(item.first_key / TILE_SIDE * TILE_SIDE),
          in_place(!SCALED<Type> && problem.block_size % TILE_SIDE == 0 && shape.whole_chunks == shape.chunks) {
        if (!next) return;
        const auto* queries = static_cast<const Element*>(problem.queries) + next->first_head * group * shape.head_dim;
        next_query = queries + (problem.query_start[next->sequence] + next->first_query) * problem.query_stride;
        next_queries = next->last_query - next->first_query;
    }

    void attend(float* partials) {
        prepare();
        for (int first = first_key; first < item.last_key; first += TILED_KEYS) {
            locate(first);
            visit(first);
        }
        finish(partials);
    }

private:
    using Element = typename Type::Element;
    using Stored = typename Type::Stored;

    const Problem& problem;
    const Shape<Type>& shape;
    const Item& item;
    TiledScratch& scratch;
    const int group, rows, row_tiles, start, first_key;
    const bool in_place;           // tiles can load keys from the cache
    int64_t key_rows[TILED_KEYS];  // rows of the cache that hold the keys and values of an iteration
    const Element* next_query = nullptr;
    int next_queries = 0;  // not prefetched yet

    // Keys, up to the next multiple of what an instruction covers.
    static int in_steps(int keys) { return (keys + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS; }
    int64_t token_of(int row) const { return start + row / group; }
    int head_of(int row) const { return item.first_head * group + row % group; }

    void prepare() {
        const int count = row_tiles * TILE_SIDE;
        scratch.fit(count, shape.channels);
        const int32_t* starts = problem.query_start + item.sequence;
        const int first_position = problem.seq_lens[item.sequence] - (starts[1] - starts[0]) + item.first_query;
        for (int row = 0; row < count; ++row) {
            const int position = first_position + std::min(row, rows - 1) / group;
            const int begin = problem.window > 0 ? position - problem.window + 1 : 0;
            scratch.first_seen[row] = std::max(begin, item.first_key);
            scratch.last_seen[row] = std::min(position, item.last_key - 1);
        }
        const auto* queries = static_cast<const Element*>(problem.queries);
        for (int tile = 0; tile < row_tiles; ++tile)
            for (int chunk = 0; chunk < shape.chunks; ++chunk) {
                Words words[LANES];
                for (int i = 0; i < TILE_SIDE; ++i) {
                    const int row = tile * TILE_SIDE + i;
                    words[i] = Words{};
                    if (row >= rows) continue;
                    const Element* query = queries + token_of(row) * problem.query_stride;
                    words[i] = load_chunk<Type>(query + head_of(row) * shape.head_dim, chunk, shape.head_dim);
                }
                transpose(words);
                std::copy_n(words, LANES, queries_of(tile) + chunk * TILE_SIDE);
            }
        std::fill_n(scratch.sums, int64_t(count) * shape.channels, 0.0f);
        std::fill_n(scratch.most, count, HIDDEN);
        std::fill_n(scratch.total, count, 0.0f);
    }

    Words* queries_of(int tile) const { return scratch.queries + tile * shape.chunks * TILE_SIDE; }

    int count_of(int first) const { return std::min(TILED_KEYS, item.last_key - first); }

    static const char* at_bytes(const void* at) { return static_cast<const char*>(at); }
    bool is_ours(int first, int key) const { return first + key >= item.first_key && first + key < item.last_key; }

    void locate(int first) {
        const int count = count_of(first), size = problem.block_size;
        const int32_t* table = problem.block_tables + int64_t(item.sequence) * problem.table_width;
        for (int key = 0; key < count;) {
            const int position = first + key, offset = position % size, run = std::min(size - offset, count - key);
            const int64_t row = (int64_t(table[position / size]) * problem.num_kv_heads + item.first_head) * size + offset;
            for (int i = 0; i < run; ++i, ++key) key_rows[key] = row + i;
        }
    }

    void visit(int first) {
        const int count = count_of(first), lead = std::max(0, item.first_key - first);  // keys [lead, count) belong to the item
        TiledSide keys[TILED_KEYS / TILE_SIDE];
        take_keys(lead, count, keys);
        pack_values(lead, count);
        for (int tile = 0; tile < row_tiles; tile += 2) {
            const int tiles = std::min(2, row_tiles - tile), first_row = tile * TILE_SIDE;
            const int last_row = first_row + tiles * TILE_SIDE - 1;
            const int seen = std::min(count, scratch.last_seen[last_row] + 1 - first);
            if (seen <= 0 || first + count <= scratch.first_seen[first_row]) continue;
            prefetch_queries(tiles * TILE_SIDE / group + 1);
            score(keys, seen, queries_of(tile), tiles);
            for (int i = 0; i < tiles; ++i) soften(tile + i, i, first, seen);
            add_values(seen, tiles, scratch.sums + int64_t(first_row) * shape.channels);
        }
    }

    // The queries of two tokens are far apart, so that the processor does not prefetch them by itself.
    void prefetch_queries(int count) {
        const int bytes = group * shape.head_dim * int(sizeof(Element));
        for (; count > 0 && next_queries > 0; --count, --next_queries, next_query += problem.query_stride)
            for (int at = 0; at < bytes; at += 64) prefetch(at_bytes(next_query) + at);
    }

    // Addresses from which tiles load 16 keys each.
    void take_keys(int lead, int count, TiledSide* sides) {
        const auto* cache = static_cast<const Stored*>(problem.keys);
        const int row_bytes = (in_place ? shape.head_dim : shape.channels) * int(sizeof(Element));
        for (int key = 0; key < count; key += TILE_SIDE) {
            const char* at;
            if (in_place) {
                at = at_bytes(cache + key_rows[key] * shape.head_dim);
            } else {
                uint16_t* to = scratch.keys + key * shape.channels;
                for (int i = key; i < key + TILE_SIDE; ++i) {
                    const bool ours = i >= lead && i < count;
                    const Stored* row = cache + (ours ? key_rows[i] * shape.head_dim : 0);
                    for (int chunk = 0; chunk < shape.chunks; ++chunk, to += Type::CHUNK)
                        store_words(to, ours ? load_chunk<Type>(row, chunk, shape.head_dim) : Words{});
                }
                at = at_bytes(scratch.keys + key * shape.channels);
            }
            sides[key / TILE_SIDE] = {at, row_bytes, 0, TILE_BYTES};
        }
    }

    // Prefetch two rows of keys or values: the processor does not do so by itself across blocks.
    void prefetch_rows(const Stored* cache, int key, int count) const {
        for (int i = key; i < std::min(key + 2, count); ++i)
            for (int at = 0; at < shape.head_dim; at += 64 / int(sizeof(Stored)))
                prefetch(cache + key_rows[i] * shape.head_dim + at);
    }

    // Values of keys outside the item, up to the next multiple of 32, are set to 0: a weight of 0 times NaN is NaN.
    void pack_values(int lead, int count) {
        const auto* cache = static_cast<const Stored*>(problem.values);
        const int tiles = shape.channels / LANES;
        Words units[2];
        for (int key = 0; key < in_steps(count); key += 2) {
            Words* to = scratch.values + key / TILE_INPUTS * tiles * TILE_SIDE + key % TILE_INPUTS / 2;
            const bool has_first = key >= lead && key < count, has_second = key + 1 >= lead && key + 1 < count;
            const Stored* first_row = cache + (has_first ? key_rows[key] * shape.head_dim : 0);
            const Stored* second_row = cache + (has_second ? key_rows[key + 1] * shape.head_dim : 0);
            prefetch_rows(cache, key + TILE_SIDE, count);
            if (in_place) prefetch_rows(static_cast<const Stored*>(problem.keys), key, count);
            for (int chunk = 0; chunk < shape.chunks; ++chunk, to += 2 * TILE_SIDE) {
                const Words first = has_first ? load_chunk<Type>(first_row, chunk, shape.head_dim) : Words{};
                const Words second = has_second ? load_chunk<Type>(second_row, chunk, shape.head_dim) : Words{};
                units_of_values<Type>(first, second, units);
                to[0] = units[0];
                to[TILE_SIDE] = units[1];
            }
        }
    }

    // Scores of `count` keys, to the next multiple of 16, and one or two tiles of rows.
    void score(const TiledSide* keys, int count, const Words* queries, int tiles) {
        constexpr int64_t tile_bytes = TILE_SIDE * TILE_BYTES;
        const TiledSide right{at_bytes(queries), TILE_BYTES, shape.chunks * tile_bytes, tile_bytes};
        const auto two = tiles == 2 ? multiply_tiles<2, 2> : multiply_tiles<2, 1>;
        const auto one = tiles == 2 ? multiply_tiles<1, 2> : multiply_tiles<1, 1>;
        for (int key = 0; key < count; key += 2 * TILE_SIDE) {
            TiledSide left = keys[key / TILE_SIDE];
            const bool both = key + TILE_SIDE < count;
            if (both) left.next = keys[key / TILE_SIDE + 1].at - left.at;
            (both ? two : one)(left, right, shape.chunks, scratch.scores + key * PAIR_ROWS, PAIR_ROWS, false);
        }
    }

    // Turn the scores of a tile of rows, number `place` of a pair, into weights, and update the rows' maximum, total and
    // sums.
    void soften(int tile, int place, int first, int count) {
        const int state = tile * TILE_SIDE;
        const int32_t* first_seen = scratch.first_seen + state;
        const int32_t* last_seen = scratch.last_seen + state;
        const int whole = in_steps(count);
        float* scores = scratch.scores + place * TILE_SIDE;
        const bool all_seen = first >= first_seen[TILE_SIDE - 1] && first + whole - 1 <= last_seen[0];
        const bool plain = !SCALED<Type> && problem.soft_cap <= 0;
        const __m512 before = _mm512_loadu_ps(scratch.most + state), hidden = _mm512_set1_ps(HIDDEN);
        __m512 most = hidden, also = hidden;
        float unit = problem.scale;  // factor from a number in `scores` to the score
        if (plain && all_seen) {
            for (int key = 0; key < whole; key += 2) {
                most = _mm512_max_ps(most, _mm512_load_ps(scores + key * PAIR_ROWS));
                also = _mm512_max_ps(also, _mm512_load_ps(scores + (key + 1) * PAIR_ROWS));
            }
        } else {
            const __m512i low = _mm512_loadu_si512(first_seen), high = _mm512_loadu_si512(last_seen);
            for (int key = 0; key < whole; ++key) {
                const __m512i position = _mm512_set1_epi32(first + key);
                const __mmask16 seen = _mm512_cmple_epi32_mask(low, position) & _mm512_cmple_epi32_mask(position, high);
                Floats x = load(scores + key * PAIR_ROWS);
                if (!plain) {
                    x *= problem.scale;
                    if constexpr (SCALED<Type>)
                        x *= is_ours(first, key) ? problem.key_scales[key_rows[key]] : 0.0f;
                    if (problem.soft_cap > 0) x = hyperbolic_tangent(x / problem.soft_cap) * problem.soft_cap;
                }
                const __m512 shown = _mm512_mask_blend_ps(seen, hidden, (__m512)x);
                _mm512_store_ps(scores + key * PAIR_ROWS, shown);
                most = _mm512_max_ps(most, shown);
            }
            if (!plain) unit = 1.0f;
        }
        most = _mm512_max_ps(before, _mm512_mul_ps(_mm512_max_ps(most, also), _mm512_set1_ps(unit)));
        // A row that has seen no key yet: minus infinity minus minus infinity is NaN.
        const __mmask16 something = _mm512_cmp_ps_mask(most, hidden, _CMP_NEQ_OQ);
        const __m512 base = _mm512_maskz_mov_ps(something, most);
        constexpr float LOG2_E = 1.44269504f;
        const __m512 log2_e = _mm512_set1_ps(LOG2_E);
        __m512 total = _mm512_loadu_ps(scratch.total + state);
        // If no key was seen before, no sums have to be rescaled.
        const __mmask16 raised =
            _mm512_cmp_ps_mask(most, before, _CMP_GT_OQ) & _mm512_cmp_ps_mask(before, hidden, _CMP_NEQ_OQ);
        if (raised) {
            const __m512 shrink = rough_power_of_two(_mm512_mul_ps(_mm512_sub_ps(before, base), log2_e));
            total = _mm512_mask_mul_ps(total, raised, total, shrink);
            alignas(64) float factors[TILE_SIDE];
            _mm512_store_ps(factors, shrink);
            for (int row = 0; row < TILE_SIDE; ++row) {
                if (!(raised >> row & 1)) continue;
                float* sums = scratch.sums + int64_t(state + row) * shape.channels;
                for (int channel = 0; channel < shape.channels; channel += LANES)
                    store(sums + channel, load(sums + channel) * factors[row]);
            }
        }
        _mm512_storeu_ps(scratch.most + state, most);
        const __m512 times = _mm512_set1_ps(unit * LOG2_E), less = _mm512_mul_ps(base, log2_e);
        const __m512i interleave = _mm512_load_si512(INTERLEAVED);
        __m512 more = _mm512_setzero_ps();
        const auto weight_of = [&](int key, __m512& sum) {
            const __m512 x = rough_power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + key * PAIR_ROWS), times, less));
            sum = _mm512_add_ps(sum, x);
            if constexpr (SCALED<Type>) {
                const float scale = is_ours(first, key) ? problem.value_scales[key_rows[key]] : 0.0f;
                return _mm512_mul_ps(x, _mm512_set1_ps(scale));
            }
            return x;
        };
        uint16_t* weights = scratch.weights + place * TILE_SIDE * TILED_KEYS;
        for (int step = 0; step < whole; step += TILE_INPUTS) {
            Words pairs[LANES];
            for (int i = 0; i < LANES; ++i) {
                const __m512 x = weight_of(step + 2 * i, total), y = weight_of(step + 2 * i + 1, more);
                pairs[i] = (Words)_mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(y, x));
            }
            transpose(pairs);
            for (int row = 0; row < TILE_SIDE; ++row)
                store_words(weights + row * TILED_KEYS + step, pairs[row]);
        }
        _mm512_storeu_ps(scratch.total + state, _mm512_add_ps(total, more));
    }

    // The values of `count` keys, weighted, added to the sums of one or two tiles of rows.
    void add_values(int count, int tiles, float* sums) {
        constexpr int64_t tile_bytes = TILE_SIDE * TILE_BYTES, weights_row = TILED_KEYS * sizeof(uint16_t);
        const int columns = shape.channels / LANES;  // an even number
        const TiledSide left{at_bytes(scratch.weights), weights_row, TILE_SIDE * weights_row, TILE_BYTES};
        const auto multiply = tiles == 2 ? multiply_tiles<2, 2> : multiply_tiles<1, 2>;
        for (int column = 0; column < columns; column += 2) {
            const char* values = at_bytes(scratch.values + column * TILE_SIDE);
            const TiledSide right{values, TILE_BYTES, tile_bytes, columns * tile_bytes};
            multiply(left, right, in_steps(count) / TILE_INPUTS, sums + column * LANES, shape.channels, true);
        }
    }

    void finish(float* partials) const {
        float* partial = partials + int64_t(item.partial) * (shape.channels + 2);
        for (int row = 0; row < rows; ++row) {
            const float* sums = scratch.sums + int64_t(row) * shape.channels;
            if (item.partial < 0) {
                store_output<Type>(problem, shape, token_of(row), head_of(row), sums, scratch.total[row]);
                continue;
            }
            float* to = partial + row * (shape.channels + 2);
            to[0] = scratch.most[row];
            to[1] = scratch.total[row];
            std::copy_n(sums, shape.channels, to + 2);
        }
    }
};

// Whether tiles can compute this problem.
template <class Type>
bool tiles_serve(const Problem& problem) {
    return Type::PER_UNIT == 2 && problem.scale > 0 && has_tiles();
}

// Compute an item in tiles and return true. Returns false, with nothing done, where the processor has no tiles or vectors
// are faster: with few rows, and for items of several heads, which read memory in order.
template <class Type>
bool attend_in_tiles(const Problem& problem, const Shape<Type>& shape, const Item& item, const Item* next,
                     float* partials) {
    if constexpr (Type::PER_UNIT == 2) {
        const int rows = (item.last_query - item.first_query) * problem.group();
        if (rows < TILED_FROM || item.last_head - item.first_head > 1 || !tiles_serve<Type>(problem)) return false;
        const Tiles in_use;
        TiledItem<Type>(problem, shape, item, next).attend(partials);
        return true;
    }
    return false;
}
#else
template <class Type>
bool tiles_serve(const Problem&) { return false; }

template <class Type>
bool attend_in_tiles(const Problem&, const Shape<Type>&, const Item&, const Item*, float*) { return false; }
#endif

}  // namespace
