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
        plain = panels % 2 == 0 && !product.scales && !product.bias && (panel + panels) * LANES <= product.outputs;
    }

    int left() const { return rows - done; }

    INLINE_MEMBER void finish(int count) {
        for (const int end = std::min(rows, done + count); done < end; ++done) finish_row();
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
    bool plain = true;  // nothing to be added or multiplied, no output cut off

    INLINE_MEMBER void finish_row() {
        const float* from = numbers + done * panels * LANES;
        const int row = top + done;
        const int64_t at = int64_t(row) * product.outputs + panel * LANES;
        if (best)
            finish_best(row, from);
        else if (product.gate != Gate::NONE)
            finish_gated(row, from);
        else if (plain && product.out_in_float32)
            finish_floats(reinterpret_cast<float*>(product.out) + at, from);
        else if (plain)
            finish_plain(product.out + at, from);
        else
            for (int i = 0; i < panels; ++i) store_outputs(product, row, panel + i, load(from + i * LANES));
    }

    INLINE_MEMBER void finish_plain(uint16_t* out, const float* from) {
        for (int i = 0; i < panels; i += 2, from += 2 * LANES, out += 2 * LANES) {
            const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(from + LANES), _mm512_load_ps(from));
            if (past_caches)
                _mm512_stream_si512(reinterpret_cast<__m512i*>(out), (__m512i)both);
            else
                std::memcpy(out, &both, sizeof both);
        }
    }

    INLINE_MEMBER void finish_floats(float* out, const float* from) {
        for (int i = 0; i < panels; ++i, from += LANES, out += LANES) {
            if (past_caches)
                _mm512_stream_ps(out, _mm512_load_ps(from));
            else
                std::memcpy(out, from, LANES * sizeof *from);
        }
    }

    // Both factors are rounded first, as if they had been stored and loaded.
    __attribute__((noinline)) void finish_gated(int row, const float* from) {
        const int gates = panels / 2, half = product.panels() / 2;
        const RowLayout to(row, product.outputs / 2, product.out_in_tiles);
        for (int i = 0; i < gates; ++i, from += LANES) {
            const Floats x = rounded<uint16_t>(finished(product, panel + i, load(from)));
            const Floats up = rounded<uint16_t>(finished(product, half + panel + i, load(from + gates * LANES)));
            const Halves narrow = narrowed(gated<uint16_t>(x, up, product.gate == Gate::GELU));
            std::memcpy(product.out + to.of((panel + i) * LANES), &narrow, sizeof narrow);
        }
    }

    // Of equal outputs the first one counts.
    __attribute__((noinline)) void finish_best(int row, const float* from) {
        for (int i = 0; i < panels; ++i, from += LANES) {
            const Floats outputs = finished(product, panel + i, load(from));
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
