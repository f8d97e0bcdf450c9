// int8 with a scale. A row of numbers is divided by its scale, which is its largest magnitude / 127, and rounded. Results
// computed from it are multiplied by the scale, once per row. bfloat16 represents every int8 exactly, so that the
// arithmetic on bfloat16 serves both.
#pragma once

#include "simd.hpp"

#include <algorithm>

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

// The lowest byte of each lane. (The compiler's own conversion takes lanes one by one.)
INLINE Bytes lowest_bytes(Ints x) {
#if defined(__AVX512F__)
    return (Bytes)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
    const __m256i first = _mm256_set1_epi32(0x0c080400);
    const __m256i fours = _mm256_shuffle_epi8((__m256i)x, first);  // of each half, in its lowest word
    const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), _mm256_extracti128_si256(fours, 1));
    Bytes bytes;
    std::memcpy(&bytes, &both, sizeof bytes);
    return bytes;
#else
    return __builtin_convertvector(x, Bytes);
#endif
}

// x * by, rounded once to whole numbers, ties to even: adding 1.5 * 2^23 in the same operation, or 1.5 * 2^52 to the exact
// product in double, leaves the integer in the low bits.
INLINE Bytes rounded_product(Floats x, Floats by) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const Floats shifted = (Floats)_mm512_fmadd_ps((__m512)x, (__m512)by, _mm512_set1_ps(12582912.0f));
    return lowest_bytes(reinterpret_cast<Ints>(shifted));
#elif defined(__AVX2__) && defined(__FMA__)
    const Floats shifted = (Floats)_mm256_fmadd_ps((__m256)x, (__m256)by, _mm256_set1_ps(12582912.0f));
    return lowest_bytes(reinterpret_cast<Ints>(shifted));
#else
    typedef double Doubles __attribute__((vector_size(LANES * 8)));
    typedef int64_t Longs __attribute__((vector_size(LANES * 8)));
    const Doubles exact = __builtin_convertvector(x, Doubles) * __builtin_convertvector(by, Doubles);
    return __builtin_convertvector(reinterpret_cast<Longs>(exact + 6755399441055744.0), Bytes);
#endif
}

// The largest magnitude; NaN if a number is not finite.
INLINE float magnitude_of(const float* x, int count) {
    Floats most{}, wrong{};
    for_each_vector(count, [&](int i, int lanes) {
        const Floats part = widen_some(x + i, lanes);
        most = larger(larger(part, -part), most);
        wrong += part * 0.0f;
    });
    return largest(most) + sum(wrong);
}

// bfloat16 without their sign have the order of integers.
INLINE float magnitude_of(const uint16_t* x, int count) {
    typedef uint16_t Pairs __attribute__((vector_size(LANES * 4)));
    Pairs most{};
    int i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        const Pairs part = reinterpret_cast<Pairs>(load_words(x + i)) & 0x7fff;
        most = part > most ? part : most;
    }
    uint16_t bits = 0;
    for (int lane = 0; lane < 2 * LANES; ++lane) bits = std::max<uint16_t>(bits, most[lane]);
    for (; i < count; ++i) bits = std::max<uint16_t>(bits, x[i] & 0x7fff);
    const Floats magnitude = as_floats(uint32_t(bits) << 16 | Words{});
    return bits < 0x7f80 ? magnitude[0] : NAN;
}

// Convert `count` numbers to int8 and return their scale, which is NaN if one of them is not finite. `place(i)`: where
// number i goes, and all others of its vector behind it.
template <class Element, class Place>
INLINE float quantize(const Element* x, int count, Place place) {
    constexpr float SMALLEST = 1e-30f;  // smaller magnitudes count as 0
    const float magnitude = magnitude_of(x, count);
    const Floats inverse = all(127.0f / (magnitude > SMALLEST ? magnitude : SMALLEST));
    for_each_vector(count, [&](int i, int lanes) {
        const Bytes bytes = rounded_product(widen_some(x + i, lanes), inverse);
        std::memcpy(place(i), &bytes, lanes);
    });
    return magnitude / 127.0f;
}

template <class Element>
INLINE float quantize(const Element* x, int count, int8_t* out) {
    return quantize(x, count, [&](int i) { return out + i; });
}
