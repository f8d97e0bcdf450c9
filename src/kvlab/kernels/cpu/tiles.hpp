// Matrix tiles: how rows are laid out for them, and Intel's instructions on them (AMX).
#pragma once

#include "interface.hpp"
#include "simd.hpp"

namespace {

constexpr int64_t IN_TILES = -1;  // in place of the number of elements between two rows

// Where the elements of a row are: consecutive, or in consecutive tiles of 16 rows by 32 elements. Products in tiles read
// their rows in the second layout. A kernel that writes it saves the product a pass that rearranges rows.
struct RowLayout {
    static constexpr int ROWS = TILE_SIDE, ELEMENTS = 32;  // of a tile

    int64_t first, step;  // index of the first element; elements from one tile to the next

    RowLayout(int64_t row, int64_t size, bool in_tiles)
        : first(in_tiles ? row / ROWS * ROWS * size + row % ROWS * ELEMENTS : row * size),
          step(in_tiles ? ROWS * ELEMENTS : ELEMENTS) {}

    int64_t of(int element) const { return first + element / ELEMENTS * step + element % ELEMENTS; }
};

}  // namespace

// AMX multiplies 16 rows of 32 bfloat16 by 32 rows of 16 in one instruction, or 16 rows of 64 int8 by 64 rows of 16. All
// eight tiles are configured as 16 rows of 64 bytes (fewer for few columns): four or more hold sums, the others hold either
// side. A tile of the right side has a row for each pair of inputs, or for four in int8, with a pair or four for each of 16
// outputs, which is the layout of a packed weight.
//
// The code is compiled where the instruction set has AMX, and used where the system lets the process use it
// (`has_tiles`).

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define KVLAB_TILES

#include <sys/syscall.h>
#include <unistd.h>

// TILE_SIDE is the number of rows of a tile, and of outputs of a tile of sums.
constexpr int TILE_BYTES = 64;   // of a row of a tile
constexpr int TILE_INPUTS = 32;  // inputs that one instruction covers

// Of products in int8 it covers twice as many.
constexpr int tile_inputs(bool integers) { return integers ? 2 * TILE_INPUTS : TILE_INPUTS; }

// Multiply tiles by their numbers, which are part of the instruction's name: bfloat16 or, where INTEGERS is true, int8 with
// a sign by such without one.
#define KVLAB_MULTIPLY_TILES(sums, left, right)        \
    do {                                               \
        if constexpr (INTEGERS)                        \
            _tile_dpbsud(sums, left, right);           \
        else                                           \
            _tile_dpbf16ps(sums, left, right);         \
    } while (0)

// Whether the process may use tiles. Linux reserves memory for their state only on request.
inline bool has_tiles() {
    static const bool allowed = [] {
        constexpr long request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        return syscall(SYS_arch_prctl, request, tile_data) == 0;
    }();
    return allowed;
}

// Configures the tiles of its thread and, at the end of its life, releases them: context switches are slower with tiles.
class Tiles {
public:
    // `columns` of sums and of the right side, whose tiles are all but 4 and 5.
    explicit Tiles(int columns = TILE_SIDE) {
        alignas(64) struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } setup;
        for (int tile = 0; tile < 8; ++tile) {
            setup.row_bytes[tile] = tile == 4 || tile == 5 ? TILE_BYTES : columns * sizeof(float);
            setup.rows[tile] = TILE_SIDE;
        }
        asm volatile("" : : "r"(&setup) : "memory");  // GCC does not know that the next line reads all of it
        _tile_loadconfig(&setup);
    }
    ~Tiles() { _tile_release(); }
    Tiles(const Tiles&) = delete;
};

// Either side of a product. `row_bytes` is the distance of rows (left) or of pairs of inputs (right); `next` of the next
// 16 rows (left) or outputs (right); `step` of the next 32 inputs.
struct TiledSide {
    const char* at;
    int64_t row_bytes, next, step;
};

// sums [16 ROWS, 16 COLUMNS] (+)= left * right over `steps` times 32 inputs. `stride`: floats between rows of sums.
// `meanwhile(i)` is done behind product i of ROWS * COLUMNS * steps: a little work for other units of the processor.
template <int ROWS, int COLUMNS, class Meanwhile>
INLINE void multiply_tiles(const TiledSide& left, const TiledSide& right, int steps, float* sums, int64_t stride,
                           bool add, Meanwhile meanwhile) {
    asm volatile("" ::: "memory");  // GCC does not know that loading a tile reads memory: keep earlier writes before it
    const int64_t sum_bytes = stride * sizeof(float);
    float *low = sums, *below = sums + TILE_SIDE * stride;
    if (add) {
        _tile_loadd(0, low, sum_bytes);
        if (COLUMNS > 1) _tile_loadd(1, low + TILE_SIDE, sum_bytes);
        if (ROWS > 1) _tile_loadd(2, below, sum_bytes);
        if (ROWS > 1 && COLUMNS > 1) _tile_loadd(3, below + TILE_SIDE, sum_bytes);
    } else {
        _tile_zero(0);
        if (COLUMNS > 1) _tile_zero(1);
        if (ROWS > 1) _tile_zero(2);
        if (ROWS > 1 && COLUMNS > 1) _tile_zero(3);
    }
    const char *a = left.at, *b = right.at;
    for (int step = 0, product = 0; step < steps; ++step, a += left.step, b += right.step) {
        _tile_loadd(4, a, left.row_bytes);
        _tile_loadd(6, b, right.row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        meanwhile(product++);
        if (COLUMNS > 1) {
            _tile_loadd(7, b + right.next, right.row_bytes);
            _tile_dpbf16ps(1, 4, 7);
            meanwhile(product++);
        }
        if (ROWS > 1) {
            _tile_loadd(5, a + left.next, left.row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            meanwhile(product++);
            if (COLUMNS > 1) {
                _tile_dpbf16ps(3, 5, 7);
                meanwhile(product++);
            }
        }
    }
    _tile_stored(0, low, sum_bytes);
    if (COLUMNS > 1) _tile_stored(1, low + TILE_SIDE, sum_bytes);
    if (ROWS > 1) _tile_stored(2, below, sum_bytes);
    if (ROWS > 1 && COLUMNS > 1) _tile_stored(3, below + TILE_SIDE, sum_bytes);
}
#endif
