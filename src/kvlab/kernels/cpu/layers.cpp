// A decoder's layers one after another. Each kernel is called as Python would call it; but between two products, which
// read all of the caches full of weights, Python has to fetch its own code from memory again, and takes longer than
// a norm does. Tensors are bfloat16.

#include "kernels.hpp"
#include "rows.hpp"

#include <chrono>

namespace {

constexpr int ELEMENT_BYTES = 2;

// These three are in layers.py, too, field by field.
struct Norm {
    const void* weight;  // null: there is none
    float eps;
    int weight_bytes;
};

struct Product {
    const void* packed;
    const float* scales;
    const uint16_t* bias;
    int outputs, inputs;
};

struct Layer {
    Norm attention_norm, query_norm, key_norm, post_attention_norm, mlp_norm, post_mlp_norm;
    Product qkv, out, gate_up, down;
    const void *cosine, *sine;  // of all positions
    int num_heads, num_kv_heads, head_dim, window, gelu;
    float scale, soft_cap;
};

struct Step {
    // K and V of all layers; `rows` of [head_dim] in a layer, and scales of int8.
    void *keys, *values;
    float *key_scales, *value_scales;
    int64_t rows;
    const int64_t *positions, *slot_mapping;
    const int32_t *block_tables, *seq_lens, *query_start;
    uint16_t *residual, *delta, *normed;  // [tokens, hidden]; normed, like scratch, with room for whole tiles of tokens
    uint16_t* scratch;  // what is wider: [tokens, qkv, queries twice], then [tokens, gate and up, both in one]
    double* times;      // null, or room for when each part of each layer began, and the last ended: in seconds
    int tokens, hidden, num_sequences, table_width, block_size, threads;
};

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether all that a layer's products multiply can lie in tiles, see rows.hpp, so that none has to put it there.
bool in_tiles(const Layer& layer) {
    return layer.head_dim % RowPlace::ELEMENTS == 0 && kvlab_multiplies_in_tiles(layer.qkv.inputs) &&
           kvlab_multiplies_in_tiles(layer.out.inputs) && kvlab_multiplies_in_tiles(layer.down.inputs);
}

void multiply(const Product& product, const uint16_t* x, bool in_tiles, const Step& step, uint16_t* out) {
    kvlab_linear(x, in_tiles ? IN_TILES : product.inputs, step.tokens, product.packed, product.scales, product.bias,
                 product.outputs, product.inputs, out, step.threads);
}

void normalize(const Norm& norm, const uint16_t* x, uint16_t* residual, const Step& step, uint16_t* out,
               bool in_tiles = false) {
    if (norm.weight)
        kvlab_rms_norm(x, residual, norm.weight, norm.eps, step.tokens, step.hidden, out, in_tiles, ELEMENT_BYTES,
                       norm.weight_bytes, step.threads);
}

void rotate(const Layer& layer, int index, const Step& step, const uint16_t* qkv, uint16_t* q) {
    const int64_t row = int64_t(index) * step.rows, bytes = step.key_scales ? 1 : ELEMENT_BYTES;
    const int64_t offset = row * layer.head_dim * bytes;
    kvlab_rotate_and_store(qkv, layer.query_norm.weight, layer.key_norm.weight, layer.query_norm.eps, layer.cosine,
                           layer.sine, step.positions, step.slot_mapping, step.tokens, layer.num_heads,
                           layer.num_kv_heads, layer.head_dim, step.block_size, q,
                           static_cast<char*>(step.keys) + offset, static_cast<char*>(step.values) + offset,
                           step.key_scales ? step.key_scales + row : nullptr,
                           step.key_scales ? step.value_scales + row : nullptr, ELEMENT_BYTES,
                           layer.query_norm.weight_bytes, step.threads);
}

void attend(const Layer& layer, int index, const Step& step, const uint16_t* q, uint16_t* out, bool in_tiles) {
    const int64_t row = int64_t(index) * step.rows, bytes = step.key_scales ? 1 : ELEMENT_BYTES;
    const int64_t offset = row * layer.head_dim * bytes;
    const auto run = step.key_scales ? kvlab_paged_attention_int8 : kvlab_paged_attention;
    run(out, q, static_cast<const char*>(step.keys) + offset, static_cast<const char*>(step.values) + offset,
        step.key_scales ? step.key_scales + row : nullptr, step.key_scales ? step.value_scales + row : nullptr,
        step.block_tables, step.seq_lens, step.query_start, int64_t(layer.num_heads) * layer.head_dim,
        step.table_width, step.num_sequences, layer.num_heads, layer.num_kv_heads, layer.head_dim, step.block_size,
        layer.window, layer.scale, layer.soft_cap, in_tiles, ELEMENT_BYTES, step.threads);
}

}  // namespace

// Adds to `residual` what all layers but the last's feed-forward give, which is left in `delta` for the norm that
// follows to add. The residual stream of each layer is normed ahead of attention and of the feed-forward.
extern "C" void kvlab_layers(const Layer* layers, int count, const Step* at) {
    const Step& step = *at;
    double* times = step.times;
    const auto timed = [&](auto part) {
        if (times) *times++ = seconds();
        part();
    };
    for (int index = 0; index < count; ++index) {
        const Layer& layer = layers[index];
        const bool tiled = in_tiles(layer);
        const int64_t queries = int64_t(step.tokens) * layer.num_heads * layer.head_dim;
        uint16_t* qkv = step.scratch;
        uint16_t* q = qkv + int64_t(step.tokens) * layer.qkv.outputs;
        uint16_t* gate_up = step.scratch;
        uint16_t* activated = gate_up + int64_t(step.tokens) * layer.gate_up.outputs;
        // What is timed is named, in this order, in layers.py.
        timed([&] {
            if (index == 0)
                normalize(layer.attention_norm, step.residual, nullptr, step, step.normed, tiled);
            else
                normalize(layer.attention_norm, step.delta, step.residual, step, step.normed, tiled);
        });
        timed([&] { multiply(layer.qkv, step.normed, tiled, step, qkv); });
        timed([&] { rotate(layer, index, step, qkv, q); });
        timed([&] { attend(layer, index, step, q, q + queries, tiled); });
        timed([&] { multiply(layer.out, q + queries, tiled, step, step.delta); });
        timed([&] {
            normalize(layer.post_attention_norm, step.delta, nullptr, step, step.delta);
            normalize(layer.mlp_norm, step.delta, step.residual, step, step.normed, tiled);
        });
        timed([&] {
            const Product& wide = layer.gate_up;
            kvlab_linear_gated(step.normed, tiled ? IN_TILES : wide.inputs, step.tokens, wide.packed, wide.scales, wide.bias,
                               wide.outputs, wide.inputs, layer.gelu, gate_up, activated, tiled, step.threads);
        });
        timed([&] { multiply(layer.down, activated, tiled, step, step.delta); });
        timed([&] { normalize(layer.post_mlp_norm, step.delta, nullptr, step, step.delta); });
    }
    timed([] {});
}
