"""The loss in token chunks: any chunk gives the same, and none outlives its turn."""
import dataclasses
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model import reference
from model.head import Head, HeadSpace
from model.layout import head_layout
from tests.models import TINY, packed, random_weights
from tests.runtime.make import relative_error

T, V = 257, 1009
C = dataclasses.replace(TINY, vocab=V)
SAME = 1e-6


def loss_and_gradients(chunk, dtype=torch.float32, matrix_gradient=None):
    """Losses, dx and gradients of norm and matrix, from buffers full of NaN; a third of the labels is masked."""
    layout, batch = head_layout(C), packed([100, 1, T - 101], V, 0, masked=0.3).on("cpu")
    # labels at the edges of the chunks of 100 count once
    batch.labels[[99, 101, 199, 200]] = torch.tensor([3, 4, 5, 6], dtype=torch.int32)

    def take(_name, shape, special=None):
        return torch.full(shape, float("nan"), dtype=special or dtype)
    x = torch.randn(T, C.hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    w = layout.bind(random_weights(layout, dtype, 1))
    grads = layout.bind(torch.full((layout.numel,), float("nan")))
    head, dx = Head(C, reference, HeadSpace.take(C, T, chunk, take), None), torch.full_like(x, float("nan"))
    before = x.clone()
    losses = head.loss_backward(w, w.view("head"), x, batch, 0.01, dx, grads, grads.view("head"), accumulate=False).clone()
    assert torch.equal(x, before), "what enters the head was written to"
    assert torch.equal(head.loss(w, w.view("head"), x, batch), losses), "the loss alone is another one"
    return losses, dx, grads.view("norm").clone(), grads.view("head").clone(), (x, w, batch)


@pytest.mark.parametrize("chunk", [1, 100, T, T + 904])
def test_LOSS6_chunks(chunk):
    *ours, (x, w, batch) = loss_and_gradients(chunk)
    wide_x, norm, matrix = (t.double().requires_grad_() for t in (x, w.view("norm"), w.view("head")))
    losses = F.cross_entropy(F.rms_norm(wide_x, (C.hidden,), norm, C.norm_eps) @ matrix.T, batch.labels.long(), reduction="none")
    (0.01 * losses.sum()).backward()
    for got, exact in zip(ours, (losses.detach(), wide_x.grad, norm.grad, matrix.grad), strict=True):
        assert relative_error([got], [exact]) <= SAME


def test_LOSS6_one_chunk_of_logits_is_all_that_is_planned():
    taken = {}
    HeadSpace.take(C, 4096, 100, lambda name, shape, dtype=None: taken.setdefault(name, shape))
    assert taken["logits"] == (100, 1016)
    assert all(V not in shape for name, shape in taken.items() if name != "logits")


class LiveLogits(TorchDispatchMode):
    """Counts the storages alive at once behind results whose last size is V; `apart`: those that do not count."""

    def __init__(self, *apart):
        super().__init__()
        self.apart = {t.untyped_storage()._cdata for t in apart}
        self.alive, self.most = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, tuple | list) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() == 2 and t.shape[-1] == V and t.untyped_storage()._cdata not in self.apart:
                self.alive[id(t)] = weakref.ref(t), t.untyped_storage()._cdata
        live = {storage for ref, storage in self.alive.values() if ref() is not None}
        self.most = max(self.most, len(live))
        return out


def most_alive(op, N, dtype=torch.float32, chunk=8, D=16):
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, D, generator=g).to(dtype) for n in (N, V))
    labels = torch.randint(0, V, (N,), generator=g, dtype=torch.int32)
    logits, losses = torch.empty(chunk, V, dtype=dtype), torch.empty(N)
    dx, dw, before = torch.empty_like(x), torch.empty(V, D), x.clone()
    results = []
    for _ in range(2):
        gc.collect()
        with LiveLogits(w, dw) as live:
            op(x, w, labels, 1.0, V=V, logits=logits, losses=losses, dx=dx, dw_addr=dw, accumulate=False)
        results.append([t.clone() for t in (losses, dx, dw)])
    assert torch.equal(x, before), "the hidden states handed in were written to"
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), "a second call gave other bits"
    return live.most


def one_backward_behind_all_chunks(x, w, labels, scale, *, V, logits, losses, dx, dw_addr, accumulate):
    """Chunked forward, autograd behind it: the fault that LOSS9 is about."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    for i in range(0, len(x), len(logits)):
        rows = slice(i, i + len(logits))
        losses[rows] = F.cross_entropy(x[rows] @ w.T, labels[rows].long(), reduction="none")
    losses.sum().backward()
    losses.detach_()
    dx.copy_(x.grad)
    dw_addr.copy_(w.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_LOSS9_chunks_are_let_go(dtype):
    """A chunk and its gradient, in two dtypes at most, whatever the number of tokens."""
    assert most_alive(reference.linear_cross_entropy, 64, dtype) == most_alive(reference.linear_cross_entropy, 256, dtype)
    assert most_alive(reference.linear_cross_entropy, 256) <= 2


def test_LOSS9_the_count_sees_chunks_that_are_kept():
    kept = [most_alive(one_backward_behind_all_chunks, N) for N in (64, 256)]
    assert kept[0] > 2 and kept[1] > 2 * kept[0]


def test_LOSS10_masked_rows_have_neither_loss_nor_gradient():
    losses, dx, _, _, (_, _, batch) = loss_and_gradients(100)
    masked = batch.labels < 0
    assert (losses[masked] == 0).all() and (dx[masked] == 0).all()
    assert (losses[~masked] > 0).all() and (dx[~masked] != 0).any(1).all()


def test_logits_are_those_of_the_loss():
    layout, batch = head_layout(C), packed([T], V, 0).on("cpu")
    w, x = layout.bind(random_weights(layout, torch.float32, 1)), torch.randn(T, C.hidden)
    head = Head(C, reference, HeadSpace.take(C, T, 100, lambda _, shape, dtype=None: torch.empty(shape)), None)
    losses = head.loss(w, w.view("head"), x, batch).clone()
    row = head.logits(w, w.view("head"), x[7:8])
    assert F.cross_entropy(row, batch.labels[7:8].long()).item() == pytest.approx(losses[7].item(), rel=SAME)
