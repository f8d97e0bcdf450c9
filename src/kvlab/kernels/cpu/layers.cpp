// The layers of a decoder in one call. A product reads its weights through all of the caches, so that Python would have
// to fetch its own code from memory again behind each one, which takes longer than a norm does. Tensors are all in
// bfloat16 or all in float32, but for the residual stream, which is float32: rounded at each addition, it would lose more
// than all that is rounded beside it.
//
// A layer is a sequence of parts. They pass on the residual stream [tokens, hidden] and x, the latest result:
//
//     INPUT_NORM       x = norm(residual)                     of the first layer
//     RESIDUAL_NORM    residual += x, x = norm(residual)
//     OUTPUT_NORM      x = norm(x)
//     ATTENTION, MLP   x = f(x)
//
// x is in `normed` behind the first two, and in `delta` behind the others. ATTENTION and MLP come behind one of the first
// two, OUTPUT_NORM behind ATTENTION or MLP (Python sees to it).
//
// Behind the last ATTENTION no token needs another one: only the rows that are sampled go on, and all tensors have those
// rows alone.
//
// Where the model is divided among processes, what ATTENTION and MLP give is a part of a sum. It is in float32, and rounded
// once it is whole, as in one process.

#include "interface.hpp"
#include "kv_formats.hpp"
#include "tiles.hpp"

#include <algorithm>
#include <chrono>
#include <memory>

namespace {

double seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether a part reads x in tiles (see tiles.hpp). All products within it then do, and none has to put it there.
bool reads_tiles(const LayerPart& part) {
    const auto both = [](const LinearWeight& first, const LinearWeight& second) {
        return kvlab_multiplies_in_tiles(&first) && kvlab_multiplies_in_tiles(&second);
    };
    if (part.kind == ATTENTION) {
        const auto& attention = *static_cast<const AttentionPart*>(part.at);
        return attention.head_dim % RowLayout::ELEMENTS == 0 && both(attention.qkv, attention.out);
    }
    if (part.kind == MLP) {
        const auto& mlp = *static_cast<const MlpPart*>(part.at);
        return both(mlp.gate_up, mlp.down);
    }
    return false;
}

template <class Element>
class Run {
public:
    explicit Run(const LayersStep& step)
        : step(step),
          residual(step.residual),
          delta(static_cast<Element*>(step.delta)),
          normed(static_cast<Element*>(step.normed)),
          scratch(static_cast<Element*>(step.scratch)),
          times(step.times),
          tokens(step.tokens) {}

    bool failed = false;  // to sum: nothing more can be computed

    void input_norm(const Norm& norm, bool in_tiles) {
        timed([&] { normalize(norm, nullptr, residual, normed, in_tiles); });
    }

    void residual_norm(const Norm& norm, bool in_tiles) {
        timed([&] { normalize(norm, delta, residual, normed, in_tiles); });
    }

    void output_norm(const Norm& norm) {
        timed([&] { normalize(norm, delta, nullptr, delta, false); });
    }

    void attention(const AttentionPart& part, bool in_tiles, bool last) {
        const int64_t width = int64_t(part.num_heads) * part.head_dim;
        Element* qkv = scratch;
        Element* attended = qkv + int64_t(tokens) * part.qkv.outputs;
        timed([&] { multiply(part.qkv, normed, in_tiles, qkv); });
        timed([&] { rotate_and_store(part, qkv); });
        timed([&] { attend(part, qkv, attended, in_tiles); });
        timed([&] {
            if (last && step.num_sampled < tokens) {  // whole tiles of these rows end before `attended`
                take_sampled(attended, width, in_tiles, qkv);
                attended = qkv;
                tokens = step.num_sampled;
                const std::unique_ptr<float[]> taken(new float[int64_t(tokens) * step.hidden]);
                for (int64_t row = 0; row < tokens; ++row)
                    std::copy_n(residual + step.sampled[row] * step.hidden, step.hidden, &taken[row * step.hidden]);
                std::copy_n(taken.get(), int64_t(tokens) * step.hidden, residual);
            }
            multiply_into_delta(part.out, attended, in_tiles);
        });
    }

    void mlp(const MlpPart& part, bool in_tiles) {
        const LinearWeight& wide = part.gate_up;
        Element* gate_up = scratch;
        Element* gated = gate_up + int64_t(tokens) * wide.outputs;
        timed([&] {
            kvlab_linear_gated(normed, in_tiles ? IN_TILES : wide.inputs, tokens, &wide, part.gelu, gate_up, gated,
                               in_tiles, step.threads);
        });
        timed([&] { multiply_into_delta(part.down, gated, in_tiles); });
    }

    void end() {
        timed([] {});
    }

private:
    const LayersStep& step;
    float* residual;
    Element *delta, *normed, *scratch;
    double* times;
    int tokens;  // rows of all tensors

    // Copy the sampled rows of `from`, of `width` elements.
    void take_sampled(const Element* from, int64_t width, bool in_tiles, Element* to) const {
        for (int row = 0; row < step.num_sampled; ++row) {
            const RowLayout source(step.sampled[row], width, in_tiles), target(row, width, in_tiles);
            for (int at = 0; at < width; at += RowLayout::ELEMENTS)
                std::copy_n(from + source.of(at), std::min<int64_t>(RowLayout::ELEMENTS, width - at), to + target.of(at));
        }
    }

    template <class Operation>
    void timed(Operation operation) {
        if (times) *times++ = seconds();
        operation();
    }

    void multiply(const LinearWeight& weight, const Element* x, bool in_tiles, Element* out) const {
        kvlab_linear(x, in_tiles ? IN_TILES : weight.inputs, tokens, &weight, out, false, step.threads);
    }

    void multiply_into_delta(const LinearWeight& weight, const Element* x, bool in_tiles) {
        if (!step.sum) return multiply(weight, x, in_tiles, delta);
        kvlab_linear(x, in_tiles ? IN_TILES : weight.inputs, tokens, &weight, step.sums, true, step.threads);
        const auto sum = reinterpret_cast<int (*)(int64_t)>(const_cast<void*>(step.sum));
        failed = sum(int64_t(tokens) * step.hidden) != 0;
    }

    void normalize(const Norm& norm, const Element* x, float* added_to, Element* out, bool in_tiles) const {
        kvlab_rms_norm(x, added_to, norm.weight, norm.eps, tokens, step.hidden, out, in_tiles, int(sizeof(Element)),
                       norm.weight_bytes, step.threads);
    }

    // The part's layer of the cache, and where its group of layers has its tokens.
    struct Cache {
        char *keys, *values;
        float *key_scales, *value_scales;
        const int64_t* slot_mapping;
        const int32_t* block_tables;
    };

    Cache cache_of(const AttentionPart& part) const {
        const int64_t group = step.places ? step.places[2 * part.layer] : 0;
        const int64_t layer = step.places ? step.places[2 * part.layer + 1] : part.layer;
        const int64_t row = layer * step.rows;
        const auto bytes = [&](int format) { return row * row_bytes(format, part.head_dim, int(sizeof(Element))); };
        return {static_cast<char*>(step.keys) + bytes(step.key_format),
                static_cast<char*>(step.values) + bytes(step.value_format),
                step.key_scales ? step.key_scales + row : nullptr,
                step.value_scales ? step.value_scales + row : nullptr,
                step.slot_mapping + group * tokens,
                step.block_tables + group * step.num_sequences * step.table_width};
    }

    // Queries stay in qkv.
    void rotate_and_store(const AttentionPart& part, Element* qkv) const {
        const Cache cache = cache_of(part);
        kvlab_rotate_and_store(qkv, part.query_norm.weight, part.key_norm.weight, part.query_norm.eps, part.cosine,
                               part.sine, step.positions, cache.slot_mapping, tokens, part.num_heads,
                               part.num_kv_heads, part.head_dim, step.block_size, nullptr, cache.keys, cache.values,
                               cache.key_scales, cache.value_scales, step.key_format, step.value_format, int(sizeof(Element)),
                               part.query_norm.weight_bytes, step.threads);
    }

    void attend(const AttentionPart& part, const Element* qkv, Element* out, bool in_tiles) const {
        const Cache cache = cache_of(part);
        kvlab_paged_attention(out, qkv, cache.keys, cache.values, cache.key_scales, cache.value_scales,
                              cache.block_tables, step.seq_lens, step.query_start,
                              part.qkv.outputs, step.table_width, step.num_sequences,
                              part.num_heads, part.num_kv_heads, part.head_dim, step.block_size, part.window, part.scale,
                              part.soft_cap, step.key_format, step.value_format, in_tiles, int(sizeof(Element)), step.threads);
    }
};

template <class Element>
void run_parts(const LayerPart* parts, int count, const LayersStep& step) {
    Run<Element> run(step);
    int last = count - 1;  // attention
    while (last >= 0 && parts[last].kind != ATTENTION) --last;
    for (int index = 0; index < count && !run.failed; ++index) {
        const LayerPart& part = parts[index];
        const auto& norm = *static_cast<const Norm*>(part.at);  // if it is one
        const bool next_in_tiles = index + 1 < count && reads_tiles(parts[index + 1]);
        switch (part.kind) {
            case INPUT_NORM: run.input_norm(norm, next_in_tiles); break;
            case RESIDUAL_NORM: run.residual_norm(norm, next_in_tiles); break;
            case OUTPUT_NORM: run.output_norm(norm); break;
            case ATTENTION:
                run.attention(*static_cast<const AttentionPart*>(part.at), reads_tiles(part), index == last);
                break;
            case MLP: run.mlp(*static_cast<const MlpPart*>(part.at), reads_tiles(part)); break;
            default: break;
        }
    }
    run.end();
}

}  // namespace

// Run `count` parts. What the last one gives for the sampled rows is left in `delta`: it is not added to `residual` yet,
// since the norm behind the layers does that in the same pass.
extern "C" void kvlab_layers(const LayerPart* parts, int count, const LayersStep* step) {
    if (step->element_bytes == 4)
        run_parts<float>(parts, count, *step);
    else
        run_parts<uint16_t>(parts, count, *step);
}
