// Top-k of each row: the largest numbers and their indices, with which sampling begins.

#include "interface.hpp"
#include "ranking.hpp"

#include <algorithm>
#include <functional>
#include <memory>

namespace {

constexpr int64_t NUMBERS_WORTH_A_THREAD = 1 << 15;  // with fewer elements, waking other threads costs more than it saves

template <class Element>
INLINE float number(const Element* at) {
    if constexpr (sizeof(Element) == 4) return *at;
    const uint32_t bits = uint32_t(*at) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Index of the largest of `size` numbers; of equal ones the first.
template <class Element>
int64_t index_of_largest(const Element* x, int64_t size) {
    Floats most = all(-INFINITY);
    Ints where{}, at{}, strange{};
    for (int lane = 0; lane < LANES; ++lane) at[lane] = lane;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES, at += LANES) {
        const Floats part = widen(x + i);
        where = part > most ? at : where;
        most = larger(part, most);
        strange |= part != part;
    }
    float best = -INFINITY;
    int64_t index = 0;
    for (int lane = 0; lane < LANES && i > 0; ++lane)
        if (most[lane] > best || (most[lane] == best && where[lane] < index)) best = most[lane], index = where[lane];
    bool has_nan = any(strange);
    for (; i < size; ++i) {
        const float last = number(x + i);
        if (last > best) best = last, index = i;
        has_nan |= last != last;
    }
    if (has_nan)
        for (index = 0; number(x + index) == number(x + index);) ++index;
    return index;
}

// `keys` has room for `capacity` keys, at least `count` + 4 * LANES: the `count` best so far and candidates found since.
// Few numbers become candidates: those not above the worst of the best are skipped, four vectors at a time.
template <class Element>
void indices_of_largest(const Element* x, int64_t size, int count, uint64_t* keys, int capacity, int64_t* indices) {
    constexpr int STRIDE = 4 * LANES;
    int held = 0;
    float least = 0;
    bool full = false;
    const auto settle = [&] {
        if (held < count) return;
        std::nth_element(keys, keys + count - 1, keys + held, std::greater<uint64_t>());
        held = count;
        full = true;
        least = number(x + index_of(keys[count - 1]));
    };
    const auto consider = [&](int64_t from, int64_t to) {
        for (; from < to; ++from) {
            const float next = number(x + from);
            if (!full || !(next <= least)) keys[held++] = key_of(next, from);
        }
        if (held + STRIDE > capacity) settle();
    };
    int64_t i = 0;
    for (; i + STRIDE <= size; i += STRIDE) {
        if (full) {
            const Floats bound = all(least);
            Ints passed = widen(x + i) <= bound;
            for (int k = 1; k < 4; ++k) passed &= widen(x + i + k * LANES) <= bound;
            if (!any(~passed)) continue;
        }
        consider(i, i + STRIDE);
    }
    consider(i, size);
    settle();
    std::sort(keys, keys + count, std::greater<uint64_t>());
    for (int k = 0; k < count; ++k) indices[k] = index_of(keys[k]);
}

template <class Element>
void largest(const Element* x, int64_t stride, int rows, int64_t size, int count, Element* values, int64_t* indices,
             int threads) {
    const int capacity = count + std::max(count, 512);
#pragma omp parallel num_threads(threads) if (rows * size > NUMBERS_WORTH_A_THREAD)
    {
        const std::unique_ptr<uint64_t[]> keys(count > 1 ? new uint64_t[capacity] : nullptr);
#pragma omp for schedule(static)
        for (int row = 0; row < rows; ++row) {
            const Element* from = x + row * stride;
            int64_t* where = indices + int64_t(row) * count;
            if (count > 1)
                indices_of_largest(from, size, count, keys.get(), capacity, where);
            else
                *where = index_of_largest(from, size);
            for (int k = 0; k < count; ++k) values[int64_t(row) * count + k] = from[where[k]];
        }
    }
}

}  // namespace

// values, indices [rows, count]: the `count` largest numbers of each row [size] of x, largest first; 1 <= count <=
// size < 2^31. `stride`: elements between rows of x.
extern "C" void kvlab_topk(const void* x, int64_t stride, int rows, int64_t size, int count, void* values,
                              int64_t* indices, int element_bytes, int threads) {
    if (element_bytes == 4)
        largest(static_cast<const float*>(x), stride, rows, size, count, static_cast<float*>(values), indices,
                threads);
    else
        largest(static_cast<const uint16_t*>(x), stride, rows, size, count, static_cast<uint16_t*>(values), indices,
                threads);
}
