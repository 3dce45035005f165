"""FLOPs and bytes, counted once for every report and plan."""
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
