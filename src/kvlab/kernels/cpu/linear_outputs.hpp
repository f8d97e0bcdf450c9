// The sums of a block of tiles on their way to the output: row by row, while the next block is summed. Written all
// at once they would let memory wait, and the tiles with it.
#pragma once

#include "packed_weight.hpp"
#include "tiles.hpp"

#include <algorithm>

#if defined(KVLAB_TILES)
namespace {

class PendingOutputs {
public:
    static constexpr int MOST_SUMS = 3 * TILE_SIDE * 2 * LANES;  // 48 rows by 32 outputs, or 16 by 64

    explicit PendingOutputs(const Product& product) : product(product) {}

    // Where the next block's sums [rows, panels * LANES] belong, once no row is left of the last one's.
    float* sums() { return numbers; }

    // They are there.
    void begin(int first_row, int row_count, int first_panel, int panel_count) {
        top = first_row;
        rows = row_count;
        panel = first_panel;
        panels = panel_count;
        done = 0;
        plain = panels % 2 == 0 && !product.scales && !product.bias && (panel + panels) * LANES <= product.outputs;
    }

    int left() const { return rows - done; }

    __attribute__((always_inline)) void finish(int count) {
        for (const int end = std::min(rows, done + count); done < end; ++done) finish_row();
    }

private:
    const Product& product;
    alignas(64) float numbers[MOST_SUMS];
    int top = 0, rows = 0, done = 0, panel = 0, panels = 0;
    bool plain = true;  // nothing to be added or multiplied, no output cut off

    __attribute__((always_inline)) void finish_row() {
        const float* from = numbers + done * panels * LANES;
        if (!plain) {
            for (int i = 0; i < panels; ++i)
                store_outputs(product, top + done, panel + i, load(from + i * LANES));
            return;
        }
        uint16_t* out = product.out + int64_t(top + done) * product.outputs + panel * LANES;
        for (int i = 0; i < panels; i += 2, from += 2 * LANES, out += 2 * LANES) {
            const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(from + LANES), _mm512_load_ps(from));
            std::memcpy(out, &both, sizeof both);
        }
    }
};

}  // namespace
#endif
