// The operations as torch sees them, and which instruction set serves them here.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "shapes.h"

// name, and what it is called with
#define OPERATIONS(OPERATION) \
  OPERATION(paged_attention, AttentionCall) \
  OPERATION(write_kv, WriteCall) \
  OPERATION(rms_norm, NormCall) \
  OPERATION(rotary_embedding, RotaryCall) \
  OPERATION(write_qkv, QkvCall) \
  OPERATION(activate_and_mul, GateCall) \
  OPERATION(largest, LargestCall) \
  OPERATION(gumbel_argmax, GumbelCall) \
  OPERATION(linear, LinearCall) \
  OPERATION(int8_linear, Int8Call)

#define DECLARE(name, Call) void name(const Call&);
namespace avx512 {
OPERATIONS(DECLARE)
}
namespace avx2 {
OPERATIONS(DECLARE)
}

namespace {

using at::Tensor;

#define MEMBER(name, Call) void (*name)(const Call&);
struct Operations {
  const char* instruction_set;
  OPERATIONS(MEMBER)
};

#define OF_AVX512(name, Call) avx512::name,
#define OF_AVX2(name, Call) avx2::name,
const Operations kAvx512{"avx512_bf16", OPERATIONS(OF_AVX512)};
const Operations kAvx2{"avx2", OPERATIONS(OF_AVX2)};

// PAGEMILL_CPU_ISA=avx2 takes the older one where both are there.
const Operations& operations() {
  static const Operations* chosen = [] {
    const char* wanted = std::getenv("PAGEMILL_CPU_ISA");
    bool newest = !wanted || std::string(wanted) != "avx2";
    if (newest && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
      return &kAvx512;
    TORCH_CHECK(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"), "this processor has no AVX2");
    return &kAvx2;
  }();
  return *chosen;
}

const uint16_t* bits(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "bfloat16 is wanted, not ", x.scalar_type());
  return static_cast<const uint16_t*>(x.const_data_ptr());
}

uint16_t* mutable_bits(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 && x.is_contiguous(), "contiguous bfloat16 is wanted");
  return static_cast<uint16_t*>(x.mutable_data_ptr());
}

// A token's heads lie side by side; tokens may lie apart, as the parts of a fused projection do.
ptrdiff_t token_stride(const Tensor& x) {
  TORCH_CHECK(x.dim() == 3 && x.stride(2) == 1 && x.stride(1) == x.size(2), "heads must be contiguous in a token");
  return x.stride(0);
}

std::string instruction_set() { return operations().instruction_set; }

// One layer's keys or values are bfloat16, or int8 with scales.
const void* blocks_of(const Tensor& cache, const std::optional<Tensor>& scales) {
  TORCH_CHECK(cache.is_contiguous(), "blocks must be contiguous");
  TORCH_CHECK(cache.scalar_type() == (scales ? at::kChar : at::kBFloat16), "bfloat16, or int8 with scales, is wanted");
  return cache.const_data_ptr();
}

const float* scales_of(const Tensor& cache, const std::optional<Tensor>& scales) {
  if (!scales) return nullptr;
  TORCH_CHECK(cache.size(3) <= kLargestInt8Head, "int8 heads of at most ", kLargestInt8Head, " are served");
  TORCH_CHECK(scales->is_contiguous() && scales->sizes() == cache.sizes().slice(0, 3), "a scale for each key or value");
  return scales->const_data_ptr<float>();
}

Tensor paged_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                       const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales,
                       const Tensor& block_tables, const Tensor& items, const Tensor& parts, int64_t max_queries,
                       int64_t num_segments, int64_t window, double scale, double softcap,
                       const std::optional<Tensor>& sinks) {
  for (const Tensor* table : {&block_tables, &items, &parts})
    TORCH_CHECK(table->scalar_type() == at::kInt && table->is_contiguous(), "tables must be contiguous int32");
  TORCH_CHECK(items.size(1) == 3 && parts.size(1) == 4, "items: [n, 3], parts: [n, 4]");
  Tensor out = at::empty(query.sizes(), query.options());
  std::optional<Tensor> wide_sinks;
  if (sinks) wide_sinks = sinks->to(at::kFloat).contiguous();
  AttentionCall call{};
  call.out = mutable_bits(out);
  call.query = bits(query);
  call.query_stride = token_stride(query);
  call.key = blocks_of(key, key_scales);
  call.value = blocks_of(value, value_scales);
  call.key_scales = scales_of(key, key_scales);
  call.value_scales = scales_of(value, value_scales);
  call.block_tables = block_tables.const_data_ptr<int32_t>();
  call.items = items.const_data_ptr<int32_t>();
  call.parts = parts.const_data_ptr<int32_t>();
  call.sinks = wide_sinks ? wide_sinks->const_data_ptr<float>() : nullptr;
  call.num_items = int(items.size(0));
  call.num_segments = int(num_segments);
  call.max_blocks = int(block_tables.size(1));
  call.num_kv_heads = int(key.size(1));
  call.group = int(query.size(1) / key.size(1));
  call.block_size = int(key.size(2));
  call.head_dim = int(key.size(3));
  call.max_rows = int(max_queries) * call.group;
  call.window = int(window);
  call.scale = float(scale);
  call.softcap = float(softcap);
  operations().paged_attention(call);
  return out;
}

WriteCall write_call(const Tensor& key_cache, const Tensor& value_cache, const std::optional<Tensor>& key_scales,
                     const std::optional<Tensor>& value_scales, const Tensor& slots) {
  WriteCall call{};
  call.slots = slots.const_data_ptr<int64_t>();
  call.key_cache = const_cast<void*>(blocks_of(key_cache, key_scales));
  call.value_cache = const_cast<void*>(blocks_of(value_cache, value_scales));
  call.key_scales = const_cast<float*>(scales_of(key_cache, key_scales));
  call.value_scales = const_cast<float*>(scales_of(value_cache, value_scales));
  call.num_tokens = slots.numel();
  call.num_kv_heads = int(key_cache.size(1));
  call.block_size = int(key_cache.size(2));
  call.head_dim = int(key_cache.size(3));
  return call;
}

void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
              const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales,
              const Tensor& slots) {
  WriteCall call = write_call(key_cache, value_cache, key_scales, value_scales, slots);
  call.key = bits(key);
  call.value = bits(value);
  call.key_stride = token_stride(key);
  call.value_stride = token_stride(value);
  operations().write_kv(call);
}

NormCall norm_of(const Tensor& weight, double eps, bool rounds_first) {
  TORCH_CHECK(weight.is_contiguous(), "the weight must be contiguous");
  NormCall call{};
  call.size = weight.numel();
  if (weight.scalar_type() == at::kFloat)
    call.wide_weight = weight.const_data_ptr<float>();
  else
    call.weight = bits(weight);
  call.eps = float(eps);
  call.rounds_first = rounds_first;
  return call;
}

// Rows of the last dimension; all others are one.
NormCall norm_call(const Tensor& x, const Tensor& weight, double eps, bool rounds_first, const Tensor& out) {
  NormCall call = norm_of(weight, eps, rounds_first);
  TORCH_CHECK(x.size(-1) == call.size, "the weight is as long as a row");
  call.x = bits(x);
  call.rows = x.numel() / call.size;
  call.x_stride = call.size;
  call.out = mutable_bits(out);
  return call;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, bool rounds_first) {
  // The parts of a fused projection are rows that lie apart; no norm needs anything else.
  Tensor rows = x.is_contiguous() ? x : x.contiguous();
  Tensor out = at::empty(x.sizes(), x.options());
  operations().rms_norm(norm_call(rows, weight, eps, rounds_first, out));
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const Tensor& weight, double eps,
                                        bool rounds_first) {
  TORCH_CHECK(x.is_contiguous() && residual.is_contiguous(), "rows must be contiguous");
  Tensor out = at::empty(x.sizes(), x.options()), sum = at::empty(x.sizes(), x.options());
  NormCall call = norm_call(x, weight, eps, rounds_first, out);
  call.residual = bits(residual);
  call.sum = mutable_bits(sum);
  operations().rms_norm(call);
  return {out, sum};
}

Tensor rotary_embedding(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous(), "cos and sin must be contiguous");
  Tensor out = at::empty(x.sizes(), x.options());
  RotaryCall call{};
  call.x = bits(x);
  call.x_stride = token_stride(x);
  call.cos = cos.const_data_ptr<float>();
  call.sin = sin.const_data_ptr<float>();
  call.out = mutable_bits(out);
  call.num_tokens = x.size(0);
  call.num_heads = int(x.size(1));
  call.head_dim = int(x.size(2));
  call.half = int(cos.size(1));
  operations().rotary_embedding(call);
  return out;
}

Tensor write_qkv(const Tensor& qkv, const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm,
                 double eps, bool rounds_first, const std::optional<Tensor>& cos, const std::optional<Tensor>& sin,
                 const Tensor& key_cache, const Tensor& value_cache, const std::optional<Tensor>& key_scales,
                 const std::optional<Tensor>& value_scales, const Tensor& slots) {
  TORCH_CHECK(qkv.dim() == 2 && qkv.stride(1) == 1 && qkv.size(0) == slots.numel(), "qkv: a row for each slot");
  QkvCall call{};
  call.write = write_call(key_cache, value_cache, key_scales, value_scales, slots);
  const int64_t head_dim = call.write.head_dim, key_size = call.write.num_kv_heads * head_dim;
  const int64_t query_size = qkv.size(1) - 2 * key_size;
  TORCH_CHECK(query_size > 0 && query_size % head_dim == 0, "qkv: heads of the cache's size");
  call.qkv = bits(qkv);
  call.stride = qkv.stride(0);
  call.num_heads = int(query_size / head_dim);
  call.write.value = call.qkv + query_size + key_size;
  call.write.value_stride = call.stride;
  if (query_norm) call.query_norm = norm_of(*query_norm, eps, rounds_first);
  if (key_norm) call.key_norm = norm_of(*key_norm, eps, rounds_first);
  if (cos && sin) {
    TORCH_CHECK(cos->is_contiguous() && sin->is_contiguous(), "cos and sin must be contiguous");
    call.cos = cos->const_data_ptr<float>();
    call.sin = sin->const_data_ptr<float>();
    call.half = int(cos->size(1));
  }
  Tensor query = at::empty({qkv.size(0), call.num_heads, head_dim}, qkv.options());
  call.query = mutable_bits(query);
  operations().write_qkv(call);
  return query;
}

Tensor activate_and_mul(const Tensor& gate_up, Activation activation) {
  TORCH_CHECK(gate_up.is_contiguous(), "rows must be contiguous");
  GateCall call{};
  call.activation = activation;
  call.num_tokens = gate_up.size(0);
  call.size = gate_up.size(1) / 2;
  Tensor out = at::empty({call.num_tokens, call.size}, gate_up.options());
  call.gate_up = bits(gate_up);
  call.out = mutable_bits(out);
  operations().activate_and_mul(call);
  return out;
}

OutputKind output_kind(const std::string& name) {
  if (name == "plain") return OutputKind::plain;
  if (name == "gate_up") return OutputKind::gate_up;
  if (name == "silu") return OutputKind::silu;
  if (name == "gelu") return OutputKind::gelu;
  TORCH_CHECK(name == "gelu_tanh", "no kind of outputs: ", name);
  return OutputKind::gelu_tanh;
}

// An empty tensor for a product's rows, and how they are stored in it.
std::pair<Tensor, Outputs> outputs_of(const Tensor& x, const Tensor& weight, int64_t size, const std::string& name) {
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "rows must be contiguous");
  TORCH_CHECK(weight.is_contiguous() && weight.dim() == 5, "the weight must be packed");
  const OutputKind kind = output_kind(name);
  const int64_t in_panel = kind == OutputKind::plain ? 32 : 16;
  TORCH_CHECK(weight.size(0) == (size + in_panel - 1) / in_panel, "the weight has no ", size, " outputs");
  Tensor out = at::empty({x.size(0), kind == OutputKind::gate_up ? 2 * size : size}, x.options());
  return {out, {mutable_bits(out), ptrdiff_t(size), kind}};
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t size,
              const std::string& kind) {
  auto [out, outputs] = outputs_of(x, weight, size, kind);
  TORCH_CHECK(x.size(1) == 2 * weight.size(1), "rows of ", 2 * weight.size(1), " are wanted, not of ", x.size(1));
  LinearCall call{};
  call.x = bits(x);
  call.x_stride = x.stride(0);
  call.weight = bits(weight);
  call.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  call.rows = x.size(0);
  call.in_size = x.size(1);
  call.panels = weight.size(0);
  call.outputs = outputs;
  operations().linear(call);
  return out;
}

Tensor int8_linear(const Tensor& x, const Tensor& weight, const Tensor& weight_scales, const Tensor& weight_sums,
                   const std::optional<Tensor>& bias, int64_t size, const std::string& kind) {
  auto [out, outputs] = outputs_of(x, weight, size, kind);
  Int8Call call{};
  call.x = bits(x);
  call.x_stride = x.stride(0);
  call.rows = x.size(0);
  call.in_size = x.size(1);
  call.in_padded = weight.size(1) * weight.size(4);
  call.panels = weight.size(0);
  Tensor quantized = at::empty({call.rows, call.in_padded}, x.options().dtype(at::kByte));
  Tensor row_scales = at::empty({call.rows}, x.options().dtype(at::kFloat));
  call.quantized = quantized.mutable_data_ptr<uint8_t>();
  call.row_scales = row_scales.mutable_data_ptr<float>();
  call.weight = weight.const_data_ptr<int8_t>();
  call.weight_scales = weight_scales.const_data_ptr<float>();
  call.weight_sums = weight_sums.const_data_ptr<int32_t>();
  call.bias = bias ? bias->const_data_ptr<float>() : nullptr;
  call.outputs = outputs;
  operations().int8_linear(call);
  return out;
}

Tensor silu_and_mul(const Tensor& gate_up) { return activate_and_mul(gate_up, Activation::silu); }
Tensor gelu_and_mul(const Tensor& gate_up) { return activate_and_mul(gate_up, Activation::gelu); }
Tensor gelu_tanh_and_mul(const Tensor& gate_up) { return activate_and_mul(gate_up, Activation::gelu_tanh); }

Logits logits_of(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.is_contiguous(), "logits: contiguous rows");
  Logits call{nullptr, nullptr, logits.size(0), ptrdiff_t(logits.size(1))};
  if (logits.scalar_type() == at::kFloat)
    call.wide = logits.const_data_ptr<float>();
  else
    call.narrow = bits(logits);
  return call;
}

std::tuple<Tensor, Tensor> largest(const Tensor& logits) {
  const Logits rows = logits_of(logits);
  Tensor values = at::empty({rows.num_rows}, logits.options().dtype(at::kFloat));
  Tensor places = at::empty({rows.num_rows}, logits.options().dtype(at::kLong));
  operations().largest({rows, values.mutable_data_ptr<float>(), places.mutable_data_ptr<int64_t>()});
  return {values, places};
}

std::tuple<Tensor, Tensor> gumbel_argmax(const Tensor& logits, const Tensor& temperatures, const Tensor& seeds,
                                         const Tensor& positions) {
  const Logits rows = logits_of(logits);
  TORCH_CHECK(temperatures.is_contiguous() && seeds.is_contiguous() && positions.is_contiguous(), "one for each row");
  Tensor tokens = at::empty({rows.num_rows}, logits.options().dtype(at::kLong));
  Tensor sure = at::empty({rows.num_rows}, logits.options().dtype(at::kBool));
  operations().gumbel_argmax({rows, temperatures.const_data_ptr<float>(), seeds.const_data_ptr<int64_t>(),
                              positions.const_data_ptr<int64_t>(), tokens.mutable_data_ptr<int64_t>(),
                              sure.mutable_data_ptr<bool>()});
  return {tokens, sure};
}

}  // namespace

TORCH_LIBRARY(pagemill_cpu, library) {
  library.def("instruction_set() -> str", instruction_set);
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? key_scales, Tensor? value_scales, "
      "Tensor block_tables, Tensor items, Tensor parts, int max_queries, int num_segments, int window, float scale, float softcap, Tensor? sinks) -> Tensor",
      paged_attention);
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!)? key_scales, "
      "Tensor(d!)? value_scales, Tensor slots) -> ()",
      write_kv);
  library.def("rms_norm(Tensor x, Tensor weight, float eps, bool rounds_first) -> Tensor", rms_norm);
  library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool rounds_first) -> (Tensor, Tensor)",
              add_rms_norm);
  library.def("rotary_embedding(Tensor x, Tensor cos, Tensor sin) -> Tensor", rotary_embedding);
  library.def(
      "write_qkv(Tensor qkv, Tensor? query_norm, Tensor? key_norm, float eps, bool rounds_first, Tensor? cos, "
      "Tensor? sin, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!)? key_scales, Tensor(d!)? value_scales, "
      "Tensor slots) -> Tensor",
      write_qkv);
  library.def("silu_and_mul(Tensor gate_up) -> Tensor", silu_and_mul);
  library.def("linear(Tensor x, Tensor weight, Tensor? bias, int size, str kind) -> Tensor", linear);
  library.def(
      "int8_linear(Tensor x, Tensor weight, Tensor weight_scales, Tensor weight_sums, Tensor? bias, int size, "
      "str kind) -> Tensor",
      int8_linear);
  library.def("gelu_and_mul(Tensor gate_up) -> Tensor", gelu_and_mul);
  library.def("gelu_tanh_and_mul(Tensor gate_up) -> Tensor", gelu_tanh_and_mul);
  library.def("largest(Tensor logits) -> (Tensor, Tensor)", largest);
  library.def("gumbel_argmax(Tensor logits, Tensor temperatures, Tensor seeds, Tensor positions) -> (Tensor, Tensor)",
              gumbel_argmax);
}
