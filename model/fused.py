"""The operations of a block on our Triton kernels, under the names that model/block.py calls: weights by address."""
from kernels.attention import attention, attention_backward
from kernels.cross_entropy import linear_cross_entropy
from kernels.embedding import embedding, embedding_backward
from kernels.gemm import linear, linear_bias_grad, linear_dgrad, linear_dgrad_swiglu, linear_wgrad
from kernels.norm2 import norm2
from kernels.rmsnorm import rmsnorm, rmsnorm_backward
from kernels.rope import rope, rope_backward
from kernels.swiglu import swiglu
from model.layout import Weights

__all__ = ["attention", "attention_backward", "embedding", "embedding_backward", "linear", "linear_bias_grad",
           "linear_cross_entropy", "linear_dgrad", "linear_dgrad_swiglu", "linear_wgrad", "norm2", "operand",
           "rmsnorm", "rmsnorm_backward", "rope", "rope_backward", "swiglu"]


def operand(w: Weights, name: str) -> int:
    """What these operations take for a weight: its address, 0 where the layer has none."""
    return w.ptr(name)
