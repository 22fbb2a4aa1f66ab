// Work over torch's threads and plain aligned memory. Every unit of work writes its own results, and partial results
// meet only by integer sums and maxima, so neither the number of threads nor their order can change a bit.
#pragma once

#include <torch/csrc/stable/ops.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "../float_env.h"

namespace det_attn {
namespace cpu {

// Calls work(next) once on each of several threads, where next() hands out 0..count-1, then -1. Handing out one at a
// time balances uneven units (causal tiles). A thread that comes late finds nothing left.
template <class Work>
void run_units(int64_t count, const Work& work) {
  if (count <= 0) return;
  std::atomic<int64_t> counter{0};
  const auto next = [&counter, count]() -> int64_t {
    const int64_t unit = counter.fetch_add(1, std::memory_order_relaxed);
    return unit < count ? unit : -1;
  };
  torch::stable::parallel_for(0, count, 1, [&](int64_t, int64_t) {
    const ContractFloatEnv environment;  // the caller's applies to its own thread only
    work(next);
  });
}

// Ranges for cheap items: work(begin, end).
template <class Work>
void run_ranges(int64_t count, int64_t grain, const Work& work) {
  if (count <= 0) return;
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    const ContractFloatEnv environment;
    work(begin, end);
  });
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Uninitialised memory, aligned to cache lines. Resizing loses the contents and keeps memory that is large enough.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) { resize(count); }
  void resize(int64_t count) {
    if (count <= capacity_) return;
    const size_t bytes = static_cast<size_t>(count) * sizeof(T);
    const bool huge = bytes >= 4 * kHugePage;
    void* p = nullptr;
    memory_.reset();
    capacity_ = 0;
    if (posix_memalign(&p, huge ? kHugePage : 64, bytes) != 0) throw std::bad_alloc();
#if defined(__linux__)
    if (huge) madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults: they dominate when few queries meet many keys
#endif
    memory_.reset(static_cast<T*>(p));
    capacity_ = count;
  }
  T* data() const { return memory_.get(); }
  T& operator[](int64_t i) const { return memory_.get()[i]; }

 private:
  static constexpr size_t kHugePage = size_t(1) << 21;
  std::unique_ptr<T, Free> memory_;
  int64_t capacity_ = 0;
};

}  // namespace cpu
}  // namespace det_attn
