// Packing a weight [outputs, inputs], in bfloat16 or in int8 with a scale for each output, and reading rows of it
// back.

#include "interface.hpp"
#include "packed_weight.hpp"

#include <memory>

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

// out [count, inputs]: the rows `ids` of a packed weight.
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
