// The floating-point environment the contract needs: round to nearest even, denormals kept (docs/contract.md section
// 7). In: whatever the calling thread was set to (torch.set_flush_denormal, another library). Out: restored on exit.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace det_attn {

class ContractFloatEnv {
 public:
#if defined(__x86_64__)
  // 0x1f80: all exceptions masked, round to nearest, neither flush-to-zero nor denormals-are-zero.
  ContractFloatEnv() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80u); }
  ~ContractFloatEnv() { _mm_setcsr(saved_); }

 private:
  uint32_t saved_;
#elif defined(__aarch64__)
  ContractFloatEnv() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t(0)));
  }
  ~ContractFloatEnv() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  ContractFloatEnv() {}
  ~ContractFloatEnv() {}

 private:
#endif
  ContractFloatEnv(const ContractFloatEnv&) = delete;
  ContractFloatEnv& operator=(const ContractFloatEnv&) = delete;
};

}  // namespace det_attn
