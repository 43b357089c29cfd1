// A small persistent pool of threads. It has no notion of errors or futures: kernels split a job
// into independent items and wait for all of them.
#ifndef TVM_FLASHINFER_KERNELS_CPU_THREAD_POOL_H_
#define TVM_FLASHINFER_KERNELS_CPU_THREAD_POOL_H_

#include <cstddef>
#include <cstdint>

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {

/*!
 * \brief Call item(context, i) for every i in [0, count), on several threads when that pays.
 *
 * Items are handed out one by one in ascending order, so put the longest ones first. The items run
 * on the calling thread alone when the job is too small to be worth waking anyone, when the call
 * comes from inside an item, or when another thread is using the pool.
 *
 * \param cost_ns A rough estimate of what all the items take together on one thread.
 */
void ParallelFor(int64_t count, double cost_ns, void (*item)(void* context, int64_t i),
                 void* context);

/*! \brief The same for a callable. */
template <typename Function>
void ParallelFor(int64_t count, double cost_ns, const Function& function) {
  ParallelFor(
      count, cost_ns, [](void* context, int64_t i) { (*static_cast<const Function*>(context))(i); },
      const_cast<Function*>(&function));
}

/*! \brief Independent scratch buffers of a thread; nested users take different slots. */
enum class ScratchSlot { kItem = 0, kJob = 1 };

/*!
 * \brief Uninitialised scratch of the calling thread, aligned to 64 bytes. It stays valid until the
 * next call with the same slot on the same thread.
 */
void* ThreadScratch(ScratchSlot slot, size_t num_bytes);

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_THREAD_POOL_H_
