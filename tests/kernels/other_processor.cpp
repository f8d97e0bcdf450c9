// Products of every path of the library against the same in double precision: a program of its own, so that it can be
// built for another processor and run in an emulator, where there is no PyTorch.

#include "interface.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

uint32_t state = 1;

float number() {  // in [-1, 1), exact in bfloat16
    state = state * 1664525u + 1013904223u;
    return float(int(state >> 24) - 128) / 128;
}

uint16_t narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return uint16_t(bits >> 16);
}

float wide(uint16_t x) {
    const uint32_t bits = uint32_t(x) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

// Whether a product is right up to one rounding, of int8_w8a8 also that of x. The weight's rows are read back: int8 has
// changed them.
bool agrees(int rows, int outputs, int inputs, int format) {
    std::vector<uint16_t> weight(outputs * inputs), x(rows * inputs), out(rows * outputs), read(outputs * inputs);
    std::vector<char> packed(kvlab_packed_linear_bytes(outputs, inputs, format, 2) + 64);
    std::vector<float> scales(outputs);
    std::vector<int64_t> ids(outputs);
    for (auto& each : weight) each = narrow(number());
    for (auto& each : x) each = narrow(number());
    for (int i = 0; i < outputs; ++i) ids[i] = i;
    const bool in_int8 = format != WEIGHT_PLAIN;
    if (in_int8)
        kvlab_pack_linear_int8(weight.data(), outputs, inputs, format, packed.data(), scales.data(), 1);
    else
        kvlab_pack_linear(weight.data(), outputs, inputs, packed.data(), 2, 1);
    const float* scale = in_int8 ? scales.data() : nullptr;
    const LinearWeight whole{packed.data(), scale, nullptr, outputs, inputs, format, 2};
    kvlab_packed_rows(&whole, ids.data(), outputs, read.data(), 1);
    if (!in_int8 && read != weight) return false;
    const double error = format == WEIGHT_INT8_W8A8 ? 1.2e-2 : 4e-3;
    kvlab_linear(x.data(), inputs, rows, &whole, out.data(), false, 2);
    for (int row = 0; row < rows; ++row)
        for (int output = 0; output < outputs; ++output) {
            double exact = 0, size = 0;
            for (int i = 0; i < inputs; ++i) {
                const double each = double(wide(x[row * inputs + i])) * wide(read[output * inputs + i]);
                exact += each;
                size += std::fabs(each);
            }
            if (std::fabs(wide(out[row * outputs + output]) - exact) > error * (std::fabs(exact) + size)) return false;
        }
    return true;
}

}  // namespace

int main() {
    const int shapes[][2] = {{1, 1}, {17, 33}, {64, 64}, {70, 96}, {33, 255}};
    int failed = 0, tried = 0;
    for (int few = 0; few < 2; ++few)
        for (int many = 0; many < 2; ++many) {
            kvlab_choose_paths(0, few, many);
            for (const auto& shape : shapes)
                for (int rows : {1, 2, 4, 7, 9, 13, 24, 26})
                    for (int format : {WEIGHT_PLAIN, WEIGHT_INT8, WEIGHT_INT8_W8A8}) {
                        ++tried;
                        if (agrees(rows, shape[0], shape[1], format)) continue;
                        ++failed;
                        std::printf("%d rows, %d by %d, format %d, few %d, many %d: wrong\n", rows, shape[0], shape[1],
                                    format, few, many);
                    }
        }
    std::printf("%s: %d of %d products agree\n", kvlab_paths(), tried - failed, tried);
    for (int path = 0; path < 2; ++path) failed += kvlab_multiply_in_registers(path, 10, 1) <= 0;
    return failed != 0;
}
