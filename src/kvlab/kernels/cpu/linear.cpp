// y = x W^T + b for any number of rows; x, y and b in bfloat16, W too or in int8 with a scale for each output.
//
// W is packed once: panels of LANES outputs, in a panel one vector for each pair of inputs, so that a panel is read
// from its first byte to its last. x is packed per call, in blocks of rows, the rows of a pair of inputs side by side.
// The product of a block and a panel keeps its sums in registers from beginning to end: with many rows one vector of
// outputs each, with one or two rows two, so that there are enough sums to hide the latency of an addition. One copy
// of the weights serves both ends: with few rows it is read at the speed of memory, with many at that of the
// arithmetic.

#include "int8.hpp"
#include "tiles.hpp"

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

namespace {

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;
#else
constexpr bool PAIRS = false;
#endif
constexpr int ROWS = LANES == 16 ? 24 : 12;  // of a block: its sums and one vector of weights fit the registers
constexpr int PER_PAIR = PAIRS ? 1 : 2;      // numbers of packed x for each row and pair of inputs
constexpr int PANELS = 4;                    // that share a block of rows while it is in the cache
constexpr int AHEAD = 8192;                  // bytes between prefetch and use

// What a panel holds for a pair of inputs: a vector of pairs, each an output's, as they are multiplied.
#if defined(__AVX512BF16__)
struct Pairs {
    Words both;
};
#else
struct Pairs {
    Floats first, second;
};
#endif

struct BFloat16 {
    static constexpr int BYTES = 4 * LANES;  // of a vector of pairs

    INLINE Pairs load(const char* at) {
        const Words pairs = load_words(at);
#if defined(__AVX512BF16__)
        return {pairs};
#else
        return {as_floats(pairs << 16), as_floats(pairs & 0xffff0000u)};
#endif
    }
};

struct Int8 {
    static constexpr int BYTES = 2 * LANES;

    INLINE Pairs load(const char* at) {
        const auto* numbers = reinterpret_cast<const int8_t*>(at);
#if defined(__AVX512BF16__)
        return {bfloat16_of(numbers)};
#else
        const Words pairs = int8_pairs(numbers);
        return {even_int8(pairs), odd_int8(pairs)};
#endif
    }
};

INLINE Floats add_pair(const float* x, const Pairs& weights, Floats sum) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights.both, (__m512bh)all(*x));
#else
    return sum + all(x[0]) * weights.first + all(x[1]) * weights.second;
#endif
}

struct Product {
    const float* x;       // packed: [blocks, pairs, ROWS * PER_PAIR]
    const char* weights;  // packed
    const float* scales;  // of each output of int8 weights, else null
    const uint16_t* bias;
    uint16_t* out;
    int rows, outputs, pairs;

    int panels() const { return (outputs + LANES - 1) / LANES; }
};

INLINE float from_bfloat16(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

INLINE uint16_t to_bfloat16(float x) { return uint16_t(rounded_to_bfloat16(all(x))[0] >> 16); }

void store_outputs(const Product& product, int row, int panel, Floats sums) {
    const int first = panel * LANES, lanes = std::min(LANES, product.outputs - first);
    if (product.scales) sums *= widen_some(product.scales + first, lanes);
    if (product.bias) sums += widen_some(product.bias + first, lanes);
    const Halves narrow = narrowed(sums);
    uint16_t* out = product.out + int64_t(row) * product.outputs + first;
    if (lanes == LANES)
        std::memcpy(out, &narrow, sizeof narrow);
    else
        std::memcpy(out, &narrow, lanes * sizeof out[0]);
}

// Up to COUNT rows of a block against VECTORS panels.
template <class Weight, int COUNT, int VECTORS>
void multiply_block(const Product& product, int block, int panel) {
    const int64_t panel_size = int64_t(product.pairs) * Weight::BYTES;
    const float* x = product.x + int64_t(block) * product.pairs * ROWS * PER_PAIR;
    const char* weights = product.weights + panel * panel_size;
    Floats sums[COUNT][VECTORS] = {};
    for (int pair = 0; pair < product.pairs; ++pair, x += ROWS * PER_PAIR, weights += Weight::BYTES) {
        Pairs right[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            right[v] = Weight::load(weights + v * panel_size);
            __builtin_prefetch(weights + v * panel_size + AHEAD);
        }
#pragma GCC unroll 24
        for (int row = 0; row < COUNT; ++row)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = add_pair(x + row * PER_PAIR, right[v], sums[row][v]);
    }
    for (int v = 0; v < VECTORS; ++v)
        for (int row = 0; row < COUNT && block * ROWS + row < product.rows; ++row)
            store_outputs(product, block * ROWS + row, panel + v, sums[row][v]);
}

template <class Weight, int COUNT, int VECTORS>
void multiply_panels(const Product& product, int block, int first, int last) {
    int panel = first;
    for (; panel + VECTORS <= last; panel += VECTORS) multiply_block<Weight, COUNT, VECTORS>(product, block, panel);
    for (; panel < last; ++panel) multiply_block<Weight, COUNT, 1>(product, block, panel);
}

template <class Weight>
void multiply(const Product& product, int block, int first, int last) {
    const int rows = std::min(ROWS, product.rows - block * ROWS);
    if (rows <= 1) return multiply_panels<Weight, 1, 2>(product, block, first, last);
    if (rows <= 2) return multiply_panels<Weight, 2, 2>(product, block, first, last);
    if (rows <= 4) return multiply_panels<Weight, 4, 1>(product, block, first, last);
    if (rows <= 8) return multiply_panels<Weight, 8, 1>(product, block, first, last);
    if (rows <= 12) return multiply_panels<Weight, 12, 1>(product, block, first, last);
    if constexpr (ROWS > 12) {
        if (rows <= 16) return multiply_panels<Weight, 16, 1>(product, block, first, last);
        if (rows <= 20) return multiply_panels<Weight, 20, 1>(product, block, first, last);
        return multiply_panels<Weight, 24, 1>(product, block, first, last);
    }
}

// Rows beyond the last are zero.
void pack_rows(const uint16_t* x, int64_t stride, int rows, int inputs, int block, float* out) {
    const int first = block * ROWS, count = std::min(ROWS, rows - first), pairs = (inputs + 1) / 2;
    const auto pair_of = [&](int row, int pair) {
        uint32_t both = 0;
        std::memcpy(&both, x + (first + row) * stride + 2 * pair, std::min(2, inputs - 2 * pair) * sizeof x[0]);
        return both;
    };
    out += int64_t(block) * pairs * ROWS * PER_PAIR;
    for (int pair = 0; pair < pairs; pair += LANES) {
        const int width = std::min(LANES, pairs - pair);
        for (int row = 0; row < ROWS; row += LANES) {
            Words tile[LANES];
            for (int i = 0; i < LANES; ++i) {
                tile[i] = Words{};
                if (row + i >= count) continue;
                const uint16_t* at = x + (first + row + i) * stride + 2 * pair;
                if (2 * (pair + LANES) <= inputs)
                    tile[i] = load_words(at);
                else
                    for (int k = 0; k < width; ++k) tile[i][k] = pair_of(row + i, pair + k);
            }
            transpose(tile);
            const int lanes = std::min(LANES, ROWS - row);
            for (int k = 0; k < width; ++k) {
                float* to = out + (int64_t(pair + k) * ROWS + row) * PER_PAIR;
                if (PAIRS) {
                    std::memcpy(to, &tile[k], lanes * sizeof to[0]);
                    continue;
                }
                for (int i = 0; i < lanes; ++i) {
                    to[2 * i] = from_bfloat16(uint16_t(tile[k][i]));
                    to[2 * i + 1] = from_bfloat16(uint16_t(tile[k][i] >> 16));
                }
            }
        }
    }
}

}  // namespace

// The number of bytes that the packed weight [outputs, inputs] takes, in int8 or in bfloat16.
extern "C" int64_t kvlab_packed_linear_bytes(int outputs, int inputs, int int8) {
    return int64_t((outputs + LANES - 1) / LANES) * ((inputs + 1) / 2) * (int8 ? Int8::BYTES : BFloat16::BYTES);
}

// Pack `weight` [outputs, inputs], C-contiguous, into `packed`.
extern "C" void kvlab_pack_linear(const uint16_t* weight, int outputs, int inputs, void* packed, int threads) {
    const int panels = (outputs + LANES - 1) / LANES, pairs = (inputs + 1) / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int panel = 0; panel < panels; ++panel) {
        uint32_t* out = static_cast<uint32_t*>(packed) + int64_t(panel) * pairs * LANES;
        for (int pair = 0; pair < pairs; pair += LANES) {
            const int width = std::min(LANES, pairs - pair);
            Words tile[LANES];
            for (int i = 0; i < LANES; ++i) {
                uint16_t row[2 * LANES] = {};
                const int output = panel * LANES + i;
                if (output < outputs)
                    std::memcpy(row, weight + int64_t(output) * inputs + 2 * pair,
                                std::min(2 * LANES, inputs - 2 * pair) * sizeof row[0]);
                tile[i] = load_words(row);
            }
            transpose(tile);
            for (int k = 0; k < width; ++k) store_words(out + (pair + k) * LANES, tile[k]);
        }
    }
}

// The same in int8; writes each output's scale, `scales` [outputs].
extern "C" void kvlab_pack_linear_int8(const uint16_t* weight, int outputs, int inputs, void* packed, float* scales,
                                       int threads) {
    const int panels = (outputs + LANES - 1) / LANES, pairs = (inputs + 1) / 2;
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<int8_t[]> row(new int8_t[2 * pairs]());  // a last half pair stays 0
#pragma omp for schedule(static)
        for (int panel = 0; panel < panels; ++panel) {
            int8_t* out = static_cast<int8_t*>(packed) + int64_t(panel) * pairs * Int8::BYTES;
            for (int i = 0; i < LANES; ++i) {
                const int output = panel * LANES + i;
                if (output < outputs)
                    scales[output] = quantize(weight + int64_t(output) * inputs, inputs, row.get());
                else
                    std::memset(row.get(), 0, 2 * pairs);
                for (int pair = 0; pair < pairs; ++pair)
                    std::memcpy(out + int64_t(pair) * Int8::BYTES + 2 * i, row.get() + 2 * pair, 2);
            }
        }
    }
}

namespace {

template <class Weight>
void linear_in_vectors(Product product, const uint16_t* x, int64_t x_stride, int inputs, int threads) {
    const int rows = product.rows, blocks = (rows + ROWS - 1) / ROWS;
    const std::unique_ptr<float[]> packed_x(new float[int64_t(blocks) * product.pairs * ROWS * PER_PAIR]);
    product.x = packed_x.get();
    const int panels = product.panels(), groups = (panels + PANELS - 1) / PANELS;
    const int at_once = std::max(1, groups / (threads * 16));
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int block = 0; block < blocks; ++block)
            pack_rows(x, x_stride, rows, inputs, block, packed_x.get());
#pragma omp for schedule(dynamic, at_once)
        for (int group = 0; group < groups; ++group)
            for (int block = 0; block < blocks; ++block)
                multiply<Weight>(product, block, group * PANELS, std::min(group * PANELS + PANELS, panels));
    }
}

#if defined(KVLAB_TILES)
// In tiles, 32 rows by 32 outputs (two panels, a stripe) are summed at once, in four tiles.
//
// A product of FEW_ROWS takes its time from memory: stripe by stripe is read from end to end, and while one is computed
// the next is asked for, in equal shares by every block of rows, so that memory is never idle. With more rows what
// counts is what is near. A chunk of STEPS_NEAR * 32 inputs of a stripe stays in the first cache while all rows pass; the
// rows' part of that chunk stays in the second while a group of stripes passes; sums wait in memory between chunks.
constexpr int BLOCK_ROWS = 2 * TILE_SIDE;
constexpr int FEW_ROWS = 4 * BLOCK_ROWS;
constexpr int MOST_ROWS = 512;  // of a pass; more are taken in several
constexpr int STEPS_NEAR = 8;
constexpr int STRIPES = 8;  // of a group
constexpr int64_t TILE = TILE_SIDE * TILE_BYTES;

// Buffers keep their memory from call to call, each thread its own: fresh memory costs more than filling it.
thread_local std::vector<char> packed_rows, wide_weights;
thread_local std::vector<float> waiting_sums;

template <class Number>
Number* at_least(std::vector<Number>& buffer, size_t count) {
    const size_t room = count + 64 / sizeof(Number);
    if (buffer.size() < room) buffer.resize(room);
    return reinterpret_cast<Number*>((reinterpret_cast<uintptr_t>(buffer.data()) + 63) / 64 * 64);
}

// Steps [begin, end) of 16 rows of x from `first`, in tiles: [inputs / 32, 16, 32]; rows beyond the last are zero.
void pack_tiles(const uint16_t* x, int64_t stride, int rows, int first, int begin, int end, char* out) {
    for (int row = 0; row < TILE_SIDE; ++row) {
        char* to = out + row * TILE_BYTES + begin * TILE;
        const uint16_t* from = x + int64_t(first + row) * stride + begin * TILE_INPUTS;
        for (int step = begin; step < end; ++step, to += TILE, from += TILE_INPUTS)
            store_words(to, first + row < rows ? load_words(from) : Words{});
    }
}

// The sums [rows, 32] of a stripe, of which the last may be half a one, to the output.
void store_stripe(const Product& product, const float* sums, int first_row, int rows, int stripe) {
    const int panel = 2 * stripe, outputs = product.outputs;
    if (!product.scales && !product.bias && (panel + 2) * LANES <= outputs) {
        uint16_t* out = product.out + int64_t(first_row) * outputs + panel * LANES;
        for (int row = 0; row < rows; ++row, out += outputs, sums += 2 * LANES) {
            const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(sums + LANES), _mm512_load_ps(sums));
            std::memcpy(out, &both, sizeof both);
        }
        return;
    }
    const int panels = std::min(2, product.panels() - panel);
    for (int row = 0; row < rows; ++row)
        for (int i = 0; i < panels; ++i)
            store_outputs(product, first_row + row, panel + i, load(sums + (row * 2 + i) * LANES));
}

// A block of rows by a stripe: `steps` times 32 inputs.
template <int LINES = 0>
void multiply_stripe(const TiledSide& x, const TiledSide& weights, int rows, int panels, int steps, float* sums,
                     bool add, const char* ahead = nullptr) {
    constexpr int stride = 2 * LANES;
    if (rows > TILE_SIDE)
        panels == 2 ? multiply_tiles<2, 2, LINES>(x, weights, steps, sums, stride, add, ahead)
                    : multiply_tiles<2, 1>(x, weights, steps, sums, stride, add);
    else
        panels == 2 ? multiply_tiles<1, 2, LINES>(x, weights, steps, sums, stride, add, ahead)
                    : multiply_tiles<1, 1>(x, weights, steps, sums, stride, add);
}

// Stripes one behind the other, for one thread; who has done its own helps with the others'.
struct alignas(64) Run {
    std::atomic<int> next;
    int end;
};

template <class Weight>
class TiledProduct {
public:
    const int stripes;

    TiledProduct(const Product& product, const char* x)
        : stripes((product.panels() + 1) / 2), product(product), x(x), steps(product.pairs / TILE_SIDE) {}

    // Ask for the beginning of a stripe.
    void ask_for(int stripe) const {
        if (stripe >= stripes) return;
        const int64_t size = std::min<int64_t>(2 * int64_t(product.pairs) * Weight::BYTES, 1 << 16);
        for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(stripe_of(stripe) + at, 0, 2);
    }

    // All rows, few, by the stripes that are left of a run.
    void stream(Run& run) const {
        constexpr int lines = 2 * TILE_SIDE * Weight::BYTES / 64;  // of a step
        switch ((product.rows + BLOCK_ROWS - 1) / BLOCK_ROWS) {
            case 1: return stream_asking_for<lines>(run);
            case 2: return stream_asking_for<lines / 2>(run);
            case 3: return stream_asking_for<lines / 3>(run);
            default: return stream_asking_for<lines / 4>(run);
        }
    }

    // Rows [first, last), at most MOST_ROWS, by stripes [begin, end), at most STRIPES.
    void multiply(int first, int last, int begin, int end) const {
        const int64_t size = int64_t(last - first + BLOCK_ROWS) * 2 * LANES;
        float* sums = at_least(waiting_sums, (end - begin) * size);
        const char* weights[STRIPES];
        for (int i = 0; i < end - begin; ++i) weights[i] = widened(begin + i, i);
        for (int step = 0; step < steps; step += STEPS_NEAR)
            for (int i = 0; i < end - begin; ++i)
                for (int row = first; row < last; row += BLOCK_ROWS)
                    multiply_stripe(left(row, step), right(weights[i], step), last - row, panels_of(begin + i),
                                    std::min(STEPS_NEAR, steps - step), sums + i * size + (row - first) * 2 * LANES,
                                    step > 0);
        for (int i = 0; i < end - begin; ++i)
            store_stripe(product, sums + i * size, first, last - first, begin + i);
    }

private:
    const Product& product;
    const char* x;
    const int steps;

    template <int LINES>
    void stream_asking_for(Run& run) const {
        alignas(64) float sums[BLOCK_ROWS * 2 * LANES];
        for (int stripe; (stripe = run.next.fetch_add(1, std::memory_order_relaxed)) < run.end;) {
            const char* weights = widened(stripe, 0);
            const char* ahead = stripe_of(std::min(stripe + 1, run.end - 1));
            for (int row = 0; row < product.rows; row += BLOCK_ROWS, ahead += int64_t(steps) * LINES * 64) {
                const int rows = std::min(BLOCK_ROWS, product.rows - row);
                multiply_stripe<LINES>(left(row, 0), right(weights, 0), rows, panels_of(stripe), steps, sums, false, ahead);
                store_stripe(product, sums, row, rows, stripe);
            }
        }
    }

    int panels_of(int stripe) const { return std::min(2, product.panels() - 2 * stripe); }
    const char* stripe_of(int stripe) const {
        return product.weights + 2 * stripe * int64_t(product.pairs) * Weight::BYTES;
    }
    TiledSide left(int row, int step) const {
        return {x + row / TILE_SIDE * steps * TILE + step * TILE, TILE_BYTES, steps * TILE, TILE};
    }
    TiledSide right(const char* stripe, int step) const {
        return {stripe + step * TILE, TILE_BYTES, steps * TILE, TILE};
    }

    // A stripe's weights as they are multiplied; int8 are widened, into the given place of the thread's buffer.
    const char* widened(int stripe, int place) const {
        const char* from = stripe_of(stripe);
        if constexpr (Weight::BYTES == BFloat16::BYTES) {
            return from;
        } else {
            char* to = at_least(wide_weights, STRIPES * 2 * steps * TILE) + place * 2 * steps * TILE;
            const int64_t pairs = int64_t(panels_of(stripe)) * product.pairs;
            for (int64_t pair = 0; pair < pairs; ++pair, from += Weight::BYTES)
                store_words(to + pair * BFloat16::BYTES, Weight::load(from).both);
            return to;
        }
    }
};

template <class Weight>
void linear_in_tiles(const Product& product, const uint16_t* x, int64_t x_stride, int inputs, int threads) {
    const int rows = product.rows, tiles = (rows + TILE_SIDE - 1) / TILE_SIDE;
    const int64_t tile_row = int64_t(product.pairs) * TILE_BYTES;
    char* packed = at_least(packed_rows, (tiles + 1) * tile_row);
    const TiledProduct<Weight> tiled(product, packed);
    const int stripes = tiled.stripes;
    const int group = std::min(STRIPES, std::max(1, stripes / (threads * 2))), groups = (stripes + group - 1) / group;
    const int steps = inputs / TILE_INPUTS, parts = std::max(1, threads / tiles);
    const std::unique_ptr<Run[]> runs(new Run[threads]);
    for (int i = 0; i < threads; ++i) {
        runs[i].next = int(int64_t(stripes) * i / threads);
        runs[i].end = int(int64_t(stripes) * (i + 1) / threads);
    }
#pragma omp parallel num_threads(threads)
    {
        const Tiles in_use;
        const int me = omp_get_thread_num();
        if (rows <= FEW_ROWS) tiled.ask_for(runs[me].next);
#pragma omp for collapse(2) schedule(static)
        for (int tile = 0; tile < tiles; ++tile)
            for (int part = 0; part < parts; ++part)
                pack_tiles(x, x_stride, rows, tile * TILE_SIDE, steps * part / parts, steps * (part + 1) / parts,
                           packed + tile * tile_row);
        if (rows <= FEW_ROWS) {
            for (int i = 0; i < threads; ++i) tiled.stream(runs[(me + i) % threads]);
        } else {
            for (int first = 0; first < rows; first += MOST_ROWS)
#pragma omp for schedule(dynamic, 1) nowait
                for (int i = 0; i < groups; ++i)
                    tiled.multiply(first, std::min(first + MOST_ROWS, rows), i * group,
                                   std::min((i + 1) * group, stripes));
        }
    }
}
#endif

template <class Weight>
void linear(const Product& product, const uint16_t* x, int64_t x_stride, int inputs, int threads) {
    if (product.rows == 0) return;
#if defined(KVLAB_TILES)
    if (inputs % TILE_INPUTS == 0 && has_tiles())
        return linear_in_tiles<Weight>(product, x, x_stride, inputs, threads);
#endif
    linear_in_vectors<Weight>(product, x, x_stride, inputs, threads);
}

}  // namespace

// out [rows, outputs] = x [rows, inputs] W^T + bias. `x_stride`: elements between rows of x. bias may be null; so
// may scales, for a weight that was packed in bfloat16.
extern "C" void kvlab_linear(const uint16_t* x, int64_t x_stride, int rows, const void* packed, const float* scales,
                             const uint16_t* bias, int outputs, int inputs, uint16_t* out, int threads) {
    const Product product{nullptr, static_cast<const char*>(packed), scales, bias, out, rows, outputs,
                          (inputs + 1) / 2};
    scales ? linear<Int8>(product, x, x_stride, inputs, threads)
           : linear<BFloat16>(product, x, x_stride, inputs, threads);
}

// out [count, inputs]: the rows `ids` of the weight that `packed` was made of.
extern "C" void kvlab_packed_rows(const void* packed, const float* scales, int inputs, const int64_t* ids,
                                  int count, uint16_t* out, int threads) {
    const int64_t pairs = (inputs + 1) / 2;
    const int bytes = scales ? Int8::BYTES : BFloat16::BYTES;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 8)
    for (int i = 0; i < count; ++i) {
        const int64_t panel = ids[i] / LANES, lane = ids[i] % LANES;
        const char* from = static_cast<const char*>(packed) + panel * pairs * bytes + lane * (bytes / LANES);
        uint16_t* to = out + int64_t(i) * inputs;
        for (int pair = 0; pair < pairs; ++pair, from += bytes) {
            uint16_t both[2];
            if (scales)
                for (int k = 0; k < 2; ++k)
                    both[k] = to_bfloat16(reinterpret_cast<const int8_t*>(from)[k] * scales[ids[i]]);
            else
                std::memcpy(both, from, sizeof both);
            std::memcpy(to + 2 * pair, both, std::min(2, inputs - 2 * pair) * sizeof to[0]);
        }
    }
}
