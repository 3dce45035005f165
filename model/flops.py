"""FLOPs and bytes, counted once for every report and plan."""
import dataclasses
from collections.abc import Iterable

from model.config import ModelConfig
from model.layout import num_params


def step_flops(c: ModelConfig, tokens: int, sum_of_squares: int) -> float:
    """Model FLOPs of one step: 6 a non-embedding parameter and token, plus causal attention; recompute not counted.

    tokens: supervised or not, all rounds together. sum_of_squares: of the lengths of the documents attended within.
    Source: PaLM, arXiv 2204.02311, appendix B, with the causal half of the attention term. A tied matrix is used once
    as a GEMM, by the head, and counts once.
    """
    embedding = 0 if c.tied else c.vocab * c.hidden
    return 6.0 * (num_params(c) - embedding) * tokens + 6.0 * c.layers * c.attention_width * sum_of_squares


# what forward saves; `model/block.py` says which tensors each name stands for
KEEPS = ("attention", "projections", "mlp")


def keep_bytes(c: ModelConfig, keep: Iterable[str], item_bytes: int) -> int:
    """Bytes a token that a layer saves for backward with `keep`, besides the boundary (D items)."""
    each = {"attention": c.attention_width * item_bytes + 4 * c.heads,
            "projections": c.qkv_width * item_bytes,
            "mlp": (c.hidden + 2 * c.ffn) * item_bytes}
    return sum(each[name] for name in keep)


def recompute_flops(c: ModelConfig, keep: Iterable[str], T: int) -> float:
    """FLOPs a token and layer that backward computes again where `keep` is all that forward saved."""
    keep = set(keep)
    flops = 0.0
    if "projections" not in keep:
        flops += 2.0 * c.hidden * c.qkv_width
    if "attention" not in keep:
        flops += 2.0 * c.attention_width * T
    if "mlp" not in keep:
        flops += 2.0 * c.hidden * (c.attention_width + 2 * c.ffn)
    return flops


@dataclasses.dataclass(frozen=True)
class Pass:
    """HBM traffic of one operation of a layer if every number crosses the bus once: bytes a token, and bytes however many
    tokens there are (weights, or their fp32 gradients). num_kernels: what it launches."""
    name: str
    token_bytes: int
    weight_bytes: int = 0
    num_kernels: int = 1


def layer_passes(c: ModelConfig, item_bytes: int) -> list[Pass]:
    """Every operation of model/block.py's forward and backward in launch order, everything kept, no q/k norm."""
    D, F, A, Q, i = c.hidden, c.ffn, c.attention_width, c.qkv_width, item_bytes
    rotated, statistic = (c.heads + c.kv_heads) * c.head_dim, 4 * c.heads

    def product(name: str, inputs: int, outputs: int, reads: int = 0) -> Pass:
        return Pass(name, (inputs + outputs + reads) * i, inputs * outputs * i)

    def wgrad(name: str, inputs: int, outputs: int) -> Pass:
        return Pass(f"{name} wgrad", (inputs + outputs) * i, 4 * inputs * outputs)

    def norm(name: str) -> Pass:
        return Pass(name, 2 * D * i + 4)

    def norm_backward(name: str) -> Pass:
        return Pass(f"{name} backward, + residual", 4 * D * i + 4, num_kernels=2)
    forward = [norm("norm1"), product("qkv", D, Q), Pass("rope", 2 * rotated * i), Pass("attention", (Q + A) * i + statistic),
               product("o + residual", A, D, D), norm("norm2"), product("gate_up + swiglu", D, 2 * F, F),
               product("down + residual", F, D, D)]
    backward = [Pass("down dgrad + swiglu backward", (D + 5 * F) * i, D * F * i), wgrad("down", F, D), norm("norm2 again"),
                wgrad("gate_up", D, 2 * F), product("gate_up dgrad", 2 * F, D), norm_backward("norm2"), wgrad("o", A, D),
                product("o dgrad", D, A), Pass("attention delta", 2 * A * i + statistic),
                Pass("attention dk dv", (2 * Q) * i + 2 * statistic), Pass("attention dq", (Q + 2 * A) * i + 2 * statistic),
                Pass("rope backward", 2 * rotated * i), norm("norm1 again"), wgrad("qkv", D, Q),
                *([Pass("qkv bias", Q * i, num_kernels=2)] if c.qkv_bias else []), product("qkv dgrad", Q, D),
                norm_backward("norm1")]
    return forward + backward
