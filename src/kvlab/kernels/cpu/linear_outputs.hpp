// Writes the sums of a block of tiles to the output, row by row, while the next block is computed. Writing all of them at
// once would stall the tiles.
#pragma once

#include "packed_weight.hpp"
#include "ranking.hpp"
#include "tiles.hpp"

#include <algorithm>

#if defined(KVLAB_TILES)
namespace {

class PendingOutputs {
public:
    static constexpr int MOST_SUMS = 3 * TILE_SIDE * 2 * LANES;  // 48 rows by 32 outputs, or 16 by 64

    // `best` [rows]: null, or receives the key of each row's largest output; outputs are then not written.
    explicit PendingOutputs(const Product& product, uint64_t* best)
        : product(product),
          best(best),
          past_caches(int64_t(product.rows) * product.outputs >= MUCH && product.outputs % (2 * LANES) == 0 &&
                      reinterpret_cast<uintptr_t>(product.out) % 64 == 0) {}

    // Buffer for the next block's sums [rows, panels * LANES]. Write to it when `left()` is 0.
    float* sums() { return numbers; }

    // Room for a tile that nothing reads.
    float* unused() { return unread; }

    // The buffer holds the sums of a block. The first half of the panels may be gates of the others.
    void begin(int first_row, int row_count, int first_panel, int panel_count) {
        top = first_row;
        rows = row_count;
        panel = first_panel;
        panels = panel_count;
        done = 0;
        whole = panels % 2 == 0 && (panel + panels) * LANES <= product.outputs;
        plain = whole && !best && product.gate == Gate::NONE && !product.scales && !product.bias;
    }

    int left() const { return rows - done; }

    // MAYBE_PLAIN: sums may be outputs as they are. Only what finishes those is inlined.
    template <bool MAYBE_PLAIN = true>
    INLINE_MEMBER void finish(int count) {
        const int end = std::min(rows, done + count);
        if (!MAYBE_PLAIN || !plain) return finish_others(end);
        for (; done < end; ++done) finish_plain();
    }

    // Write all that is left, so that other threads can read it.
    void finish() {
        finish(left());
        _mm_sfence();
    }

private:
    // From this many elements on, no cache holds the outputs until they are read. They are written past the caches, which
    // saves reading the old contents of each line.
    static constexpr int64_t MUCH = 1 << 20;

    const Product& product;
    uint64_t* const best;
    const bool past_caches;
    alignas(64) float numbers[MOST_SUMS];
    alignas(64) float unread[TILE_SIDE * LANES];
    int top = 0, rows = 0, done = 0, panel = 0, panels = 0;
    bool whole = true;  // no output cut off
    bool plain = true;  // nor is anything else to be done than to write them

    const float* sums_of_row() const { return numbers + done * panels * LANES; }
    int64_t place_of_row() const { return int64_t(top + done) * product.outputs + panel * LANES; }

    INLINE_MEMBER void finish_plain() {
        const float* const from = sums_of_row();
        if (product.out_in_float32)
            write_floats(reinterpret_cast<float*>(product.out) + place_of_row(), from);
        else
            write(product.out + place_of_row(), [&](int i) { return load(from + i * LANES); });
    }

    __attribute__((noinline)) void finish_others(int end) {
        for (; done < end; ++done) {
            const float* const from = sums_of_row();
            const int row = top + done;
            if (best)
                finish_best(row, from);
            else if (product.gate != Gate::NONE)
                finish_gated(row, from);
            else if (whole && !product.out_in_float32)
                write(product.out + place_of_row(),
                      [&](int i) { return finished<true>(product, panel + i, sums_of(row, i, from)); });
            else
                for (int i = 0; i < panels; ++i) store_outputs(product, row, panel + i, sums_of(row, i, from));
        }
    }

    // Of a row and panel `i` of the block, in float32.
    INLINE_MEMBER Floats sums_of(int row, int i, const float* from) const {
        const Floats sums = load(from + i * LANES);
        return product.x_rows ? product.x_rows[row].scaled(reinterpret_cast<Ints>(sums)) : sums;
    }

    // Round `outputs(i)` of each panel.
    template <class Outputs>
    INLINE_MEMBER void write(uint16_t* out, Outputs outputs) {
        for (int i = 0, count = panels; i < count; i += 2, out += 2 * LANES) {
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)outputs(i + 1), (__m512)outputs(i));
            if (past_caches)
                _mm512_stream_si512(reinterpret_cast<__m512i*>(out), (__m512i)both);
            else
                std::memcpy(out, &both, sizeof both);
        }
    }

    INLINE_MEMBER void write_floats(float* out, const float* from) {
        for (int i = 0; i < panels; ++i, from += LANES, out += LANES) {
            if (past_caches)
                _mm512_stream_ps(out, _mm512_load_ps(from));
            else
                std::memcpy(out, from, LANES * sizeof *from);
        }
    }

    // Both factors are rounded first, as if they had been stored and loaded.
    INLINE_MEMBER void finish_gated(int row, const float* from) {
        const int gates = panels / 2, half = product.panels() / 2;
        const RowLayout to(row, product.outputs / 2, product.out_in_tiles);
        for (int i = 0; i < gates; ++i) {
            const Floats x = rounded<uint16_t>(finished<true>(product, panel + i, sums_of(row, i, from)));
            const Floats up = rounded<uint16_t>(finished<true>(product, half + panel + i, sums_of(row, gates + i, from)));
            const Halves narrow = narrowed(gated<uint16_t>(x, up, product.gate == Gate::GELU));
            std::memcpy(product.out + to.of((panel + i) * LANES), &narrow, sizeof narrow);
        }
    }

    // Of equal outputs the first one counts.
    INLINE_MEMBER void finish_best(int row, const float* from) {
        for (int i = 0; i < panels; ++i) {
            const Floats outputs = finished(product, panel + i, sums_of(row, i, from));
            const Floats before = all(number_of(best[row]));
            if (!any(~(outputs < before))) continue;
            const int first = (panel + i) * LANES, lanes = std::min(LANES, product.outputs - first);
            for (int lane = 0; lane < lanes; ++lane)
                best[row] = std::max(best[row], key_of(outputs[lane], first + lane));
        }
    }
};

}  // namespace
#endif
