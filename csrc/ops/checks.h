// Checks of arguments, shared by every op. A message names the function and the argument, and says
// what was got, what was expected and, where it is not plain, what to do.
#ifndef TVM_FLASHINFER_OPS_CHECKS_H_
#define TVM_FLASHINFER_OPS_CHECKS_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>
#include <utility>

#include "../kernels/types.h"

namespace tvm_flashinfer {
namespace ops {

using tvm::ffi::Optional;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

/*! \brief The parts in words, for messages. */
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

bool IsCPU(DLDevice device);
bool IsCUDA(DLDevice device);
std::string ShapeText(const TensorView& tensor);
std::string DTypeText(DLDataType dtype);
std::string DeviceText(DLDevice device);

/*!
 * \brief One call of the op `flashinfer.<op>`: checks its arguments, and counts it for
 * `flashinfer.call_counts` when it ends without an error.
 */
class Checker {
 public:
  /*! \param op A literal. */
  explicit Checker(const char* op) : op_(op) {}
  ~Checker();
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  /*! \brief The settings of the CPU kernels in the environment can be followed. */
  void CPUSettings() const;

  /*! \brief The device of the call: that of `tensor`, which must be CPU or CUDA. Calls that ask
   * for none, such as those that bind options, are not counted. */
  DLDevice Device(const char* name, const TensorView& tensor) const;
  void OnDevice(const char* name, const TensorView& tensor, DLDevice device) const;
  /*! \brief The tensor lies in memory that the host reads: CPU, or pinned by CUDA. */
  void OnHost(const char* name, const TensorView& tensor) const;

  /*! \brief float16, bfloat16 or float32. This and the following want addresses to fit the dtype.
   */
  kernels::DType FloatDType(const char* name, const TensorView& tensor) const;
  void DType(const char* name, const TensorView& tensor, DLDataType expected) const;
  /*! \brief Those of FloatDType, and float8_e4m3fn and float8_e5m2. */
  kernels::DType StoredDType(const char* name, const TensorView& tensor) const;
  /*! \brief Keys or values of a call: of q's dtype, or 8-bit. */
  kernels::DType KVDType(const char* name, const TensorView& tensor, DLDataType q_dtype) const;
  /*! \brief For functions with a plan: keys of q's dtype; for 8-bit ones it says what serves them.
   */
  void PlannedKVDType(const char* name, const TensorView& tensor, DLDataType q_dtype) const;
  /*! \brief A contiguous uint8 tensor that starts at a multiple of 16 bytes. */
  void Workspace(const char* name, const TensorView& tensor) const;

  /*! \brief The sizes are as expected; `meaning` spells them: "(n, num_qo_heads, head_dim)". */
  void Shape(const char* name, const TensorView& tensor, std::initializer_list<int64_t> expected,
             const char* meaning) const;
  /*! \brief Every size fits 32 bits, with which kernels count heads and dimensions. */
  void Sizes32(const char* name, const TensorView& tensor) const;
  void Rank(const char* name, const TensorView& tensor, int expected, const char* meaning) const;
  void Contiguous(const char* name, const TensorView& tensor) const;
  void UnitLastStride(const char* name, const TensorView& tensor) const;

  /*! \brief An int32 vector of `size` elements, contiguous. */
  void IndexVector(const char* name, const TensorView& tensor, int64_t size,
                   const char* meaning) const;
  /*! \brief A contiguous tensor of data of this dtype on this device. */
  void Data(const char* name, const TensorView& tensor, DLDevice device, DLDataType dtype,
            std::initializer_list<int64_t> expected, const char* meaning) const;

  /*!
   * \brief No byte of the output belongs to the other tensor: kernels write while they read. Gaps
   * between the elements of a strided tensor count as its bytes.
   */
  void NoOverlap(const char* output_name, const TensorView& output, const char* name,
                 const TensorView& tensor) const;
  /*! \brief The same for each of some tensors. */
  void NoOverlap(const char* output_name, const TensorView& output,
                 std::initializer_list<std::pair<const char*, TensorView>> tensors) const;

  void Positive(const char* name, int64_t value) const;
  void Finite(const char* name, double value) const;
  /*! \brief The tensor is there: a parameter of type Tensor takes None too. */
  void Defined(const char* name, const Tensor& tensor) const;
  /*! \brief A number that stands for false or true: 0 or 1. */
  void Flag(const char* name, int64_t value) const;
  void HeadRatio(int64_t num_qo_heads, int64_t num_kv_heads) const;

  /*! \brief Call a CPU kernel; what it refuses is a ValueError. */
  template <typename Kernel>
  void Run(const Kernel& kernel) const {
    try {
      kernel();
    } catch (const std::invalid_argument& error) {
      FailValue(error.what());
    }
  }

  [[noreturn]] void FailValue(const std::string& message) const;
  [[noreturn]] void FailType(const std::string& message) const;
  [[noreturn]] void FailRuntime(const std::string& message) const;

 private:
  /*! \brief Its address is a multiple of num_bytes, unless it is empty. */
  void Aligned(const char* name, const TensorView& tensor, int64_t num_bytes) const;

  enum class Counted { kNo, kCPU, kCUDA };
  const char* op_;
  mutable Counted counted_ = Counted::kNo;
};

constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kUInt8{kDLUInt, 8, 1};

/*! \brief Address of the first element: TVM passes views with a byte offset. */
template <typename T = void>
T* DataOf(const TensorView& tensor) {
  return reinterpret_cast<T*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

/*! \brief Stride of a dimension in elements; tensors that carry no strides are contiguous. */
int64_t StrideOf(const TensorView& tensor, int dim);

/*! \brief indptr starts at 0, never falls, and ends at most at `limit`, the size of `limit_name`.
 */
void CheckIndptr(const Checker& check, const char* name, const int32_t* indptr, int64_t batch_size,
                 int64_t limit, const char* limit_name);

/*! \brief Page indices lie in the pool, and last pages hold as many tokens as they may. */
void CheckPageTable(const Checker& check, const int32_t* indptr, const int32_t* indices,
                    const int32_t* last_page_len, int64_t batch_size, int64_t num_pages,
                    int64_t page_size);

/*! \brief Page indices lie in the pool. */
void CheckPageIndices(const Checker& check, const int32_t* indices, int64_t size,
                      int64_t num_pages);

/*! \brief Every position lies in the pool; -1 is let pass where rows may be left out. */
void CheckPositions(const Checker& check, const char* name, const int32_t* positions, int64_t size,
                    int64_t num_slots, bool allow_skip);

/*! \brief Whether TVM_FLASHINFER_CHECK=1 asks for the contents of device index tensors. */
bool CheckDeviceContents();

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_CHECKS_H_
