// The operations for AVX-512 with bfloat16 products.
//
// The standard headers come before the instruction set: what they define inline is shared by the whole library.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")
#define PAGEMILL_ISA avx512
#define PAGEMILL_AVX512
#include "attention.h"
#include "glue.h"
#include "int8.h"
#include "kv_blocks.h"
#include "linear.h"
#include "sampling.h"
