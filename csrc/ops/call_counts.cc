#include "call_counts.h"

#include <atomic>
#include <map>
#include <string>

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief Counts of one name. A cache line of its own keeps threads of other ops from waiting. */
struct alignas(64) Counter {
  std::atomic<const char*> op{nullptr};
  std::atomic<int64_t> cpu{0};
  std::atomic<int64_t> cuda{0};
};

// A hash table by address that is never emptied: a name that is in it is found without a lock. One
// name may be several literals, one for each file that has it; there are some dozens in all.
constexpr size_t kCapacity = 256;
Counter g_counters[kCapacity];

Counter* Find(const char* op) {
  const size_t start = (reinterpret_cast<uintptr_t>(op) * 0x9E3779B97F4A7C15u) >> 56;
  static_assert(kCapacity == size_t{1} << 8, "the hash has 8 bits");
  for (size_t i = 0; i < kCapacity; ++i) {
    Counter* counter = &g_counters[(start + i) % kCapacity];
    const char* found = counter->op.load(std::memory_order_relaxed);
    if (found == nullptr && counter->op.compare_exchange_strong(found, op)) return counter;
    if (found == op) return counter;
  }
  return nullptr;
}

}  // namespace

void CountCall(const char* op, bool on_cuda) {
  Counter* counter = Find(op);
  if (counter == nullptr) return;
  (on_cuda ? counter->cuda : counter->cpu).fetch_add(1, std::memory_order_relaxed);
}

Map<String, Map<String, int64_t>> CallCounts() {
  std::map<std::string, int64_t> cpu, cuda;
  for (const Counter& counter : g_counters) {
    const char* op = counter.op.load(std::memory_order_relaxed);
    if (op == nullptr) continue;
    cpu[op] += counter.cpu.load(std::memory_order_relaxed);
    cuda[op] += counter.cuda.load(std::memory_order_relaxed);
  }
  auto called = [](const std::map<std::string, int64_t>& counts) {
    Map<String, int64_t> result;
    for (const auto& [op, count] : counts) {
      if (count != 0) result.Set(op, count);
    }
    return result;
  };
  return {{"cpu", called(cpu)}, {"cuda", called(cuda)}};
}

void ResetCallCounts() {
  for (Counter& counter : g_counters) {
    counter.cpu.store(0, std::memory_order_relaxed);
    counter.cuda.store(0, std::memory_order_relaxed);
  }
}

}  // namespace ops
}  // namespace tvm_flashinfer
