// The operations for AVX2.
//
// The standard headers come before the instruction set: what they define inline is shared by the whole library.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#pragma GCC target("avx2,fma")
#define PAGEMILL_ISA avx2

#include "attention.h"
#include "glue.h"
#include "int8.h"
#include "kv_blocks.h"
#include "linear.h"
#include "sampling.h"
