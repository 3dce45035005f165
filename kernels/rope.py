"""Rotary position embedding on the fused projection, with RMSNorm over each q and k head before it where a family has it.

    x_hat = x * rstd * w over each head of q and k (without norms x_hat = x), then with angle a of position and column
    y1 = x_hat1 cos a - x_hat2 sin a        1, 2: first and second half of the head, Hugging Face's order
    y2 = x_hat2 cos a + x_hat1 sin a

    dx_hat: dy rotated by -a
    dx = rstd * (w * dx_hat - x_hat' * mean(w * dx_hat * x_hat')), dw = sum of dx_hat * x_hat'      x_hat' = x * rstd

    qkv dqkv  [N, (H + 2K) Dh] bf16, fp16 or fp32, contiguous: H query heads, K key heads, K value heads
    cos sin   [P, Dh / 2] fp32       positions  [N] int32, rows of cos and sin
    weights   [Dh], dtype of qkv, one for q and one for k, raw addresses; their gradients fp32

Heads of v do not change. Source: Su et al. 2021, arXiv 2104.09864; norms: Dehghani et al. 2023, arXiv 2302.05442.
"""
import math

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, check_address, check_partials, check_rows, num_sms
from kernels.rmsnorm import rmsnorm_ref, sum_partials


def rope_ref(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, H: int, K: int, Dh: int, *,
             q_norm: torch.Tensor | None = None, k_norm: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
    """Plain torch; fp64 in, fp64 out, so that it can judge the kernel (and, through autograd, its backward)."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(wide).view(-1, H + 2 * K, Dh).split([H, K, K], 1)
    if q_norm is not None:
        q, k = rmsnorm_ref(q, q_norm, eps), rmsnorm_ref(k, k_norm, eps)
    c, s = (table.to(wide)[positions.long()][:, None] for table in (cos, sin))
    x1, x2 = torch.cat([q, k], 1).chunk(2, -1)
    return torch.cat([torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1), v], 1).flatten(1).to(qkv.dtype)


@triton.jit
def _head_weight(q_w_addr, k_w_addr, column, head, H: tl.constexpr, dtype: tl.constexpr):
    """[BH, BC]: the weight of q for heads below H, of k for the others."""
    q_w = tl.multiple_of(q_w_addr.to(tl.pointer_type(dtype)), 16)
    k_w = tl.multiple_of(k_w_addr.to(tl.pointer_type(dtype)), 16)
    b_q, b_k = tl.load(q_w + column).to(tl.float32), tl.load(k_w + column).to(tl.float32)
    return tl.where((head < H)[:, None], b_q[None, :], b_k[None, :])


@triton.jit
def _rope_fwd(x, cos, sin, positions, q_w_addr, k_w_addr, eps, y, H: tl.constexpr, K: tl.constexpr, HEADS: tl.constexpr,
              Dh: tl.constexpr, NORMS: tl.constexpr, BACK: tl.constexpr, BH: tl.constexpr):
    """One row and BH of its first HEADS heads. BACK turns by the negative angle: the backward where there are no norms."""
    blocks: tl.constexpr = (HEADS + BH - 1) // BH
    HALF: tl.constexpr = Dh // 2
    # N * (H + 2K) Dh passes 2^31 at 300k rows of 7168
    row = (tl.program_id(0) // blocks).to(tl.int64)
    head = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    column = tl.arange(0, HALF)
    inside = (head < HEADS)[:, None]
    at = row * ((H + 2 * K) * Dh) + head[:, None] * Dh + column[None, :]       # [BH, HALF]
    # first what depends on nothing: the angles wait for the position
    b_x1 = tl.load(x + at, mask=inside, other=0.0)
    b_x2 = tl.load(x + at + HALF, mask=inside, other=0.0)
    angle = tl.load(positions + row).to(tl.int64) * HALF + column              # [HALF]
    b_cos = tl.load(cos + angle)[None, :]
    b_sin = tl.load(sin + angle)[None, :]
    if BACK:
        b_sin = -b_sin
    b_n1, b_n2 = b_x1.to(tl.float32), b_x2.to(tl.float32)
    if NORMS:
        b_rstd = tl.rsqrt(tl.sum(b_n1 * b_n1 + b_n2 * b_n2, 1) / Dh + eps)[:, None]
        b_n1 *= b_rstd * _head_weight(q_w_addr, k_w_addr, column, head, H, x.dtype.element_ty)
        b_n2 *= b_rstd * _head_weight(q_w_addr, k_w_addr, column + HALF, head, H, x.dtype.element_ty)
    # heads of v are among them only when y is another buffer: copied, whatever bits they are
    turned = (head < H + K)[:, None]
    b_y1 = tl.where(turned, (b_n1 * b_cos - b_n2 * b_sin).to(y.dtype.element_ty), b_x1)
    b_y2 = tl.where(turned, (b_n2 * b_cos + b_n1 * b_sin).to(y.dtype.element_ty), b_x2)
    tl.store(y + at, b_y1, mask=inside)
    tl.store(y + at + HALF, b_y2, mask=inside)


@triton.jit
def _rope_norm_bwd(dy, x, cos, sin, positions, q_w_addr, k_w_addr, eps, q_partials, k_partials, N, H: tl.constexpr,
                   K: tl.constexpr, Dh: tl.constexpr, BH: tl.constexpr, STAGES: tl.constexpr):
    """BH heads of every num_programs / blocks-th row, in place on dy; one sum of dw for q and one for k a program."""
    blocks: tl.constexpr = (H + K + BH - 1) // BH
    HALF: tl.constexpr = Dh // 2
    head = (tl.program_id(0) % blocks) * BH + tl.arange(0, BH)
    column = tl.arange(0, HALF)
    inside = (head < H + K)[:, None]
    b_w1 = _head_weight(q_w_addr, k_w_addr, column, head, H, x.dtype.element_ty)
    b_w2 = _head_weight(q_w_addr, k_w_addr, column + HALF, head, H, x.dtype.element_ty)
    b_dw1 = tl.zeros([BH, HALF], tl.float32)
    b_dw2 = tl.zeros([BH, HALF], tl.float32)
    for row in tl.range(tl.program_id(0) // blocks, N, tl.num_programs(0) // blocks, num_stages=STAGES):
        # N * (H + 2K) Dh passes 2^31 at 300k rows of 7168
        at = tl.cast(row, tl.int64) * ((H + 2 * K) * Dh) + head[:, None] * Dh + column[None, :]
        b_dy1 = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)        # [BH, HALF]
        b_dy2 = tl.load(dy + at + HALF, mask=inside, other=0.0).to(tl.float32)
        b_x1 = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        b_x2 = tl.load(x + at + HALF, mask=inside, other=0.0).to(tl.float32)
        angle = tl.load(positions + row).to(tl.int64) * HALF + column          # [HALF]
        b_cos = tl.load(cos + angle)[None, :]
        b_sin = tl.load(sin + angle)[None, :]
        b_g1 = b_dy1 * b_cos + b_dy2 * b_sin
        b_g2 = b_dy2 * b_cos - b_dy1 * b_sin
        b_rstd = tl.rsqrt(tl.sum(b_x1 * b_x1 + b_x2 * b_x2, 1) / Dh + eps)[:, None]
        b_x1 *= b_rstd
        b_x2 *= b_rstd
        b_dw1 += b_g1 * b_x1
        b_dw2 += b_g2 * b_x2
        b_g1 *= b_w1
        b_g2 *= b_w2
        b_mean = (tl.sum(b_g1 * b_x1 + b_g2 * b_x2, 1) / Dh)[:, None]
        tl.store(dy + at, (b_rstd * (b_g1 - b_x1 * b_mean)).to(dy.dtype.element_ty), mask=inside)
        tl.store(dy + at + HALF, (b_rstd * (b_g2 - b_x2 * b_mean)).to(dy.dtype.element_ty), mask=inside)
    out = tl.program_id(0) * Dh + column
    is_q = (head < H)[:, None]
    tl.store(q_partials + out, tl.sum(tl.where(is_q, b_dw1, 0.0), 0))
    tl.store(q_partials + out + HALF, tl.sum(tl.where(is_q, b_dw2, 0.0), 0))
    tl.store(k_partials + out, tl.sum(tl.where(is_q, 0.0, b_dw1), 0))
    tl.store(k_partials + out + HALF, tl.sum(tl.where(is_q, 0.0, b_dw2), 0))


# elements of a tile (heads times Dh) and programs of the backward with norms on one multiprocessor
TILE, PROGRAMS_PER_SM = 2048, 5
# one less is the number of rows on their way to shared memory while another is computed
BACKWARD_STAGES = 3


def _tile(heads: int, Dh: int) -> tuple[int, int]:
    """Heads of a tile (a power of two) and warps: 16 elements a thread, 8 of each half, which is 16 bytes of bf16."""
    BH = min(triton.next_power_of_2(heads), max(1, TILE // Dh))
    return BH, max(1, BH * Dh // 512)


def rope_partials_shape(Dh: int) -> tuple[int, int, int]:
    """fp32 scratch that `rope_backward` needs if there are norms: one sum of dw a program, for q and for k."""
    return 2, num_sms() * PROGRAMS_PER_SM, Dh


def _check(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, H: int, K: int, Dh: int, norm_addrs: dict[str, int],
           **rows: torch.Tensor) -> None:
    N, dtype = next((tensor.shape[0], tensor.dtype) for tensor in rows.values())
    if Dh < 2 or Dh & (Dh - 1):
        raise ValueError(f"Dh: {Dh}; wanted a power of two")
    for name, tensor in rows.items():
        check_rows(name, tensor, dtype if dtype in DTYPES else DTYPES, N, (H + 2 * K) * Dh)
    for name, table in (("cos", cos), ("sin", sin)):
        check_rows(name, table, torch.float32, cos.shape[0], Dh // 2)
    check_rows("positions", positions, torch.int32, N)
    for name, address in norm_addrs.items():
        check_address(name, address)
    if len({address != 0 for address in norm_addrs.values()}) > 1:
        raise ValueError(f"{' '.join(norm_addrs)}: some are 0; wanted all or none")


def rope(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor, H: int, K: int, Dh: int, *,
         out: torch.Tensor, q_norm_addr: int = 0, k_norm_addr: int = 0, eps: float = 0.0) -> None:
    """Writes `out` [N, (H + 2K) Dh] (dtype of qkv): q and k normed if there are norms and rotated, v as it is.

    out may be qkv only if there are no norms: their backward reads qkv as it was. q_norm_addr, k_norm_addr: addresses of
    the weights [Dh], both 0 if there are no norms. Raises ValueError, naming the tensor, on a wrong shape, stride,
    dtype or alignment.
    """
    _check(cos, sin, positions, H, K, Dh, {"q_norm": q_norm_addr, "k_norm": k_norm_addr}, qkv=qkv, out=out)
    in_place, norms = out.data_ptr() == qkv.data_ptr(), q_norm_addr != 0
    if in_place and norms:
        raise ValueError("out: is qkv, which the backward of the norms reads; wanted another buffer")
    heads = H + K if in_place else H + 2 * K
    BH, num_warps = _tile(heads, Dh)
    _rope_fwd[qkv.shape[0] * triton.cdiv(heads, BH),](
        qkv, cos, sin, positions, q_norm_addr, k_norm_addr, eps, out, H=H, K=K, HEADS=heads, Dh=Dh, NORMS=norms, BACK=False,
        BH=BH, num_warps=num_warps)


def rope_backward(dqkv: torch.Tensor, qkv: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor,
                  positions: torch.Tensor, H: int, K: int, Dh: int, *, q_norm_addr: int = 0, k_norm_addr: int = 0,
                  eps: float = 0.0, dq_norm_addr: int = 0, dk_norm_addr: int = 0, partials: torch.Tensor | None = None,
                  accumulate: bool = False) -> None:
    """In place on `dqkv` [N, (H + 2K) Dh]: the gradient of what `rope` read from the gradient of what it wrote.

    Only with norms: qkv is what `rope` read (before norms and rotation); dq_norm_addr, dk_norm_addr: addresses of the
    weights' gradients [Dh] fp32 (= or +=); partials: fp32 scratch, `rope_partials_shape(Dh)` or more. Raises ValueError
    as `rope` does.
    """
    N, heads = dqkv.shape[0], H + K
    addrs = {"q_norm": q_norm_addr, "k_norm": k_norm_addr, "dq_norm": dq_norm_addr, "dk_norm": dk_norm_addr}
    norms = q_norm_addr != 0
    if norms and qkv is None:
        raise ValueError("qkv: none, but the backward of the norms reads it")
    _check(cos, sin, positions, H, K, Dh, addrs, dqkv=dqkv, **({"qkv": qkv} if norms else {}))
    BH, num_warps = _tile(heads, Dh)
    blocks = triton.cdiv(heads, BH)
    if not norms:
        _rope_fwd[N * blocks,](dqkv, cos, sin, positions, 0, 0, 0.0, dqkv, H=H, K=K, HEADS=heads, Dh=Dh, NORMS=False, BACK=True,
                               BH=BH, num_warps=num_warps)
        return
    shape = rope_partials_shape(Dh)
    check_partials(partials, *shape)
    q_partials, k_partials = partials.view(-1)[:math.prod(shape)].view(shape)
    P = blocks * min(N, shape[1] // blocks)
    _rope_norm_bwd[P,](dqkv, qkv, cos, sin, positions, q_norm_addr, k_norm_addr, eps, q_partials, k_partials, N, H=H, K=K,
                       Dh=Dh, BH=BH, STAGES=BACKWARD_STAGES, num_warps=num_warps)
    sum_partials(q_partials, P, Dh, dq_norm_addr, accumulate=accumulate)
    sum_partials(k_partials, P, Dh, dk_norm_addr, accumulate=accumulate)
