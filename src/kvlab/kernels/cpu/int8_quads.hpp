// The instructions that multiply four pairs of int8, a quad, and add the products to 32 bits.
//
// They take one side unsigned. Where there is no VNNI, `vpmaddubsw` adds two products in 16 bits, and saturates beyond them.
// With |x0 + x1| <= 128 it cannot: 255 * 128 < 2^15, and two products of unlike signs are less than the larger of them.
// `any_large` says whether a pair of x is larger.
#pragma once

#include "simd.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// `sum` plus the four products of each quad: of unsigned weights and signed x.
#if defined(__AVX512VNNI__) && defined(__AVX512DQ__)
constexpr const char* INT8_NAME = "avx512-vnni";
constexpr bool SATURATES = false;
INLINE bool any_large(Words) { return false; }

INLINE Ints add_quads(Ints sum, Words weights, Words x) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)x);
}
#elif defined(__AVX512BW__) && defined(__AVX512DQ__)
constexpr const char* INT8_NAME = FLOATS_NAME;
constexpr bool SATURATES = true;

INLINE Ints add_quads(Ints sum, Words weights, Words x) {
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, (__m512i)x);
    return sum + (Ints)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}

INLINE bool any_large(Words x) {
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi8(1), (__m512i)x);
    return _mm512_cmpgt_epi16_mask(_mm512_abs_epi16(pairs), _mm512_set1_epi16(128)) != 0;
}
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
constexpr const char* INT8_NAME = "avx-vnni";
constexpr bool SATURATES = false;
INLINE bool any_large(Words) { return false; }

INLINE Ints add_quads(Ints sum, Words weights, Words x) {
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)x);
}
#elif defined(__AVX2__) && !defined(__AVX512F__)
constexpr const char* INT8_NAME = FLOATS_NAME;
constexpr bool SATURATES = true;

INLINE Ints add_quads(Ints sum, Words weights, Words x) {
    const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, (__m256i)x);
    return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

INLINE bool any_large(Words x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), (__m256i)x);
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(_mm256_abs_epi16(pairs), _mm256_set1_epi16(128))) != 0;
}
#elif defined(__SSE2__) && !defined(__AVX512F__)
constexpr const char* INT8_NAME = FLOATS_NAME;
constexpr bool SATURATES = false;
INLINE bool any_large(Words) { return false; }

// Even and odd bytes, each as 16 bits.
INLINE Ints add_quads(Ints sum, Words weights, Words x) {
    const __m128i w = (__m128i)weights, even = _mm_and_si128(w, _mm_set1_epi16(255)), odd = _mm_srli_epi16(w, 8);
    const __m128i x_even = _mm_srai_epi16(_mm_slli_epi16((__m128i)x, 8), 8), x_odd = _mm_srai_epi16((__m128i)x, 8);
    return sum + (Ints)_mm_madd_epi16(even, x_even) + (Ints)_mm_madd_epi16(odd, x_odd);
}
#else
constexpr const char* INT8_NAME = FLOATS_NAME;
constexpr bool SATURATES = false;
INLINE bool any_large(Words) { return false; }

INLINE Ints add_quads(Ints sum, Words weights, Words x) {
#pragma GCC unroll 4
    for (int byte = 0; byte < 4; ++byte)
        sum += reinterpret_cast<Ints>(weights >> 8 * byte & 255) * (reinterpret_cast<Ints>(x << (24 - 8 * byte)) >> 24);
    return sum;
}
#endif
