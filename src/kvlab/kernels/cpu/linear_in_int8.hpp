// y = x W^T in integers ("W8A8", dynamic per token): each row of x is quantized to int8 when a product begins, as int8.hpp
// does it, products are summed in int32 without any rounding, and a sum is multiplied by the scales of its row and its output.
//
// Four inputs are multiplied at once, a quad. The instructions for that take one side unsigned, so that weights are stored
// with 128 added; 128 times the sum of the row is subtracted in the end.
//
// With many rows matrix tiles give the same (linear_in_tiles.hpp).
//
// Pairs of x that some instructions would saturate with (int8_quads.hpp) are split: one half stays, the other is in a list, whose
// quads are added behind all others. They are few, since a row's scale is that of its largest number.
#pragma once

#include "buffer.hpp"
#include "int8_quads.hpp"
#include "interface.hpp"
#include "packed_weight.hpp"

#include <algorithm>

namespace {

constexpr int QUAD = 4;
constexpr int MOST_ROWS = LANES == 16 ? 12 : 6;  // at once: with two panels their sums fit the registers
constexpr int INT8_PANELS = 8;                   // that share the rows of a block while they are in the cache

// What is left of a quad that was split.
struct Rest {
    int32_t quad;
    uint32_t numbers;
};

// Rows of x in int8, [rows, quads], and what belongs to each.
struct Int8Rows {
    int8_t* numbers;
    Int8Row* facts;
    Rest* rests;  // [rows, quads]
    int quads;

    int8_t* row(int at) const { return numbers + int64_t(at) * quads * QUAD; }
    Rest* rests_of(int at) const { return rests + int64_t(at) * quads; }
};

thread_local Buffer int8_rows;

Int8Rows room_for(int rows, int quads) {
    const int64_t padded = (rows + MOST_ROWS - 1) / MOST_ROWS * MOST_ROWS;
    const int64_t facts = padded * int64_t(sizeof(Int8Row)), rests = SATURATES ? padded * quads * int64_t(sizeof(Rest)) : 0;
    char* at = int8_rows.at_least(rests + facts + padded * quads * QUAD);
    const Int8Rows found{reinterpret_cast<int8_t*>(at + rests + facts), reinterpret_cast<Int8Row*>(at + rests),
                         reinterpret_cast<Rest*>(at), quads};
    std::memset(found.facts + rows, 0, (padded - rows) * sizeof(Int8Row));  // no rests
    std::memset(found.row(rows), 0, (padded - rows) * quads * QUAD);
    return found;
}

// Split quads that have a pair that is too large. Returns how many.
int split_large(int8_t* row, int quads, Rest* rests) {
    int count = 0;
    for (int quad = 0; quad < quads; quad += LANES) {
        Words several{};
        const int width = std::min(LANES, quads - quad);
        std::memcpy(&several, row + quad * QUAD, width * QUAD);
        if (!any_large(several)) continue;
        for (int i = quad; i < quad + width; ++i) {
            int8_t *const numbers = row + i * QUAD, rest[QUAD] = {};
            for (int first = 0; first < QUAD; first += 2) {
                if (std::abs(numbers[first] + numbers[first + 1]) <= 128) continue;
                for (int at = first; at < first + 2; ++at) {
                    rest[at] = int8_t(numbers[at] / 2);
                    numbers[at] = int8_t(numbers[at] - rest[at]);
                }
            }
            uint32_t all_four;
            std::memcpy(&all_four, rest, QUAD);
            if (all_four) rests[count++] = {i, all_four};
        }
    }
    return count;
}

void quantize_row(const uint16_t* x, int inputs, const Int8Rows& rows, int row) {
    int8_t* const numbers = rows.row(row);
    Int8Row& facts = rows.facts[row];
    facts.scale = quantize(x, inputs, numbers);
    for (int i = inputs; i < rows.quads * QUAD; ++i) numbers[i] = 0;
    int32_t sum = 0;
    for (int i = 0; i < inputs; ++i) sum += numbers[i];
    facts.sum = sum;
    facts.rests = SATURATES ? split_large(numbers, rows.quads, rows.rests_of(row)) : 0;
}

INLINE Words all_words(const void* at) {
    uint32_t word;
    std::memcpy(&word, at, sizeof word);
    return word - Words{};
}

// COUNT rows, from `first` on, by VECTORS panels.
template <int COUNT, int VECTORS>
void multiply_quads(const Product& product, const Int8Rows& rows, int first, int panel) {
    const int quads = rows.quads;
    const int64_t panel_size = int64_t(quads) * Int8Quads::BYTES;
    const char* const weights = product.weights + panel * panel_size;
    const int8_t* const x = rows.row(first);
    Ints sums[COUNT][VECTORS] = {};
    for (int quad = 0; quad < quads; ++quad) {
        const char* const at = weights + int64_t(quad) * Int8Quads::BYTES;
        const int64_t ahead = bytes_ahead<VECTORS>(int64_t(quad) * Int8Quads::BYTES, panel_size);
        Words right[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            __builtin_prefetch(at + v * panel_size + ahead, 0, INTO_SECOND_CACHE && COUNT <= 4 ? 2 : 3);
            right[v] = load_words(at + v * panel_size);
        }
#pragma GCC unroll 24
        for (int row = 0; row < COUNT; ++row) {
            const Words left = all_words(x + (int64_t(row) * quads + quad) * QUAD);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v) sums[row][v] = add_quads(sums[row][v], right[v], left);
        }
    }
#pragma GCC unroll 24
    for (int row = 0; row < COUNT; ++row) {
        if (first + row >= product.rows) break;
        const Int8Row& facts = rows.facts[first + row];
        for (const Rest *rest = rows.rests_of(first + row), *end = rest + (SATURATES ? facts.rests : 0); rest < end; ++rest) {
            const char* const at = weights + int64_t(rest->quad) * Int8Quads::BYTES;
            const Words left = all_words(&rest->numbers);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; ++v)
                sums[row][v] = add_quads(sums[row][v], load_words(at + v * panel_size), left);
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
            store_outputs(product, first + row, panel + v, facts.scaled(sums[row][v]));
        }
    }
}

template <int COUNT>
void multiply_quads(const Product& product, const Int8Rows& rows, int row, int panel, int end) {
    constexpr int AT_ONCE = side_by_side<COUNT>();
    for (; panel + AT_ONCE <= end; panel += AT_ONCE) multiply_quads<COUNT, AT_ONCE>(product, rows, row, panel);
    for (; panel < end; ++panel) multiply_quads<COUNT, 1>(product, rows, row, panel);
}

void linear_in_int8(const Product& product, const uint16_t* x, int64_t x_stride, int inputs, int threads) {
    const int count = product.rows, panels = product.panels(), groups = (panels + INT8_PANELS - 1) / INT8_PANELS;
    const int at_once = std::max(1, groups / (threads * 16));
    const Int8Rows rows = room_for(count, (inputs + QUAD - 1) / QUAD);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int row = 0; row < count; ++row) quantize_row(x + row * x_stride, inputs, rows, row);
#pragma omp for schedule(dynamic, at_once)
        for (int group = 0; group < groups; ++group) {
            const int first = group * INT8_PANELS, last = std::min(first + INT8_PANELS, panels);
            for (int row = 0; row < count; row += MOST_ROWS) {
                const int left = count - row;
                if (left <= 1)
                    multiply_quads<1>(product, rows, row, first, last);
                else if (left <= 2)
                    multiply_quads<2>(product, rows, row, first, last);
                else if (left <= 4)
                    multiply_quads<4>(product, rows, row, first, last);
                else
                    multiply_quads<MOST_ROWS>(product, rows, row, first, last);
            }
        }
    }
}

}  // namespace
