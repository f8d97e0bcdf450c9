// The instructions that the library was compiled for, as far as its sources make a difference of them.

#include "simd.hpp"

extern "C" const char* kvlab_instruction_set() {
#if defined(__AVX512BF16__)
    return "avx512-bf16";
#else
    return LANES == 16 ? "avx512" : LANES == 8 ? "avx2" : "portable";
#endif
}
