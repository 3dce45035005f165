"""The stateless block: one template serves every layer of its kind. Weights come in bound to a slot, activations in
buffers that the engine owns, gradients go to a flat fp32 buffer; nothing is allocated, nothing is remembered.

    forward     normed = norm1(x)             qkv = normed Wqkv^T (+ bias), q and k rotated
                attn = attention(qkv)         mid = x + attn Wo^T
                normed = norm2(mid)           gate_up = normed Wgu^T
                act = silu(gate) up           y = mid + act Wdown^T

What backward needs of it is either in `saved` (`keep` says which) or computed again into the workspace:

    attention    attn, lse      projections    qkv      mlp    mid, gate_up      (the boundary is x itself)

`ops` is model/fused.py (Triton) or model/reference.py (plain torch): one interface, two implementations.
Source: the formulas are Llama's, arXiv 2302.13971; backward is derived by hand from them.
"""
import dataclasses
import types

import torch

from model.config import ModelConfig
from model.layout import Weights

SAVED = {"attention": ("attn", "lse"), "projections": ("qkv",), "mlp": ("mid", "gate_up")}


@dataclasses.dataclass
class Batch:
    """One micro-batch on the device: int32 [N] each, N rows of all its sequences, one after the other.

    labels are -100 where nothing is supervised. Row i attends to rows doc_start[i] .. i and its document ends before
    row doc_end[i]. order is the stable argsort of tokens.
    """
    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    doc_start: torch.Tensor
    doc_end: torch.Tensor
    order: torch.Tensor


def rope_tables(c: ModelConfig, positions: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [positions, Dh / 2]; angles in fp64, which fp32 misses by 0.06 rad at position 1 M."""
    inv_freq = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim)
    angle = torch.arange(positions, dtype=torch.float64)[:, None] * inv_freq
    return angle.cos().float().to(device), angle.sin().float().to(device)


def activation_shapes(c: ModelConfig, N: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what forward may save, by name; lse is fp32, the others have the working dtype."""
    return {"attn": (N, c.attention_width), "lse": (c.heads, N), "qkv": (N, c.qkv_width), "mid": (N, c.hidden),
            "gate_up": (N, 2 * c.ffn)}


@dataclasses.dataclass
class Workspace:
    """Temporaries of one micro-batch, shared by all layers: [N, ...] in the working dtype, statistics in fp32."""
    normed: torch.Tensor
    rstd: torch.Tensor
    rotated: torch.Tensor | None
    act: torch.Tensor
    dmid: torch.Tensor
    dattn: torch.Tensor
    dqkv: torch.Tensor
    delta: torch.Tensor
    partials: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    # stand-ins for what a layer does not save
    activations: dict[str, torch.Tensor]

    @classmethod
    def take(cls, c: ModelConfig, N: int, positions: int, partials: int, take) -> "Workspace":
        """`take(name, shape, dtype=working dtype)` hands out memory; partials: fp32 elements of reduction scratch."""
        f32 = torch.float32
        shapes = activation_shapes(c, N)
        return cls(
            normed=take("normed", (N, c.hidden)), rstd=take("rstd", (N,), f32),
            rotated=take("rotated", shapes["qkv"]) if c.qk_norm else None,
            act=take("act", (N, c.ffn)), dmid=take("dmid", (N, c.hidden)), dattn=take("dattn", shapes["attn"]),
            dqkv=take("dqkv", shapes["qkv"]), delta=take("delta", shapes["lse"], f32),
            partials=take("partials", (partials,), f32),
            cos=take("cos", (positions, c.head_dim // 2), f32), sin=take("sin", (positions, c.head_dim // 2), f32),
            activations={name: take(name, shape, f32) if name == "lse" else take(name, shape) for name, shape in shapes.items()})


class Block:
    """forward and backward of one decoder layer on given buffers."""

    def __init__(self, config: ModelConfig, ops: types.ModuleType, workspace: Workspace):
        self.c, self.ops, self.ws = config, ops, workspace
        self.scale = config.head_dim ** -0.5
        self.head_shape = (config.heads, config.kv_heads, config.head_dim)

    def forward(self, w: Weights, x: torch.Tensor, batch: Batch, saved: dict[str, torch.Tensor], y: torch.Tensor) -> None:
        """y [N, D] from x [N, D]; fills the buffers in `saved`, any union of SAVED's values."""
        a = self._buffers(saved, x.shape[0])
        self._project(w, x, batch, a)
        self._attend(batch, a)
        self._residual(w, x, a)
        self._norm2(w, a)
        self.ops.linear_swiglu(a.normed, self._operand(w, "gate_up"), gate_up=a.gate_up, act=a.act)
        self.ops.linear(a.act, self._operand(w, "down"), out=y, residual=a.mid)

    def backward(self, w: Weights, x: torch.Tensor, batch: Batch, saved: dict[str, torch.Tensor], dy: torch.Tensor,
                 grads: Weights, accumulate: bool) -> None:
        """dy [N, D], gradient of y, becomes the gradient of x in place. grads: fp32, overwritten or added to.

        What `saved` holds is used up: the buffers are overwritten.
        """
        ops, a = self.ops, self._buffers(saved, x.shape[0])
        self._restore(w, x, batch, saved, a)

        def operand(name):
            return self._operand(w, name)

        def grad(name):
            return self._operand(grads, name)

        # MLP: d(gate) and d(up) take the place of gate and up
        ops.linear_dgrad_swiglu(dy, operand("down"), a.gate_up, d_gate_up=a.gate_up, act=a.act)
        ops.linear_wgrad(dy, a.act, grad("down"), accumulate=accumulate)
        self._norm2(w, a)
        ops.linear_wgrad(a.gate_up, a.normed, grad("gate_up"), accumulate=accumulate)
        ops.linear_dgrad(a.gate_up, operand("gate_up"), out=a.dmid)
        ops.rmsnorm_backward(a.dmid, a.mid, operand("norm2"), a.rstd, dy, dx=a.dmid, dw_addr=grad("norm2"),
                             partials=self.ws.partials, accumulate=accumulate)

        # attention
        ops.linear_wgrad(a.dmid, a.attn, grad("o"), accumulate=accumulate)
        ops.linear_dgrad(a.dmid, operand("o"), out=a.dattn)
        ops.attention_backward(a.rotated, a.attn, a.lse, a.dattn, batch.doc_start, batch.doc_end, *self.head_shape,
                               self.scale, delta=a.delta, dqkv=a.dqkv)
        norms = {}
        if self.c.qk_norm:
            norms = dict(q_norm_addr=operand("q_norm"), k_norm_addr=operand("k_norm"), eps=self.c.norm_eps,
                         dq_norm_addr=grad("q_norm"), dk_norm_addr=grad("k_norm"), partials=self.ws.partials,
                         accumulate=accumulate)
        ops.rope_backward(a.dqkv, a.qkv, self.ws.cos, self.ws.sin, batch.positions, *self.head_shape, **norms)
        ops.rmsnorm(x, operand("norm1"), self.c.norm_eps, out=a.normed, rstd=a.rstd)
        ops.linear_wgrad(a.dqkv, a.normed, grad("qkv"), accumulate=accumulate)
        if self.c.qkv_bias:
            ops.linear_bias_grad(a.dqkv, grad("qkv_bias"), partials=self.ws.partials, accumulate=accumulate)
        ops.linear_dgrad(a.dqkv, operand("qkv"), out=dy)
        ops.rmsnorm_backward(dy, x, operand("norm1"), a.rstd, a.dmid, dx=dy, dw_addr=grad("norm1"),
                             partials=self.ws.partials, accumulate=accumulate)

    def _operand(self, w: Weights, name: str):
        return self.ops.operand(w, name)

    def _buffers(self, saved: dict[str, torch.Tensor], N: int) -> types.SimpleNamespace:
        """Every temporary of N rows; what is saved lies in its own buffer, the rest in the workspace."""
        ws = self.ws
        a = types.SimpleNamespace(normed=ws.normed[:N], rstd=ws.rstd[:N], act=ws.act[:N], dmid=ws.dmid[:N],
                                  dattn=ws.dattn[:N], dqkv=ws.dqkv[:N], delta=ws.delta.view(-1)[: self.c.heads * N].view(-1, N))
        for name, spare in ws.activations.items():
            mine = spare.view(-1)[: self.c.heads * N].view(-1, N) if name == "lse" else spare[:N]
            setattr(a, name, saved.get(name, mine))
        a.rotated = ws.rotated[:N] if self.c.qk_norm else a.qkv
        return a

    def _restore(self, w, x, batch, saved, a) -> None:
        """Computes again what backward reads and forward did not save."""
        if "qkv" not in saved:
            self._project(w, x, batch, a)
        elif self.c.qk_norm:
            self._rotate(w, batch, a)
        if "attn" not in saved:
            self._attend(batch, a)
        if "mid" not in saved:
            self._residual(w, x, a)
            self._norm2(w, a)
            self.ops.linear(a.normed, self._operand(w, "gate_up"), out=a.gate_up)

    def _project(self, w, x, batch, a) -> None:
        self.ops.rmsnorm(x, self._operand(w, "norm1"), self.c.norm_eps, out=a.normed, rstd=a.rstd)
        self.ops.linear(a.normed, self._operand(w, "qkv"), out=a.qkv, bias_addr=self._operand(w, "qkv_bias"))
        self._rotate(w, batch, a)

    def _rotate(self, w, batch, a) -> None:
        self.ops.rope(a.qkv, self.ws.cos, self.ws.sin, batch.positions, *self.head_shape, out=a.rotated,
                      q_norm_addr=self._operand(w, "q_norm"), k_norm_addr=self._operand(w, "k_norm"), eps=self.c.norm_eps)

    def _attend(self, batch, a) -> None:
        self.ops.attention(a.rotated, batch.doc_start, batch.doc_end, *self.head_shape, self.scale, out=a.attn, lse=a.lse)

    def _residual(self, w, x, a) -> None:
        self.ops.linear(a.attn, self._operand(w, "o"), out=a.mid, residual=x)

    def _norm2(self, w, a) -> None:
        self.ops.rmsnorm(a.mid, self._operand(w, "norm2"), self.c.norm_eps, out=a.normed, rstd=a.rstd)
