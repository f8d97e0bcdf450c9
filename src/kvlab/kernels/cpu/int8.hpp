// int8 with a scale. A row of numbers is divided by its scale, which is its largest magnitude / 127, and rounded. Results
// computed from it are multiplied by the scale, once per row. bfloat16 represents every int8 exactly, so that the
// arithmetic on bfloat16 serves both.
#pragma once

#include "simd.hpp"

typedef int8_t Bytes __attribute__((vector_size(LANES)));

// LANES int8 as float32.
INLINE Floats floats_of(const int8_t* at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#else
    Bytes bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

// 2 * LANES int8, two to a word, the first in the lower half. `even_int8` extracts the first, `odd_int8` the second.
INLINE Words int8_pairs(const int8_t* at) {
    Halves pairs;
    std::memcpy(&pairs, at, sizeof pairs);
    return __builtin_convertvector(pairs, Words);
}

INLINE Floats even_int8(Words pairs) {
    return __builtin_convertvector(reinterpret_cast<Ints>(pairs << 24) >> 24, Floats);
}

INLINE Floats odd_int8(Words pairs) {
    return __builtin_convertvector(reinterpret_cast<Ints>(pairs << 16) >> 24, Floats);
}

#if defined(__AVX512BF16__)
// 2 * LANES int8 as bfloat16, two to a word, the first in the lower half.
INLINE Words bfloat16_of(const int8_t* at) {
    return (Words)_mm512_cvtne2ps_pbh((__m512)floats_of(at + LANES), (__m512)floats_of(at));
}
#endif

// x * by, rounded once to whole numbers, ties to even: adding 1.5 * 2^23 in the same operation, or 1.5 * 2^52 to the exact
// product in double, leaves the integer in the low bits.
INLINE Bytes rounded_product(Floats x, Floats by) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const Floats shifted = (Floats)_mm512_fmadd_ps((__m512)x, (__m512)by, _mm512_set1_ps(12582912.0f));
    return __builtin_convertvector(reinterpret_cast<Ints>(shifted), Bytes);
#elif defined(__AVX2__) && defined(__FMA__)
    const Floats shifted = (Floats)_mm256_fmadd_ps((__m256)x, (__m256)by, _mm256_set1_ps(12582912.0f));
    return __builtin_convertvector(reinterpret_cast<Ints>(shifted), Bytes);
#else
    typedef double Doubles __attribute__((vector_size(LANES * 8)));
    typedef int64_t Longs __attribute__((vector_size(LANES * 8)));
    const Doubles exact = __builtin_convertvector(x, Doubles) * __builtin_convertvector(by, Doubles);
    return __builtin_convertvector(reinterpret_cast<Longs>(exact + 6755399441055744.0), Bytes);
#endif
}

// Convert `count` numbers to int8 and return their scale, which is NaN if one of them is not finite.
template <class Element>
INLINE float quantize(const Element* x, int count, int8_t* out) {
    constexpr float SMALLEST = 1e-30f;  // smaller magnitudes count as 0
    Floats most{}, wrong{};
    for_each_vector(count, [&](int i, int lanes) {
        const Floats part = widen_some(x + i, lanes);
        most = larger(larger(part, -part), most);
        wrong += part * 0.0f;
    });
    const float magnitude = largest(most);
    const Floats inverse = all(127.0f / (magnitude > SMALLEST ? magnitude : SMALLEST));
    for_each_vector(count, [&](int i, int lanes) {
        const Bytes bytes = rounded_product(widen_some(x + i, lanes), inverse);
        std::memcpy(out + i, &bytes, lanes);
    });
    return magnitude / 127.0f + sum(wrong);
}
