// Attention over a paged KV cache: decode, prefill, chunks and any mix of them in one ragged batch.
//
// Rows are the queries of one KV head: `group` query heads for each new token, so that K and V are read once for all of
// them. The work is divided into items: rows and keys of a sequence. The keys of an item are computed a tile at a time,
// with an online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022), in matrix tiles where the processor has them
// and in vectors elsewhere.

// This is compiled twice, since each type takes seconds: KVLAB_ELEMENT_BYTES is 4 for float32; 2 for bfloat16, with what C calls.

#include "attention_decode.hpp"
#include "attention_tiles.hpp"
#include "interface.hpp"

#include <memory>
#include <utility>

namespace {

constexpr int MIN_SPAN = 128;  // keys below which splitting a sequence costs more than it saves

// Combine the parts of a split item, first to last, so that the result does not depend on the number of threads.
template <class Type>
void combine(const Problem& problem, const Shape<Type>& shape, const Item* parts, int count, const float* partials) {
    const int group = problem.group(), rows = (parts->last_query - parts->first_query) * group;
    const int heads = parts->last_head - parts->first_head, stride = shape.channels + 2;
    const int start = problem.query_start[parts->sequence] + parts->first_query;
    std::vector<float> sums(shape.channels);
    for (int state = 0; state < heads * rows; ++state) {
        const int head = state / rows, row = state % rows;
        const auto part = [&](int i) {
            return partials + int64_t(parts[i].partial + state) * stride;
        };
        float most = HIDDEN, total = 0;
        for (int i = 0; i < count; ++i) most = std::max(most, part(i)[0]);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int i = 0; i < count; ++i) {
            if (part(i)[0] == HIDDEN) continue;
            const float shrink = exponential(all(part(i)[0] - most))[0];
            total += part(i)[1] * shrink;
            for (int c = 0; c < shape.channels; c += LANES)
                store(&sums[c], load(&sums[c]) + load(part(i) + 2 + c) * shrink);
        }
        const int query_head = (parts->first_head + head) * group + row % group;
        store_output<Type>(problem, shape, start + row / group, query_head, sums.data(), total);
    }
}

Work divide(const Problem& problem, int rows_at_once, int threads) {
    const int queries_at_once = std::max(1, rows_at_once / problem.group());
    std::vector<Item> whole;
    for (int sequence = 0; sequence < problem.num_sequences; ++sequence) {
        const int new_tokens = problem.query_start[sequence + 1] - problem.query_start[sequence];
        const int before = problem.seq_lens[sequence] - new_tokens;
        for (int query = 0; query < new_tokens; query += queries_at_once) {
            const int last_query = std::min(query + queries_at_once, new_tokens);
            const int first_key = problem.window > 0 ? std::max(0, before + query - problem.window + 1) : 0;
            const int queries = last_query - query;
            const int heads = std::max(1, queries == 1 ? problem.num_kv_heads : 1);
            for (int head = 0; head < problem.num_kv_heads; head += heads)
                whole.push_back({sequence, head, head + heads, query, last_query, first_key, before + last_query, -1});
        }
    }
    const int wanted = threads == 1 ? 1 : 4 * threads;
    if (int(whole.size()) >= wanted) return {std::move(whole), {}};
    Work work;
    const int pieces = (wanted + int(whole.size()) - 1) / std::max(1, int(whole.size()));
    for (const Item& item : whole) {
        const int keys = item.last_key - item.first_key;
        const int span = std::max(MIN_SPAN, (keys / pieces + TILE_KEYS) / TILE_KEYS * TILE_KEYS);
        if (keys <= span) {
            work.items.push_back(item);
            continue;
        }
        work.splits.push_back({int(work.items.size()), (keys + span - 1) / span});
        for (int key = item.first_key; key < item.last_key; key += span) {
            Item part = item;
            part.first_key = key;
            part.last_key = std::min(key + span, item.last_key);
            part.partial = work.partial_rows;
            work.partial_rows += (item.last_head - item.first_head) * (item.last_query - item.first_query) * problem.group();
            work.items.push_back(part);
        }
    }
    return work;
}

// The items' order by cost, the longest first, so that the threads end at about the same time.
std::vector<int> longest_first(const std::vector<Item>& items) {
    std::vector<std::pair<int64_t, int>> costs(items.size());
    for (size_t i = 0; i < items.size(); ++i)
        costs[i] = {-int64_t(items[i].last_key - items[i].first_key) * (8 + items[i].last_query - items[i].first_query),
                    int(i)};
    std::sort(costs.begin(), costs.end());
    std::vector<int> order(items.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = costs[i].second;
    return order;
}

}  // namespace

template <class Type>
void attend_batch(const Problem& problem, int threads) {
    const Shape<Type> shape(problem.head_dim);
    const Shape<Few<Type>> few_shape(problem.head_dim);
    const int rows_at_once = tiles_serve<Type>(problem) ? TILED_ROWS : rows_in_vectors(problem);
    const Work work = divide(problem, rows_at_once, threads);
    const auto& items = work.items;
    const std::unique_ptr<float[]> partials(new float[int64_t(work.partial_rows) * (shape.channels + 2)]);

    const std::vector<int> order = longest_first(items);

#pragma omp parallel num_threads(threads)
    {
        scratch.fit(shape, rows_in_vectors(problem));
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < order.size(); ++i) {
            const Item& item = items[order[i]];
            const Item* next = i + threads < order.size() ? &items[order[i + threads]] : nullptr;
            if (attend_in_tiles<Type>(problem, shape, item, next, partials.get())) continue;
            if (attend_few_in_tiles<Type>(problem, item, next, partials.get())) continue;
            const bool is_few = (item.last_query - item.first_query) * problem.group() <= UNPACKED_ROWS;
            if (is_few && (problem.key_format || problem.value_format))
                attend<Few<Type>>(problem, few_shape, item, partials.get());
            else
                attend<Type>(problem, shape, item, partials.get());
        }
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < work.splits.size(); ++i)
            combine<Type>(problem, shape, &items[work.splits[i].first], work.splits[i].count, partials.get());
    }
}

#if KVLAB_ELEMENT_BYTES == 4
template void attend_batch<Float32>(const Problem& problem, int threads);
#else
extern template void attend_batch<Float32>(const Problem& problem, int threads);

// Take the functions that read formats from their library; nothing reads a format before.
extern "C" void kvlab_use_formats(const void* readers) { format_readers = static_cast<const FormatReaders*>(readers); }

// Pointers are to C-contiguous arrays: queries [T, num_heads, head_dim] with `query_stride` elements between
// tokens, out the same without gaps, keys and values [blocks, num_kv_heads, block_size, head_dim], block_tables
// [num_sequences, table_width], seq_lens [num_sequences], query_start [num_sequences + 1]. window and soft_cap: 0
// for none. out_in_tiles: write out in tiles, see tiles.hpp; heads then have whole tiles. element_bytes: 4 for
// float32, 2 for bfloat16. Rows of keys and values are in their KVLAB_FORMATS (kv_formats.hpp), whose scales are [blocks,
// num_kv_heads, block_size] in the formats that have them apart, and null in others.
extern "C" void kvlab_paged_attention(void* out, const void* queries, const void* keys, const void* values,
                                      const float* key_scales, const float* value_scales,
                                      const int32_t* block_tables, const int32_t* seq_lens,
                                      const int32_t* query_start, int64_t query_stride, int table_width,
                                      int num_sequences, int num_heads, int num_kv_heads, int head_dim,
                                      int block_size, int window, float scale, float soft_cap, int key_format,
                                      int value_format, int out_in_tiles, int element_bytes, int threads) {
    const Problem problem{queries,      keys,          values,      key_scales,   value_scales, out,
                          block_tables, seq_lens,      query_start, query_stride, table_width,  num_sequences,
                          num_heads,    num_kv_heads,  head_dim,    block_size,   window,       scale,
                          soft_cap,     out_in_tiles != 0, key_format, value_format};
    if (element_bytes == 4)
        attend_batch<Float32>(problem, threads);
    else
        attend_batch<BFloat16>(problem, threads);
}
#endif
