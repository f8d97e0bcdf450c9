// y = x W^T + b for any number of rows; all in float32, or x, y and b in bfloat16, and W too or in one of its formats.
//
// W is packed once, and one copy serves any number of rows: with few rows the speed of memory is the limit, with many
// rows the arithmetic.

#include "interface.hpp"
#include "linear_in_int8.hpp"
#include "linear_in_tiles.hpp"
#include "linear_in_vectors.hpp"

#include <string>
#include <vector>

namespace {

// Which instructions multiply. All that can be chosen from in vectors give the same bits, so that a row's result depends
// on no other row; tiles round differently, and multiply any number of rows or none.
struct Paths {
    bool tiles = true, few_in_pairs = true, many_in_pairs = true;
};

Paths chosen_paths;

#if defined(KVLAB_TILES)
constexpr int INT8_TILE_ROWS = 5;  // in integers, fewer are as fast in vectors, one and two 5 % faster

template <class Weight>
bool in_tiles(int inputs) {
    return chosen_paths.tiles && inputs % STEP_INPUTS<Weight> == 0 && has_tiles();
}
#endif

// Whether a product with so many rows is multiplied in tiles. Of integers vectors give the same bits, and the rows decide.
bool is_in_tiles(const LinearWeight& weight, int rows) {
#if defined(KVLAB_TILES)
    if (weight.format == WEIGHT_INT8_W8A8) return rows >= INT8_TILE_ROWS && in_tiles<Int8Quads>(weight.inputs);
    return weight.element_bytes == 2 && in_tiles<BFloat16>(weight.inputs);
#else
    return false;
#endif
}

// The largest output of each row, over the results of all threads: `find` takes [threads, rows] keys to fill.
template <class Find>
void largest(int rows, int threads, float* values, int64_t* indices, Find find) {
    std::vector<uint64_t> best(size_t(threads) * rows);
    find(best.data());
    for (int row = 0; row < rows; ++row) {
        uint64_t most = 0;
        for (int thread = 0; thread < threads; ++thread) most = std::max(most, best[size_t(thread) * rows + row]);
        values[row] = number_of(most);
        indices[row] = index_of(most);
    }
}

// `best`: null, or what is wanted instead of outputs, see linear_in_vectors.hpp.
void linear(const ProductOf<float>& product, const float* x, int64_t x_stride, int inputs, int threads,
            uint64_t* best = nullptr) {
    if (product.rows) linear_in_vectors<Float32, AsFloats>(product, x, x_stride, inputs, threads, best);
}

template <class Weight>
void linear(const Product& product, const uint16_t* x, int64_t x_stride, int inputs, int threads, uint64_t* best = nullptr) {
    if (product.rows == 0) return;
#if defined(KVLAB_TILES)
    if (in_tiles<Weight>(inputs)) return linear_in_tiles<Weight>(product, x, x_stride, inputs, threads, best);
#endif
#if defined(KVLAB_PAIRS)
    const bool pairs = product.rows <= FEW_ROWS ? chosen_paths.few_in_pairs : chosen_paths.many_in_pairs;
    if (pairs) return linear_in_vectors<Weight, InPairs>(product, x, x_stride, inputs, threads, best);
#endif
    linear_in_vectors<Weight, AsFloats>(product, x, x_stride, inputs, threads, best);
}

// `work` for the weight's format: its argument is a BFloat16, Int8 or Compact. In vectors, products in integers go
// another way.
template <class Work>
void in_format(const LinearWeight& weight, Work work) {
    if (weight.format == WEIGHT_INT8) return work(Int8{});
#if defined(KVLAB_COMPACT)
    if (weight.format == WEIGHT_COMPACT) return work(Compact{});
#endif
    work(BFloat16{});
}

template <class Element>
ProductOf<Element> product_of(const LinearWeight& weight, int rows, void* out, bool out_in_float32 = false) {
    ProductOf<Element> product{static_cast<const char*>(weight.packed), weight.scales,
                               static_cast<const Element*>(weight.bias), static_cast<Element*>(out), rows,
                               weight.outputs, (weight.inputs + 1) / 2};
    product.out_in_float32 = out_in_float32;
    return product;
}

void multiply(const Product& product, const LinearWeight& weight, const void* x, int64_t x_stride, int threads) {
    const auto* from = static_cast<const uint16_t*>(x);
    if (weight.format == WEIGHT_INT8_W8A8) {
#if defined(KVLAB_TILES)
        if (is_in_tiles(weight, product.rows))
            return linear_in_tiles<Int8Quads>(product, from, x_stride, weight.inputs, threads);
#endif
        return linear_in_int8(product, from, x_stride, weight.inputs, threads);
    }
    in_format(weight, [&](auto format) { linear<decltype(format)>(product, from, x_stride, weight.inputs, threads); });
}

}  // namespace

// Choose the instructions of all products that begin later: tiles, where the process may use them and the inputs are whole
// tiles; else pairs of bfloat16, for up to FEW_ROWS rows and for more, where the processor has them; else float32. Not to
// be called while a product runs.
extern "C" void kvlab_choose_paths(int tiles, int few_in_pairs, int many_in_pairs) {
    chosen_paths = {tiles != 0, few_in_pairs != 0, many_in_pairs != 0};
}

// Whether products with this weight can read x in tiles, see tiles.hpp.
extern "C" int kvlab_multiplies_in_tiles(const LinearWeight* weight) {
    return weight->format != WEIGHT_INT8_W8A8 && is_in_tiles(*weight, 1);
}

// The instructions of products in integers: of few rows, and of many if there are others for them.
extern "C" const char* kvlab_int8_path() {
#if defined(KVLAB_TILES)
    static const std::string both = std::string(INT8_NAME) + ", amx";
    if (in_tiles<Int8Quads>(0)) return both.c_str();
#endif
    return INT8_NAME;
}

// out [rows, outputs] = x [rows, inputs] W^T + bias, in the type of x or in float32. `x_stride`: elements between rows of
// x, or IN_TILES.
extern "C" void kvlab_linear(const void* x, int64_t x_stride, int rows, const LinearWeight* weight, void* out,
                             int out_in_float32, int threads) {
    if (weight->element_bytes == 4)
        linear(product_of<float>(*weight, rows, out), static_cast<const float*>(x), x_stride, weight->inputs, threads);
    else
        multiply(product_of<uint16_t>(*weight, rows, out, out_in_float32 != 0), *weight, x, x_stride, threads);
}

// kvlab_linear and then kvlab_gated, with the same result to the last bit: the first half of the outputs are gates of the
// second, and out is [rows, outputs / 2]. With tiles this is one pass; else `wide` [rows, outputs] holds the product in
// between. x and out may be in tiles if there are tiles for this number of inputs and out has whole tiles.
extern "C" void kvlab_linear_gated(const void* x, int64_t x_stride, int rows, const LinearWeight* weight, int gelu,
                                   void* wide, void* out, int out_in_tiles, int threads) {
    if (!is_in_tiles(*weight, rows) || weight->outputs % (2 * LANES) != 0) {
        kvlab_linear(x, x_stride, rows, weight, wide, false, threads);
        return kvlab_gated(wide, rows, weight->outputs / 2, gelu, out, weight->element_bytes, threads);
    }
    Product product = product_of<uint16_t>(*weight, rows, out);
    product.gate = gelu ? Gate::GELU : Gate::SILU;
    product.out_in_tiles = out_in_tiles != 0;
    multiply(product, *weight, x, x_stride, threads);
}

// kvlab_linear in float32 and then kvlab_topk with count 1, without storing the product: values and indices [rows].
// Returns 0, with nothing done, where products are in integers but not in tiles.
extern "C" int kvlab_linear_top1(const void* x, int64_t x_stride, int rows, const LinearWeight* weight, float* values,
                                 int64_t* indices, int threads) {
    if (weight->format == WEIGHT_INT8_W8A8 && !is_in_tiles(*weight, rows)) return 0;
    largest(rows, threads, values, indices, [&](uint64_t* best) {
        if (weight->element_bytes == 4) {
            const auto product = product_of<float>(*weight, rows, nullptr);
            return linear(product, static_cast<const float*>(x), x_stride, weight->inputs, threads, best);
        }
        const Product product = product_of<uint16_t>(*weight, rows, nullptr);
        const auto* from = static_cast<const uint16_t*>(x);
#if defined(KVLAB_TILES)
        if (weight->format == WEIGHT_INT8_W8A8)
            return linear_in_tiles<Int8Quads>(product, from, x_stride, weight->inputs, threads, best);
#endif
        in_format(*weight, [&](auto format) {
            linear<decltype(format)>(product, from, x_stride, weight->inputs, threads, best);
        });
    });
    return 1;
}
