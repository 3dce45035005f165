"""Rotation (and q/k norms) and its backward against fp64; the peer is Hugging Face's formula and its autograd."""
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from kernels.rope import rope, rope_backward, rope_partials_shape, rope_ref
from model.block import rope_tables
from tests.judge import judge
from tests.models import TINY

EPS = 1e-6
# N, H, K, Dh: one row, odd numbers of heads, one tile of heads and one more, every kind of group
SHAPES = [(1, 1, 1, 16), (3, 3, 1, 16), (5, 9, 3, 64), (3, 12, 4, 128), (2, 15, 2, 128), (33, 4, 2, 32), (1, 2, 2, 256)]
DTYPES = [torch.float32, torch.float16]
GPU_SHAPES = [(N, *heads) for N in (1, 127, 4099) for heads in ((9, 3, 64), (32, 8, 128), (40, 8, 128), (96, 8, 128))]


class Inputs:
    """Random qkv, incoming gradient, norm weights, and tables of 50 positions that rows refer to in no order."""
    def __init__(self, N, H, K, Dh, dtype, device):
        self.N, self.H, self.K, self.Dh = N, H, K, Dh
        self.qkv, self.dout = torch.randn(2, N, (H + 2 * K) * Dh, device=device).to(dtype)
        self.q_norm, self.k_norm = torch.randn(2, Dh, device=device).to(dtype)
        angles = torch.arange(50.0, device=device)[:, None] * 10000.0 ** (-torch.arange(Dh // 2, device=device) * 2 / Dh)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.positions = torch.randint(50, (N,), device=device, dtype=torch.int32)
        self.places = self.cos, self.sin, self.positions, H, K, Dh

    def weights(self, norms):
        return {"q_norm_addr": self.q_norm.data_ptr(), "k_norm_addr": self.k_norm.data_ptr(), "eps": EPS} if norms else {}


def hugging_face(qkv, cos, sin, positions, H, K, Dh, *, q_norm=None, k_norm=None, eps=0.0):
    """As transformers' Llama and Qwen3 do it, in the dtype of qkv."""
    q, k, v = qkv.view(-1, H + 2 * K, Dh).split([H, K, K], 1)
    if q_norm is not None:
        q, k = F.rms_norm(q, (Dh,), q_norm, eps), F.rms_norm(k, (Dh,), k_norm, eps)
    cos, sin = (torch.cat([t, t], -1)[positions.long()].to(qkv.dtype).unsqueeze(1) for t in (cos, sin))

    def rotate_half(x):
        return torch.cat([-x[..., Dh // 2:], x[..., :Dh // 2]], -1)

    q, k = (x * cos + rotate_half(x) * sin for x in (q, k))
    return torch.cat([q, k, v], 1).flatten(1)


def autograd(op, case, norms, dtype):
    """`op` in `dtype`: what it gives, and its gradients with respect to qkv and the weights of the norms."""
    leaves = [t.to(dtype).requires_grad_() for t in (case.qkv, case.q_norm, case.k_norm)[:3 if norms else 1]]
    weights = {"q_norm": leaves[1], "k_norm": leaves[2], "eps": EPS} if norms else {}
    out = op(leaves[0], *case.places, **weights)
    return out.detach(), torch.autograd.grad(out, leaves, case.dout.to(dtype))


def forward(case, norms, empty):
    out = empty(*case.qkv.shape, dtype=case.qkv.dtype)
    rope(case.qkv, *case.places, out=out, **case.weights(norms))
    return out


def backward(case, norms, empty, accumulate_on=None):
    """The gradient of qkv and, with norms, those of both weights."""
    dqkv = case.dout.clone()
    if not norms:
        rope_backward(dqkv, None, *case.places)
        return (dqkv,)
    dq_norm, dk_norm = empty(2, case.Dh) if accumulate_on is None else accumulate_on
    rope_backward(dqkv, case.qkv, *case.places, **case.weights(True), dq_norm_addr=dq_norm.data_ptr(),
                  dk_norm_addr=dk_norm.data_ptr(), partials=empty(math.prod(rope_partials_shape(case.Dh)) + 5),
                  accumulate=accumulate_on is not None)
    return dqkv, dq_norm, dk_norm


def check(N, H, K, Dh, norms, dtype, device, empty):
    case = Inputs(N, H, K, Dh, dtype, device)
    exact_out, exact_grads = autograd(rope_ref, case, norms, torch.float64)
    peer_out, peer_grads = autograd(hugging_face, case, norms, dtype)
    # gradients of the weights are fp32 whatever qkv is
    peer_grads = peer_grads[:1] + autograd(hugging_face, case, norms, torch.float32)[1][1:]
    out = forward(case, norms, empty)
    judge(out, exact=exact_out, peer=peer_out)
    v = slice((H + K) * Dh, None)
    assert torch.equal(out[:, v], case.qkv[:, v])
    grads = backward(case, norms, empty)
    for got, exact, peer in zip(grads, exact_grads, peer_grads, strict=True):
        judge(got, exact=exact, peer=peer)
    assert torch.equal(grads[0][:, v], case.dout[:, v])


@pytest.mark.parametrize(("N", "H", "K", "Dh"), SHAPES)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_as_exact_as_torch(N, H, K, Dh, norms, dtype, device, empty):
    check(N, H, K, Dh, norms, dtype, device, empty)


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "H", "K", "Dh"), SHAPES + GPU_SHAPES)
@pytest.mark.parametrize("norms", [False, True], ids=["plain", "norms"])
def test_bf16_is_as_exact_as_torch(N, H, K, Dh, norms, device, empty):
    check(N, H, K, Dh, norms, torch.bfloat16, device, empty)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("Dh", [64, pytest.param(128, marks=pytest.mark.gpu)])
def test_POS5_far_positions_keep_their_angles(Dh, dtype, device, empty):
    positions = [256, 257, 12_345, 130_001]
    cos, sin = rope_tables(dataclasses.replace(TINY, head_dim=Dh, rope_theta=1e6), positions[-1] + 1, device)
    qkv = torch.zeros(4, 3 * Dh, device=device, dtype=dtype)
    # a one in each column of a first half: turned, it is the cosine there and the sine in the second half
    qkv[:, : Dh // 2], qkv[:, Dh: Dh + Dh // 2] = 1, 1
    out = empty(4, 3 * Dh, dtype=dtype)
    rope(qkv, cos, sin, torch.tensor(positions, dtype=torch.int32, device=device), 1, 1, Dh, out=out)
    angle = torch.tensor(positions).double()[:, None] * 1e6 ** (-torch.arange(0, Dh, 2).double() / Dh)
    exact = torch.cat([angle.cos(), angle.sin()], 1)
    for head in (out[:, :Dh], out[:, Dh: 2 * Dh]):
        # one rounding to fp32 in the tables, one to dtype
        judge(head, exact=exact, peer=exact.float().to(dtype))
        assert not torch.equal(head[0], head[1]), "257 became 256"
        # the case's own number and bound; a step of bf16 is 5e-4 there
        assert head[2, 0].item() == pytest.approx(0.111436, abs=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_gives_the_same_bits_and_leaves_v_alone(dtype, device, empty):
    case = Inputs(5, 9, 3, 64, dtype, device)
    expected = forward(case, False, empty)
    # v is not even read: its NaN stays where it is
    case.qkv[:, -1] = float("nan")
    rope(case.qkv, *case.places, out=case.qkv)
    assert torch.equal(case.qkv[:, :-1], expected[:, :-1])
    assert case.qkv[:, -1].isnan().all()


def test_v_is_copied_bit_for_bit(device, empty):
    case = Inputs(3, 2, 1, 16, torch.float32, device)
    v = case.qkv[:, 3 * 16:]
    v.copy_(torch.tensor([float("inf"), -0.0, float("nan"), 1.0], device=device).repeat(4))
    out = forward(case, False, empty)
    assert torch.equal(out[:, 3 * 16:].view(torch.int32), v.view(torch.int32))
    assert out[:, :3 * 16].isfinite().all()


def test_backward_undoes_the_rotation(device, empty):
    case = Inputs(7, 3, 1, 64, torch.float32, device)
    case.dout = forward(case, False, empty)
    (back,) = backward(case, False, empty)
    judge(back, exact=case.qkv.double(), peer=autograd(hugging_face, case, False, torch.float32)[1][0])


def test_accumulating_adds_to_what_is_there(device, empty):
    case = Inputs(5, 3, 1, 32, torch.float32, device)
    before = torch.randn(2, 32, device=device)
    _, *alone = backward(case, True, empty)
    _, *added = backward(case, True, empty, accumulate_on=before.clone())
    assert torch.equal(torch.stack(added), before + torch.stack(alone))


def test_the_same_input_gives_the_same_bits(device, empty):
    case = Inputs(35, 5, 1, 64, torch.float16, device)
    first = backward(case, True, empty)
    assert all(map(torch.equal, backward(case, True, empty), first))
