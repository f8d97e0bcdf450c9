// Attention of few rows of bfloat16 where the processor has matrix tiles (AMX): decode.
//
// It waits for memory, and what counts is that requests to memory never end. So it does little else: the scores of 32 keys
// take 8 products in tiles for 128 channels, whose left side are the keys as they lie in the cache, and which leave no sums
// across lanes. The scores of a step come before the values of the one before it, so that neither waits for the other's
// results. Values are widened to float32. Nothing branches on data.
#pragma once

#include "attention_vectors.hpp"

#if defined(KVLAB_TILES) && defined(__AVX512BF16__)

constexpr int STEP_TILES = 2, STEP_KEYS = STEP_TILES * TILE_SIDE;  // keys of a step, of one KV head
constexpr int SMALL_PAGE = 4096;  // of which a virtual machine's memory may consist, even where it says otherwise
constexpr int TOUCHED_AHEAD = 4;  // steps

// Row `row` of scores [16 keys, COLUMNS].
template <int COLUMNS>
INLINE Floats scores_of(const float* scores, int row) {
    if constexpr (COLUMNS == 1) return load(scores);
    Ints from, halves;
    for (int lane = 0; lane < LANES; ++lane) from[lane] = (lane * COLUMNS + row) % (2 * LANES);
    const Floats first = __builtin_shuffle(load(scores), load(scores + LANES), from);
    if constexpr (COLUMNS == 2) return first;
    for (int lane = 0; lane < LANES; ++lane) halves[lane] = lane < LANES / 2 ? lane : LANES + lane;
    return __builtin_shuffle(first, __builtin_shuffle(load(scores + 2 * LANES), load(scores + 3 * LANES), from), halves);
}

template <int ROWS>
class FewRowsItem {
public:
    // `next`: the item that the thread will probably compute next, whose first keys are prefetched; or null.
    FewRowsItem(const Problem& problem, const Shape<Widened>& shape, const Item& item, const Item* next)
        : problem(problem), shape(shape), item(item), next(next), row_bytes(shape.head_dim * int(sizeof(uint16_t))) {}

    void attend(float* partials) {
        const Tiles in_use(COLUMNS);
        prepare();
        Step now(item, next), second = now, third, far;
        second.advance();
        third = second;
        third.advance();
        far = third;
        for (int i = 2; i < TOUCHED_AHEAD; ++i) far.advance();
        Place place = place_of(now), ahead = place_of(second);
        score(0, place, ahead);
        soften(now);
        while (true) {
            const bool last = second.item != &item || (second.first == now.first && second.head == now.head);
            const Place later = place_of(third);
            touch(far);
            if (!last) score(second.head - item.first_head, ahead, later);
            add_values(now, place, ahead);
            if (last) break;
            soften(second);
            place = ahead;
            ahead = later;
            now = second;
            second = third;
            third.advance();
            far.advance();
        }
        finish(partials);
    }

private:
    static constexpr int COLUMNS = ROWS == 3 ? 4 : ROWS;
    static constexpr int CHUNKS = ROWS <= 2 ? 4 : 2;  // of values at once: 16 sums in registers

    // Keys of a KV head: in order and, inside a step, head by head, which is the order of memory. Stays at the end.
    struct Step {
        const Item *item = nullptr, *next = nullptr;
        int first = 0, head = 0;

        Step() = default;
        Step(const Item& item, const Item* next)
            : item(&item), next(next), first(item.first_key / TILE_SIDE * TILE_SIDE), head(item.first_head) {}

        void advance() {
            if (++head < item->last_head) return;
            if (first + STEP_KEYS < item->last_key) {
                first += STEP_KEYS;
                head = item->first_head;
            } else if (next) {
                *this = Step(*next, nullptr);
            } else {
                --head;
            }
        }
    };

    // Where the keys and values of a step are.
    struct Place {
        const char *keys[STEP_TILES], *values[STEP_TILES];
    };

    const Problem& problem;
    const Shape<Widened>& shape;
    const Item& item;
    const Item* next;
    const int row_bytes;
    alignas(64) float scores[STEP_TILES][TILE_SIDE * COLUMNS];
    alignas(64) float weights[ROWS][STEP_KEYS];
    float shrink[ROWS];  // what the sums so far are multiplied by

    // Index of a row's query head.
    int head_of(int head, int row) const { return (item.first_head + head) * problem.group() + row % problem.group(); }
    int64_t token_of(int row) const {
        return problem.query_start[item.sequence] + item.first_query + row / problem.group();
    }
    const int32_t* table_of(const Step& step) const {
        return problem.block_tables + int64_t(step.item->sequence) * problem.table_width;
    }
    float* queries_of(int head) const { return scratch.queries + head * COLUMNS * shape.head_dim / 2; }

    void prepare() {
        const int heads = item.last_head - item.first_head;
        for (int head = 0; head < heads; ++head)
            for (int row = 0; row < ROWS; ++row) {
                const auto* query = static_cast<const uint16_t*>(problem.queries) + token_of(row) * problem.query_stride +
                                    head_of(head, row) * shape.head_dim;
                float* to = queries_of(head) + row;  // a column of the right side: [pairs of channels, COLUMNS]
                for (int pair = 0; pair < shape.head_dim / 2; ++pair, to += COLUMNS)
                    std::memcpy(to, query + 2 * pair, sizeof *to);
            }
        std::fill_n(scratch.sums, heads * ROWS * shape.channels, 0.0f);
        std::fill_n(scratch.most, heads * ROWS, HIDDEN);
        std::fill_n(scratch.total, heads * ROWS * LANES, 0.0f);
    }

    Place place_of(const Step& step) const {
        const int32_t* table = table_of(step);
        Place place;
        for (int tile = 0; tile < STEP_TILES; ++tile) {
            const int key = std::min(step.first + tile * TILE_SIDE, (step.item->last_key - 1) / TILE_SIDE * TILE_SIDE);
            const int64_t head = int64_t(table[key / problem.block_size]) * problem.num_kv_heads + step.head;
            const int64_t at = (head * problem.block_size + key % problem.block_size) * row_bytes;
            place.keys[tile] = static_cast<const char*>(problem.keys) + at;
            place.values[tile] = static_cast<const char*>(problem.values) + at;
        }
        return place;
    }

    // Looking up the address of a page takes so long that it is done well before the page is read. Where the blocks follow
    // each other in memory, the processor does so by itself, and other requests disturb it.
    void touch(const Step& step) const {
        const int32_t* table = table_of(step);
        const int block = step.first / problem.block_size;
        if (block > 0 && table[block] == table[block - 1] + 1) return;
        const Place place = place_of(step);
        for (int tile = 0; tile < STEP_TILES; ++tile)
            for (int byte = 0; byte < TILE_SIDE * row_bytes; byte += SMALL_PAGE) {
                prefetch(place.keys[tile] + byte);
                prefetch(place.values[tile] + byte);
            }
    }

    // `head`: of the item.
    void score(int head, const Place& now, const Place& ahead) {
        const float* queries = queries_of(head);
        asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory
        _tile_zero(0);
        _tile_zero(1);
#pragma GCC unroll 4
        for (int chunk = 0; chunk < shape.chunks; ++chunk) {
            _tile_loadd(6, queries + chunk * TILE_SIDE * COLUMNS, COLUMNS * sizeof(float));
            prefetch_lines(ahead.keys[0] + chunk * TILE_SIDE * TILE_BYTES);
            _tile_loadd(4, now.keys[0] + chunk * TILE_BYTES, row_bytes);
            _tile_dpbf16ps(0, 4, 6);
            prefetch_lines(ahead.keys[1] + chunk * TILE_SIDE * TILE_BYTES);
            _tile_loadd(5, now.keys[1] + chunk * TILE_BYTES, row_bytes);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, scores[0], COLUMNS * sizeof(float));
        _tile_stored(1, scores[1], COLUMNS * sizeof(float));
    }

    // In the order of memory: lines of 16 keys, one below the other, take longer.
    static INLINE_MEMBER void prefetch_lines(const char* at) {
#pragma GCC unroll 16
        for (int i = 0; i < TILE_SIDE; ++i) prefetch(at + i * TILE_BYTES);
    }

    // Turn the scores of a step into weights. Sums are scaled, by `shrink`, when its values are added.
    void soften(const Step& step) {
        const int before_query = problem.seq_lens[item.sequence] - problem.query_start[item.sequence + 1];
        for (int row = 0; row < ROWS; ++row) {
            const int position = before_query + int(token_of(row));
            const int begin = std::max(item.first_key, problem.window > 0 ? position - problem.window + 1 : 0) - step.first;
            const int end = std::min(item.last_key, position + 1) - step.first;
            const int state = (step.head - item.first_head) * ROWS + row;
            const float before = scratch.most[state];
            Floats x[STEP_TILES], top = all(before);
            for (int tile = 0; tile < STEP_TILES; ++tile) {
                x[tile] = scores_of<COLUMNS>(scores[tile], row) * problem.scale;
                if (problem.soft_cap > 0) x[tile] = hyperbolic_tangent(x[tile] / problem.soft_cap) * problem.soft_cap;
                const Ints key = lane_numbers() + tile * TILE_SIDE;
                x[tile] = (key >= begin) & (key < end) ? x[tile] : all(HIDDEN);
                top = larger(x[tile], top);
            }
            const float now = largest(top), base = now == HIDDEN ? 0 : now;  // minus infinity less itself is NaN
            const Floats scale = exponential(all(before - base));
            scratch.most[state] = now;
            shrink[row] = scale[0];
            Floats total = load(scratch.total + state * LANES) * scale;
            for (int tile = 0; tile < STEP_TILES; ++tile) {
                x[tile] = exponential(x[tile] - base);
                total += x[tile];
                store(weights[row] + tile * LANES, x[tile]);
            }
            store(scratch.total + state * LANES, total);
        }
    }

    void add_values(const Step& step, const Place& now, const Place& ahead) {
        float* sums = scratch.sums + (step.head - item.first_head) * ROWS * shape.channels;
        // Values of keys outside the item are not read: 0 times NaN is NaN.
        const int lead = std::max(0, item.first_key - step.first);
        const int count = std::min(STEP_KEYS, item.last_key - step.first);
        int chunk = 0;
        for (; chunk + CHUNKS <= shape.chunks; chunk += CHUNKS)
            add_chunks<CHUNKS>(now, ahead, chunk, lead, count, sums + chunk * 2 * LANES);
        for (; chunk < shape.chunks; ++chunk) add_chunks<1>(now, ahead, chunk, lead, count, sums + chunk * 2 * LANES);
    }

    template <int COUNT>
    INLINE_MEMBER void add_chunks(const Place& now, const Place& ahead, int chunk, int lead, int count, float* sums) const {
        Floats total[ROWS][2 * COUNT];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < 2 * COUNT; ++v) total[r][v] = load(sums + r * shape.channels + v * LANES) * shrink[r];
        for (int tile = 0; tile < STEP_TILES; ++tile) {
            const int begin = tile == 0 ? lead : 0, end = std::min(TILE_SIDE, count - tile * TILE_SIDE);
            const char* values = now.values[tile] + begin * row_bytes + chunk * TILE_BYTES;
            const char* later = ahead.values[tile] + chunk * TILE_SIDE * TILE_BYTES;
            for (int key = begin; key < end; ++key, values += row_bytes)
#pragma GCC unroll 8
                for (int c = 0; c < COUNT; ++c, later += TILE_BYTES) {
                    prefetch(later);
                    const Words pairs = load_words(values + c * TILE_BYTES);
                    const Floats low = as_floats(even<uint16_t>(pairs)), high = as_floats(odd<uint16_t>(pairs));
#pragma GCC unroll 8
                    for (int r = 0; r < ROWS; ++r) {
                        const Floats weight = all(weights[r][tile * TILE_SIDE + key]);
                        total[r][2 * c] += low * weight;
                        total[r][2 * c + 1] += high * weight;
                    }
                }
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 8
            for (int v = 0; v < 2 * COUNT; ++v) store(sums + r * shape.channels + v * LANES, total[r][v]);
    }

    void finish(float* partials) const {
        const int heads = item.last_head - item.first_head;
        float* partial = partials + int64_t(item.partial) * (shape.channels + 2);
        for (int state = 0; state < heads * ROWS; ++state, partial += shape.channels + 2) {
            const int row = state % ROWS;
            const float* sums = scratch.sums + state * shape.channels;
            const float total = sum(load(scratch.total + state * LANES));
            if (item.partial < 0) {
                store_output(problem, shape, token_of(row), head_of(state / ROWS, row), sums, total);
                continue;
            }
            partial[0] = scratch.most[state];
            partial[1] = total;
            std::copy_n(sums, shape.channels, partial + 2);
        }
    }
};
#endif

// Compute an item and return true. Returns false, with nothing done, where this does not serve.
template <class Type>
bool attend_few_in_tiles(const Problem& problem, const Item& item, const Item* next, float* partials) {
#if defined(KVLAB_TILES) && defined(__AVX512BF16__)
    const int rows = (item.last_query - item.first_query) * problem.group();
    if (Type::PER_UNIT != 2 || rows > UNPACKED_ROWS || problem.key_format != PLAIN || problem.value_format != PLAIN ||
        problem.head_dim % TILE_INPUTS != 0 || problem.block_size % TILE_SIDE != 0 || !has_tiles())
        return false;
    const Shape<Widened> shape(problem.head_dim);
    switch (rows) {
        case 1: FewRowsItem<1>(problem, shape, item, next).attend(partials); break;
        case 2: FewRowsItem<2>(problem, shape, item, next).attend(partials); break;
        case 3: FewRowsItem<3>(problem, shape, item, next).attend(partials); break;
        default: FewRowsItem<4>(problem, shape, item, next).attend(partials); break;
    }
    return true;
#else
    return false;
#endif
}
