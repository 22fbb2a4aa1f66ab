"""layers: what kernels.kernelize puts in a model gives det-attn's bytes, in training, inference and compiled.

In: a small model whose attention is a layer of its own, marked as model authors do. Out: the same model, kernelized.
"""

import pytest
import torch
from conftest import REPO_ID, ROOT, assert_same_bits
from kernels import (
    KernelizeFallback,
    LayerRepository,
    LocalLayerRepository,
    Mode,
    kernelize,
    use_kernel_forward_from_hub,
    use_kernel_mapping,
)
from torch import nn
from torch.nn import functional

MODES = [Mode.INFERENCE, Mode.TRAINING, Mode.INFERENCE | Mode.TORCH_COMPILE, Mode.TRAINING | Mode.TORCH_COMPILE]
REPOSITORIES = {
    "local": LocalLayerRepository(repo_path=ROOT, layer_name="ScaledDotProductAttention"),
    "hub": LayerRepository(
        repo_id=REPO_ID, layer_name="ScaledDotProductAttention", revision="v1", trust_remote_code=True
    ),
}


@use_kernel_forward_from_hub("Attention")
class Attention(nn.Module):
    def forward(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
    ):  # fmt: skip
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, q, k, v):
        return self.attention(q, k, v, is_causal=True, enable_gqa=True)


def kernelized(repository, mode, device):
    with use_kernel_mapping({"Attention": {device: repository}}):
        return kernelize(Model(), mode=mode, device=device, use_fallback=KernelizeFallback.NONE)


def tensors(device):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 7, 16), (2, 2, 7, 16), (2, 2, 7, 16))
    return [torch.randn(s, generator=generator).to(device) for s in shapes]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("repository", REPOSITORIES)
def test_kernelize_takes_the_layer_in_every_mode(kernel, device, repository, mode):
    model = kernelized(REPOSITORIES[repository], mode, device)
    q, k, v = tensors(device)
    assert_same_bits(model(q, k, v), kernel.det_attn(q, k, v, causal=True))


def test_the_kernelized_model_trains(kernel, device):
    model = kernelized(REPOSITORIES["local"], Mode.TRAINING, device)
    ours, expected = ([x.requires_grad_() for x in tensors(device)] for _ in range(2))
    kernel.det_attn(*expected, causal=True).square().sum().backward()
    model(*ours).square().sum().backward()
    for x, y in zip(ours, expected):
        assert_same_bits(x.grad, y.grad)


def test_the_kernelized_model_compiles_to_one_graph(kernel, device):
    model = kernelized(REPOSITORIES["local"], Mode.INFERENCE | Mode.TORCH_COMPILE, device)
    model = torch.compile(model, fullgraph=True)
    q, k, v = tensors(device)
    assert_same_bits(model(q, k, v), kernel.det_attn(q, k, v, causal=True))


def test_a_layer_with_other_arguments_is_refused(kernel):
    @use_kernel_forward_from_hub("Attention")
    class Narrow(nn.Module):
        def forward(self, query, key, value):
            return query

    from kernels.layer.layer import _CACHED_LAYER

    _CACHED_LAYER.clear()  # the check runs when a layer is loaded
    with use_kernel_mapping({"Attention": {"cpu": REPOSITORIES["local"]}}), pytest.raises(TypeError, match="arguments"):
        kernelize(Narrow(), mode=Mode.INFERENCE, device="cpu")
    _CACHED_LAYER.clear()


def test_layers_are_pure_and_say_what_they_can(kernel):
    """The Hub's rules: no constructor, no state, no members but the two flags."""
    classes = [x for x in vars(kernel.layers).values() if isinstance(x, type) and issubclass(x, nn.Module)]
    assert classes
    for layer in classes:
        assert layer.__init__ is nn.Module.__init__ and layer.__doc__
        assert set(vars(layer)) - set(vars(nn.Module)) <= {"can_torch_compile", "has_backward"}
        assert layer.can_torch_compile and layer.has_backward
