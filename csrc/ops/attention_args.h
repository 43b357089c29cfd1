// The arguments that the attention runs share, checked and turned into the kernels' structs.
#ifndef TVM_FLASHINFER_OPS_ATTENTION_ARGS_H_
#define TVM_FLASHINFER_OPS_ATTENTION_ARGS_H_

#include "../kernels/types.h"
#include "attention_plan.h"
#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief Tensors and numbers that every run has. */
struct RunInputs {
  TensorView float_workspace;
  TensorView int_workspace;
  TensorView q;
  TensorView o;
  Optional<TensorView> lse;
  int64_t mask_mode;
  int64_t layout;
  int64_t window_left;
  double sm_scale;
};

/*! \brief What both plan functions are given. */
struct PlanInputs {
  TensorView float_workspace;
  TensorView int_workspace;
  TensorView pinned_int_workspace;
  int64_t batch_size;
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t page_size;
  int64_t head_dim_qk;
  int64_t head_dim_vo;
  int64_t window_left;
  bool enable_cuda_graph;
};

/*! \brief Check them; the device of the plan is that of its workspaces. */
DLDevice BeginPlan(const Checker& check, const PlanInputs& in);

/*!
 * \brief The device of the run: that of its workspaces, where q and the plan must be too. Also
 * checks q's dtype, which the dtypes of keys and values are compared with.
 */
DLDevice BeginRun(const Checker& check, const RunInputs& in, const PlanReader& plan);

/*!
 * \brief Check what does not depend on how keys are stored, against the plan too.
 * \param head_dim_vo Columns of the values, from which o takes its shape.
 */
kernels::AttentionArgs MakeAttentionArgs(const Checker& check, const RunInputs& in,
                                         const PlanReader& plan, int64_t num_kv_heads,
                                         int64_t head_dim_vo);

/*! \brief What a run writes, o, lse and the float workspace, shares no memory with these inputs. */
void CheckOutputs(const Checker& check, const RunInputs& in,
                  std::initializer_list<std::pair<const char*, TensorView>> inputs);

/*! \brief Sizes and strides of one operand of keys or values, whatever the layout. */
struct KVOperand {
  int64_t outer;  // pages; 1 for ragged
  int64_t num_heads;
  int64_t length;  // page size, or tokens of a ragged batch
  int64_t head_dim;
  int64_t stride_outer;
  int64_t stride_head;
  int64_t stride_length;
};

/*! \brief Read (P, H, S, d) or (P, S, H, d). */
KVOperand ReadPages(const Checker& check, const char* name, const TensorView& pages,
                    int64_t layout);
/*! \brief Read (H, m, d) or (m, H, d). */
KVOperand ReadRagged(const Checker& check, const char* name, const TensorView& tensor,
                     int64_t layout);

/*! \brief Pages as kernels take them, checked against each other, q and the index tensors. */
kernels::PagedKV MakePagedKV(const Checker& check, const TensorView& q, const TensorView& k_pages,
                             const TensorView& v_pages, const TensorView& page_indptr,
                             const TensorView& page_indices, const TensorView& last_page_len,
                             int64_t batch_size, int64_t layout, KVOperand* k_out);

/*! \brief Contents of the index tensors of a paged run: always on CPU, on request on CUDA. */
void CheckPagedContents(const Checker& check, const TensorView& page_indptr,
                        const TensorView& page_indices, const TensorView& last_page_len,
                        int64_t batch_size, int64_t num_pages, int64_t page_size);

/*!
 * \brief Raise when no CUDA kernel exists for this dtype and these head dimensions.
 * \param ragged Whether keys are ragged: these may have the head dimensions of latent attention
 * before compression.
 */
void RequireCudaAttention(const Checker& check, const kernels::AttentionArgs& args,
                          bool ragged = false);

/*! \brief Raise when q, keys, values or o cannot be moved 16 bytes at a time. */
void CheckCudaAlignment(const Checker& check, const kernels::AttentionArgs& args, const void* k,
                        const void* v, std::initializer_list<int64_t> kv_strides);

/*! \brief Raise when FlashInfer's kernels cannot read these addresses or strides. */
void CheckCudaStrides(const Checker& check, const kernels::AttentionArgs& args, const void* k,
                      const void* v, std::initializer_list<int64_t> kv_strides);

/*! \brief The same for pages; the CUDA kernels read keys and values with one set of strides. */
void CheckCudaPages(const Checker& check, const kernels::AttentionArgs& args,
                    const kernels::PagedKV& kv);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_ATTENTION_ARGS_H_
