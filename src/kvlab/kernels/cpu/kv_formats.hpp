// How the cache stores K and V. A row is the numbers of one token's head.
//
//     plain       the elements themselves
//     int8, fp8   a byte for each number. A row has a scale, kept apart: results are multiplied by it, once per row
//     int4        groups of 32 numbers: their scale in bfloat16, then 16 bytes, number i in the lower half of byte i and
//                 number i + 16 in the upper half, as in llama.cpp's Q4_0. A number is (half - 8) * scale
//
// The fp8 formats are those of the OCP specification (2023) without subnormal numbers. What is below the smallest normal
// number, 2^-15 of a row's largest magnitude in e4m3 and 2^-30 in e5m2, is stored as 0.
#pragma once

#include "int8.hpp"
#include "interface.hpp"

#include <type_traits>

struct E4M3 {
    uint8_t bits;
    static constexpr int MANTISSA = 3, BIAS = 7;
    static constexpr float LARGEST = 448;
};

struct E5M2 {
    uint8_t bits;
    static constexpr int MANTISSA = 2, BIAS = 15;
    static constexpr float LARGEST = 57344;
};

struct Int4 {  // a byte of a group
    uint8_t bits;
    static constexpr int GROUP = 32, BYTES = 18, SCALE_BYTES = 2;  // of a group
};

template <class Number>
constexpr bool IS_FP8 = false;
template <>
constexpr bool IS_FP8<E4M3> = true;
template <>
constexpr bool IS_FP8<E5M2> = true;
template <class Number>
constexpr bool IS_INT4 = false;
template <>
constexpr bool IS_INT4<Int4> = true;
// Whether a number is a byte, and its row has a scale.
template <class Number>
constexpr bool IS_BYTE = sizeof(Number) == 1 && !IS_INT4<Number>;
template <class Number>
constexpr bool IS_PLAIN = !IS_BYTE<Number> && !IS_INT4<Number>;

// body(Number{}) for a KVLAB_FORMAT; Element is the plain format's.
template <class Element, class Body>
INLINE auto with_format(int format, Body body) {
    switch (format) {
        case INT8: return body(int8_t{});
        case FP8_E4M3: return body(E4M3{});
        case FP8_E5M2: return body(E5M2{});
        case INT4: return body(Int4{});
        default: return body(Element{});
    }
}

// Bytes of `count` numbers; of int4, whole groups or a part of one that is not read.
template <class Number>
constexpr int bytes_of(int count) {
    return IS_INT4<Number> ? count * Int4::BYTES / Int4::GROUP : count * int(sizeof(Number));
}

inline int row_bytes(int format, int head_dim, int element_bytes) {
    if (format == INT4) return bytes_of<Int4>(head_dim);
    return format == PLAIN ? head_dim * element_bytes : head_dim;
}

// An fp8 number's exponent and mantissa, put where float32 has them, are the number times a power of two: the difference
// of the biases. This undoes it.
template <class Number>
constexpr float RAISE = Number::BIAS == 7 ? 0x1p120f : 0x1p112f;

// LANES fp8 numbers as float32.
template <class Number, std::enable_if_t<IS_FP8<Number>, int> = 0>
INLINE Floats floats_of(const Number* at) {
#if defined(__AVX512F__)
    const Words wide = (Words)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#elif defined(__AVX2__)
    const Words wide = (Words)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at)));
#else
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    Bytes bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    const Words wide = reinterpret_cast<Words>(__builtin_convertvector(bytes, Ints));
#endif
    constexpr int UP = 23 - Number::MANTISSA;
    return as_floats(wide << UP & (0x80000000u | 0x7fu << UP)) * RAISE<Number>;
}

// 2 * LANES bytes, two to a word, the first in the lower half: int8 as 16-bit integers, fp8 with exponent and mantissa
// where bfloat16 has them. `even` and `odd` make numbers of them.
template <class Number>
INLINE Words byte_pairs(const Number* at) {
#if defined(__AVX512F__)
    const Words wide = (Words)_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
#elif defined(__AVX2__)
    const Words wide = (Words)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
#else
    typedef int8_t Bytes __attribute__((vector_size(2 * LANES)));
    typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
    Bytes bytes;
    std::memcpy(&bytes, at, sizeof bytes);
    const Words wide = reinterpret_cast<Words>(__builtin_convertvector(bytes, Shorts));
#endif
    if constexpr (IS_FP8<Number>) {  // bits that cross from one half to the other are not kept
        constexpr uint32_t kept = 0x8000u | 0x7fu << (7 - Number::MANTISSA);
        return wide << (7 - Number::MANTISSA) & (kept << 16 | kept);
    }
    return wide;
}

// The first (even) or second (odd) number of each pair as float32. bfloat16 is the upper half of a float32. Bytes come
// as multiples of their numbers, see PairFactors.
template <class Number>
INLINE Words even(Words pairs) {
    const Words upper = pairs << 16;
    if constexpr (!IS_BYTE<Number> || IS_FP8<Number>) return upper;
    else return as_words(__builtin_convertvector(reinterpret_cast<Ints>(upper), Floats));
}

template <class Number>
INLINE Words odd(Words pairs) {
    const Words upper = pairs & 0xffff0000u;
    if constexpr (!IS_BYTE<Number> || IS_FP8<Number>) return upper;
    else return as_words(__builtin_convertvector(reinterpret_cast<Ints>(upper), Floats));
}

// What the other side of a product with `even` and `odd` is to be multiplied by, and what the result is: powers of two,
// which cost a conversion nothing. Those of fp8 are parted in two since float32 would hold neither product.
struct PairFactors {
    float before = 1, after = 1;
};

template <class Number>
constexpr PairFactors pair_factors() {
    if constexpr (IS_FP8<Number>) return Number::BIAS == 7 ? PairFactors{0x1p60f, 0x1p60f} : PairFactors{0x1p56f, 0x1p56f};
    else if constexpr (IS_BYTE<Number>) return {0x1p-16f, 1};
    else return {};
}

#if defined(__AVX512BF16__)
// 2 * LANES fp8 numbers as bfloat16, two to a word, the first in the lower half: the exponent is moved, and 0 stays 0.
template <class Number, std::enable_if_t<IS_FP8<Number>, int> = 0>
INLINE Words bfloat16_of(const Number* at) {
    const __m512i bytes = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    const __mmask32 nonzero = _mm512_test_epi16_mask(bytes, _mm512_set1_epi16(0x7f));
    const __m512i kept = _mm512_set1_epi16(short(0x8000 | 0x7f << (7 - Number::MANTISSA)));
    const __m512i small = _mm512_and_si512(_mm512_slli_epi16(bytes, 7 - Number::MANTISSA), kept);
    return (Words)_mm512_mask_add_epi16(small, nonzero, small, _mm512_set1_epi16((127 - Number::BIAS) << 7));
}
#endif

// COUNT numbers of a row in int4 from `first` on, a multiple of COUNT: LANES of them as float32, or 2 * LANES as bfloat16,
// two to a word, the first in the lower half.
template <int COUNT>
INLINE Words load_int4(const Int4* row, int first) {
    static_assert(COUNT <= Int4::GROUP, "a load has one scale");
    constexpr int HALF = Int4::GROUP / 2;
    const uint8_t* group = &row->bits + first / Int4::GROUP * Int4::BYTES;
    uint16_t narrow;
    std::memcpy(&narrow, group, sizeof narrow);
    const Floats scale = as_floats(Words{} + (uint32_t(narrow) << 16));
    const int within = first % Int4::GROUP, shift = within < HALF ? 0 : 4;
    const uint8_t* bytes = group + Int4::SCALE_BYTES + within % HALF;
    const auto numbers = [&](const uint8_t* at, int by) {
        typedef uint8_t Bytes __attribute__((vector_size(LANES)));
        Bytes both;
        std::memcpy(&both, at, sizeof both);
        const Words half = __builtin_convertvector(both, Words) >> by & 15u;
        return __builtin_convertvector(reinterpret_cast<Ints>(half) - 8, Floats) * scale;
    };
    if constexpr (COUNT == LANES) {
        return as_words(numbers(bytes, shift));
    } else {
        const Floats low = numbers(bytes, shift);
        const Floats high = COUNT == Int4::GROUP ? numbers(bytes, 4) : numbers(bytes + LANES, shift);
#if defined(__AVX512BF16__)
        return (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
        const Halves parts[] = {narrowed(low), narrowed(high)};
        return load_words(parts);
#endif
    }
}

// What follows writes a row. Each function returns the row's scale, which is NaN if a number is not finite.

// The largest magnitude of `count` numbers, or NaN.
template <class Element>
INLINE float largest_magnitude(const Element* x, int count) {
    Floats most{}, wrong{};
    for_each_vector(count, [&](int i, int lanes) {
        const Floats part = widen_some(x + i, lanes);
        most = larger(larger(part, -part), most);
        wrong += part * 0.0f;
    });
    return largest(most) + sum(wrong);
}

// To the nearest number, ties to even.
template <class Number, class Element>
INLINE float quantize_fp8(const Element* x, int count, Number* out) {
    typedef int8_t Bytes __attribute__((vector_size(LANES)));
    constexpr float SMALLEST = 1e-30f;  // smaller magnitudes count as 0
    constexpr float NORMAL = Number::BIAS == 7 ? 0x1p-6f : 0x1p-14f;
    constexpr int CUT = 23 - Number::MANTISSA;
    const float magnitude = largest_magnitude(x, count);
    const Floats inverse = all(Number::LARGEST / (magnitude > SMALLEST ? magnitude : SMALLEST));
    for_each_vector(count, [&](int i, int lanes) {
        const Floats part = widen_some(x + i, lanes) * inverse, positive = larger(part, -part);
        const Words bits = as_words(positive);
        Words number = (bits + ((1u << (CUT - 1)) - 1) + (bits >> CUT & 1u)) >> CUT;
        number -= uint32_t(127 - Number::BIAS) << Number::MANTISSA;
        number = positive < NORMAL ? Words{} : number;
        number |= as_words(part) >> 24 & 0x80u;
        const Bytes bytes = __builtin_convertvector(reinterpret_cast<Ints>(number), Bytes);
        std::memcpy(out + i, &bytes, lanes);
    });
    return magnitude / Number::LARGEST;
}

// A group's scale makes the number of largest magnitude -8, so that all 16 steps are used.
template <class Element>
INLINE void quantize_int4(const Element* x, int count, Int4* out) {
    typedef uint8_t Bytes __attribute__((vector_size(LANES)));
    const Floats shifter = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    uint8_t* at = &out->bits;
    for (int group = 0; group < count; group += Int4::GROUP, x += Int4::GROUP, at += Int4::BYTES) {
        Floats high{}, low{}, wrong{};
        for (int i = 0; i < Int4::GROUP; i += LANES) {
            const Floats part = widen(x + i);
            high = larger(part, high);
            low = larger(-part, low);
            wrong += part * 0.0f;
        }
        const float most = largest(high), least = largest(low);
        const Words rounded = rounded_to_bfloat16(all((most >= least ? most : -least) / -8.0f + sum(wrong)));
        const uint16_t narrow = uint16_t(rounded[0] >> 16);
        std::memcpy(at, &narrow, sizeof narrow);
        const float scale = as_floats(rounded)[0];
        const Floats inverse = all(scale != 0 ? 1.0f / scale : 0.0f);
        const auto halves = [&](int i) {
            Floats number = widen(x + i) * inverse;
            number = number > 7.0f ? all(7.0f) : number < -8.0f ? all(-8.0f) : number;
            return (as_words(number + shifter) + 8u) & 15u;
        };
        constexpr int HALF = Int4::GROUP / 2;
        for (int i = 0; i < HALF; i += LANES) {
            const Bytes bytes = __builtin_convertvector(halves(i) | halves(i + HALF) << 4, Bytes);
            std::memcpy(at + Int4::SCALE_BYTES + i, &bytes, sizeof bytes);
        }
    }
}

// Write `count` numbers as a row in a format that is not plain; `scale` is the row's, if it has one.
template <class Element>
INLINE void store_row(int format, const Element* x, int count, char* out, float* scale) {
    with_format<Element>(format, [&](auto number) {
        using Number = decltype(number);
        auto* to = reinterpret_cast<Number*>(out);
        if constexpr (IS_FP8<Number>) *scale = quantize_fp8(x, count, to);
        else if constexpr (IS_INT4<Number>) quantize_int4(x, count, to);
        else if constexpr (IS_BYTE<Number>) *scale = quantize(x, count, to);
        else std::memcpy(to, x, count * sizeof x[0]);
    });
}
