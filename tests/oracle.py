"""What the engine must equal bit for bit: a resident loop over the reference block, and AdamW in numpy."""
import math

import numpy as np
import torch

from model import reference
from model.block import Block
from model.head import Head, HeadSpace
from model.layout import block_layout, embedding_layout, head_layout
from tests.models import workspace


def numpy_adamw(w, m, v, g, factor, lr, beta1, beta2, eps, weight_decay, t):
    """One AdamW step in fp32, operation by operation (HOST formulas: coefficients in fp64, rounded once). In place."""
    f = np.float32
    x = g * f(factor)
    m[:] = f(beta1) * m + f(1 - beta1) * x
    v[:] = f(beta2) * v + f(1 - beta2) * (x * x)
    rbc2 = f(1 / math.sqrt(1 - beta2 ** t))
    w[:] = w * f(1 - lr * weight_decay) - f(lr / (1 - beta1 ** t)) * (m / (np.sqrt(v) * rbc2 + f(eps)))


def resident_loop(c, masters, steps, adamw, head_chunk, grad_dtype=torch.float32):
    """Losses, norms and final masters of plain training with everything in one place.

    masters: flat fp32 per unit, updated in place. steps: lists of micro-batches. adamw: runtime.optimizer.AdamW.
    """
    layouts = [embedding_layout(c), *[block_layout(c)] * c.layers, head_layout(c)]
    m, v = ([torch.zeros_like(w) for w in masters] for _ in range(2))
    N = len(steps[0][0].tokens)
    space = HeadSpace.take(c, N, head_chunk, lambda _, shape, d=None: torch.zeros(shape))
    block, head = Block(c, reference, workspace(c, N, torch.float32)), Head(c, reference, space, None)
    losses, norms = [], []
    for t, micro_batches in enumerate(steps):
        supervised = sum(int((b.labels >= 0).sum()) for b in micro_batches)
        w = [layout.bind(flat) for layout, flat in zip(layouts, masters, strict=True)]
        grads = [layout.bind(torch.zeros(layout.numel)) for layout in layouts]
        matrix, dmatrix = ((w[0].view("embedding"), grads[0].view("embedding")) if c.tied else (w[-1].view("head"), grads[-1].view("head")))
        parts = []
        for i, host in enumerate(micro_batches):
            batch, xs = host.on("cpu"), [torch.empty(N, c.hidden) for _ in range(c.layers + 1)]
            reference.embedding(batch.tokens, w[0].view("embedding"), out=xs[0])
            for layer in range(c.layers):
                block.forward(w[1 + layer], xs[layer], batch, {}, xs[layer + 1])
            dx = torch.empty(N, c.hidden)
            parts.append((batch, xs, dx, head.loss_backward(w[-1], matrix, xs[-1], batch, 1 / supervised, dx, grads[-1], dmatrix,
                                                            i > 0).sum(dtype=torch.float64)))
        for layer in reversed(range(c.layers)):
            for i, (batch, xs, dx, _) in enumerate(parts):
                block.backward(w[1 + layer], xs[layer], batch, {}, dx, grads[1 + layer], i > 0)
        for batch, _, dx, _ in parts:
            reference.embedding_backward(dx, batch.tokens, batch.order, grads[0].view("embedding"), partials=None)
        norm = math.sqrt(math.fsum(g.flat.double().square().sum().item() for g in grads))
        factor = min(1.0, adamw.max_norm / (norm + 1e-6))
        for u, layout in enumerate(layouts):
            g = grads[u].flat.to(grad_dtype).float()
            for part, decay in ((slice(0, layout.decay_from), 0.0), (slice(layout.decay_from, None), adamw.weight_decay)):
                numpy_adamw(masters[u].numpy()[part], m[u].numpy()[part], v[u].numpy()[part], g.numpy()[part], factor,
                            adamw.schedule.at(t), adamw.beta1, adamw.beta2, adamw.eps, decay, t + 1)
        losses.append(torch.stack([p[3] for p in parts]).sum().item() / supervised)
        norms.append(norm)
    return losses, norms, masters
