// The instructions that the library can multiply with, and what each sustains in registers.

#include "int8_quads.hpp"
#include "interface.hpp"
#include "tiles.hpp"

#include <string>

namespace {

enum Path { FLOATS, PAIRS, TILES };  // in the order of kvlab_paths; INT8_PATH is none of these

constexpr int SUMS = LANES == 16 ? 24 : 12;  // that wait for nothing but themselves: they hide the latency

// An operand of an assembly statement that is in a vector register, and may have changed behind it.
#if defined(__aarch64__)
#define REGISTER(vector) "+w"(vector)
#else
#define REGISTER(vector) "+x"(vector)
#endif

// Multiply and add `rounds` times to SUMS vectors. The compiler does not know `side`, so that it leaves no product out.
template <class Side, class MultiplyAdd>
INLINE void multiply_in_registers(int64_t rounds, Side side, MultiplyAdd multiply_add) {
    Floats sums[SUMS];
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; ++i) sums[i] = all(float(i));
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < SUMS; ++i) {
            asm volatile("" : REGISTER(side));
            sums[i] = multiply_add(side, sums[i]);
        }
    }
#pragma GCC unroll 24
    for (int i = 1; i < SUMS; ++i) sums[0] += sums[i];
    volatile float result = sums[0][0];
    (void)result;
}

int64_t in_floats(int64_t rounds) {
    multiply_in_registers(rounds, all(0.5f), [](Floats a, Floats sum) { return a * a + sum; });
    return rounds * SUMS * LANES * 2;
}

#if defined(KVLAB_PAIRS)
int64_t in_pairs(int64_t rounds) {
    const Words half = as_words(all(0.5f)) | as_words(all(0.5f)) >> 16;
    multiply_in_registers(rounds, half, [](Words a, Floats sum) { return add_products(sum, a, a); });
    return rounds * SUMS * LANES * 4;
}
#endif

#if defined(KVLAB_TILES)
template <bool INTEGERS>
int64_t in_tiles(int64_t rounds) {
    const Tiles in_use;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t round = 0; round < rounds; ++round) {
        KVLAB_MULTIPLY_TILES(0, 6, 7);
        KVLAB_MULTIPLY_TILES(1, 6, 7);
        KVLAB_MULTIPLY_TILES(2, 6, 7);
        KVLAB_MULTIPLY_TILES(3, 6, 7);
        KVLAB_MULTIPLY_TILES(4, 6, 7);
        KVLAB_MULTIPLY_TILES(5, 6, 7);
    }
    return rounds * 6 * TILE_SIDE * TILE_SIDE * tile_inputs(INTEGERS) * 2;
}
#endif

int64_t in_int8(int64_t rounds) {
#if defined(KVLAB_TILES)
    if (has_tiles()) return in_tiles<true>(rounds);
#endif
    multiply_in_registers(rounds, 0x01010101u - Words{}, [](Words a, Floats sum) {
        return reinterpret_cast<Floats>(add_quads(reinterpret_cast<Ints>(sum), a, a));
    });
    return rounds * SUMS * LANES * 8;
}

int64_t in_registers(int path, int64_t rounds) {
    if (path == INT8_PATH) return in_int8(rounds);
#if defined(KVLAB_TILES)
    if (path == TILES) return in_tiles<false>(rounds);
#endif
#if defined(KVLAB_PAIRS)
    if (path == PAIRS) return in_pairs(rounds);
#endif
    return in_floats(rounds);
}

}  // namespace

// The instructions that this process can multiply with: float32, pairs of bfloat16, tiles, as far as there are any.
extern "C" const char* kvlab_paths() {
    static const std::string names = [] {
        std::string text = FLOATS_NAME;
#if defined(KVLAB_PAIRS)
        text += std::string(" ") + PAIRS_NAME;
#endif
#if defined(KVLAB_TILES)
        if (has_tiles()) text += " amx";
#endif
        return text;
    }();
    return names.c_str();
}

// Multiply and add numbers that stay in registers, by all threads. `path`: index of a name in kvlab_paths, or INT8_PATH. Returns how many
// operations that were.
extern "C" int64_t kvlab_multiply_in_registers(int path, int64_t rounds, int threads) {
    int64_t operations = 0;
#pragma omp parallel num_threads(threads) reduction(+ : operations)
    operations += in_registers(path, rounds);
    return operations;
}
