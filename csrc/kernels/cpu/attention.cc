// Cuts batches of attention into blocks and runs them on the threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "../workspace.h"
#include "attention_block.h"
#include "kernel_table.h"
#include "kernels.h"
#include "thread_pool.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace {

constexpr double kLog2E = 1.4426950408889634074;

/*! \brief The keys of one request; every head has its own KeySource. */
struct RequestKeys {
  int64_t kv_len;
  const int32_t* pages;
  int64_t page_size;
  int64_t k_offset;  // elements
  int64_t v_offset;
  int64_t sink_size;
  int64_t slot_shift;
};

/*! \brief Whether blocks must know of the extras; the others are in bounds and key sources. */
bool ReachesBlocks(const AttentionExtras& extras) {
  return extras.tree_indptr != nullptr || extras.mask_indptr != nullptr ||
         extras.logits_soft_cap != 0 || extras.alibi_slopes != nullptr ||
         extras.bias.data != nullptr || extras.sinks != nullptr || extras.rotary_dim > 0;
}

RequestKeys KeysOfRequest(const PagedKV& kv, const AttentionExtras& extras, int64_t request) {
  const int64_t num_pages = kv.indptr[request + 1] - kv.indptr[request];
  RequestKeys keys = {0, kv.indices + kv.indptr[request], kv.page_size, 0, 0, 0, 0};
  if (num_pages <= 0) return keys;
  keys.kv_len = (num_pages - 1) * kv.page_size + kv.last_page_len[request];
  if (extras.window_offset != nullptr) {
    keys.sink_size = extras.sink_size == nullptr ? 0 : extras.sink_size[request];
    keys.slot_shift = extras.window_offset[request] - keys.sink_size;
    keys.kv_len = std::max<int64_t>(0, keys.kv_len - keys.slot_shift);
  }
  return keys;
}

RequestKeys KeysOfRequest(const RaggedKV& kv, const AttentionExtras&, int64_t request) {
  const int64_t begin = kv.indptr[request];
  const int64_t kv_len = std::max<int64_t>(0, kv.indptr[request + 1] - begin);
  return {kv_len,
          nullptr,
          std::max<int64_t>(1, kv_len),
          begin * kv.k_stride_token,
          begin * kv.v_stride_token,
          0,
          0};
}

void SetStrides(const PagedKV& kv, KeySource* keys) {
  keys->k_stride_page = kv.k_stride_page;
  keys->k_stride_slot = kv.k_stride_slot;
  keys->v_stride_page = kv.v_stride_page;
  keys->v_stride_slot = kv.v_stride_slot;
}

void SetStrides(const RaggedKV& kv, KeySource* keys) {
  keys->k_stride_page = 0;
  keys->k_stride_slot = kv.k_stride_token;
  keys->v_stride_page = 0;
  keys->v_stride_slot = kv.v_stride_token;
}

/*! \brief Rough time of one thread; only ratios and the order of magnitude matter. */
double CostNs(const AttentionBlock& block, int64_t num_keys) {
  const double dims = block.head_dim_qk + block.head_dim_vo;
  const double rows = static_cast<double>(block.row_end - block.row_begin);
  return 100 + num_keys * dims * (0.05 + rows / 30);
}

class Batch {
 public:
  template <typename KV>
  Batch(const AttentionArgs& args, const KV& kv, const AttentionExtras& extras) {
    const double unit = StoredUnit(args.kv_dtype), sm_scale = args.sm_scale * unit;
    const int64_t group = args.num_qo_heads / args.num_kv_heads;
    AttentionBlock block = {};
    block.dtype = args.dtype;
    block.kv_dtype = args.kv_dtype;
    block.v_scale = static_cast<float>(args.v_scale * unit);
    block.head_dim_qk = args.head_dim_qk;
    block.head_dim_vo = args.head_dim_vo;
    block.group = group;
    block.q_factor = sm_scale > 0 ? 1.0f : sm_scale < 0 ? -1.0f : 0.0f;
    block.score_scale = static_cast<float>(std::fabs(sm_scale) * kLog2E);
    if (block.score_scale == 0) {
      block.q_factor = 0;
      block.score_scale = 1;
    }
    if (ReachesBlocks(extras)) {
      SetExtras(sm_scale, extras, kv.indptr);
      block.extras = &extras_;
      if (extras_.transforms_scores) {
        block.q_factor = 1;
        block.score_scale = static_cast<float>(kLog2E);
      }
    }
    block.q_stride_row = args.q_stride_row;
    block.q_stride_head = args.q_stride_head;
    block.o_stride_row = static_cast<int64_t>(args.num_qo_heads) * args.head_dim_vo;
    block.lse_stride_row = args.num_qo_heads;
    block.causal = args.causal;
    block.window_left = args.window_left;
    SetStrides(kv, &block.keys);
    const int64_t size = ElementSize(args.dtype), kv_size = ElementSize(args.kv_dtype);
    const int64_t equal_rows = args.qo_indptr == nullptr ? args.num_rows / args.batch_size : 0;
    for (int64_t request = 0; request < args.batch_size; ++request) {
      const bool is_equal = args.qo_indptr == nullptr;
      const int64_t row = is_equal ? request * equal_rows : args.qo_indptr[request];
      const int64_t row_end = is_equal ? row + equal_rows : args.qo_indptr[request + 1];
      const RequestKeys keys = KeysOfRequest(kv, extras, request);
      block.request = request;
      block.first_row = row;
      block.qo_len = row_end - row;
      block.kv_len = keys.kv_len;
      block.keys.pages = keys.pages;
      block.keys.page_size = keys.page_size;
      block.keys.sink_size = keys.sink_size;
      block.keys.slot_shift = keys.slot_shift;
      block.first_diagonal = keys.kv_len - (extras.rows_after_keys ? 0 : block.qo_len);
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        const int64_t qo_head = head * group;
        block.first_head = qo_head;
        block.q = static_cast<const char*>(args.q) +
                  (row * args.q_stride_row + qo_head * args.q_stride_head) * size;
        block.o = static_cast<char*>(args.o) +
                  (row * block.o_stride_row + qo_head * args.head_dim_vo) * size;
        block.lse = args.lse == nullptr ? nullptr : args.lse + row * block.lse_stride_row + qo_head;
        block.keys.k =
            static_cast<const char*>(kv.k) + (keys.k_offset + head * kv.k_stride_head) * kv_size;
        block.keys.v =
            static_cast<const char*>(kv.v) + (keys.v_offset + head * kv.v_stride_head) * kv_size;
        AddBlocks(block);
      }
    }
  }

  void Run() const {
    const int64_t scratch_bytes = NumThreads() * BlockScratchBytes();
    CheckWorkspaceBytes(scratch_bytes);
    // The state of a chunk is small, but not next to that of one key: do not fill the memory.
    const int64_t max_state_bytes =
        std::min(int64_t{64} << 20, MaxWorkspaceBytes() - scratch_bytes);
    const bool uneven = longest_ns_ * 2 * NumThreads() > total_ns_;
    const int64_t state_bytes = state_floats_ * static_cast<int64_t>(sizeof(float));
    if (uneven && num_chunks_ > static_cast<int64_t>(blocks_.size()) &&
        state_bytes <= max_state_bytes) {
      RunChunks();
    } else {
      RunBlocks();
    }
  }

 private:
  void SetExtras(double sm_scale, const AttentionExtras& extras, const int32_t* kv_indptr) {
    extras_.args = extras;
    extras_.transforms_scores = extras.logits_soft_cap != 0 || extras.alibi_slopes != nullptr ||
                                extras.bias.data != nullptr;
    extras_.sm_scale = static_cast<float>(sm_scale);
    extras_.kv_indptr = kv_indptr;
    if (extras.rotary_dim > 0 && extras.k_positions != nullptr) {
      offset_angles_.resize(2 * kKeyTile * OffsetStride(extras.rotary_dim));
      ActiveKernels().rotary_offsets(extras, kKeyTile, offset_angles_.data());
      extras_.offset_angles = offset_angles_.data();
    }
  }

  void AddBlocks(AttentionBlock block) {
    const int64_t num_rows = block.qo_len * block.group;
    // From the last rows on, since those see the most keys under a causal mask.
    for (block.row_end = num_rows; block.row_end > 0; block.row_end = block.row_begin) {
      block.row_begin = (block.row_end - 1) / kRowBlock * kRowBlock;
      block.key_begin = FirstKey(block, block.row_begin);
      block.key_end = std::max<int64_t>(0, LastKey(block, block.row_end - 1) + 1);
      blocks_.push_back(block);
      const double cost_ns = CostNs(block, std::max<int64_t>(0, block.key_end - block.key_begin));
      total_ns_ += cost_ns;
      longest_ns_ = std::max(longest_ns_, cost_ns);
      const int64_t chunks = LastChunk(block) - FirstChunk(block);
      num_chunks_ += chunks;
      state_floats_ += chunks * StateFloats(block);
    }
  }

  /*! \brief What a thread needs, whatever the length of the requests. */
  int64_t BlockScratchBytes() const {
    if (blocks_.empty()) return 0;
    const AttentionBlock& block = blocks_.front();
    return ScratchFloats(block.head_dim_qk, block.head_dim_vo) *
           static_cast<int64_t>(sizeof(float));
  }

  float* BlockScratch() const {
    return static_cast<float*>(ThreadScratch(ScratchSlot::kItem, BlockScratchBytes()));
  }

  void RunBlocks() const {
    const KernelTable& kernels = ActiveKernels();
    ParallelFor(blocks_.size(), total_ns_,
                [&](int64_t i) { kernels.attend_block(blocks_[i], BlockScratch()); });
  }

  /*!
   * \brief Also spread the chunks of a block over the threads. Whoever finishes the last chunk of a
   * block folds all of them, in order, so the result does not depend on who did what.
   */
  void RunChunks() const {
    struct Item {
      int64_t block;
      int64_t chunk;
    };
    std::vector<Item> items;
    std::vector<float*> states(blocks_.size());
    std::unique_ptr<std::atomic<int64_t>[]> missing(new std::atomic<int64_t>[blocks_.size()]);
    float* memory =
        static_cast<float*>(ThreadScratch(ScratchSlot::kJob, state_floats_ * sizeof(float)));
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const AttentionBlock& block = blocks_[i];
      const int64_t chunks = LastChunk(block) - FirstChunk(block);
      states[i] = memory;
      memory += chunks * StateFloats(block);
      missing[i].store(chunks, std::memory_order_relaxed);
      for (int64_t c = 0; c < std::max<int64_t>(1, chunks); ++c) {
        items.push_back({static_cast<int64_t>(i), FirstChunk(block) + c});
      }
    }
    const KernelTable& kernels = ActiveKernels();
    ParallelFor(items.size(), total_ns_, [&](int64_t i) {
      const AttentionBlock& block = blocks_[items[i].block];
      const int64_t first = FirstChunk(block);
      float* scratch = BlockScratch();
      if (LastChunk(block) - first <= 1) {
        kernels.attend_block(block, scratch);
        return;
      }
      float* block_states = states[items[i].block];
      float* state = block_states + (items[i].chunk - first) * StateFloats(block);
      kernels.attend_chunk(block, items[i].chunk, state, scratch);
      if (missing[items[i].block].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        kernels.fold_chunks(block, block_states, scratch);
      }
    });
  }

  // Blocks point to the extras, so a batch stays where it is.
  BatchExtras extras_ = {};
  std::vector<float> offset_angles_;
  std::vector<AttentionBlock> blocks_;
  double total_ns_ = 0;
  double longest_ns_ = 0;
  int64_t num_chunks_ = 0;
  int64_t state_floats_ = 0;
};

}  // namespace

void BatchAttentionPaged(const AttentionArgs& args, const PagedKV& kv,
                         const AttentionExtras& extras) {
  Batch(args, kv, extras).Run();
}

void BatchAttentionRagged(const AttentionArgs& args, const RaggedKV& kv,
                          const AttentionExtras& extras) {
  Batch(args, kv, extras).Run();
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer
