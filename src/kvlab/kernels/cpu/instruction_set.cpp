// The instructions that the library uses, as far as its sources make a difference of them.

#include "tiles.hpp"

extern "C" const char* kvlab_instruction_set() {
#if defined(KVLAB_TILES)
    if (has_tiles()) return "avx512-bf16, amx";
#endif
#if defined(__AVX512BF16__)
    return "avx512-bf16";
#else
    return LANES == 16 ? "avx512" : LANES == 8 ? "avx2" : "portable";
#endif
}
