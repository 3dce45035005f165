"""The block's hand-written backward against torch.autograd, in fp64, on a forward written with torch.nn.functional."""
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from model import reference
from model.block import SAVED, Block, rope_tables
from model.layout import block_layout
from tests.judge import judge
from tests.models import TINY, VARIANTS, packed, random_weights, saved_buffers, workspace

KEEPS = [keep for n in range(4) for keep in itertools.combinations(SAVED, n)]


def plain_block(c, w, x, batch):
    """One layer as anybody would write it; w: views by name that require gradients."""
    def rms(x, weight):
        return F.rms_norm(x, (x.shape[-1],), weight, c.norm_eps)

    N = x.shape[0]
    qkv = F.linear(rms(x, w["norm1"]), torch.cat([w["q"], w["k"], w["v"]]), w.get("qkv_bias"))
    q, k, v = qkv.view(N, -1, c.head_dim).transpose(0, 1).split([c.heads, c.kv_heads, c.kv_heads])
    if c.qk_norm:
        q, k = rms(q, w["q_norm"]), rms(k, w["k_norm"])
    cos, sin = (t[batch.positions.long()].to(x.dtype) for t in rope_tables(c, N, x.device))
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    q, k = (t * cos + torch.cat([-t[..., c.head_dim // 2:], t[..., : c.head_dim // 2]], -1) * sin for t in (q, k))
    rows = torch.arange(N, device=x.device)
    mask = (rows[None] <= rows[:, None]) & (rows[None] >= batch.doc_start[:, None])
    attn = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    mid = x + F.linear(attn.transpose(0, 1).reshape(N, -1), w["o"])
    h = rms(mid, w["norm2"])
    return mid + F.linear(F.silu(F.linear(h, w["gate"])) * F.linear(h, w["up"]), w["down"])


def run(c, names, batch, x, dy, flat, accumulate_twice=False):
    """Output, dx and the gradients of Block, with only `names` saved."""
    layout = block_layout(c)
    block = Block(c, reference, workspace(c, len(x), torch.float64))
    saved = saved_buffers(c, len(x), names, torch.float64)
    y, dx = torch.full_like(x, float("nan")), dy.clone()
    grads = layout.bind(torch.zeros(layout.numel, dtype=torch.float64))
    w = layout.bind(flat)
    for again in range(1 + accumulate_twice):
        dx.copy_(dy)
        block.forward(w, x, batch, saved, y)
        block.backward(w, x, batch, saved, dx, grads, accumulate=bool(again))
    return y, dx, grads


def inputs(c, lengths=(5, 1, 17, 9), seed=0):
    batch = packed(list(lengths), c.vocab, seed).on("cpu")
    g = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(sum(lengths), c.hidden, generator=g, dtype=torch.float64) for _ in range(2))
    return batch, x, dy, random_weights(block_layout(c), torch.float64, seed)


@pytest.mark.parametrize("c", VARIANTS.values(), ids=VARIANTS)
def test_OPT14_gradients_are_autograds_by_name(c):
    batch, x, dy, flat = inputs(c)
    layout = block_layout(c)
    leaves = {name: layout.bind(flat).view(name).clone().requires_grad_() for name in layout.tensors}
    x_leaf = x.clone().requires_grad_()
    expected = plain_block(c, leaves, x_leaf, batch)
    expected.backward(dy)
    y, dx, grads = run(c, (), batch, x, dy, flat)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dx, x_leaf.grad, rtol=1e-9, atol=1e-9)
    for name, leaf in leaves.items():
        torch.testing.assert_close(grads.view(name), leaf.grad, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("keep", KEEPS, ids=lambda keep: "+".join(keep) or "nothing")
@pytest.mark.parametrize("c", [TINY, VARIANTS["both"]], ids=["plain", "both"])
def test_what_is_kept_changes_no_bit(c, keep):
    batch, x, dy, flat = inputs(c)
    nothing = run(c, (), batch, x, dy, flat)
    some = run(c, tuple(name for part in keep for name in SAVED[part]), batch, x, dy, flat)
    assert torch.equal(some[0], nothing[0]) and torch.equal(some[1], nothing[1])
    assert torch.equal(some[2].flat, nothing[2].flat)


def test_gradients_accumulate():
    batch, x, dy, flat = inputs(TINY)
    once, twice = run(TINY, (), batch, x, dy, flat)[2], run(TINY, (), batch, x, dy, flat, accumulate_twice=True)[2]
    assert torch.equal(twice.flat, 2 * once.flat)


def test_POS1_a_document_does_not_see_the_one_before():
    batch, x, dy, flat = inputs(TINY, lengths=(7, 12))
    dy[:7] = 0
    x2 = x.clone()
    x2[3] += 1
    y, dx, grads = run(TINY, (), batch, x, dy, flat)
    y2, dx2, grads2 = run(TINY, (), batch, x2, dy, flat)
    assert torch.equal(y[7:], y2[7:]) and torch.equal(dx[7:], dx2[7:])
    assert not torch.equal(y[3:7], y2[3:7])
    for name in grads.layout.tensors:
        assert torch.equal(grads.view(name), grads2.view(name)), name


def test_POS1_a_packed_document_is_the_document_alone():
    batch, x, dy, flat = inputs(TINY, lengths=(7, 12))
    alone = packed([12], TINY.vocab, 0).on("cpu")
    y, dx, _ = run(TINY, (), batch, x, dy, flat)
    y2, dx2, _ = run(TINY, (), alone, x[7:].clone(), dy[7:].clone(), flat)
    torch.testing.assert_close(y[7:], y2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx[7:], dx2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T", [1, 127, 128, 129, 300])
def test_POS7_any_length(T):
    batch, x, dy, flat = inputs(TINY, lengths=(T,))
    y, dx, grads = run(TINY, (), batch, x, dy, flat)
    layout = block_layout(TINY)
    x_leaf = x.clone().requires_grad_()
    expected = plain_block(TINY, {n: layout.bind(flat).view(n) for n in layout.tensors}, x_leaf, batch)
    expected.backward(dy)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(dx, x_leaf.grad, rtol=1e-9, atol=1e-9)


WIDE = {name: dataclasses.replace(c, hidden=576, heads=9, kv_heads=3 if c.kv_heads > 1 else 1, head_dim=64, ffn=1536)
        for name, c in VARIANTS.items()}


@pytest.mark.parametrize("c", [TINY, VARIANTS["both"]], ids=["plain", "both"])
def test_fused_block_is_as_exact_as_torch(c, device):
    judge_fused(c, (), (13, 1, 26), torch.float32, device)


@pytest.mark.gpu
@pytest.mark.parametrize("c", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("keep", [(), tuple(SAVED)], ids=["recomputed", "kept"])
def test_fused_block_is_as_exact_as_torch_in_bf16(c, keep):
    judge_fused(c, keep, (129, 1, 700, 213), torch.bfloat16, "cuda")


def judge_fused(c, keep, lengths, dtype, device):
    """Output and every gradient of the kernels against fp64, and twice the same bits; the peer is the reference in the same
    dtype on the same device."""
    from model import fused
    batch, x, dy, flat = inputs(c, lengths)
    exact = run(c, (), batch, x, dy, flat)
    names = tuple(name for part in keep for name in SAVED[part])
    ours, again, peer = (run_as(c, ops, names, lengths, x, dy, flat, dtype, device) for ops in (fused, fused, reference))
    for which in range(2):
        judge(ours[which], exact=exact[which], peer=peer[which])
    for name in exact[2].layout.tensors:
        judge(ours[2].view(name), exact=exact[2].view(name), peer=peer[2].view(name))
        assert torch.equal(ours[2].view(name), again[2].view(name)), f"{name}: two runs, different bits"


def run_as(c, ops, names, lengths, x, dy, flat, dtype, device):
    """As `run`, with these operations in this dtype; gradients start as NaN."""
    layout, N = block_layout(c), len(x)
    batch = packed(list(lengths), c.vocab, 0).on(device)
    block = Block(c, ops, workspace(c, N, dtype, device, ops.partials_elements(c, N)))
    saved = saved_buffers(c, N, names, dtype, device)
    x, dx = x.to(device, dtype), dy.to(device, dtype)
    y = torch.full_like(x, float("nan"))
    grads = layout.bind(torch.full((layout.numel,), float("nan"), device=device))
    w = layout.bind(flat.to(device, dtype))
    block.forward(w, x, batch, saved, y)
    block.backward(w, x, batch, saved, dx, grads, accumulate=False)
    return y, dx, grads
