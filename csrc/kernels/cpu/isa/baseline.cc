// What any CPU of the architecture can run.
#define TVM_FLASHINFER_ISA baseline
#if defined(__x86_64__)
#define TVM_FLASHINFER_ISA_NAME "x86-64"
#else
#define TVM_FLASHINFER_ISA_NAME "generic"
#endif
#include "table.h"
