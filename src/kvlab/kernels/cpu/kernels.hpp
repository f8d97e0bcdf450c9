// The kernels that other native code calls. Whoever defines one includes this, so that the compiler compares.
#pragma once

#include <cstdint>

extern "C" {
void kvlab_rms_norm(const void* x, void* residual, const void* weight, float eps, int rows, int size, void* out,
                    int in_tiles, int element_bytes, int weight_bytes, int threads);
void kvlab_gated(const void* gate_up, int rows, int size, int gelu, void* out, int element_bytes, int threads);
void kvlab_rotate_and_store(const void* qkv, const void* q_weight, const void* k_weight, float eps,
                            const void* cosine, const void* sine, const int64_t* positions,
                            const int64_t* slot_mapping, int tokens, int num_heads, int num_kv_heads, int head_dim,
                            int block_size, void* q, void* keys, void* values, float* key_scales,
                            float* value_scales, int element_bytes, int weight_bytes, int threads);
void kvlab_linear(const uint16_t* x, int64_t x_stride, int rows, const void* packed, const float* scales,
                  const uint16_t* bias, int outputs, int inputs, uint16_t* out, int threads);
void kvlab_linear_gated(const uint16_t* x, int64_t x_stride, int rows, const void* packed, const float* scales,
                        const uint16_t* bias, int outputs, int inputs, int gelu, uint16_t* wide, uint16_t* out,
                        int out_in_tiles, int threads);
int kvlab_multiplies_in_tiles(int inputs);
#define ATTENTION_ARGUMENTS                                                                                          \
    void *out, const void *queries, const void *keys, const void *values, const float *key_scales,                   \
        const float *value_scales, const int32_t *block_tables, const int32_t *seq_lens, const int32_t *query_start, \
        int64_t query_stride, int table_width, int num_sequences, int num_heads, int num_kv_heads, int head_dim,     \
        int block_size, int window, float scale, float soft_cap, int out_in_tiles, int element_bytes, int threads
void kvlab_paged_attention(ATTENTION_ARGUMENTS);
void kvlab_paged_attention_int8(ATTENTION_ARGUMENTS);
}
