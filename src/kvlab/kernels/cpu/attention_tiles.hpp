// Attention in matrix tiles (AMX) of several rows of one KV head; bfloat16, and other formats converted to it.
//
//     scores [keys, rows]      = keys [keys, head_dim] * queries^T
//     sums   [head_dim, rows] += values^T [head_dim, keys] * weights [keys, rows]
//
// Keys are the left side of the first product just as they lie in memory. Its result has a row in each lane, so that
// the softmax of 16 rows needs no sum or maximum across lanes, and weights are the right side of the second product as
// soon as those of two keys are put in pairs. Only values are transposed, once for all rows of an item.
#pragma once

#include "attention_scratch.hpp"

#include <utility>

namespace {

#if defined(KVLAB_TILES) && defined(__AVX512BF16__)
// VALUES_SCALED: rows of values have scales.
template <class Type, bool VALUES_SCALED>
class TiledItem {
public:
    // `next`: the item that the thread will probably compute next, whose data is prefetched; or null.
    TiledItem(const Problem& problem, const Shape<Type>& shape, const Item& item, const Item* next)
        : problem(problem),
          shape(shape),
          item(item),
          next(next),
          scratch(tiled_scratch),
          group(problem.group()),
          rows((item.last_query - item.first_query) * group),
          row_tiles((rows + TILE_SIDE - 1) / TILE_SIDE),
          start(problem.query_start[item.sequence] + item.first_query),
          first_key(item.first_key / TILE_SIDE * TILE_SIDE),
          key_bytes(row_bytes(problem.key_format, shape.head_dim, sizeof(Element))),
          value_bytes(row_bytes(problem.value_format, shape.head_dim, sizeof(Element))),
          in_place(problem.key_format == PLAIN && problem.block_size % TILE_SIDE == 0 && shape.whole_chunks == shape.chunks) {
        if (!next) return;
        const auto* queries = static_cast<const Element*>(problem.queries) + next->first_head * group * shape.head_dim;
        next_query = queries + (problem.query_start[next->sequence] + next->first_query) * problem.query_stride;
        next_queries = next->last_query - next->first_query;
    }

    void attend(float* partials) {
        prepare();
        for (int first = first_key; first < item.last_key; first += TILED_KEYS) {
            locate(item, first, count_of(first), key_rows);
            visit(first, partials);
        }
        for (int tile = 0; tile < row_tiles; tile += 2) finish(tile, partials);
    }

private:
    using Element = typename Type::Element;

    const Problem& problem;
    const Shape<Type>& shape;
    const Item& item;
    const Item* const next;
    TiledScratch& scratch;
    const int group, rows, row_tiles, start, first_key, key_bytes, value_bytes;
    const bool in_place;           // tiles can load keys from the cache
    int64_t key_rows[TILED_KEYS];  // rows of the cache that hold the keys and values of an iteration
    int64_t ahead_rows[TILED_KEYS];  // the same of the next iteration
    int ahead = 0, ahead_count = 0, ahead_share = 0;  // how many are prefetched, of how many, and in a step
    const Element* next_query = nullptr;
    int next_queries = 0;  // not prefetched yet
    int iteration = 0;     // its first key
    int scored = -1;       // the tile of rows whose first scores of the iteration are computed already
    int turn = 0;          // which buffer has the scores of the next step

    // Keys, up to the next multiple of what an instruction covers.
    static int in_steps(int keys) { return (keys + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS; }

    // Calls `body(i, token, head)` for row i of a tile. A division for each row would take as long as its data.
    template <class Body>
    INLINE_MEMBER void for_each_row(int tile, Body body) const {
        const int first = tile * TILE_SIDE, count = std::min(TILE_SIDE, rows - first);
        int64_t token = start + first / group;
        for (int i = 0, head = first % group; i < count; ++i) {
            body(i, token, item.first_head * group + head);
            if (++head == group) {
                head = 0;
                ++token;
            }
        }
    }

    void prepare() {
        const int count = row_tiles * TILE_SIDE;
        scratch.fit(count, shape.channels);
        const int32_t* starts = problem.query_start + item.sequence;
        const int first_position = problem.seq_lens[item.sequence] - (starts[1] - starts[0]) + item.first_query;
        for (int row = 0, position = first_position; row < count; ++position) {
            const int begin = problem.window > 0 ? position - problem.window + 1 : 0;
            // Rows beyond the last see what that one sees.
            for (const int end = (row + group < rows) ? row + group : count; row < end; ++row) {
                scratch.first_seen[row] = std::max(begin, item.first_key);
                scratch.last_seen[row] = std::min(position, item.last_key - 1);
            }
        }
        const auto* queries = static_cast<const Element*>(problem.queries);
        for (int tile = 0; tile < row_tiles; ++tile) {
            const Element* of_row[TILE_SIDE] = {};
            for_each_row(tile, [&](int i, int64_t token, int head) {
                of_row[i] = queries + token * problem.query_stride + head * shape.head_dim;
            });
            for (int chunk = 0; chunk < shape.chunks; ++chunk) {
                Words words[LANES];
                for (int i = 0; i < TILE_SIDE; ++i)
                    words[i] = of_row[i] ? load_chunk<Type, Element>(of_row[i], chunk, shape.head_dim) : Words{};
                transpose(words);
                std::copy_n(words, LANES, queries_of(tile) + chunk * TILE_SIDE);
            }
        }
        std::fill_n(scratch.states, (row_tiles + 1) / 2, NOTHING_ADDED);
        std::fill_n(scratch.most, count, HIDDEN);
        std::fill_n(scratch.total, count, 0.0f);
    }

    // Of a tile's rows: [channels, PAIR_ROWS].
    float* sums_of(int tile) const {
        return scratch.sums + int64_t(tile / 2) * shape.channels * PAIR_ROWS + tile % 2 * TILE_SIDE;
    }

    Words* queries_of(int tile) const { return scratch.queries + tile * shape.chunks * TILE_SIDE; }

    int count_of(int first) const { return std::min(TILED_KEYS, item.last_key - first); }

    static const char* at_bytes(const void* at) { return static_cast<const char*>(at); }
    bool is_ours(int first, int key) const { return first + key >= item.first_key && first + key < item.last_key; }

    // Find the rows of the cache that hold `count` keys of an item, from `first` on.
    void locate(const Item& of, int first, int count, int64_t* rows) const {
        const int size = problem.block_size;
        const int32_t* table = problem.block_tables + int64_t(of.sequence) * problem.table_width;
        for (int key = 0; key < count;) {
            const int position = first + key, offset = position % size, run = std::min(size - offset, count - key);
            const int64_t row = (int64_t(table[position / size]) * problem.num_kv_heads + of.first_head) * size + offset;
            for (int i = 0; i < run; ++i, ++key) rows[key] = row + i;
        }
    }

    // Find what the next iteration reads, of this item or the next one, to prefetch it in steps of this iteration.
    void look_ahead(int first) {
        const bool ends = first >= item.last_key;
        const Item* of = ends ? next : &item;
        ahead = ahead_count = 0;
        if (!of) return;
        if (ends) first = of->first_key;
        ahead_count = std::min(TILED_KEYS, of->last_key - first);
        locate(*of, first, ahead_count, ahead_rows);
        const int steps = (row_tiles + 1) / 2 * TILED_STEPS;
        ahead_share = (ahead_count + steps - 1) / steps;
    }

    INLINE_MEMBER void prefetch_ahead() {
        for (const int end = std::min(ahead + ahead_share, ahead_count); ahead < end; ++ahead) {
            prefetch_row(problem.keys, key_bytes, ahead_rows[ahead]);
            prefetch_row(problem.values, value_bytes, ahead_rows[ahead]);
        }
    }

    INLINE_MEMBER void prefetch_row(const void* cache, int bytes, int64_t row) const {
        for (int at = 0; at < bytes; at += 64) prefetch(at_bytes(cache) + row * bytes + at);
    }

    void visit(int first, float* partials) {
        iteration = first;
        look_ahead(first + TILED_KEYS);
        const int count = count_of(first), lead = std::max(0, item.first_key - first);  // keys [lead, count) belong to the item
        TiledSide keys[TILED_KEYS / TILE_SIDE];
        take_keys(lead, count, keys);
        with_format<Element>(problem.value_format, [&](auto number) {
            if constexpr (IS_BYTE<decltype(number)> == VALUES_SCALED) pack_values<decltype(number)>(lead, count);
        });
        for (int tile = 0, seen = seen_by(0, first), next; tile < row_tiles; tile += 2, seen = next) {
            next = seen_by(tile + 2, first);
            if (seen == 0) continue;
            prefetch_queries(2 * TILE_SIDE / group + 1);
            if (tile + 1 == row_tiles)
                attend_rows<1>(keys, tile, first, seen, 0);
            else
                attend_rows<2>(keys, tile, first, seen, tile + 3 < row_tiles ? next : 0);
            if (first + count > scratch.last_seen[last_row(tile)]) finish(tile, partials);
        }
        scored = -1;
    }

    int last_row(int tile) const { return std::min(tile + 2, row_tiles) * TILE_SIDE - 1; }

    // How many keys of an iteration two tiles of rows see, if they see any. There may be fewer that each row sees.
    int seen_by(int tile, int first) const {
        const int count = count_of(first);
        if (tile >= row_tiles || first + count <= scratch.first_seen[tile * TILE_SIDE]) return 0;
        return std::clamp(scratch.last_seen[last_row(tile)] + 1 - first, 0, count);
    }

    // The queries of two tokens are far apart, so that the processor does not prefetch them by itself.
    void prefetch_queries(int count) {
        const int bytes = group * shape.head_dim * int(sizeof(Element));
        for (; count > 0 && next_queries > 0; --count, --next_queries, next_query += problem.query_stride)
            for (int at = 0; at < bytes; at += 64) prefetch(at_bytes(next_query) + at);
    }

    // Addresses from which tiles load 16 keys each.
    void take_keys(int lead, int count, TiledSide* sides) {
        const int bytes = (in_place ? shape.head_dim : shape.channels) * int(sizeof(Element));
        if (!in_place)
            with_format<Element>(problem.key_format, [&](auto number) { copy_keys<decltype(number)>(lead, count); });
        for (int key = 0; key < count; key += TILE_SIDE) {
            const char* at = in_place ? at_bytes(problem.keys) + key_rows[key] * key_bytes
                                      : at_bytes(scratch.keys + key * shape.channels);
            sides[key / TILE_SIDE] = {at, bytes, 0, TILE_BYTES};
        }
    }

    template <class Number>
    void copy_keys(int lead, int count) {
        uint16_t* to = scratch.keys;
        for (int key = 0; key < (count + TILE_SIDE - 1) / TILE_SIDE * TILE_SIDE; ++key) {
            const bool ours = key >= lead && key < count;
            const char* row = at_bytes(problem.keys) + (ours ? key_rows[key] * key_bytes : 0);
            for (int chunk = 0; chunk < shape.chunks; ++chunk, to += Type::CHUNK)
                store_words(to, ours ? load_chunk<Type, Number>(row, chunk, shape.head_dim) : Words{});
        }
    }

    // Transpose values. Those of keys outside the item, up to the next multiple of 32, are set to 0: a weight of 0 times
    // NaN is NaN.
    template <class Number>
    void pack_values(int lead, int count) {
        for (int begin = 0; begin < in_steps(count); begin += TILE_INPUTS) {
            for (int chunk = 0; chunk < shape.chunks; ++chunk) {
                const auto value = [&](int key) {
                    if (key < lead || key >= count) return Words{};
                    return load_chunk<Type, Number>(at_bytes(problem.values) + key_rows[key] * value_bytes, chunk,
                                                    shape.head_dim);
                };
                Words even[LANES], odd[LANES], units[2];
                for (int pair = 0; pair < LANES; ++pair) {
                    const int key = begin + 2 * pair;
                    units_of_values<Type, Number>(value(key), value(key + 1), units);
                    even[pair] = units[0];
                    odd[pair] = units[1];
                }
                transpose(even);
                transpose(odd);
                Words* to = scratch.values + (2 * chunk * TILED_STEPS + begin / TILE_INPUTS) * TILE_SIDE;
                std::copy_n(even, LANES, to);
                std::copy_n(odd, LANES, to + TILED_STEPS * TILE_SIDE);
            }
        }
    }

    // Attend from TILES tiles of rows to `count` keys, 32 at a time: their scores are computed while those of the 32
    // before are turned into weights. Behind the last 32, the first scores of the next tiles of rows are computed, which
    // see `next_count` keys; 0: none are.
    template <int TILES>
    void attend_rows(const TiledSide* keys, int tile, int first, int count, int next_count) {
        const int steps = in_steps(count) / TILE_INPUTS, products = 2 * TILES * shape.chunks;
        const int share = (PAIRS + products - 1) / products;  // of pairs of keys to be weighed behind each product
        int added = 0;        // steps whose values are in the sums
        bool looked[TILES];   // for the largest scores of the step, once
        const auto choose_bases = [&](int step, bool again) {
            for (int i = 0; i < TILES; ++i) {
                const int at = first + step * TILE_INPUTS;
                const bool skip = again ? looked[i] : has_bases(tile + i) && is_plain() && all_see(tile + i, at);
                if (!again) looked[i] = !skip;
                if (skip) continue;
                const __m512 most = largest_scores(scores_of(step) + i * TILE_SIDE, tile + i, at);
                if (!choose_base(tile + i, most)) continue;
                add_values<TILES>(added, step, tile);
                added = step;
                rescale(tile + i, most);
            }
        };
        if (scored != tile) score<TILES>(keys, 0, count, tile, scores_of(0), [](int) {});
        for (int step = 0; step < steps; ++step) {
            prefetch_ahead();
            choose_bases(step, false);
            // These stay in registers, since nothing else can reach them.
            const float* const scores = scores_of(step);
            Words *const weights = weights_of(0, step), *const weights_below = weights_of(1, step);
            const int begin = step * TILE_INPUTS;
            const __m512 times = times_of(), less = less_of(tile), less_below = less_of(tile + TILES - 1);
            __m512 total = total_of(tile), total_below = total_of(tile + TILES - 1);
            if (step + 1 < steps || next_count > 0) {
                const auto weigh_some = [&](int product) __attribute__((always_inline)) {
                    for (int pair = product * share; pair < std::min(PAIRS, (product + 1) * share); ++pair) {
                        const float* at = scores + 2 * pair * PAIR_ROWS;
                        weights[pair] = weigh(at, begin + 2 * pair, times, less, total);
                        if constexpr (TILES == 2)
                            weights_below[pair] = weigh(at + TILE_SIDE, begin + 2 * pair, times, less_below, total_below);
                    }
                };
                if (step + 1 < steps)
                    score<TILES>(keys, step + 1, count, tile, scores_of(step + 1), weigh_some);
                else
                    score<TILES>(keys, 0, next_count, tile + TILES, scores_of(step + 1), weigh_some);
            } else {
                total = weigh_all(0, step, tile);
                if constexpr (TILES == 2) total_below = weigh_all(1, step, tile + 1);
            }
            if (grew_much(tile, total) || (TILES == 2 && grew_much(tile + 1, total_below))) {
                choose_bases(step, true);
                total = weigh_all(0, step, tile);
                if constexpr (TILES == 2) total_below = weigh_all(1, step, tile + 1);
            }
            _mm512_storeu_ps(scratch.total + tile * TILE_SIDE, total);
            if constexpr (TILES == 2) _mm512_storeu_ps(scratch.total + (tile + 1) * TILE_SIDE, total_below);
        }
        turn += steps;
        scored = next_count > 0 ? tile + TILES : -1;
        add_values<TILES>(added, steps, tile);
    }

    __m512 total_of(int tile) const { return _mm512_loadu_ps(scratch.total + tile * TILE_SIDE); }
    Words* weights_of(int i, int step) const { return scratch.weights + (i * TILED_STEPS + step) * TILE_SIDE; }
    float* scores_of(int step) const { return scratch.scores + (turn + step) % 2 * STEP_SCORES; }

    static constexpr int PAIRS = TILE_INPUTS / 2;  // of a step's keys

    // Scores of a step of keys, of which the last 16 may be beyond `count`: they are not used then.
    template <int TILES, class Meanwhile>
    INLINE_MEMBER void score(const TiledSide* keys, int step, int count, int tile, float* to, Meanwhile meanwhile) const {
        constexpr int64_t tile_bytes = TILE_SIDE * TILE_BYTES;
        const TiledSide right{at_bytes(queries_of(tile)), TILE_BYTES, shape.chunks * tile_bytes, tile_bytes};
        TiledSide left = keys[2 * step];
        left.next = step * TILE_INPUTS + TILE_SIDE < count ? keys[2 * step + 1].at - left.at : 0;
        multiply_tiles<2, TILES>(left, right, shape.chunks, to, PAIR_ROWS, false, meanwhile);
    }

    // Whether all rows of a tile see all of the 32 keys from `first` on.
    bool all_see(int tile, int first) const {
        const int from = scratch.first_seen[tile * TILE_SIDE + TILE_SIDE - 1], to = scratch.last_seen[tile * TILE_SIDE];
        return first >= from && first + TILE_INPUTS - 1 <= to;
    }

    // The largest scores of a tile of rows among the 32 keys from `first` on. Scores of keys that a row does not see are
    // set to minus infinity, and all are made ready for `weigh`.
    INLINE_MEMBER __m512 largest_scores(float* scores, int tile, int first) const {
        if (!is_plain() || !all_see(tile, first)) return hide_unseen(scores, tile, first);
        __m512 most[4];
        for (int key = 0; key < 4; ++key) most[key] = _mm512_load_ps(scores + key * PAIR_ROWS);
#pragma GCC unroll 8
        for (int key = 4; key < TILE_INPUTS; ++key)
            most[key % 4] = _mm512_max_ps(most[key % 4], _mm512_load_ps(scores + key * PAIR_ROWS));
        return scaled(_mm512_max_ps(_mm512_max_ps(most[0], most[1]), _mm512_max_ps(most[2], most[3])));
    }

    __attribute__((noinline)) __m512 hide_unseen(float* scores, int tile, int first) const {
        const __m512i low = _mm512_loadu_si512(scratch.first_seen + tile * TILE_SIDE);
        const __m512i high = _mm512_loadu_si512(scratch.last_seen + tile * TILE_SIDE);
        const __m512 hidden = _mm512_set1_ps(HIDDEN);
        __m512 most = hidden;
        for (int key = first; key < first + TILE_INPUTS; ++key, scores += PAIR_ROWS) {
            const __m512i position = _mm512_set1_epi32(key);
            const __mmask16 seen = _mm512_cmple_epi32_mask(low, position) & _mm512_cmple_epi32_mask(position, high);
            Floats x = load(scores);
            if (!is_plain()) {
                x *= problem.scale;
                if (problem.key_scales) x *= is_ours(0, key) ? problem.key_scales[key_rows[key - iteration]] : 0.0f;
                if (problem.soft_cap > 0) x = hyperbolic_tangent(x / problem.soft_cap) * problem.soft_cap;
            }
            const __m512 shown = _mm512_mask_blend_ps(seen, hidden, (__m512)x);
            _mm512_store_ps(scores, shown);
            most = _mm512_max_ps(most, shown);
        }
        return scaled(most);
    }

    // Whether products of queries and keys become scores by `scale` alone, which is then done where they are weighed.
    bool is_plain() const { return !problem.key_scales && problem.soft_cap <= 0; }
    float unit() const { return is_plain() ? problem.scale : 1.0f; }
    __m512 scaled(__m512 scores) const { return _mm512_mul_ps(scores, _mm512_set1_ps(unit())); }

    // Weights are relative to a base of each row: the largest score when it saw its first keys. It is raised, and sums
    // are rescaled, only for weights that would be larger than e^MOST_RAISE, since weights are as precise whatever their
    // size. Where rows have bases, their largest scores are looked for only if their weights came out large.
    static constexpr float MOST_RAISE = 16, LARGE = 8e6f;  // a little less than e^16

    INLINE_MEMBER bool grew_much(int tile, __m512 total) const {
        const __m512 grown = _mm512_sub_ps(total, total_of(tile));
        return _mm512_cmp_ps_mask(grown, _mm512_set1_ps(LARGE), _CMP_GT_OQ) != 0;
    }

    // Returns whether the base has to be raised.
    INLINE_MEMBER bool choose_base(int tile, __m512 most) const {
        float* bases = scratch.most + tile * TILE_SIDE;
        const __m512 hidden = _mm512_set1_ps(HIDDEN), before = _mm512_loadu_ps(bases);
        const __mmask16 fresh = _mm512_cmp_ps_mask(before, hidden, _CMP_EQ_OQ);
        const __m512 base = _mm512_mask_mov_ps(before, fresh, most);
        _mm512_storeu_ps(bases, base);
        return _mm512_cmp_ps_mask(most, _mm512_add_ps(base, _mm512_set1_ps(MOST_RAISE)), _CMP_GT_OQ);
    }

    // Rows that have seen keys.
    INLINE_MEMBER __mmask16 based(int tile) const {
        const __m512 bases = _mm512_loadu_ps(scratch.most + tile * TILE_SIDE);
        return _mm512_cmp_ps_mask(bases, _mm512_set1_ps(HIDDEN), _CMP_NEQ_UQ);
    }
    INLINE_MEMBER bool has_bases(int tile) const { return based(tile) == 0xffff; }

    // A weight is 2^(score * times - less). Of a row that has seen no key yet, minus infinity minus minus infinity would be
    // NaN.
    INLINE_MEMBER __m512 times_of() const { return _mm512_set1_ps(unit() * LOG2_E); }
    INLINE_MEMBER __m512 less_of(int tile) const {
        const __m512 bases = _mm512_loadu_ps(scratch.most + tile * TILE_SIDE);
        return _mm512_maskz_mul_ps(based(tile), bases, _mm512_set1_ps(LOG2_E));
    }

    __attribute__((noinline)) void rescale(int tile, __m512 most) {
        float *bases = scratch.most + tile * TILE_SIDE, *total = scratch.total + tile * TILE_SIDE;
        const __m512 before = less_of(tile);
        _mm512_storeu_ps(bases, _mm512_max_ps(_mm512_loadu_ps(bases), most));
        const __m512 shrink = rough_power_of_two(_mm512_sub_ps(before, less_of(tile)));
        _mm512_storeu_ps(total, _mm512_mul_ps(_mm512_loadu_ps(total), shrink));
        if (scratch.states[tile / 2] == NOTHING_ADDED) return;
        float* sums = sums_of(tile);
        for (int channel = 0; channel < shape.channels; ++channel, sums += PAIR_ROWS)
            _mm512_store_ps(sums, _mm512_mul_ps(_mm512_load_ps(sums), shrink));
    }

    // Weigh a step of keys for a tile of rows, number i of those attended from. Returns its total with the weights added.
    __attribute__((noinline)) __m512 weigh_all(int i, int step, int tile) const {
        const float* scores = scores_of(step) + i * TILE_SIDE;
        const __m512 times = times_of(), less = less_of(tile);
        __m512 total = total_of(tile);
        for (int pair = 0; pair < PAIRS; ++pair, scores += 2 * PAIR_ROWS)
            weights_of(i, step)[pair] = weigh(scores, step * TILE_INPUTS + 2 * pair, times, less, total);
        return total;
    }

    // The weights of two keys for a tile of rows, in pairs, added to `total`. `key` counts from the first of the iteration.
    INLINE_MEMBER Words weigh(const float* scores, int key, __m512 times, __m512 less, __m512& total) const {
        const auto weight_of = [&](int i, float more) __attribute__((always_inline)) {
            return rough_power_of_two(_mm512_fmsub_ps(_mm512_load_ps(scores + i * PAIR_ROWS), times, less), more);
        };
        if constexpr (VALUES_SCALED) {
            const auto scale_of = [&](int i) {
                return _mm512_set1_ps(is_ours(iteration, i) ? problem.value_scales[key_rows[i]] : 0.0f);
            };
            const __m512 x = weight_of(0, 0.0f), y = weight_of(1, 0.0f);
            total = _mm512_add_ps(total, _mm512_add_ps(x, y));
            return pairs_of(_mm512_mul_ps(x, scale_of(key)), _mm512_mul_ps(y, scale_of(key + 1)));
        } else {
            // Half a unit of bfloat16 is in the polynomial already, so that cutting the lower half off rounds. The
            // instruction that rounds takes as long as three others, and tiles leave it half of the ports.
            constexpr float HALF_UNIT = 1.0f / 256;
            const __m512i upper = _mm512_set1_epi32(0xffff0000);
            const __m512i x = (__m512i)weight_of(0, HALF_UNIT), y = (__m512i)weight_of(1, HALF_UNIT);
            const __m512 rounded_x = (__m512)_mm512_and_si512(x, upper), rounded_y = (__m512)_mm512_and_si512(y, upper);
            total = _mm512_add_ps(total, _mm512_add_ps(rounded_x, rounded_y));
            const __m512i halves = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(UPPER_HALVES)));
            return (Words)_mm512_mask_shuffle_epi8(y, 0x3333333333333333, x, halves);
        }
    }

    // Two vectors rounded to bfloat16: the numbers of a lane are a pair.
    static INLINE_MEMBER Words pairs_of(__m512 x, __m512 y) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(y, x);
        return (Words)_mm512_permutexvar_epi16(_mm512_load_si512(INTERLEAVED), both);
    }

    // The values of steps [from, to) of keys, weighted, added to the sums of tiles of rows.
    template <int TILES>
    void add_values(int from, int to, int tile) const {
        constexpr int64_t tile_bytes = TILE_SIDE * TILE_BYTES, next = TILED_STEPS * tile_bytes;
        if (from == to) return;
        const bool add = scratch.states[tile / 2] != NOTHING_ADDED;
        const TiledSide right{at_bytes(scratch.weights + from * TILE_SIDE), TILE_BYTES, next, tile_bytes};
        for (int channel = 0; channel < shape.channels; channel += 2 * TILE_SIDE) {  // a multiple of that
            const Words* values = scratch.values + channel * TILED_STEPS + from * TILE_SIDE;
            const TiledSide left{at_bytes(values), TILE_BYTES, next, tile_bytes};
            float* sums = sums_of(tile) + channel * PAIR_ROWS;
            multiply_tiles<2, TILES>(left, right, to - from, sums, PAIR_ROWS, add, [](int) {});
        }
        scratch.states[tile / 2] = ADDED;
    }

    // Write the results of two tiles of rows, once, as soon as they have seen all of their keys: their sums are then in
    // the nearest cache.
    void finish(int tile, float* partials) const {
        const State state = std::exchange(scratch.states[tile / 2], FINISHED);
        if (state == FINISHED) return;
        if (state == NOTHING_ADDED) std::fill_n(sums_of(tile), shape.channels * PAIR_ROWS, 0.0f);
        for (const int end = std::min(row_tiles, tile + 2); tile < end; ++tile)
            item.partial < 0 ? store_outputs(tile) : store_partial(tile, partials);
    }

    // The sums of a chunk of channels are those of even ones and then those of odd ones: they are put in pairs as
    // bfloat16 and then transposed.
    void store_outputs(int tile) const {
        const Floats total = load(scratch.total + tile * TILE_SIDE), scale = total > 0 ? 1.0f / total : Floats{};
        const float* sums = sums_of(tile);
        Element* of_row[TILE_SIDE];
        for_each_row(tile, [&](int i, int64_t token, int head) {
            const RowLayout layout(token, int64_t(problem.num_heads) * shape.head_dim, problem.out_in_tiles);
            of_row[i] = static_cast<Element*>(problem.out) + layout.of(head * shape.head_dim);
        });
        const int step = problem.out_in_tiles ? RowLayout::ROWS * RowLayout::ELEMENTS : Type::CHUNK;  // of chunks
        const int count = std::min(TILE_SIDE, rows - tile * TILE_SIDE);
        for (int chunk = 0; chunk < shape.chunks; ++chunk) {
            Words words[LANES];
            for (int i = 0; i < LANES; ++i, sums += PAIR_ROWS)
                words[i] = pairs_of((__m512)(load(sums) * scale), (__m512)(load(sums + LANES * PAIR_ROWS) * scale));
            sums += LANES * PAIR_ROWS;
            transpose(words);
            const int elements = std::min(Type::CHUNK, shape.head_dim - chunk * Type::CHUNK);
            for (int i = 0; i < count; ++i)
                if (elements == Type::CHUNK)
                    store_words(of_row[i] + chunk * step, words[i]);
                else
                    std::memcpy(of_row[i] + chunk * step, &words[i], elements * sizeof(Element));
        }
    }

    void store_partial(int tile, float* partials) const {
        const int first = tile * TILE_SIDE, count = std::min(TILE_SIDE, rows - first), width = shape.channels + 2;
        float* to = partials + int64_t(item.partial + first) * width;
        for (int i = 0; i < count; ++i) {
            to[i * width] = scratch.most[first + i];
            to[i * width + 1] = scratch.total[first + i];
        }
        const float* sums = sums_of(tile);
        for (int channel = 0; channel < shape.channels; ++channel, sums += PAIR_ROWS)
            for (int i = 0; i < count; ++i) to[i * width + 2 + channel] = sums[i];
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
        if (problem.value_scales)
            TiledItem<Type, true>(problem, shape, item, next).attend(partials);
        else
            TiledItem<Type, false>(problem, shape, item, next).attend(partials);
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
