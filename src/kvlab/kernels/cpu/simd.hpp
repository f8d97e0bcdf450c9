// Vectors of the processor that the library is compiled for, and functions of them.
//
// The compiler's flags name the instruction set: LANES is 16 with AVX-512, 8 with AVX2 and 4 elsewhere. bfloat16 can be
// multiplied in pairs where the processor has an instruction for it (AVX512-BF16, NEON with bf16), and as float32
// everywhere. A unit is 4 bytes either way, so that tiles have the same shape.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int LANES = 16, TILE_ROWS = 6, TILE_VECTORS = 4;  // 24 sums in 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2;   // 12 sums in 16 registers
#else
constexpr int LANES = 4, TILE_ROWS = 4, TILE_VECTORS = 2;
#endif

// The instructions that multiply float32 and, where there are any, pairs of bfloat16.
#if defined(__aarch64__)
constexpr const char *FLOATS_NAME = "neon", *PAIRS_NAME = "neon-bf16";
#else
constexpr const char *FLOATS_NAME = LANES == 16 ? "avx512" : LANES == 8 ? "avx2" : "portable";
constexpr const char *PAIRS_NAME = "avx512-bf16";
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
// The same without alignment, and for memory of any type.
typedef Floats FloatsAt __attribute__((aligned(4), may_alias));
typedef Words WordsAt __attribute__((aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

INLINE Floats load(const float* at) { return *reinterpret_cast<const FloatsAt*>(at); }
INLINE void store(float* at, Floats x) { *reinterpret_cast<FloatsAt*>(at) = x; }
INLINE Words load_words(const void* at) { return *static_cast<const WordsAt*>(at); }
INLINE void store_words(void* at, Words x) { *static_cast<WordsAt*>(at) = x; }
INLINE Floats all(float x) { return x - Floats{}; }
INLINE Floats as_floats(Words x) { return reinterpret_cast<Floats>(x); }
INLINE Words as_words(Floats x) { return reinterpret_cast<Words>(x); }

// `sum` plus both products of each pair of bfloat16. x86 adds the second product first, each rounded once, so that two
// fused float32 operations in this order give the same bits (but numbers below 1e-38 count as 0 here).
#if defined(__AVX512BF16__)
#define KVLAB_PAIRS
INLINE Floats add_products(Floats sum, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define KVLAB_PAIRS
INLINE Floats add_products(Floats sum, Words a, Words b) {
    return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
#endif

// The number of each lane.
INLINE Ints lane_numbers() {
    Ints lanes;
    for (int lane = 0; lane < LANES; ++lane) lanes[lane] = lane;
    return lanes;
}

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// Lanes of two vectors, each `step` apart: with `step` a power of two below LANES, lane l of the result is
// a[l] + a[l + step] where l has that bit clear and b[l - step] + b[l] where it is set.
template <int STEP>
INLINE Floats add_halves(Floats a, Floats b) {
    Floats near, far;
#if defined(__clang__) || !defined(__GNUC__)
    for (int lane = 0; lane < LANES; ++lane) {
        near[lane] = lane & STEP ? b[lane] : a[lane];
        far[lane] = lane & STEP ? b[lane - STEP] : a[lane + STEP];
    }
#else
    Ints from_near{}, from_far{};
    for (int lane = 0; lane < LANES; ++lane) {
        from_near[lane] = lane & STEP ? LANES + lane : lane;
        from_far[lane] = lane & STEP ? LANES + lane - STEP : lane + STEP;
    }
    near = __builtin_shuffle(a, b, from_near);
    far = __builtin_shuffle(a, b, from_far);
#endif
    return near + far;
}

INLINE float largest(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float most = x[0];
    for (int lane = 1; lane < LANES; ++lane) most = x[lane] > most ? x[lane] : most;
    return most;
#endif
}

INLINE float sum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += x[lane];
    return total;
#endif
}

INLINE int32_t sum(Ints x) {
    int32_t total = 0;
    for (int lane = 0; lane < LANES; ++lane) total += x[lane];
    return total;
}

INLINE bool any(Ints condition) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)condition) != 0;
#else
    int found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= condition[lane];
    return found != 0;
#endif
}

// e^x to one unit in the last place for x <= 0 (and up to 80): x = n ln 2 + r, a polynomial in r, n added to its
// exponent. Below -87, minus infinity included, it is 0; NaN stays NaN.
INLINE Floats exponential(Floats x) {
    const Floats shifter = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Floats shifted = x * 1.44269504f + shifter;
    const Floats n = shifted - shifter;
    const Floats r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
    Floats p = all(0.00138145988f) * r + 0.00836871658f;  // fitted to where r is, with 1 + r as it begins
    p = p * r + 0.041668389f;
    p = p * r + 0.166665211f;
    p = p * r + 0.49999994f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Floats result = as_floats(as_words(p) + (as_words(shifted) << 23));  // of the shifter itself, no bit is left
    return x < -87.0f ? Floats{} : result;
}

#if defined(__AVX512F__) && defined(__AVX512DQ__)
// 2^x to one part in 10,000, a twentieth of what bfloat16 rounds by; of minus infinity, 0. `more` is added to its
// significand.
INLINE __m512 rough_power_of_two(__m512 x, float more = 0.0f) {
    const __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x less its floor
    __m512 p = _mm512_set1_ps(0.0770670548f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.22764498f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.695116818f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f + more));
    return _mm512_scalef_ps(p, x);
}
#endif

// e^x to one part in 10,000 in two thirds of the time: for what is rounded to bfloat16 at once.
INLINE Floats rough_exponential(Floats x) {
#if defined(__AVX512F__) && defined(__AVX512DQ__)
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_mov_ps(kept, rough_power_of_two((__m512)(x * 1.44269504f)));
#else
    const Floats shifter = all(12582912.0f);
    const Floats shifted = x * 1.44269504f + shifter;
    const Floats r = x * 1.44269504f - (shifted - shifter);
    const Floats p = ((all(0.0550088361f) * r + 0.242211357f) * r + 0.693282962f) * r + 1.0f;
    const Floats result = as_floats(as_words(p) + (as_words(shifted) << 23));
    return x < -87.0f ? Floats{} : result;
#endif
}

// 1 / x, to one part in 10,000 where the processor has something quicker than a division.
INLINE Floats rough_inverse(Floats x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_rcp14_ps((__m512)x);
#else
    return 1.0f / x;
#endif
}

INLINE Floats hyperbolic_tangent(Floats x) {
    const Floats limited = x > 40.0f ? all(40.0f) : (x < -40.0f ? all(-40.0f) : x);
    return 1.0f - 2.0f / (exponential(limited + limited) + 1.0f);
}

// Round float32 to the bfloat16 in the upper half of each word, to nearest, ties to even; NaN stays NaN.
INLINE Words rounded_to_bfloat16(Floats x) {
    const Words bits = as_words(x);
    const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (x == x ? rounded : bits | 0x400000) & 0xffff0000u;
}

// The same, as bfloat16. (The processor's own rounding takes numbers below 1e-38 for 0.)
INLINE Halves narrowed(Floats x) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
    return __builtin_convertvector(rounded_to_bfloat16(x) >> 16, Halves);
#endif
}

// bfloat16 as float32. (The compiler's own conversion goes through halves of the vector.)
INLINE Floats widened(Halves x) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#elif defined(__AVX2__)
    return (Floats)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)x), 16);
#else
    return as_floats(__builtin_convertvector(x, Words) << 16);
#endif
}

// x rounded to the precision of Element, as if it had been stored and read again.
template <class Element>
INLINE Floats rounded(Floats x) {
    if constexpr (sizeof(Element) == 4) return x;
    return widened(narrowed(x));
}

// LANES elements, float32 or bfloat16, as float32.
template <class Element>
INLINE Floats widen(const Element* at) {
    if constexpr (sizeof(Element) == 4) return load(at);
    Halves narrow;
    std::memcpy(&narrow, at, sizeof narrow);
    return widened(narrow);
}

// The same of `lanes` elements; zeros beyond them.
template <class Element>
INLINE Floats widen_some(const Element* at, int lanes) {
    if (lanes == LANES) return widen(at);
    Element padded[LANES] = {};
    std::memcpy(padded, at, lanes * sizeof padded[0]);
    return widen(padded);
}

// The inverse: LANES float32, rounded to elements.
template <class Element>
INLINE void narrow(Element* at, Floats x) {
    if constexpr (sizeof(Element) == 4) {
        store(at, x);
    } else {
        const Halves halves = narrowed(x);
        std::memcpy(at, &halves, sizeof halves);
    }
}

template <class Element>
INLINE void narrow_some(Element* at, Floats x, int lanes) {
    if (lanes == LANES) return narrow(at, x);
    Element padded[LANES];
    narrow(padded, x);
    std::memcpy(at, padded, lanes * sizeof padded[0]);
}

// `count` elements, in whole vectors and one cut to size: `body(index, lanes)`.
template <class Body>
INLINE void for_each_vector(int count, Body body) {
    int i = 0;
    for (; i + LANES <= count; i += LANES) body(i, LANES);
    if (i < count) body(i, count - i);
}

// Transpose LANES vectors of LANES words, in log2(LANES) steps of exchanged lanes.
INLINE void transpose(Words (&rows)[LANES]) {
#if defined(__clang__) || !defined(__GNUC__)
    Words columns[LANES];
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < LANES; ++j) columns[j][i] = rows[i][j];
    for (int i = 0; i < LANES; ++i) rows[i] = columns[i];
#else
#pragma GCC unroll 4
    for (int step = LANES / 2; step > 0; step /= 2) {
        Ints from_left{}, from_right{};
        for (int lane = 0; lane < LANES; ++lane) {
            from_left[lane] = lane & step ? LANES + lane - step : lane;
            from_right[lane] = lane & step ? LANES + lane : lane + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; ++i) {
            if (i & step) continue;
            const Words a = rows[i], b = rows[i + step];
            rows[i] = __builtin_shuffle(a, b, from_left);
            rows[i + step] = __builtin_shuffle(a, b, from_right);
        }
    }
#endif
}

namespace {

// The gate of a feed-forward: activation(x) * up (Shazeer, 2020).

// x * sigmoid(y) for y >= -80. A result that is rounded to bfloat16 needs no better than the rough functions.
template <class Element>
INLINE Floats times_sigmoid(Floats x, Floats y) {
    if constexpr (sizeof(Element) == 4) return x / (1.0f + exponential(-y));
    return x * rough_inverse(1.0f + rough_exponential(-y));
}

// activation(x) * up. The activation is rounded to Element, the product is not.
template <class Element>
INLINE Floats gated(Floats x, Floats up, bool gelu) {
    // gelu in its tanh form is x * sigmoid(2 y), silu is x * sigmoid(x)
    const Floats y = gelu ? 1.5957691216f * (x + 0.044715f * x * x * x) : x;
    return rounded<Element>(times_sigmoid<Element>(x, y < -80.0f ? all(-80.0f) : y)) * up;  // e^80 is finite
}

}  // namespace
