// Shared by both implementations of attention (vectors and matrix tiles): the problem, its division into items, and
// the types of elements.
#pragma once

#include "kv_formats.hpp"
#include "tiles.hpp"

#include <algorithm>
#include <vector>

constexpr float HIDDEN = -INFINITY;

// The type of queries, outputs and products (Element), which is the plain format's. What reads keys or values is a
// template of their Number, too (kv_formats.hpp), and finds a row by the address of its first byte.
struct Float32 {
    using Element = float;
    static constexpr int PER_UNIT = 1, CHUNK = LANES;  // elements per unit of the left side; per load of channels
};

struct BFloat16 {
    using Element = uint16_t;
#if defined(__AVX512BF16__)
    static constexpr int PER_UNIT = 2;
#else
    static constexpr int PER_UNIT = 1;
#endif
    static constexpr int CHUNK = 2 * LANES;
};

// Few rows of a format: pairs would have to be made of its numbers, and their products are no faster than those of float32.
struct Widened : BFloat16 {
    static constexpr int PER_UNIT = 1;
};
template <class Type>
using Few = std::conditional_t<Type::PER_UNIT == 2, Widened, Type>;

// Load a chunk of numbers. Bytes are converted to elements, or kept in pairs where the next step widens pairs anyway.
template <class Type, class Number>
INLINE Words load_numbers(const Number* at) {
    if constexpr (!IS_BYTE<Number>) return load_words(at);
    else if constexpr (Type::CHUNK == LANES) return as_words(floats_of(at));
#if defined(__AVX512BF16__)
    else if constexpr (Type::PER_UNIT == 2) return bfloat16_of(at);
#endif
    else return byte_pairs(at);
}

// Load a row's last chunk, of `count` numbers, padded with zeros. Not inlined: it is rare, and called from many places.
template <class Type, class Number>
__attribute__((noinline)) Words load_cut_off(const Number* at, int count) {
    Number padded[Type::CHUNK] = {};
    std::memcpy(padded, at, count * sizeof padded[0]);
    return load_numbers<Type>(padded);
}

// Load one chunk of a row, of which the last may be cut off by the end of the row; WHOLE says that this one is not.
template <class Type, class Number, bool WHOLE = false>
INLINE Words load_chunk(const void* row, int chunk, int head_dim) {
    const int begin = chunk * Type::CHUNK;
    const auto* at = static_cast<const Number*>(row);
    if constexpr (IS_INT4<Number>) return load_int4<Type::CHUNK>(at, begin);
    else if (WHOLE || begin + Type::CHUNK <= head_dim) return load_numbers<Type>(at + begin);
    else return load_cut_off<Type>(at + begin, head_dim - begin);
}

struct Problem {
    const void *queries, *keys, *values;
    const float *key_scales, *value_scales;  // of rows, in formats that have them
    void* out;
    const int32_t *block_tables, *seq_lens, *query_start;
    int64_t query_stride;  // elements between tokens of `queries`
    int table_width, num_sequences, num_heads, num_kv_heads, head_dim, block_size, window;
    float scale, soft_cap;
    bool out_in_tiles;
    int key_format, value_format;

    int group() const { return num_heads / num_kv_heads; }
};

// A unit of work for one thread: queries [first_query, last_query) of a sequence and KV heads [first_head, last_head),
// over keys [first_key, last_key). All heads of a decoding sequence are one item, since they are adjacent in a block.
struct Item {
    int sequence, first_head, last_head, first_query, last_query, first_key, last_key;
    int partial;  // first row of its partial result; -1: it covers all keys and writes the output
};

// The `count` items, from `first` on, that a long one was split into.
struct Split {
    int first, count;
};

struct Work {
    std::vector<Item> items;
    std::vector<Split> splits;
    int partial_rows = 0;
};

template <class Type>
struct Shape {
    int head_dim, whole_chunks, chunks, steps, channels;  // units per row of queries; channels of the sums

    explicit Shape(int head_dim)
        : head_dim(head_dim),
          whole_chunks(head_dim / Type::CHUNK),
          chunks((head_dim + Type::CHUNK - 1) / Type::CHUNK),
          steps(chunks * Type::CHUNK / Type::PER_UNIT),
          channels(chunks * Type::CHUNK) {}
};

// A chunk of a row in the units and the order that `multiply` reads: 1 vector, or 2 where bfloat16 is widened.
template <class Type, class Number>
INLINE int units_of_chunk(Words chunk, Words (&units)[2]) {
    if constexpr (Type::CHUNK == LANES || Type::PER_UNIT == 2) {
        units[0] = chunk;
        return 1;
    }
    units[0] = even<Number>(chunk);
    units[1] = odd<Number>(chunk);
    return 2;
}

// A chunk of values of PER_UNIT keys as the right side of the second product: `out` has CHUNK / LANES vectors.
template <class Type, class Number>
INLINE void units_of_values(Words first, Words second, Words* out) {
    if constexpr (Type::CHUNK == LANES) {
        out[0] = first;
    } else if constexpr (Type::PER_UNIT == 1) {
        out[0] = even<Number>(first);
        out[1] = odd<Number>(first);
    } else {
        out[0] = (first & 0xffffu) | (second << 16);
        out[1] = (first >> 16) | (second & 0xffff0000u);
    }
}

// Write the output of one query head of a token.
template <class Type>
void store_output(const Problem& problem, const Shape<Type>& shape, int64_t token, int head, const float* sums,
                  float total) {
    auto* out = static_cast<typename Type::Element*>(problem.out);
    const RowLayout layout(token, int64_t(problem.num_heads) * shape.head_dim, problem.out_in_tiles);
    const Floats scale = all(total > 0 ? 1.0f / total : 0.0f);
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
        const float* at = sums + chunk * Type::CHUNK;
        Words result;
        if constexpr (Type::CHUNK == LANES)
            result = as_words(load(at) * scale);
        else
            result = rounded_to_bfloat16(load(at) * scale) >> 16 | rounded_to_bfloat16(load(at + LANES) * scale);
        const int begin = chunk * Type::CHUNK, count = std::min(Type::CHUNK, shape.head_dim - begin);
        auto* to = out + layout.of(head * shape.head_dim + begin);
        if (count == Type::CHUNK)
            store_words(to, result);
        else
            std::memcpy(to, &result, count * sizeof out[0]);
    }
}

INLINE void prefetch(const void* at) { __builtin_prefetch(at, 0, 2); }
