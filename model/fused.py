"""The operations of a block on our Triton kernels, under the names that model/block.py calls: weights by address.

Scratch for ordered reductions is one flat fp32 buffer, `partials_elements` large, that all of them share.
"""
import math

from kernels.adamw import adamw
from kernels.attention import attention, attention_backward
from kernels.cross_entropy import linear_cross_entropy
from kernels.embedding import embedding, embedding_backward, embedding_partials_shape
from kernels.gemm import (
    bias_grad_partials_shape,
    linear,
    linear_bias_grad,
    linear_dgrad,
    linear_dgrad_swiglu,
    linear_swiglu,
    linear_wgrad,
)
from kernels.norm2 import norm2, norm2_partials_shape
from kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_partials_shape
from kernels.rope import rope, rope_backward, rope_partials_shape
from model.config import ModelConfig
from model.layout import Weights

__all__ = ["adamw", "attention", "attention_backward", "embedding", "embedding_backward", "linear", "linear_bias_grad",
           "linear_cross_entropy", "linear_dgrad", "linear_dgrad_swiglu", "linear_swiglu", "linear_wgrad", "norm2", "operand",
           "partials_elements", "rmsnorm", "rmsnorm_backward", "rope", "rope_backward"]


def operand(w: Weights, name: str) -> int:
    """What these operations take for a weight: its address, 0 where the layer has none."""
    return w.ptr(name)


def partials_elements(c: ModelConfig, N: int) -> int:
    """fp32 elements of scratch that any operation asks for with N rows."""
    shapes = (rmsnorm_partials_shape(c.hidden), rope_partials_shape(c.head_dim), bias_grad_partials_shape(c.qkv_width),
              embedding_partials_shape(N, c.hidden), norm2_partials_shape())
    return max(math.prod(shape) for shape in shapes)
