"""`kernels benchmark`: det_attn against torch's scaled_dot_product_attention on the same inputs and device.

Run with `kernels benchmark /path/to/this/repository`. On the CPU the reference is SDPA in float64, elsewhere SDPA in
the inputs' dtype; the runner checks the outputs against it. For ratios on a busy CPU see bench_cpu.py.
"""

import torch
from kernels.benchmark import Benchmark


class DetAttnBenchmark(Benchmark):
    seed = 42

    def inputs(self, head_dim, dtype=torch.float32, length=2048):
        heads = 8 if self.device == "cpu" else 16
        shape = (1, heads, length, head_dim)
        self.q, self.k, self.v = (torch.randn(shape, dtype=dtype, device=self.device) for _ in range(3))
        dtype = torch.float64 if self.device == "cpu" else dtype
        self.reference_inputs = [x.to(dtype) for x in (self.q, self.k, self.v)]

    def attention(self, **options):
        self.out = self.kernel.det_attn(self.q, self.k, self.v, **options)

    def reference(self, causal=False):
        out = torch.nn.functional.scaled_dot_product_attention(*self.reference_inputs, is_causal=causal)
        return out.to(torch.float32)

    def setup_highest_d64(self):
        self.inputs(64)

    def benchmark_highest_d64(self):
        self.attention()

    def verify_highest_d64(self):
        return self.reference()

    def setup_highest_d128(self):
        self.inputs(128)

    def benchmark_highest_d128(self):
        self.attention()

    def verify_highest_d128(self):
        return self.reference()

    def setup_highest_d128_causal(self):
        self.inputs(128)

    def benchmark_highest_d128_causal(self):
        self.attention(causal=True)

    def verify_highest_d128_causal(self):
        return self.reference(causal=True)

    def setup_high_bfloat16_d128(self):
        self.inputs(128, torch.bfloat16)

    def benchmark_high_bfloat16_d128(self):
        self.attention(precision="high")

    def verify_high_bfloat16_d128(self):
        return self.reference()
