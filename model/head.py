"""Both ends of the network: the token embedding, and the final norm with the loss.

Tied, the head's matrix is the embedding: `matrix` is then the embedding's slot and its gradient goes to a buffer that
the embedding's own gradient is added to.
"""
import dataclasses
import types

import torch

from model.block import Batch
from model.config import ModelConfig
from model.layout import Weights


@dataclasses.dataclass
class HeadSpace:
    """Temporaries of the head: normed and its gradient [N, D], one chunk of logits, loss a row."""
    normed: torch.Tensor
    dnormed: torch.Tensor
    rstd: torch.Tensor
    logits: torch.Tensor
    losses: torch.Tensor

    @classmethod
    def take(cls, c: ModelConfig, N: int, chunk: int, take) -> "HeadSpace":
        """chunk: tokens whose logits are alive at once. `take` as in model.block.Workspace."""
        # a row of logits starts on 16 bytes, whatever the vocabulary
        padded = -(-c.vocab // 8) * 8
        f32 = torch.float32
        return cls(normed=take("head normed", (N, c.hidden)), dnormed=take("head dnormed", (N, c.hidden)),
                   rstd=take("head rstd", (N,), f32), logits=take("logits", (min(chunk, N), padded)),
                   losses=take("losses", (N,), f32))


class Head:
    """Final norm, linear and cross-entropy in token chunks; logits of N x V never exist."""

    def __init__(self, config: ModelConfig, ops: types.ModuleType, space: HeadSpace, partials: torch.Tensor):
        self.c, self.ops, self.space, self.partials = config, ops, space, partials

    def loss(self, w: Weights, matrix, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Loss of each row [N] fp32, 0 where masked; matrix: the head's operand. The result is overwritten by the next call."""
        s, N = self.space, x.shape[0]
        self._norm(w, x)
        self.ops.linear_cross_entropy(s.normed[:N], matrix, batch.labels, 1.0, V=self.c.vocab, logits=s.logits, losses=s.losses[:N])
        return s.losses[:N]

    def loss_backward(self, w: Weights, matrix, x: torch.Tensor, batch: Batch, scale: float, dx: torch.Tensor,
                      grads: Weights, matrix_grad, accumulate: bool) -> torch.Tensor:
        """As `loss`, and dx [N, D], norm's and matrix's gradients of scale * sum(losses)."""
        s, N = self.space, x.shape[0]
        self._norm(w, x)
        self.ops.linear_cross_entropy(s.normed[:N], matrix, batch.labels, scale, V=self.c.vocab, logits=s.logits,
                                      losses=s.losses[:N], dx=s.dnormed[:N], dw_addr=matrix_grad, accumulate=accumulate)
        self.ops.rmsnorm_backward(s.dnormed[:N], x, self.ops.operand(w, "norm"), s.rstd[:N], None, dx=dx,
                                  dw_addr=self.ops.operand(grads, "norm"), partials=self.partials, accumulate=accumulate)
        return s.losses[:N]

    def logits(self, w: Weights, matrix, x: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V] of x [rows, D]; at most as many rows as a chunk holds."""
        s, rows = self.space, x.shape[0]
        self._norm(w, x)
        out = s.logits[:rows, : self.c.vocab]
        self.ops.linear(s.normed[:rows], matrix, out=out)
        return out

    def _norm(self, w: Weights, x: torch.Tensor) -> None:
        N = x.shape[0]
        self.ops.rmsnorm(x, self.ops.operand(w, "norm"), self.c.norm_eps, out=self.space.normed[:N], rstd=self.space.rstd[:N])
