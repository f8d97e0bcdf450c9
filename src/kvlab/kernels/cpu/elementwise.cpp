// What stands between the matrix products: norms, rotary angles, the gate. Each pass reads and writes its tensors once;
// all arithmetic is float32, whatever the tensors hold.

#include "int8.hpp"

#include <algorithm>

namespace {

constexpr int MAX_HEAD_DIM = 512;
constexpr int64_t WORTH_A_THREAD = 1 << 15;  // elements below which waking the other threads costs more

template <class Element>
INLINE void narrow(Element* at, Floats x) {
    if constexpr (sizeof(Element) == 4) {
        store(at, x);
    } else {
        const Halves halves = narrowed(x);
        std::memcpy(at, &halves, sizeof halves);
    }
}

// x rounded to the precision of Element, as if it had been stored and read again.
template <class Element>
INLINE Floats rounded(Floats x) {
    if constexpr (sizeof(Element) == 4) return x;
    return as_floats(__builtin_convertvector(narrowed(x), Words) << 16);
}

template <class Element>
INLINE void narrow_some(Element* at, Floats x, int lanes) {
    if (lanes == LANES) return narrow(at, x);
    Element padded[LANES];
    narrow(padded, x);
    std::memcpy(at, padded, lanes * sizeof padded[0]);
}

template <class Element>
INLINE float root_mean_square_inverse(const Element* x, int size, float eps) {
    Floats squares{};
    for_each_vector(size, [&](int i, int lanes) {
        const Floats part = widen_some(x + i, lanes);
        squares += part * part;
    });
    return 1.0f / std::sqrt(sum(squares) / size + eps);
}

// Element of the tensors, Weight of the norm's weights.
template <class Element, class Weight>
void rms_norm(const Element* x, Element* residual, const Weight* weight, float eps, int rows, int size, Element* out,
              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (int64_t(rows) * size > WORTH_A_THREAD)
    for (int row = 0; row < rows; ++row) {
        const Element* from = x + int64_t(row) * size;
        Element* to = out + int64_t(row) * size;
        if (residual) {
            Element* sums = residual + int64_t(row) * size;
            for_each_vector(size, [&](int i, int lanes) {
                narrow_some(sums + i, widen_some(sums + i, lanes) + widen_some(from + i, lanes), lanes);
            });
            from = sums;
        }
        const float scale = root_mean_square_inverse(from, size, eps);
        for_each_vector(size, [&](int i, int lanes) {
            narrow_some(to + i, widen_some(from + i, lanes) * scale * widen_some(weight + i, lanes), lanes);
        });
    }
}

template <class Element>
void gated(const Element* gate_up, int rows, int size, bool gelu, Element* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (int64_t(rows) * size > WORTH_A_THREAD)
    for (int row = 0; row < rows; ++row) {
        const Element *gate = gate_up + int64_t(row) * 2 * size, *up = gate + size;
        Element* to = out + int64_t(row) * size;
        for_each_vector(size, [&](int i, int lanes) {
            const Floats x = widen_some(gate + i, lanes);
            // gelu in its tanh form is x * sigmoid(2 y), silu is x * sigmoid(x)
            const Floats y = gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
            const Floats bounded = y < -80.0f ? all(-80.0f) : y;  // e^80 is still finite
            narrow_some(to + i, rounded<Element>(x / (1.0f + exponential(-bounded))) * widen_some(up + i, lanes), lanes);
        });
    }
}

// One head: normed with `weight` unless that is null, then turned by its token's angles.
template <class Element, class Weight>
INLINE void norm_and_rotate(const Element* x, const Weight* weight, float eps, const Element* cosine,
                            const Element* sine, int head_dim, float* scratch, Element* out) {
    const float scale = weight ? root_mean_square_inverse(x, head_dim, eps) : 1.0f;
    for_each_vector(head_dim, [&](int i, int lanes) {
        Floats part = widen_some(x + i, lanes);
        if (weight) part = rounded<Element>(part * scale * widen_some(weight + i, lanes));
        store(scratch + i, part);
    });
    const int half = head_dim / 2;
    for_each_vector(half, [&](int i, int lanes) {
        const Floats low = load(scratch + i), high = load(scratch + half + i);
        narrow_some(out + i, low * widen_some(cosine + i, lanes) + high * widen_some(sine + i, lanes), lanes);
        narrow_some(out + half + i,
                    high * widen_some(cosine + half + i, lanes) + low * widen_some(sine + half + i, lanes), lanes);
    });
}

struct Heads {
    const void *qkv, *q_weight, *k_weight, *cosine, *sine;
    void *q, *keys, *values;
    float *key_scales, *value_scales;  // of int8 keys and values
    const int64_t *positions, *slot_mapping;
    int tokens, num_heads, num_kv_heads, head_dim, block_size;
    float eps;
};

// Element of the tensors, Weight of the norms' weights, Stored of the cache: Element or int8.
template <class Element, class Weight, class Stored>
void rotate_and_store(const Heads& heads, int threads) {
    constexpr bool SCALED = sizeof(Stored) == 1;
    const int dim = heads.head_dim, kv_heads = heads.num_kv_heads, block_size = heads.block_size;
    const int64_t width = int64_t(heads.num_heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) schedule(static) if (heads.tokens * width > WORTH_A_THREAD)
    for (int token = 0; token < heads.tokens; ++token) {
        alignas(64) float scratch[MAX_HEAD_DIM + LANES];
        Element row[SCALED ? MAX_HEAD_DIM : 1];
        const Element* x = static_cast<const Element*>(heads.qkv) + token * width;
        const Element* cosine = static_cast<const Element*>(heads.cosine) + heads.positions[token] * dim;
        const Element* sine = static_cast<const Element*>(heads.sine) + heads.positions[token] * dim;
        const auto* q_weight = static_cast<const Weight*>(heads.q_weight);
        const auto* k_weight = static_cast<const Weight*>(heads.k_weight);
        Element* q = static_cast<Element*>(heads.q) + int64_t(token) * heads.num_heads * dim;
        for (int head = 0; head < heads.num_heads; ++head, x += dim, q += dim)
            norm_and_rotate(x, q_weight, heads.eps, cosine, sine, dim, scratch, q);
        const int64_t slot = heads.slot_mapping[token];
        if (slot < 0) continue;  // stored already
        int64_t at = slot / block_size * kv_heads * block_size + slot % block_size;  // the row of the first head
        auto* keys = static_cast<Stored*>(heads.keys);
        auto* values = static_cast<Stored*>(heads.values);
        for (int head = 0; head < kv_heads; ++head, x += dim, at += block_size) {
            const Element* value = x + kv_heads * dim;
            if constexpr (SCALED) {
                norm_and_rotate(x, k_weight, heads.eps, cosine, sine, dim, scratch, row);
                heads.key_scales[at] = quantize(row, dim, keys + at * dim);
                heads.value_scales[at] = quantize(value, dim, values + at * dim);
            } else {
                norm_and_rotate(x, k_weight, heads.eps, cosine, sine, dim, scratch, keys + at * dim);
                std::memcpy(values + at * dim, value, dim * sizeof value[0]);
            }
        }
    }
}

}  // namespace

// element_bytes: 4 for float32, 2 for bfloat16; weight_bytes likewise, of norm weights. Tensors are C-contiguous.

// out = x / rms(x) * weight over rows of `size`. With a residual: residual += x first, and the norm is of that.
extern "C" void kvlab_rms_norm(const void* x, void* residual, const void* weight, float eps, int rows, int size,
                               void* out, int element_bytes, int weight_bytes, int threads) {
    const auto run = [&](auto element, auto of_weight) {
        using Element = decltype(element);
        using Weight = decltype(of_weight);
        rms_norm(static_cast<const Element*>(x), static_cast<Element*>(residual), static_cast<const Weight*>(weight),
                 eps, rows, size, static_cast<Element*>(out), threads);
    };
    if (element_bytes == 4) return run(float{}, float{});
    weight_bytes == 4 ? run(uint16_t{}, float{}) : run(uint16_t{}, uint16_t{});
}

// out [rows, size] = activation(gate) * up for gate_up [rows, 2 * size].
extern "C" void kvlab_gated(const void* gate_up, int rows, int size, int gelu, void* out, int element_bytes,
                            int threads) {
    if (element_bytes == 4)
        gated(static_cast<const float*>(gate_up), rows, size, gelu != 0, static_cast<float*>(out), threads);
    else
        gated(static_cast<const uint16_t*>(gate_up), rows, size, gelu != 0, static_cast<uint16_t*>(out), threads);
}

// qkv [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries and keys are normed (weights may be null) and
// turned by the angles of their positions, cosine and sine [positions, head_dim], the sine signed; queries go to q,
// keys and values into their blocks [blocks, num_kv_heads, block_size, head_dim]. With scales [blocks, num_kv_heads,
// block_size], which else are null, the blocks are int8.
extern "C" void kvlab_rotate_and_store(const void* qkv, const void* q_weight, const void* k_weight, float eps,
                                       const void* cosine, const void* sine, const int64_t* positions,
                                       const int64_t* slot_mapping, int tokens, int num_heads, int num_kv_heads,
                                       int head_dim, int block_size, void* q, void* keys, void* values,
                                       float* key_scales, float* value_scales, int element_bytes, int weight_bytes,
                                       int threads) {
    const Heads heads{qkv,        q_weight,     k_weight,  cosine,       sine,   q,         keys,         values,
                      key_scales, value_scales, positions, slot_mapping, tokens, num_heads, num_kv_heads, head_dim,
                      block_size, eps};
    const auto run = [&](auto element, auto weight) {
        using Element = decltype(element);
        using Weight = decltype(weight);
        key_scales ? rotate_and_store<Element, Weight, int8_t>(heads, threads)
                   : rotate_and_store<Element, Weight, Element>(heads, threads);
    };
    if (element_bytes == 4) return run(float{}, float{});
    weight_bytes == 4 ? run(uint16_t{}, float{}) : run(uint16_t{}, uint16_t{});
}
