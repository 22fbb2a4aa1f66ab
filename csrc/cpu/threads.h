// Work over torch's threads and plain aligned memory. Every unit of work writes its own results, and partial results
// meet only by integer sums and maxima, so neither the number of threads nor their order can change a bit.
#pragma once

#include <torch/csrc/stable/ops.h>

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

// Uninitialised memory, aligned to cache lines.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t count) { resize(count); }
  void resize(int64_t count) {
    memory_.reset();
    if (count <= 0) return;
    void* p = nullptr;
    if (posix_memalign(&p, 64, static_cast<size_t>(count) * sizeof(T)) != 0) throw std::bad_alloc();
    memory_.reset(static_cast<T*>(p));
  }
  T* data() const { return memory_.get(); }
  T& operator[](int64_t i) const { return memory_.get()[i]; }

 private:
  std::unique_ptr<T, Free> memory_;
};

}  // namespace cpu
}  // namespace det_attn
