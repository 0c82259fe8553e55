// What an operation is called with: plain pointers, so that the code of each instruction set needs no header of torch.
#pragma once

#include <cstddef>
#include <cstdint>

// Products of 16-bit queries with 8-bit keys are summed up in 32 bits.
constexpr int kLargestInt8Head = 512;

struct AttentionCall {
  uint16_t* out;          // [num_tokens, num_kv_heads * group, head_dim] bfloat16
  const uint16_t* query;  // the same shape, a token every `query_stride`
  ptrdiff_t query_stride;
  const void* key;           // one layer's blocks, see kv_blocks.h: bfloat16, or int8 where there are scales
  const void* value;
  const float* key_scales;   // [num_blocks, num_kv_heads, block_size], or null
  const float* value_scales;
  const int32_t* block_tables;  // [num_sequences, max_blocks]
  const int32_t* items;         // [num_items, 3]: first part, parts, keys that these share (a multiple of 64)
  const int32_t* parts;         // [num_parts, 4]: sequence, first row, queries, position of the first
  const float* sinks;           // [num_heads], or null
  int num_items, max_blocks;
  int max_rows;      // of an item: its queries times `group`
  int num_segments;  // of the longest context, where each is to be an item of its own; else 1
  int num_kv_heads, group, block_size, head_dim;
  int window;  // 0: none
  float scale;
  float softcap;  // 0: none
};

struct WriteCall {
  const uint16_t* key;  // [num_tokens, num_kv_heads, head_dim] bfloat16, a token every `key_stride`
  const uint16_t* value;
  ptrdiff_t key_stride, value_stride;
  const int64_t* slots;  // [num_tokens]; -1 writes nothing
  void* key_cache;     // one layer's blocks, see kv_blocks.h: bfloat16, or int8 where there are scales
  void* value_cache;
  float* key_scales;   // [num_blocks, num_kv_heads, block_size], or null
  float* value_scales;
  int64_t num_tokens;
  int num_kv_heads, block_size, head_dim;
};

struct NormCall {
  const uint16_t* x;  // [rows, size] bfloat16, a row every `x_stride`
  ptrdiff_t x_stride;
  const uint16_t* residual;  // [rows, size], or null
  uint16_t* sum;             // x + residual, where there is one
  const uint16_t* weight;    // [size], or null where it is wide
  const float* wide_weight;
  uint16_t* out;
  int64_t rows;
  ptrdiff_t size;
  float eps;
  bool rounds_first;
};

struct RotaryCall {
  const uint16_t* x;  // [num_tokens, num_heads, head_dim] bfloat16, a token every `x_stride`
  ptrdiff_t x_stride;
  const float* cos;  // [num_tokens, half]
  const float* sin;
  uint16_t* out;
  int64_t num_tokens;
  int num_heads, head_dim, half;
};

// One product of queries, keys and values, to queries for attention, and keys and values in their blocks.
struct QkvCall {
  const uint16_t* qkv;  // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] bfloat16
  ptrdiff_t stride;
  NormCall query_norm, key_norm;  // weight, size and kind alone; size 0: none
  const float* cos;               // [num_tokens, half], or null: nothing turns
  const float* sin;
  uint16_t* query;  // [num_tokens, num_heads, head_dim]
  WriteCall write;  // all but the key
  int num_heads, half;
};

enum class Activation { silu, gelu, gelu_tanh };

struct GateCall {
  const uint16_t* gate_up;  // [num_tokens, 2 * size] bfloat16
  uint16_t* out;
  int64_t num_tokens;
  ptrdiff_t size;
  Activation activation;
};

// [num_rows, size], bfloat16 or float32.
struct Logits {
  const uint16_t* narrow;  // null where they are wide
  const float* wide;
  int64_t num_rows;
  ptrdiff_t size;
};

struct LargestCall {
  Logits logits;
  float* values;  // [num_rows]
  int64_t* places;
};

struct GumbelCall {
  Logits logits;
  const float* temperatures;  // [num_rows]
  const int64_t* seeds;
  const int64_t* positions;
  int64_t* tokens;  // [num_rows]
  bool* sure;       // whether no other token comes so close that rounding decides
};

// What a product becomes. All but the first are of gate and up, and all but the first two activate it.
enum class OutputKind { plain, gate_up, silu, gelu, gelu_tanh };

struct Outputs {
  uint16_t* out;   // [rows, size] bfloat16; of the kind `gate_up` [rows, 2 * size], gate first
  ptrdiff_t size;
  OutputKind kind;
};

struct LinearCall {
  const uint16_t* x;  // [rows, in_size] bfloat16, a row every `x_stride`
  ptrdiff_t x_stride;
  const uint16_t* weight;  // packed, see linear.h
  const float* bias;       // [panels, 32], or null
  Outputs outputs;
  int64_t rows;
  ptrdiff_t in_size, panels;
};

struct Int8Call {
  const uint16_t* x;  // [rows, in_size] bfloat16, a row every `x_stride`
  ptrdiff_t x_stride;
  uint8_t* quantized;          // [rows, in_padded], written
  float* row_scales;           // [rows], written
  const int8_t* weight;        // packed, see int8.h
  const float* weight_scales;  // [panels, 32], as are the next two
  const int32_t* weight_sums;  // of each output's weights
  const float* bias;           // or null
  Outputs outputs;
  int64_t rows;
  ptrdiff_t in_size, in_padded, panels;
};
