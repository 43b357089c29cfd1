// Where plans put their index arrays.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_PLAN_BUFFER_H_
#define TVM_FLASHINFER_KERNELS_CUDA_PLAN_BUFFER_H_

#include <cuda_runtime.h>

#include <sstream>
#include <stdexcept>
#include <vector>

#include "kernel_table.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*!
 * \brief Collects the index arrays of one plan and copies them to the int workspace at once.
 *
 * A plan may be made while the kernels of earlier ones still read the same workspace: TVM's cache
 * plans on its copy stream, which does not wait for the compute stream. So plans go round the
 * workspace as round a ring, and one is overwritten only after as many bytes as the workspace holds
 * were planned since. All units go by one cursor, wherever they were linked: plans of decode and of
 * prefill may share a workspace. The copy starts from pageable memory, which the driver reads
 * before the call returns: no host buffer has to outlive it.
 */
class PlanBuffer {
 public:
  /*! \brief Append `values`; the result is the offset, relative until Commit. */
  template <typename T = int32_t>
  int64_t Add(const std::vector<T>& values) {
    static_assert(sizeof(T) % sizeof(int32_t) == 0, "made of 32-bit integers");
    const int64_t offset = size();
    const int32_t* first = reinterpret_cast<const int32_t*>(values.data());
    values_.insert(values_.end(), first, first + values.size() * sizeof(T) / sizeof(int32_t));
    while (size() % kAlignment != 0) values_.push_back(0);
    return offset;
  }

  /*! \brief Bytes so far. */
  int64_t size() const { return static_cast<int64_t>(values_.size() * sizeof(int32_t)); }

  /*! \brief Copy to the workspace; the result is to be added to every offset that Add gave. */
  int64_t Commit(const PlanArgs& args, cudaStream_t stream) {
    const int64_t size = this->size();
    if (size > args.int_workspace_bytes) {
      Throw("int_workspace", size, args.int_workspace_bytes);
    }
    const int64_t base = Reserve(args.cursor, size, args.int_workspace_bytes);
    cudaError_t status = cudaMemcpyAsync(static_cast<char*>(args.int_workspace) + base,
                                         values_.data(), size, cudaMemcpyHostToDevice, stream);
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
    return base;
  }

  /*! \brief Raise when the float workspace does not hold `need` bytes. */
  static void CheckFloatWorkspace(int64_t need, const PlanArgs& args) {
    if (need > args.float_workspace_bytes) {
      Throw("float_workspace", need, args.float_workspace_bytes);
    }
  }

 private:
  static constexpr int64_t kAlignment = 16;

  [[noreturn]] static void Throw(const char* name, int64_t need, int64_t have) {
    std::ostringstream message;
    message << name << " is too small: this plan needs " << need << " bytes and has " << have
            << "; pass a larger uint8 tensor as `" << name << "` to the plan and to the run";
    throw std::invalid_argument(message.str());
  }

  static int64_t Reserve(PlanCursor* cursor, int64_t size, int64_t capacity) {
    std::lock_guard<std::mutex> lock(cursor->mutex);
    int64_t base = cursor->position % capacity / kAlignment * kAlignment;
    if (base + size > capacity) {
      cursor->position += capacity - base;
      base = 0;
    }
    cursor->position += size;
    return base;
  }

  std::vector<int32_t> values_;
};

/*! \brief A plan as the list of integers that its fields are. */
template <typename Fields>
struct PlanAsList {
  static const Fields& From(const PlanView& view) {
    static_assert(sizeof(Fields) == Fields::kSize * sizeof(int64_t), "a plan is integers alone");
    return *reinterpret_cast<const Fields*>(view.values);
  }

  std::vector<int64_t> ToVector() const {
    const int64_t* first = reinterpret_cast<const int64_t*>(static_cast<const Fields*>(this));
    return std::vector<int64_t>(first, first + Fields::kSize);
  }
};

/*! \brief Fields of a plan, in order. `kind` tells which kernels it is for. Offsets count bytes
 * into the workspaces. */
struct Plan : PlanAsList<Plan> {
  int64_t kind;
  int64_t num_blocks;  // grid dimension of the attention kernel
  int64_t split_kv;
  int64_t cta_tile_q;
  int64_t num_rows;
  int64_t qo_indptr;  // only for decode through the prefill kernel, else -1
  int64_t request_indices;
  int64_t qo_tile_indices;
  int64_t kv_tile_indices;
  int64_t o_indptr;
  int64_t merge_indptr;
  int64_t kv_chunk_size;
  int64_t tmp_v;
  int64_t tmp_s;

  static constexpr int64_t kSize = 14;
};

/*!
 * \brief The same of prefill on Hopper; the arrays are those of PrefillSchedule. Where pages are
 * copied, page_indptr counts the pages of each request and key_indptr its keys.
 */
struct PrefillSM90Plan : PlanAsList<PrefillSM90Plan> {
  int64_t kind;
  int64_t num_blocks;
  int64_t num_groups;
  int64_t num_keys;  // where ragged keys end
  int64_t work_indptr;
  int64_t work_tile;
  int64_t work_head;
  int64_t tiles;
  int64_t page_indptr;
  int64_t key_indptr;

  static constexpr int64_t kSize = 10;
};

/*! \brief The same of latent attention; the arrays are those of MLASchedule. */
struct MLAPlan : PlanAsList<MLAPlan> {
  int64_t kind;
  int64_t blocks_per_cluster;
  int64_t num_clusters;
  int64_t causal;  // whether the kernel has to mask
  int64_t work_indptr;
  int64_t first_row;
  int64_t num_rows;
  int64_t first_page;
  int64_t num_keys;
  int64_t tile_start;
  int64_t key_begin;
  int64_t key_end;
  int64_t partial_start;
  int64_t merge_begin;
  int64_t merge_end;
  int64_t merge_part_begin;
  int64_t merge_part_end;
  int64_t merge_stride;
  int64_t partial_o;
  int64_t partial_lse;

  static constexpr int64_t kSize = kMLAPlanSize;
};

template <typename T>
T* At(void* workspace, int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_PLAN_BUFFER_H_
