// The operations between matrix products: norms, rotary angles, the gate. Each pass reads and writes its tensors once.
// All arithmetic is float32.

#include "interface.hpp"
#include "kv_formats.hpp"
#include "tiles.hpp"

#include <algorithm>

namespace {

constexpr int64_t WORTH_A_THREAD = 1 << 15;  // with fewer elements, waking other threads costs more than it saves

INLINE float root_mean_square_inverse(Floats squares, int size, float eps) {
    return 1.0f / std::sqrt(sum(squares) / size + eps);
}

// Element of the tensors, Weight of the norm's weights. The residual stream is float32 whatever the tensors are.
template <class Element, class Weight>
void rms_norm(const Element* x, float* residual, const Weight* weight, float eps, int rows, int size, Element* out,
              bool in_tiles, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (int64_t(rows) * size > WORTH_A_THREAD)
    for (int row = 0; row < rows; ++row) {
        const Element* from = x ? x + int64_t(row) * size : nullptr;
        float* sums = residual ? residual + int64_t(row) * size : nullptr;
        const RowLayout to(row, size, in_tiles), next(row + 1, size, in_tiles);
        Floats squares{};
        for_each_vector(size, [&](int i, int lanes) {
            if (row + 1 < rows && i % (64 / sizeof(Element)) == 0) {  // prefetch the next row, also where it is written
                if (from) __builtin_prefetch(from + size + i);
                if (sums) __builtin_prefetch(sums + size + i, 1);
                __builtin_prefetch(out + next.of(i), 1);
            }
            Floats part = from ? widen_some(from + i, lanes) : Floats{};
            if (sums) {
                part += widen_some(sums + i, lanes);
                if (from) narrow_some(sums + i, part, lanes);
            }
            squares += part * part;
        });
        const float scale = root_mean_square_inverse(squares, size, eps);
        for_each_vector(size, [&](int i, int lanes) {
            const Floats part = sums ? widen_some(sums + i, lanes) : widen_some(from + i, lanes);
            narrow_some(out + to.of(i), part * scale * widen_some(weight + i, lanes), lanes);
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
            narrow_some(to + i, gated<Element>(widen_some(gate + i, lanes), widen_some(up + i, lanes), gelu), lanes);
        });
    }
}

// Numbers that every head of a token needs, as float32. Elements beyond the last may be read, and are not used.
struct Row {
    alignas(64) float numbers[MAX_HEAD_DIM + LANES];

    template <class Element>
    inline __attribute__((always_inline)) void fill(const Element* from, int count) {
        for_each_vector(count, [&](int i, int lanes) { store(numbers + i, widen_some(from + i, lanes)); });
    }
    inline __attribute__((always_inline)) Floats at(int i) const { return load(numbers + i); }
};

template <int STEP>
INLINE void add_halves_of(Floats* vectors) {
    for (int i = 0; i < STEP; ++i) vectors[i] = add_halves<STEP>(vectors[i], vectors[i + STEP]);
}

// The sums of LANES vectors, each in the lane of its number, added in the order of `sum`.
INLINE Floats sums_of(Floats (&vectors)[LANES]) {
    if constexpr (LANES >= 16) add_halves_of<8>(vectors);
    if constexpr (LANES >= 8) add_halves_of<4>(vectors);
    add_halves_of<2>(vectors);
    add_halves_of<1>(vectors);
    return vectors[0];
}

// 1 / rms of up to LANES heads at once, since a square root and a division for each one would take as long as its rotation.
template <class Element>
INLINE void inverses(const Element* x, int heads, int head_dim, float eps, float* inverse) {
    Floats squares[LANES] = {};
    for (int head = 0; head < heads; ++head, x += head_dim)
        for_each_vector(head_dim, [&](int i, int lanes) {
            const Floats part = widen_some(x + i, lanes);
            squares[head] += part * part;
        });
    const Floats sums = sums_of(squares);
    for (int lane = 0; lane < LANES; ++lane) inverse[lane] = 1.0f / std::sqrt(sums[lane] / head_dim + eps);
}

// Norm one head, unless `weight` is null, and rotate it by its token's angles.
template <class Element>
INLINE void norm_and_rotate(const Element* x, const Row* weight, float inverse, const Row& cosine, const Row& sine,
                            int head_dim, Element* out) {
    const int half = head_dim / 2;
    for_each_vector(half, [&](int i, int lanes) {
        Floats low = widen_some(x + i, lanes), high = widen_some(x + half + i, lanes);
        if (weight) {
            low = rounded<Element>(low * inverse * weight->at(i));
            high = rounded<Element>(high * inverse * weight->at(half + i));
        }
        narrow_some(out + i, low * cosine.at(i) + high * sine.at(i), lanes);
        narrow_some(out + half + i, high * cosine.at(half + i) + low * sine.at(half + i), lanes);
    });
}

struct Heads {
    const void *q_weight, *k_weight, *cosine, *sine;
    void *qkv, *q, *keys, *values;
    float *key_scales, *value_scales;  // of formats that have them apart
    const int64_t *positions, *slot_mapping;
    int tokens, num_heads, num_kv_heads, head_dim, block_size;
    float eps;
    int key_format, value_format;
};

// Element of the tensors, Weight of the norms' weights.
template <class Element, class Weight>
void rotate_and_store(const Heads& heads, int threads) {
    const int dim = heads.head_dim, kv_heads = heads.num_kv_heads, block_size = heads.block_size;
    const int key_bytes = row_bytes(heads.key_format, dim, sizeof(Element));
    const int value_bytes = row_bytes(heads.value_format, dim, sizeof(Element));
    const int64_t width = int64_t(heads.num_heads + 2 * kv_heads) * dim;
#pragma omp parallel num_threads(threads) if (heads.tokens * width > WORTH_A_THREAD)
    {
        Row cosine, sine, q_weight, k_weight;
        alignas(64) float inverse[LANES] = {};
        const bool normed = heads.q_weight != nullptr;
        if (normed) {
            q_weight.fill(static_cast<const Weight*>(heads.q_weight), dim);
            k_weight.fill(static_cast<const Weight*>(heads.k_weight), dim);
        }
        const auto turn = [&](const Element* x, const Row& weight, int head, Element* out) {
            if (normed && head % LANES == 0)
                inverses(x, std::min(LANES, heads.num_heads + kv_heads - head), dim, heads.eps, inverse);
            norm_and_rotate(x, normed ? &weight : nullptr, inverse[head % LANES], cosine, sine, dim, out);
        };
        // The same head of the next token: the processor's own prefetching ends with a token's row.
        const auto prefetch_next = [&](const Element* x) {
            for (int i = 0; i < dim; i += 64 / int(sizeof(Element))) __builtin_prefetch(x + width + i, 0, 2);
        };
        Element row[MAX_HEAD_DIM];
#pragma omp for schedule(static)
        for (int token = 0; token < heads.tokens; ++token) {
            Element* x = static_cast<Element*>(heads.qkv) + token * width;
            cosine.fill(static_cast<const Element*>(heads.cosine) + heads.positions[token] * dim, dim);
            sine.fill(static_cast<const Element*>(heads.sine) + heads.positions[token] * dim, dim);
            Element* q = heads.q ? static_cast<Element*>(heads.q) + int64_t(token) * heads.num_heads * dim : x;
            const int64_t slot = heads.slot_mapping[token];
            int64_t at = slot / block_size * kv_heads * block_size + slot % block_size;  // the row of the first head
            auto* keys = static_cast<char*>(heads.keys);
            auto* values = static_cast<char*>(heads.values);
            for (int i = 0; i < heads.num_heads; ++i, x += dim, q += dim) {
                if (slot >= 0 && i < kv_heads) {  // prefetch the rows that will be written
                    const int64_t row = at + i * block_size;
                    for (int j = 0; j < key_bytes; j += 64) __builtin_prefetch(keys + row * key_bytes + j, 1);
                    for (int j = 0; j < value_bytes; j += 64) __builtin_prefetch(values + row * value_bytes + j, 1);
                }
                prefetch_next(x);
                turn(x, q_weight, i, q);
            }
            if (slot < 0) continue;  // stored already
            for (int i = 0; i < kv_heads; ++i, x += dim, at += block_size) {
                const Element* value = x + kv_heads * dim;
                prefetch_next(x);
                prefetch_next(value);
                if (heads.key_format == PLAIN) {
                    turn(x, k_weight, heads.num_heads + i, reinterpret_cast<Element*>(keys + at * key_bytes));
                } else {
                    turn(x, k_weight, heads.num_heads + i, row);
                    store_row(heads.key_format, row, dim, keys + at * key_bytes, heads.key_scales + at);
                }
                store_row(heads.value_format, value, dim, values + at * value_bytes, heads.value_scales + at);
            }
        }
    }
}

}  // namespace

// element_bytes: 4 for float32, 2 for bfloat16; weight_bytes likewise, of norm weights. Tensors are C-contiguous.

// out = x / rms(x) * weight over rows of `size`. With a residual, in float32: residual += x first, unless x is null, and
// the norm is of that.
// `in_tiles`: write out in tiles, see tiles.hpp; it then has room for whole tiles.
extern "C" void kvlab_rms_norm(const void* x, float* residual, const void* weight, float eps, int rows, int size,
                               void* out, int in_tiles, int element_bytes, int weight_bytes, int threads) {
    const auto run = [&](auto element, auto of_weight) {
        using Element = decltype(element);
        using Weight = decltype(of_weight);
        rms_norm(static_cast<const Element*>(x), residual, static_cast<const Weight*>(weight),
                 eps, rows, size, static_cast<Element*>(out), in_tiles != 0, threads);
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
// rotated by the angles of their positions: cosine and signed sine [positions, head_dim]. Queries are written to q, or
// stay in qkv if that is null, which reads and writes fewer lines of memory; keys and values are written to their blocks [blocks, num_kv_heads, block_size, head_dim], in formats of which some have scales [blocks,
// num_kv_heads, block_size].
extern "C" void kvlab_rotate_and_store(void* qkv, const void* q_weight, const void* k_weight, float eps,
                                       const void* cosine, const void* sine, const int64_t* positions,
                                       const int64_t* slot_mapping, int tokens, int num_heads, int num_kv_heads,
                                       int head_dim, int block_size, void* q, void* keys, void* values,
                                       float* key_scales, float* value_scales, int key_format, int value_format,
                                       int element_bytes, int weight_bytes, int threads) {
    const Heads heads{q_weight,   k_weight,     cosine,    sine,         qkv,    q,         keys,         values,
                      key_scales, value_scales, positions, slot_mapping, tokens, num_heads, num_kv_heads, head_dim,
                      block_size, eps,          key_format, value_format};
    const auto run = [&](auto element, auto weight) {
        using Element = decltype(element);
        using Weight = decltype(weight);
        rotate_and_store<Element, Weight>(heads, threads);
    };
    if (element_bytes == 4) return run(float{}, float{});
    weight_bytes == 4 ? run(uint16_t{}, float{}) : run(uint16_t{}, uint16_t{});
}
