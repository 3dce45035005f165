"""POS1, POS2 and POS8 on the whole chain of kernels: embedding, two layers, loss, and every gradient back to the embedding.

All buffers start as NaN and have NaN behind their end.
"""
import dataclasses
import math

import numpy as np
import pytest
import torch

from model import fused, reference
from model.block import Block, Workspace, rope_tables
from model.head import Head, HeadSpace
from model.layout import block_layout, embedding_layout, head_layout
from tests.models import VARIANTS, packed, random_weights

SMALL = dataclasses.replace(VARIANTS["qkv bias"], layers=2, heads=2, kv_heads=1, vocab=67)
# real head widths, and q/k norms, which take the interpreter long
WIDE = [dataclasses.replace(VARIANTS["both"], layers=2, hidden=256, head_dim=Dh, ffn=512, vocab=2053) for Dh in (64, 128)]
# at the end of every buffer
NAN_ELEMENTS = 4096


def each_model(lengths: list[int], on_gpu: list[list[int]]):
    """SMALL with `lengths`, and the GPU's models with each of those `on_gpu`."""
    cases = [(SMALL, torch.float32, lengths)]
    cases += [pytest.param(c, torch.bfloat16, each, marks=pytest.mark.gpu) for c in WIDE for each in on_gpu]
    ids = [f"{p[0].head_dim}-{p[2]}" for p in (getattr(case, "values", case) for case in cases)]
    return pytest.mark.parametrize(("c", "dtype", "lengths"), cases, ids=ids)


def batch_of(c, lengths: list[int], tokens: np.ndarray, masked: slice | None = None):
    """Documents of these lengths made of `tokens`; `masked`: rows whose labels are."""
    batch = packed(lengths, c.vocab, 0)
    batch.tokens[:] = tokens
    supervised = batch.labels >= 0
    batch.labels[supervised] = np.roll(tokens, -1)[supervised]
    if masked is not None:
        batch.labels[masked] = -100
    batch.order[:] = np.argsort(tokens, kind="stable")
    return batch


def train(c, batch, dtype: torch.dtype, device: str, ops=fused) -> dict[str, torch.Tensor]:
    """Losses [N], the residual stream in front of each layer and of the head [N, D], its gradient in front of the first, and the
    gradient of every tensor by layer and name."""
    N = len(batch.tokens)

    def take(_name, shape, special=None):
        kind = torch.promote_types(special or dtype, dtype)
        size = math.prod(shape)
        return torch.full((size + NAN_ELEMENTS,), float("nan"), dtype=kind, device=device)[:size].view(shape)

    layouts = [embedding_layout(c), *[block_layout(c)] * c.layers, head_layout(c)]
    weights = [layout.bind(random_weights(layout, dtype, seed, device)) for seed, layout in enumerate(layouts)]
    grads = [layout.bind(take("gradients", (layout.numel,), torch.float32)) for layout in layouts]
    grads[0].flat.zero_()
    ws = Workspace.take(c, N, N, ops.partials_elements(c, N), take)
    ws.cos, ws.sin = rope_tables(c, N, device)
    block, head = Block(c, ops, ws), Head(c, ops, HeadSpace.take(c, N, N, take), ws.partials)
    batch, stream, dx = batch.on(device), [take("x", (N, c.hidden)) for _ in range(c.layers + 1)], take("dx", (N, c.hidden))

    ops.embedding(batch.tokens, ops.operand(weights[0], "embedding"), out=stream[0])
    for layer in range(c.layers):
        block.forward(weights[1 + layer], stream[layer], batch, {}, stream[layer + 1])
    losses = head.loss_backward(weights[-1], ops.operand(weights[-1], "head"), stream[-1], batch, 0.25, dx, grads[-1],
                                ops.operand(grads[-1], "head"), accumulate=False)
    for layer in reversed(range(c.layers)):
        block.backward(weights[1 + layer], stream[layer], batch, {}, dx, grads[1 + layer], accumulate=False)
    ops.embedding_backward(dx, batch.tokens, batch.order, ops.operand(grads[0], "embedding"), partials=ws.partials)
    return ({"losses": losses, "dx": dx} | {f"x{i}": x for i, x in enumerate(stream)}
            | {f"layer {i} {name}": g.view(name) for i, g in enumerate(grads) for name in g.layout.tensors})


def is_rows(name: str) -> bool:
    return not name.startswith("layer")


def part(results: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    """The results, those a row of these rows alone."""
    return {name: x[rows] if is_rows(name) else x for name, x in results.items()}


def distance(results: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Root of the mean square, over all tensors, of their relative distance to fp64."""
    return sum(((x.double() - exact[name]).norm() / exact[name].norm()).item() ** 2 for name, x in results.items()) ** 0.5


def same_as_alone(results, alone, c, batch) -> None:
    """fp32: every tensor within the cases' own 1e-6. bf16: together at most twice as far from fp64, where one rounding that
    falls to the other side moves all that comes after it."""
    assert all(x.isfinite().all() for x in results.values())
    if results["x0"].dtype == torch.float32:
        far = [name for name, x in results.items() if (x - alone[name]).norm() > 1e-6 * alone[name].norm()]
        assert not far, f"not as if alone: {far}"
    else:
        exact = train(c, batch, torch.float64, str(results["x0"].device), reference)
        assert distance(results, exact) <= 2 * distance(alone, exact)


@each_model([3, 3], on_gpu=[[3, 3], [128, 300], [300, 5]])
def test_POS1_what_the_first_document_says_changes_nothing_of_a_loss_over_the_second(c, dtype, lengths, device):
    first, N = lengths[0], sum(lengths)
    # all different, so that no sum of the embedding's gradient is cut elsewhere when the order of the tokens changes
    tokens, others = np.split(np.random.default_rng(1).permutation(c.vocab)[: N + first].astype(np.int32), [N])
    before = train(c, batch_of(c, lengths, tokens, slice(0, first)), dtype, device)
    # each is looked at: its gradients are finite and it is not all zero
    assert all(x.isfinite().all() and x.any() for x in part(before, slice(first, None)).values())
    changed = np.concatenate([others, tokens[first:]])
    after = train(c, batch_of(c, lengths, changed, slice(0, first)), dtype, device)
    assert (after["x1"][:first] != before["x1"][:first]).any(1).all()
    expected = part(before, slice(first, None))
    other = [name for name, x in part(after, slice(first, None)).items() if not torch.equal(x, expected[name])]
    assert not other, f"depend on the first document: {other}"


@each_model([3, 3], on_gpu=[[3, 3], [128, 300], [300, 5]])
def test_POS1_a_document_is_trained_on_as_if_it_were_alone(c, dtype, lengths, device):
    first = lengths[0]
    tokens = np.random.default_rng(2).integers(0, c.vocab, sum(lengths), dtype=np.int32)
    together = part(train(c, batch_of(c, lengths, tokens, slice(0, first)), dtype, device), slice(first, None))
    alone_batch = batch_of(c, lengths[1:], tokens[first:])
    same_as_alone(together, train(c, alone_batch, dtype, device), c, alone_batch)


@each_model([1, 4, 1, 1, 3], on_gpu=[[1, 4, 1, 1, 3], [128, 1, 127, 256, 64], [5] * 300])
def test_POS2_short_documents(c, dtype, lengths, device):
    tokens = np.random.default_rng(3).integers(0, c.vocab, sum(lengths), dtype=np.int32)
    batch = batch_of(c, lengths, tokens)
    ours = train(c, batch, dtype, device)
    exact, peer = train(c, batch, torch.float64, device, reference), train(c, batch, dtype, device, reference)
    assert distance(ours, exact) <= 2 * distance(peer, exact)


@each_model([5, 35], on_gpu=[[5, 251]])
def test_POS8_padding_changes_nothing_and_gets_no_gradient(c, dtype, lengths, device):
    # a whole tile of rows, and more, is padding
    real, padding = lengths
    tokens = np.random.default_rng(4).permutation(c.vocab)[:real].astype(np.int32)
    batch = batch_of(c, lengths, np.concatenate([tokens, np.full(padding, tokens[-1])]), slice(real, None))
    padded, alone_batch = train(c, batch, dtype, device), batch_of(c, [real], tokens)
    assert all(x.isfinite().all() for x in padded.values())
    assert not padded["dx"][real:].any() and not padded["losses"][real:].any()
    same_as_alone(part(padded, slice(0, real)), train(c, alone_batch, dtype, device), c, alone_batch)
