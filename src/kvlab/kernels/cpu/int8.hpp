// int8 with a scale. A row of numbers is divided by its scale, which is its largest magnitude / 127, and rounded. Results
// computed from it are multiplied by the scale, once per row. bfloat16 represents every int8 exactly, so that the
// arithmetic on bfloat16 serves both.
#pragma once

#include "simd.hpp"

// LANES int8 as float32.
INLINE Floats floats_of(const int8_t* at) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
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

// Convert `count` numbers to int8 and return their scale, which is NaN if one of them is not finite.
template <class Element>
INLINE float quantize(const Element* x, int count, int8_t* out) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    constexpr float SMALLEST = 1e-30f;  // smaller magnitudes count as 0
    const Floats shifter = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Floats most{}, wrong{};
    for_each_vector(count, [&](int i, int lanes) {
        const Floats part = widen_some(x + i, lanes);
        most = larger(larger(part, -part), most);
        wrong += part * 0.0f;
    });
    const float magnitude = largest(most);
    const Floats inverse = all(127.0f / (magnitude > SMALLEST ? magnitude : SMALLEST));
    for_each_vector(count, [&](int i, int lanes) {
        const Floats shifted = widen_some(x + i, lanes) * inverse + shifter;
        const Bytes bytes = __builtin_convertvector(reinterpret_cast<Ints>(shifted), Bytes);
        std::memcpy(out + i, &bytes, lanes);
    });
    return magnitude / 127.0f + sum(wrong);
}
