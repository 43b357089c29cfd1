// AVX2, FMA and F16C. Compiled with -march=x86-64-v3.
#define TVM_FLASHINFER_ISA v3
#define TVM_FLASHINFER_ISA_NAME "x86-64-v3"
#include "table.h"
