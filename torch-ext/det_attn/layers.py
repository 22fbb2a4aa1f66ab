"""Layers that `kernels.kernelize` puts in the place of a model's own: pure, so they hold no state and no constructor.

In: the arguments of the layer that is replaced, which must be those below. Out: what `scaled_dot_product_attention`
gives.
"""

from typing import Optional

from torch import Tensor, nn

from .sdpa import scaled_dot_product_attention


class ScaledDotProductAttention(nn.Module):
    """For a layer whose forward has the signature of torch's scaled_dot_product_attention: training and inference.

    Shapes, dtypes, defaults and errors are those of `scaled_dot_product_attention`, precision "highest".
    """

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Optional[Tensor] = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: Optional[float] = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, precision="highest"
        )
