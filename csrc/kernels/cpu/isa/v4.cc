// AVX-512 F, BW, CD, DQ and VL. Compiled with -march=x86-64-v4.
#define TVM_FLASHINFER_ISA v4
#define TVM_FLASHINFER_ISA_NAME "x86-64-v4"
#include "table.h"
