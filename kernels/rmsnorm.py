"""RMSNorm over the last dimension, and its backward with the residual's gradient added on the way out.

    y  = x_hat * w                                  x_hat = x * rstd, rstd = 1 / sqrt(mean(x^2) + eps)
    dx = residual + rstd * (w * dy - x_hat * mean(w * dy * x_hat))
    dw = sum over rows of dy * x_hat

    x y dy dx residual  [N, D] bf16, fp16 or fp32, contiguous     w   [D], dtype of x, a raw address
    rstd                [N] fp32, kept for backward               dw  [D] fp32, a raw address

A row is read once and stays in registers. Backward keeps a sum of dw a program; a second kernel adds those sums in
order, so the bits depend on N and on the number of multiprocessors, never on timing.
Source: Zhang & Sennrich 2019, arXiv 1910.07467, section 4.
"""
import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, check_address, check_partials, check_rows, gpu, num_sms


def rmsnorm_ref(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    """Plain torch; fp64 in, fp64 out, so that it can judge the kernel (and, through autograd, its backward)."""
    a = x.to(torch.promote_types(x.dtype, torch.float32))
    return (a * torch.rsqrt(a.square().mean(-1, keepdim=True) + eps) * w.to(a.dtype)).to(x.dtype)


@triton.jit
def _rmsnorm_fwd(x, w_addr, y, rstd, eps, N, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    d = tl.arange(0, BD)
    inside = (row < N)[:, None] & (d < D)[None, :]
    # N * D passes 2^31 at 420k rows of 5120
    at = row.to(tl.int64)[:, None] * D + d[None, :]                            # [BR, BD]
    # int_to_ptr forgets alignment: without the hint, 2-byte loads instead of 16
    w = tl.multiple_of(w_addr.to(tl.pointer_type(x.dtype.element_ty)), 16)
    b_x = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)               # [BR, BD]
    b_w = tl.load(w + d, mask=d < D, other=0.0).to(tl.float32)                 # [BD]
    b_rstd = tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)                          # [BR]
    b_y = b_x * b_rstd[:, None] * b_w[None, :]
    tl.store(y + at, b_y.to(y.dtype.element_ty), mask=inside)
    tl.store(rstd + row, b_rstd, mask=row < N)


@triton.jit
def _rmsnorm_bwd(dy, x, w_addr, rstd, residual, dx, partials, N, D: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
                 STAGES: tl.constexpr, KEEP_W: tl.constexpr):
    d = tl.arange(0, BD)
    w = tl.multiple_of(w_addr.to(tl.pointer_type(x.dtype.element_ty)), 16)
    if KEEP_W:
        b_w = tl.load(w + d, mask=d < D, other=0.0).to(tl.float32)             # [BD]
    b_dw = tl.zeros([BR, BD], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(N, BR), tl.num_programs(0), num_stages=STAGES):
        row = tile * BR + tl.arange(0, BR)
        inside = (row < N)[:, None] & (d < D)[None, :]
        # added to the pointer before the columns are: that takes fewer registers
        at = row.to(tl.int64)[:, None] * D                                     # [BR, 1]
        b_dy = tl.load(dy + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
        b_x = tl.load(x + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
        b_rstd = tl.load(rstd + row, mask=row < N, other=0.0)[:, None]         # [BR, 1]
        b_x_hat = b_x * b_rstd
        if not KEEP_W:
            b_w = tl.load(w + d, mask=d < D, other=0.0).to(tl.float32)
        b_wdy = b_dy * b_w[None, :]
        b_dw += b_dy * b_x_hat
        b_dx = b_rstd * (b_wdy - b_x_hat * (tl.sum(b_wdy * b_x_hat, 1) / D)[:, None])
        if residual is not None:
            b_dx += tl.load(residual + at + d[None, :], mask=inside, other=0.0).to(tl.float32)
        # dx may be dy or residual: all of the row has been read
        tl.store(dx + at + d[None, :], b_dx.to(dx.dtype.element_ty), mask=inside)
    tl.store(partials + tl.program_id(0) * D + d, tl.sum(b_dw, 0), mask=d < D)


@triton.jit
def _sum_partials(partials, dw_addr, P, D, ACCUMULATE: tl.constexpr, BP: tl.constexpr, BD: tl.constexpr):
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    b_sum = tl.zeros([BD], tl.float32)
    for first in range(0, P, BP):
        p = first + tl.arange(0, BP)
        inside = (p < P)[:, None] & (d < D)[None, :]
        b_sum += tl.sum(tl.load(partials + p[:, None] * D + d[None, :], mask=inside, other=0.0), 0)
    dw = tl.multiple_of(dw_addr.to(tl.pointer_type(tl.float32)), 16)
    if ACCUMULATE:
        b_sum += tl.load(dw + d, mask=d < D, other=0.0)
    tl.store(dw + d, b_sum, mask=d < D)


# a row has to fit the registers of one program, in backward together with its sum of dw
MAX_D = 16384
# elements of a tile where rows are shorter than that
TILE = 4096
# warps of backward on one multiprocessor: they take up to 128 registers a thread
BACKWARD_WARPS_PER_SM = 16
# at most, by bytes an element: one less is the number of tiles on their way to shared memory while another is computed
BACKWARD_STAGES = {2: 3, 4: 2}
# of a program: what its reductions need and what the driver keeps
RESERVED_SHARED_BYTES = 2048


def _tile(D: int) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two: one row, or several if they are short."""
    BD = triton.next_power_of_2(D)
    return max(1, TILE // BD), BD


def _backward_warps(D: int) -> int:
    """16 elements a thread; 32 in rows over 8192."""
    return 8 if D <= TILE else BACKWARD_WARPS_PER_SM


def _backward_stages(D: int, element_size: int, num_inputs: int) -> int:
    """One more than the tiles on their way to shared memory, as many as programs that share a multiprocessor find room for."""
    BR, BD = _tile(D)
    programs = BACKWARD_WARPS_PER_SM // _backward_warps(D)
    room = gpu().shared_bytes // programs - RESERVED_SHARED_BYTES
    return 1 + min(BACKWARD_STAGES[element_size] - 1, room // (num_inputs * BR * BD * element_size))


def _num_programs(D: int) -> int:
    """Programs of backward: as many as run at once."""
    return num_sms() * (BACKWARD_WARPS_PER_SM // _backward_warps(D))


def rmsnorm_partials_shape(D: int) -> tuple[int, int]:
    """fp32 scratch that `rmsnorm_backward` needs: one sum of dw a program."""
    return _num_programs(D), D


def sum_partials(partials: torch.Tensor, P: int, D: int, dw_addr: int, *, accumulate: bool) -> None:
    """dw [D] fp32 (= or +=) the sum of the first P rows of D elements of `partials`, always in the same order."""
    _sum_partials[triton.cdiv(D, 32),](partials, dw_addr, P, D, ACCUMULATE=accumulate, BP=256, BD=32, num_warps=8)


def _check(x: torch.Tensor, w_addr: int, rstd: torch.Tensor, **like_x: torch.Tensor) -> tuple[int, int]:
    """N and D."""
    N, D = x.shape[0], x.shape[-1]
    if D > MAX_D:
        raise ValueError(f"x: rows of {D} elements; one program holds at most {MAX_D}")
    check_rows("x", x, DTYPES, N, D)
    for name, tensor in like_x.items():
        check_rows(name, tensor, x.dtype, N, D)
    check_rows("rstd", rstd, torch.float32, N)
    check_address("w", w_addr)
    return N, D


def rmsnorm(x: torch.Tensor, w_addr: int, eps: float, *, out: torch.Tensor, rstd: torch.Tensor) -> None:
    """Writes `out` [N, D] (dtype of x; may be x) and `rstd` [N] fp32.

    w_addr: address of w [D], dtype of x. Raises ValueError, naming the tensor, on a wrong shape, stride, dtype or
    alignment, and if D is over MAX_D.
    """
    N, D = _check(x, w_addr, rstd, out=out)
    BR, BD = _tile(D)
    _rmsnorm_fwd[triton.cdiv(N, BR),](x, w_addr, out, rstd, eps, N, D=D, BR=BR, BD=BD, num_warps=BR * BD // 1024)


def rmsnorm_backward(dy: torch.Tensor, x: torch.Tensor, w_addr: int, rstd: torch.Tensor,
                     residual: torch.Tensor | None, *, dx: torch.Tensor, dw_addr: int, partials: torch.Tensor,
                     accumulate: bool) -> None:
    """Writes `dx` [N, D] = residual (or 0) + the gradient through the norm; dw [D] fp32 (= or +=).

    dx may be dy or residual. rstd: what forward wrote. partials: fp32 scratch, `rmsnorm_partials_shape(D)` or more.
    Raises ValueError as `rmsnorm` does.
    """
    N, D = _check(x, w_addr, rstd, dy=dy, dx=dx, **({} if residual is None else {"residual": residual}))
    check_address("dw", dw_addr)
    check_partials(partials, *rmsnorm_partials_shape(D))
    BR, BD = _tile(D)
    P = min(_num_programs(D), triton.cdiv(N, BR))
    # wider, w would take the registers that the row needs, and is read again with each row
    keep_w = BD <= 8192
    _rmsnorm_bwd[P,](dy, x, w_addr, rstd, residual, dx, partials, N, D=D, BR=BR, BD=BD,
                     STAGES=_backward_stages(D, x.element_size(), 2 + (residual is not None) + (not keep_w)), KEEP_W=keep_w,
                     num_warps=_backward_warps(D))
    sum_partials(partials, P, D, dw_addr, accumulate=accumulate)
