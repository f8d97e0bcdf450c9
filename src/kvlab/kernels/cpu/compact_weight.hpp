// A weight in bfloat16 that takes 12 bits a number, without loss. Nearly all exponents in a panel are among 16: each is
// stored as a code of four bits, beside the sign and the mantissa in eight. The few other weights are stored once more, in
// a list. (Exponents of trained weights carry some 2.6 bits of information: Zhang et al., "70% Size, 100% Accuracy", 2025.
// Codes of one length take little more memory, and are unpacked faster than memory delivers them.)
//
// A packed weight is
//     [panels, steps, STEP_BYTES]      32 inputs: of two pairs of inputs 64 bytes with mantissa and sign, all 16 pairs;
//                                      of four pairs 64 bytes with codes, two to a byte
//     [panels, CODES]                  the exponent of each code
//     [panels, room_for(steps)]        exceptions, in the order of steps, and one that is in no step
#pragma once

#include "simd.hpp"

#if defined(__AVX512BW__)
#define KVLAB_COMPACT

namespace {

struct CompactWeight {
    static constexpr int STEP_INPUTS = 32, STEP_WEIGHTS = STEP_INPUTS * LANES;
    static constexpr int STEP_BYTES = STEP_WEIGHTS * 3 / 2;
    static constexpr int CODES = 16;
    static constexpr uint32_t NOWHERE = ~0u;

    struct Exception {
        uint32_t at;  // index of the weight in its panel, as BFloat16 has it
        uint16_t weight, unused;
    };

    char* packed;
    int panels, steps;

    // So many are about one of 2,000 weights. Of trained ones it is one of 20,000.
    static int room_for(int steps) { return 5 + steps / 4; }

    int64_t bytes() const { return reinterpret_cast<const char*>(exceptions(panels)) - packed; }
    char* panel(int index) const { return packed + int64_t(index) * steps * STEP_BYTES; }
    uint8_t* table(int index) const { return reinterpret_cast<uint8_t*>(panel(panels)) + int64_t(index) * CODES; }
    Exception* exceptions(int index) const {
        return reinterpret_cast<Exception*>(table(panels)) + int64_t(index) * room_for(steps);
    }

    // Where an exponent's code and the mantissa are that belong to weight `index` of a step.
    struct Place {
        int mantissa, code, shift;
    };
    static constexpr Place place_of(int index) {
        const int word = index % 64, line = index / 64;
        const int byte = word % 32 / 8 * 16 + word / 32 * 8 + word % 8;  // as instructions interleave bytes
        return {line * 64 + byte, STEP_WEIGHTS + line / 2 * 64 + byte, line % 2 * 4};
    }
};

// Unpacks a panel step by step, in four parts each, into [16 pairs, LANES, 2] bfloat16.
class CompactPanel {
public:
    static constexpr int PARTS = 4, STEP_BYTES = CompactWeight::STEP_BYTES;

    CompactPanel() = default;
    CompactPanel(const CompactWeight& weight, int panel, int first_step)
        : step(first_step),
          at(weight.panel(panel) + int64_t(first_step) * STEP_BYTES),
          table(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(weight.table(panel))))),
          next(weight.exceptions(panel)) {
        while (next->at < uint32_t(first_step) * CompactWeight::STEP_WEIGHTS) ++next;
    }

    INLINE_MEMBER void unpack(int part, char* to) {
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i codes = _mm512_loadu_si512(at + CompactWeight::STEP_WEIGHTS + part * 64);
        unpack_line(2 * part, _mm512_and_si512(codes, low), to);
        unpack_line(2 * part + 1, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low), to);
        if (part == PARTS - 1) finish_step(to);
    }

private:
    int step = 0;
    const char* at = nullptr;
    __m512i table;
    const CompactWeight::Exception* next = nullptr;

    INLINE_MEMBER void unpack_line(int line, __m512i codes, char* to) const {
        const __m512i mantissas = _mm512_loadu_si512(at + line * 64), exponents = _mm512_shuffle_epi8(table, codes);
        _mm512_storeu_si512(to + 2 * line * 64, sign_first(_mm512_unpacklo_epi8(mantissas, exponents)));
        _mm512_storeu_si512(to + 2 * line * 64 + 64, sign_first(_mm512_unpackhi_epi8(mantissas, exponents)));
    }

    // Move the sign from the lowest bit to the highest one, where bfloat16 has it.
    static __m512i sign_first(__m512i x) {
#if defined(__AVX512VBMI2__)
        return _mm512_shrdi_epi16(x, x, 1);
#else
        return _mm512_or_si512(_mm512_srli_epi16(x, 1), _mm512_slli_epi16(x, 15));
#endif
    }

    INLINE_MEMBER void finish_step(char* to) {
        const uint32_t first = uint32_t(step++) * CompactWeight::STEP_WEIGHTS, end = first + CompactWeight::STEP_WEIGHTS;
        for (; __builtin_expect(next->at < end, 0); ++next) std::memcpy(to + (next->at - first) * 2, &next->weight, 2);
        at += STEP_BYTES;
    }
};

}  // namespace
#endif
