#include "thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <thread>

#include "kernels.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace {

// Waking a sleeping thread costs several microseconds, so a shorter job is done sooner alone.
constexpr double kMinParallelCostNs = 20e3;
// How long a thread looks for work before it sleeps. Kernels of one model layer follow each other
// within this time; much more would steal time from the thread pool of the framework.
constexpr std::chrono::microseconds kSpinTime{30};

inline void CpuRelax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/*! \brief Spin until done() or until kSpinTime has passed; returns done(). */
template <typename Predicate>
bool SpinUntil(const Predicate& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 32; ++i) {
      if (done()) return true;
      CpuRelax();
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return done();
}

#if defined(__linux__)
/*! \brief The CPUs of the process. A framework may pin the calling thread to one CPU later on. */
struct ProcessAffinity {
  cpu_set_t set;
  bool known;
  ProcessAffinity() { known = sched_getaffinity(0, sizeof(set), &set) == 0; }
};
const ProcessAffinity process_affinity;
#endif

constexpr int kMaxThreads = 1024;

/*! \brief What TVM_FLASHINFER_NUM_THREADS asks for, and why that is no number of threads. */
struct ThreadSetting {
  int num = 0;  // 0 when nothing is asked for
  std::string error;

  ThreadSetting() {
    const char* text = std::getenv("TVM_FLASHINFER_NUM_THREADS");
    if (text == nullptr || *text == '\0') return;
    char* end = nullptr;
    const long value = std::strtol(text, &end, 10);
    if (*end == '\0' && value >= 1 && value <= kMaxThreads) {
      num = static_cast<int>(value);
    } else {
      error = "the environment variable TVM_FLASHINFER_NUM_THREADS is \"" + std::string(text) +
              "\"; it is a number of threads from 1 to " + std::to_string(kMaxThreads) +
              ". Set such a number, or unset it";
    }
  }
};

/*! \brief TVM's own setting is read as TVM reads it. */
int ThreadsOfTVM() {
  const char* text = std::getenv("TVM_NUM_THREADS");
  return text == nullptr ? 0 : std::max(0, std::atoi(text));
}

int ChooseNumThreads(int asked_for) {
  int num = asked_for;
  if (num == 0) num = ThreadsOfTVM();
#if defined(__linux__)
  if (num == 0 && process_affinity.known) num = CPU_COUNT(&process_affinity.set);
#endif
  if (num == 0) num = static_cast<int>(std::thread::hardware_concurrency());
  return std::min(std::max(num, 1), kMaxThreads);
}

/*!
 * \brief Keep the library that this code is part of in memory for good: it may be a model library,
 * which is unloaded together with its model, and the workers would wake up in unmapped code.
 */
void PinLibrary() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&PinLibrary), &info) != 0 && info.dli_fname != nullptr) {
    dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
  }
}

thread_local bool inside_item = false;

class ThreadPool {
 public:
  ThreadPool() : num_threads_(ChooseNumThreads(setting_.num)) {}

  int num_threads() const { return num_threads_; }
  const std::string& setting_error() const { return setting_.error; }

  void Run(int64_t count, void (*item)(void*, int64_t), void* context) {
    if (busy_.exchange(true, std::memory_order_acquire)) {
      RunInline(count, item, context);
      return;
    }
    if (!started_) Start();
    item_ = item;
    context_ = context;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    Open(count - 1);
    Drain();
    Close();
    std::exception_ptr error = std::move(error_);
    error_ = nullptr;
    busy_.store(false, std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

  static void RunInline(int64_t count, void (*item)(void*, int64_t), void* context) {
    for (int64_t i = 0; i < count; ++i) item(context, i);
  }

 private:
  // The gate of the pool is one word: the number of the job, whether workers may still join it, and
  // how many are in it. A worker that wakes up late finds the gate closed, so nobody waits for it.
  static constexpr uint64_t kActiveMask = 0xffffffffu;
  static constexpr uint64_t kOpen = uint64_t{1} << 32;
  static constexpr uint64_t kJob = uint64_t{1} << 33;

  void Start() {
    started_ = true;
    PinLibrary();
    for (int i = 1; i < num_threads_; ++i) {
      try {
        // Detached, and the pool is never destroyed: workers may outlive static destructors.
        std::thread([this] { Work(); }).detach();
      } catch (...) {
        break;  // The system has no more threads to give; those that exist do all the work.
      }
    }
  }

  void Open(int64_t max_helpers) {
    int64_t to_wake;
    {
      // Under the lock, so that a worker cannot miss the job between its last look and its sleep.
      std::lock_guard<std::mutex> lock(mutex_);
      const uint64_t job = gate_.load(std::memory_order_relaxed) & ~(kJob - 1);
      gate_.store((job + kJob) | kOpen, std::memory_order_release);
      to_wake = std::min<int64_t>(sleepers_, max_helpers);
    }
    if (to_wake >= num_threads_ - 1) {
      wake_.notify_all();
    } else {
      for (int64_t i = 0; i < to_wake; ++i) wake_.notify_one();
    }
  }

  // noexcept: unwinding would leave workers with a job whose context is gone.
  void Drain() noexcept {
    inside_item = true;
    for (;;) {
      const int64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (i >= count_) break;
      try {
        item_(context_, i);
      } catch (...) {  // out of memory; the caller gets it when all threads are done
        std::lock_guard<std::mutex> lock(mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
    inside_item = false;
  }

  void Close() {
    gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
    const auto all_left = [this] {
      return (gate_.load(std::memory_order_acquire) & kActiveMask) == 0;
    };
    if (SpinUntil(all_left)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    owner_waits_ = true;
    left_.wait(lock, all_left);
    owner_waits_ = false;
  }

  void Work() {
#if defined(__linux__)
    if (process_affinity.known) {
      pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), &process_affinity.set);
    }
#endif
    uint64_t seen = 0;
    for (;;) {
      const auto has_job = [this, seen] {
        const uint64_t gate = gate_.load(std::memory_order_acquire);
        return (gate & kOpen) != 0 && (gate & ~(kJob - 1)) != seen;
      };
      if (!SpinUntil(has_job)) {
        std::unique_lock<std::mutex> lock(mutex_);
        ++sleepers_;
        wake_.wait(lock, has_job);
        --sleepers_;
      }
      if (!Join(&seen)) continue;
      Drain();
      Leave();
    }
  }

  bool Join(uint64_t* seen) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    while ((gate & kOpen) != 0) {
      if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) {
        *seen = gate & ~(kJob - 1);
        return true;
      }
    }
    return false;
  }

  void Leave() {
    const uint64_t before = gate_.fetch_sub(1, std::memory_order_acq_rel);
    if ((before & kActiveMask) != 1 || (before & kOpen) != 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (owner_waits_) left_.notify_one();
  }

  const ThreadSetting setting_;
  const int num_threads_;
  bool started_ = false;  // guarded by busy_, as are the fields of the job
  std::atomic<bool> busy_{false};
  void (*item_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint64_t> gate_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable left_;
  int64_t sleepers_ = 0;
  bool owner_waits_ = false;
  std::exception_ptr error_;  // guarded by mutex_ while the job runs
};

std::atomic<ThreadPool*> current_pool{nullptr};

// Only the thread that forked lives on in the child, so the pool of the parent is of no use there;
// its locks may even be held by threads that are gone. It is leaked on purpose.
void ForgetPoolInChild() {
  current_pool.store(nullptr, std::memory_order_relaxed);
  inside_item = false;
}
const int fork_handler = pthread_atfork(nullptr, nullptr, ForgetPoolInChild);

// No function-local static: its guard could be held by another thread at the time of a fork.
ThreadPool& Pool() {
  ThreadPool* pool = current_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  ThreadPool* fresh = new ThreadPool();
  if (current_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
  delete fresh;  // Another thread was first. This one has started no workers yet.
  return *pool;
}

class ScratchBuffer {
 public:
  ~ScratchBuffer() { std::free(data_); }

  void* Reserve(size_t num_bytes) {
    if (num_bytes > capacity_) {
      std::free(data_);
      capacity_ = (num_bytes + num_bytes / 4 + 4095) / 4096 * 4096;
      data_ = std::aligned_alloc(64, capacity_);
      if (data_ == nullptr) {
        capacity_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t capacity_ = 0;
};

thread_local ScratchBuffer scratch_buffers[2];

}  // namespace

void ParallelFor(int64_t count, double cost_ns, void (*item)(void*, int64_t), void* context) {
  if (count <= 1 || inside_item || cost_ns < kMinParallelCostNs) {
    ThreadPool::RunInline(count, item, context);
    return;
  }
  ThreadPool& pool = Pool();
  if (pool.num_threads() == 1) {
    ThreadPool::RunInline(count, item, context);
  } else {
    pool.Run(count, item, context);
  }
}

void* ThreadScratch(ScratchSlot slot, size_t num_bytes) {
  return scratch_buffers[static_cast<int>(slot)].Reserve(num_bytes);
}

int NumThreads() { return Pool().num_threads(); }

const std::string& ThreadSettingError() { return Pool().setting_error(); }

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer
