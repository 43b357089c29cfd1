// The two parts of the program. Each returns its largest difference from plain loops.
#ifndef EXAMPLES_CPP_EXAMPLE_H_
#define EXAMPLES_CPP_EXAMPLE_H_

#include <tvm/ffi/c_api.h>

namespace example {

double Decode(DLDevice device);

double KVCache(DLDevice device);

}  // namespace example

#endif  // EXAMPLES_CPP_EXAMPLE_H_
