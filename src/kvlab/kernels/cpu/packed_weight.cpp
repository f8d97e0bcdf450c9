// Packing a weight [outputs, inputs] in one of the formats, and reading rows of it back.

#include "compact_weight.hpp"
#include "interface.hpp"
#include "packed_weight.hpp"

#include <atomic>
#include <memory>

namespace {

// Pack a panel [LANES outputs, inputs] of `weight` into words [inputs / PER_WORD, LANES]; inputs are rounded up to pairs.
template <class Element>
void pack_panel(const Element* weight, int outputs, int inputs, int panel, char* packed) {
    constexpr int PER_WORD = 4 / sizeof(Element), WIDTH = PER_WORD * LANES, WORD_BYTES = 4 * LANES;
    const int words = (inputs + 1) / 2 * 2 / PER_WORD;
    for (int word = 0; word < words; word += LANES) {
        Words tile[LANES];
        for (int i = 0; i < LANES; ++i) {
            Element row[WIDTH] = {};
            const int output = panel * LANES + i, input = word * PER_WORD;
            if (output < outputs && input < inputs)
                std::memcpy(row, weight + int64_t(output) * inputs + input, std::min(WIDTH, inputs - input) * sizeof row[0]);
            tile[i] = load_words(row);
        }
        transpose(tile);
        for (int k = 0; k < std::min(LANES, words - word); ++k)
            store_words(packed + int64_t(word + k) * WORD_BYTES, tile[k]);
    }
}

int panels_of(int outputs) { return (outputs + LANES - 1) / LANES; }

#if defined(KVLAB_COMPACT)
CompactWeight compact(void* packed, int outputs, int inputs) {
    return {static_cast<char*>(packed), panels_of(outputs), inputs / CompactWeight::STEP_INPUTS};
}

int exponent_of(uint16_t weight) { return weight >> 7 & 255; }

// Pack a panel that is packed as bfloat16. False if more exceptions are left than there is room for.
bool pack_compact(const uint16_t* panel, const CompactWeight& to, int index) {
    constexpr int WEIGHTS = CompactWeight::STEP_WEIGHTS, NONE = -1;
    int counts[256] = {}, codes[256];
    for (int64_t i = 0; i < int64_t(to.steps) * WEIGHTS; ++i) ++counts[exponent_of(panel[i])];
    std::fill(codes, codes + 256, NONE);
    for (int code = 0; code < CompactWeight::CODES; ++code) {
        const int most = int(std::max_element(counts, counts + 256) - counts);
        codes[most] = code;
        counts[most] = NONE;
        to.table(index)[code] = uint8_t(most);
    }
    CompactWeight::Exception *exception = to.exceptions(index), *const last = exception + to.room_for(to.steps) - 1;
    for (int step = 0; step < to.steps; ++step) {
        char* out = to.panel(index) + int64_t(step) * CompactWeight::STEP_BYTES;
        std::memset(out + WEIGHTS, 0, WEIGHTS / 2);
        for (int i = 0; i < WEIGHTS; ++i) {
            const uint16_t weight = panel[int64_t(step) * WEIGHTS + i];
            const int code = codes[exponent_of(weight)];
            if (code == NONE) {
                if (exception == last) return false;
                *exception++ = {uint32_t(step * WEIGHTS + i), weight, 0};
            }
            const auto place = CompactWeight::place_of(i);
            out[place.mantissa] = char(weight << 1 | weight >> 15);
            out[place.code] |= char((code == NONE ? 0 : code) << place.shift);
        }
    }
    *exception = {CompactWeight::NOWHERE, 0, 0};
    return true;
}
#endif

template <class Element>
void pack_all(const Element* weight, int outputs, int inputs, char* packed, int threads) {
    const int64_t bytes = int64_t((inputs + 1) / 2) * 2 * LANES * sizeof(Element);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int panel = 0; panel < panels_of(outputs); ++panel)
        pack_panel(weight, outputs, inputs, panel, packed + panel * bytes);
}

void read_float32_row(const LinearWeight& weight, int panel, int lane, float* to) {
    const int64_t inputs = (weight.inputs + 1) / 2 * 2;
    const float* from = static_cast<const float*>(weight.packed) + panel * inputs * LANES + lane;
    for (int input = 0; input < weight.inputs; ++input, from += LANES) to[input] = *from;
}

// Row `lane` of a panel.
template <class Weight>
void read_row(const LinearWeight& weight, int panel, int lane, uint16_t* to) {
    const int64_t pairs = (weight.inputs + 1) / 2;
    const char* from =
        static_cast<const char*>(weight.packed) + panel * pairs * Weight::BYTES + lane * (Weight::BYTES / LANES);
    for (int pair = 0; pair < pairs; ++pair, from += Weight::BYTES) {
        uint16_t both[2];
        if constexpr (Weight::BYTES == Int8::BYTES)
            for (int k = 0; k < 2; ++k)
                both[k] = to_bfloat16(reinterpret_cast<const int8_t*>(from)[k] * weight.scales[panel * LANES + lane]);
        else
            std::memcpy(both, from, sizeof both);
        std::memcpy(to + 2 * pair, both, std::min(2, weight.inputs - 2 * pair) * sizeof to[0]);
    }
}

void read_int8_quads_row(const LinearWeight& weight, int panel, int lane, uint16_t* to) {
    const int64_t quads = (weight.inputs + 3) / 4;
    const auto* from = static_cast<const uint8_t*>(weight.packed) + panel * quads * Int8Quads::BYTES + lane * 4;
    const float scale = weight.scales[panel * LANES + lane];
    for (int input = 0; input < weight.inputs; ++input)
        to[input] = to_bfloat16(float(from[input / 4 * Int8Quads::BYTES + input % 4] - Int8Quads::ZERO) * scale);
}

void read_compact_row(const LinearWeight& weight, int panel, int lane, uint16_t* to) {
#if defined(KVLAB_COMPACT)
    const CompactWeight from = compact(const_cast<void*>(weight.packed), weight.outputs, weight.inputs);
    const uint8_t* table = from.table(panel);
    const auto index_of = [&](int input) { return input / 2 * 2 * LANES + 2 * lane + input % 2; };  // in a step
    for (int step = 0; step < from.steps; ++step) {
        const char* at = from.panel(panel) + int64_t(step) * CompactWeight::STEP_BYTES;
        for (int input = 0; input < CompactWeight::STEP_INPUTS; ++input) {
            const auto place = CompactWeight::place_of(index_of(input));
            const int mantissa = uint8_t(at[place.mantissa]), code = uint8_t(at[place.code]) >> place.shift & 15;
            *to++ = uint16_t((mantissa & 1) << 15 | table[code] << 7 | mantissa >> 1);
        }
    }
    to -= weight.inputs;
    for (const auto* next = from.exceptions(panel); next->at != CompactWeight::NOWHERE; ++next) {
        const int pair = int(next->at / (2 * LANES)), place = int(next->at % (2 * LANES));
        if (place / 2 == lane) to[2 * pair + place % 2] = next->weight;
    }
#endif
}

}  // namespace

// The number of bytes that the packed weight [outputs, inputs] takes in a format; 0 where it cannot have that format.
// element_bytes: 4 for float32, which is plain; 2 for bfloat16.
extern "C" int64_t kvlab_packed_linear_bytes(int outputs, int inputs, int format, int element_bytes) {
    const int64_t pairs = int64_t(panels_of(outputs)) * ((inputs + 1) / 2);
    if (format == WEIGHT_PLAIN) return pairs * (element_bytes == 4 ? Float32::BYTES : BFloat16::BYTES);
    if (element_bytes == 4) return 0;
    if (format == WEIGHT_INT8) return pairs * Int8::BYTES;
    if (format == WEIGHT_INT8_W8A8) return int64_t(panels_of(outputs)) * ((inputs + 3) / 4) * Int8Quads::BYTES;
#if defined(KVLAB_COMPACT)
    if (inputs % CompactWeight::STEP_INPUTS == 0) return compact(nullptr, outputs, inputs).bytes();
#endif
    return 0;
}

// Pack `weight` [outputs, inputs], C-contiguous, into `packed`.
extern "C" void kvlab_pack_linear(const void* weight, int outputs, int inputs, void* packed, int element_bytes,
                                  int threads) {
    auto* const to = static_cast<char*>(packed);
    if (element_bytes == 4)
        pack_all(static_cast<const float*>(weight), outputs, inputs, to, threads);
    else
        pack_all(static_cast<const uint16_t*>(weight), outputs, inputs, to, threads);
}

// The same of bfloat16 in WEIGHT_COMPACT. Returns 0 for a weight that has too many exponents for that.
extern "C" int kvlab_pack_linear_compact(const uint16_t* weight, int outputs, int inputs, void* packed, int threads) {
#if defined(KVLAB_COMPACT)
    const CompactWeight to = compact(packed, outputs, inputs);
    std::atomic<bool> fits{true};
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<uint16_t[]> panel(new uint16_t[int64_t(to.steps) * CompactWeight::STEP_WEIGHTS]);
#pragma omp for schedule(static)
        for (int index = 0; index < to.panels; ++index) {
            if (!fits) continue;
            pack_panel(weight, outputs, inputs, index, reinterpret_cast<char*>(panel.get()));
            if (!pack_compact(panel.get(), to, index)) fits = false;
        }
    }
    return fits;
#else
    return 0;
#endif
}

// The same of bfloat16 in WEIGHT_INT8 or WEIGHT_INT8_W8A8; writes each output's scale, `scales` [outputs].
extern "C" void kvlab_pack_linear_int8(const uint16_t* weight, int outputs, int inputs, int format, void* packed,
                                       float* scales, int threads) {
    const bool in_quads = format == WEIGHT_INT8_W8A8;
    const int together = in_quads ? 4 : 2, groups = (inputs + together - 1) / together;
    const uint8_t added = in_quads ? Int8Quads::ZERO : 0;
#pragma omp parallel num_threads(threads)
    {
        const std::unique_ptr<int8_t[]> row(new int8_t[groups * together]());  // behind the last input it stays 0
#pragma omp for schedule(static)
        for (int panel = 0; panel < panels_of(outputs); ++panel) {
            auto* out = static_cast<uint8_t*>(packed) + int64_t(panel) * groups * together * LANES;
            for (int i = 0; i < LANES; ++i) {
                const int output = panel * LANES + i;
                if (output < outputs)
                    scales[output] = quantize(weight + int64_t(output) * inputs, inputs, row.get());
                else
                    std::memset(row.get(), 0, inputs);
                for (int group = 0; group < groups; ++group)
                    for (int k = 0; k < together; ++k)
                        out[(int64_t(group) * LANES + i) * together + k] = uint8_t(row[group * together + k] + added);
            }
        }
    }
}

// out [count, inputs]: the rows `ids` of a packed weight, in its element type.
extern "C" void kvlab_packed_rows(const LinearWeight* weight, const int64_t* ids, int count, void* out, int threads) {
    const int64_t inputs = weight->inputs;
#pragma omp parallel for num_threads(threads) schedule(static) if (count > 8)
    for (int i = 0; i < count; ++i) {
        const int panel = int(ids[i] / LANES), lane = int(ids[i] % LANES);
        if (weight->element_bytes == 4) {
            read_float32_row(*weight, panel, lane, static_cast<float*>(out) + i * inputs);
            continue;
        }
        uint16_t* to = static_cast<uint16_t*>(out) + i * inputs;
        switch (weight->format) {
            case WEIGHT_INT8: read_row<Int8>(*weight, panel, lane, to); break;
            case WEIGHT_INT8_W8A8: read_int8_quads_row(*weight, panel, lane, to); break;
            case WEIGHT_COMPACT: read_compact_row(*weight, panel, lane, to); break;
            default: read_row<BFloat16>(*weight, panel, lane, to);
        }
    }
}
