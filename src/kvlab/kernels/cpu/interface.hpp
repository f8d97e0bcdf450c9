// The interface of the library: the functions that Python and other native code call, and the structures that they
// pass. Every definition includes this file, so that the compiler compares it with its declaration here.
//
// Python has no header files. `kvlab_interface` therefore describes all of this at run time (interface.cpp), with the
// types, sizes and offsets that the compiler used. Python takes the functions' argument types from the description and
// compares the structures with its own copies (interface.py). So that nothing can be left out, the fields of a
// structure, and the names of functions and constants, are listed once, in a macro.
#pragma once

#include <cstdint>

#define KVLAB_CONSTANTS(CONSTANT)                                                                \
    CONSTANT(TILE_SIDE, 16)      /* rows of a tile, see tiles.hpp */                             \
    CONSTANT(MAX_HEAD_DIM, 512)  /* of kvlab_rotate_and_store */                                 \
    CONSTANT(FEW_ROWS, 8)        /* of kvlab_choose_paths */                                     \
    CONSTANT(WEIGHT_PLAIN, 0)    /* from here on: formats of a LinearWeight. Its elements */     \
    CONSTANT(WEIGHT_INT8, 1)     /* of bfloat16, with a scale for each output */                 \
    CONSTANT(WEIGHT_COMPACT, 2)  /* bfloat16 in 12 bits, see compact_weight.hpp */               \
    CONSTANT(WEIGHT_INT8_W8A8, 3) /* as INT8, and rows of x are rounded to int8, too: linear_in_int8.hpp */ \
    CONSTANT(INT8_PATH, 3)       /* of kvlab_multiply_in_registers: the fastest in integers */   \
    CONSTANT(PLAIN, 0)           /* from here on: formats of K and V, see kv_formats.hpp */      \
    CONSTANT(INT8, 1)                                                                            \
    CONSTANT(FP8_E4M3, 2)                                                                        \
    CONSTANT(FP8_E5M2, 3)                                                                        \
    CONSTANT(INT4, 4)                                                                            \
    CONSTANT(INPUT_NORM, 0)      /* from here on: the kinds of LayerPart, and what `at` is then */ \
    CONSTANT(RESIDUAL_NORM, 1)   /* Norm, as for the other two norms */                          \
    CONSTANT(OUTPUT_NORM, 2)                                                                     \
    CONSTANT(ATTENTION, 3)       /* AttentionPart */                                             \
    CONSTANT(MLP, 4)             /* MlpPart */

// An RMSNorm's weight: [hidden] or [head_dim], null where there is no norm.
#define KVLAB_NORM(FIELD)      \
    FIELD(const void*, weight) \
    FIELD(float, eps)          \
    FIELD(int, weight_bytes) /* of an element: 2 for bfloat16, 4 for float32 */

// A weight [outputs, inputs] as kvlab_pack_linear or another function for its format left it.
#define KVLAB_LINEAR_WEIGHT(FIELD)                                           \
    FIELD(const void*, packed)                                               \
    FIELD(const float*, scales)  /* [outputs] of a weight in int8, or null */ \
    FIELD(const void*, bias)     /* [outputs] or null */                     \
    FIELD(int, outputs)                                                      \
    FIELD(int, inputs)                                                       \
    FIELD(int, format)                                                       \
    FIELD(int, element_bytes) /* of x, bias and outputs: 2 for bfloat16, 4 for float32 */

#define KVLAB_ATTENTION_PART(FIELD)                                                              \
    FIELD(LinearWeight, qkv)                                                                     \
    FIELD(LinearWeight, out)                                                                     \
    FIELD(Norm, query_norm) /* both norms or none */                                             \
    FIELD(Norm, key_norm)                                                                        \
    FIELD(const void*, cosine) /* of all positions, [positions, head_dim] */                     \
    FIELD(const void*, sine)                                                                     \
    FIELD(int, layer) /* of the cache */                                                         \
    FIELD(int, num_heads)                                                                        \
    FIELD(int, num_kv_heads)                                                                     \
    FIELD(int, head_dim)                                                                         \
    FIELD(int, window)     /* tokens that a token sees, itself included; 0: all */               \
    FIELD(float, scale)                                                                          \
    FIELD(float, soft_cap) /* 0: none */

#define KVLAB_MLP_PART(FIELD)                                        \
    FIELD(LinearWeight, gate_up) /* the gate's outputs, then the others */ \
    FIELD(LinearWeight, down)                                        \
    FIELD(int, gelu) /* the gate's activation: gelu in its tanh form, else silu */

// One operation of a decoder layer.
#define KVLAB_LAYER_PART(FIELD) \
    FIELD(int, kind)            \
    FIELD(const void*, at)

// What one step works on.
#define KVLAB_LAYERS_STEP(FIELD)                                                                               \
    FIELD(void*, keys) /* of all layers of the cache */                                                        \
    FIELD(void*, values)                                                                                       \
    FIELD(float*, key_scales) /* of formats that have them apart, or null */                                   \
    FIELD(float*, value_scales)                                                                                \
    FIELD(int64_t, rows) /* of [head_dim] in one layer of the cache */                                         \
    FIELD(const int64_t*, positions)                                                                           \
    FIELD(const int64_t*, slot_mapping) /* [groups, tokens] */                                                 \
    FIELD(const int32_t*, block_tables) /* [groups, num_sequences, table_width] */                             \
    FIELD(const int32_t*, places) /* each layer's group, and its layer of the cache; null: one group, in order */ \
    FIELD(const int32_t*, seq_lens)                                                                            \
    FIELD(const int32_t*, query_start)                                                                         \
    FIELD(const int64_t*, sampled) /* [num_sampled]: the rows that are wanted behind the last attention */     \
    FIELD(float*, residual) /* [tokens, hidden] */                                                             \
    FIELD(void*, delta)    /* [tokens, hidden]: what a part gives */                                           \
    FIELD(void*, normed)   /* [tokens, hidden]: what a part takes; room for whole tiles of tokens */           \
    FIELD(void*, scratch)  /* of attention: [tokens, qkv] and the queries twice; of an MLP: [tokens, gate, \
                                  up] and the gated; whichever is wider, room for whole tiles of tokens */     \
    FIELD(double*, times)      /* null, or room for the time at which each timed operation begins and the last \
                                  one ends, in seconds */                                                      \
    FIELD(float*, sums)       /* [tokens, hidden], of a model that is divided among processes, or null */      \
    FIELD(const void*, sum)   /* int (int64_t count): to `delta` what all processes have in `sums`, 0 if so */ \
    FIELD(int, tokens)                                                                                         \
    FIELD(int, num_sampled) /* `tokens`, or fewer by a tile at least */                                        \
    FIELD(int, hidden)                                                                                         \
    FIELD(int, num_sequences)                                                                                  \
    FIELD(int, table_width)                                                                                    \
    FIELD(int, block_size)                                                                                     \
    FIELD(int, key_format) /* of K and V: see kv_formats.hpp */                                                \
    FIELD(int, value_format)                                                                                   \
    FIELD(int, element_bytes) /* of all other tensors, and of K and V that are plain: 2 for bfloat16, 4 for float32 */ \
    FIELD(int, threads)

#define KVLAB_STRUCTURES(STRUCTURE)                \
    STRUCTURE(Norm, KVLAB_NORM)                    \
    STRUCTURE(LinearWeight, KVLAB_LINEAR_WEIGHT)   \
    STRUCTURE(AttentionPart, KVLAB_ATTENTION_PART) \
    STRUCTURE(MlpPart, KVLAB_MLP_PART)             \
    STRUCTURE(LayerPart, KVLAB_LAYER_PART)         \
    STRUCTURE(LayersStep, KVLAB_LAYERS_STEP)

// The library of attention_formats.cpp has one function; it is compiled with the same structures and constants.
#if defined(KVLAB_FORMATS)
#define KVLAB_FUNCTIONS(FUNCTION) FUNCTION(kvlab_format_readers)
#else
#define KVLAB_FUNCTIONS(FUNCTION)       \
    FUNCTION(kvlab_rms_norm)            \
    FUNCTION(kvlab_gated)               \
    FUNCTION(kvlab_rotate_and_store)    \
    FUNCTION(kvlab_packed_linear_bytes) \
    FUNCTION(kvlab_pack_linear)         \
    FUNCTION(kvlab_pack_linear_int8)    \
    FUNCTION(kvlab_pack_linear_compact) \
    FUNCTION(kvlab_packed_rows)         \
    FUNCTION(kvlab_linear)              \
    FUNCTION(kvlab_linear_gated)        \
    FUNCTION(kvlab_linear_top1)         \
    FUNCTION(kvlab_multiplies_in_tiles) \
    FUNCTION(kvlab_choose_paths)        \
    FUNCTION(kvlab_paths)               \
    FUNCTION(kvlab_int8_path)           \
    FUNCTION(kvlab_multiply_in_registers) \
    FUNCTION(kvlab_topk)                \
    FUNCTION(kvlab_use_formats)         \
    FUNCTION(kvlab_paged_attention)     \
    FUNCTION(kvlab_layers)              \
    FUNCTION(kvlab_instruction_set)
#endif

#define KVLAB_DEFINE_CONSTANT(name, value) constexpr int name = value;
KVLAB_CONSTANTS(KVLAB_DEFINE_CONSTANT)

#define KVLAB_DEFINE_FIELD(type, name) type name;
#define KVLAB_DEFINE_STRUCTURE(name, fields) \
    struct name {                            \
        fields(KVLAB_DEFINE_FIELD)           \
    };
KVLAB_STRUCTURES(KVLAB_DEFINE_STRUCTURE)

// Nothing else of a library is visible outside it (-fvisibility=hidden): a process may have libraries for several
// instruction sets, and the loader gives all of them one copy of a variable that several of them define.
#pragma GCC visibility push(default)
extern "C" {
void kvlab_rms_norm(const void* x, float* residual, const void* weight, float eps, int rows, int size, void* out,
                    int in_tiles, int element_bytes, int weight_bytes, int threads);
void kvlab_gated(const void* gate_up, int rows, int size, int gelu, void* out, int element_bytes, int threads);
void kvlab_rotate_and_store(void* qkv, const void* q_weight, const void* k_weight, float eps,
                            const void* cosine, const void* sine, const int64_t* positions,
                            const int64_t* slot_mapping, int tokens, int num_heads, int num_kv_heads, int head_dim,
                            int block_size, void* q, void* keys, void* values, float* key_scales,
                            float* value_scales, int key_format, int value_format, int element_bytes, int weight_bytes, int threads);
int64_t kvlab_packed_linear_bytes(int outputs, int inputs, int format, int element_bytes);
void kvlab_pack_linear(const void* weight, int outputs, int inputs, void* packed, int element_bytes, int threads);
void kvlab_pack_linear_int8(const uint16_t* weight, int outputs, int inputs, int format, void* packed, float* scales,
                            int threads);
int kvlab_pack_linear_compact(const uint16_t* weight, int outputs, int inputs, void* packed, int threads);
void kvlab_packed_rows(const LinearWeight* weight, const int64_t* ids, int count, void* out, int threads);
void kvlab_linear(const void* x, int64_t x_stride, int rows, const LinearWeight* weight, void* out, int out_in_float32,
                  int threads);
void kvlab_linear_gated(const void* x, int64_t x_stride, int rows, const LinearWeight* weight, int gelu, void* wide,
                        void* out, int out_in_tiles, int threads);
int kvlab_linear_top1(const void* x, int64_t x_stride, int rows, const LinearWeight* weight, float* values,
                      int64_t* indices, int threads);
int kvlab_multiplies_in_tiles(const LinearWeight* weight);
void kvlab_choose_paths(int tiles, int few_in_pairs, int many_in_pairs);
const char* kvlab_paths();
const char* kvlab_int8_path();
int64_t kvlab_multiply_in_registers(int path, int64_t rounds, int threads);
void kvlab_topk(const void* x, int64_t stride, int rows, int64_t size, int count, void* values, int64_t* indices,
                int element_bytes, int threads);
void kvlab_use_formats(const void* readers);
const void* kvlab_format_readers();
void kvlab_paged_attention(void* out, const void* queries, const void* keys, const void* values,
                           const float* key_scales, const float* value_scales, const int32_t* block_tables,
                           const int32_t* seq_lens, const int32_t* query_start, int64_t query_stride, int table_width,
                           int num_sequences, int num_heads, int num_kv_heads, int head_dim, int block_size, int window,
                           float scale, float soft_cap, int key_format, int value_format, int out_in_tiles,
                           int element_bytes, int threads);
void kvlab_layers(const LayerPart* parts, int count, const LayersStep* step);
const char* kvlab_instruction_set();
const char* kvlab_interface();
}
#pragma GCC visibility pop
