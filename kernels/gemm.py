"""Matrix products of a linear layer, its two gradients, and the down projection's gradient joined with SwiGLU's.

    linear               out[M,N]  = x[M,K] W[N,K]^T (+ bias[N]) (+ residual[M,N])
    linear_swiglu        gu[M,2F]  = x[M,K] W[2F,K]^T;  act[M,F] = silu(g) u with g, u the halves of gu's columns
    linear_dgrad         out[M,K]  = dy[M,N] W[N,K]
    linear_wgrad         dW[N,K]  (+)= dy[M,N]^T x[M,K]
    linear_dgrad_swiglu  da = dy[M,D] W[D,F];  act = silu(g) u,  dg = da u silu'(g),  du = da silu(g)
                         silu(g) = s g and silu'(g) = s (1 + g (1 - s)) with s = 1 / (1 + exp(-g))
    linear_bias_grad     db[N]    (+)= column sums of dy[M,N]

M rows (tokens), N outputs, K inputs. Tiles: BM x BN of an output, BR of what is summed over, BE columns that the epilogue
takes at a time. x, dy, out, residual are bf16, fp16 or fp32 with a row stride that may exceed the columns; W and bias are
raw addresses of the same dtype; dW and db raw addresses of fp32. Sums are fp32, rounded once. Row strides are multiples of
16 bytes (the TMA unit asks for it), but N is arbitrary where W has N rows and `out`, `dy` have padded ones (logits): what
pads a row up to 16 bytes may be overwritten.

A persistent program takes every P-th tile of the output, in groups of GROUP rows of tiles whose operands stay in L2 while
the columns go by. Descriptors (TMA) load and store: outside the matrix they read zero and write nothing, so that no size
needs a mask. Source: Triton tutorial 09 (persistent matmul), whose scheme this is; the epilogues are ours.
"""
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels import gemm_hopper
from kernels.launch import (
    ALIGNMENT_BYTES,
    DTYPES,
    INTERPRET,
    capability,
    check_address,
    check_partials,
    check_rows,
    num_sms,
    tile_class,
)
from kernels.swiglu import swiglu

# rows of linear_bias_grad's scratch: each is the sum of one slice of the rows of dy
BIAS_GRAD_PARTIALS = 32


def linear_ref(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None,
               residual: torch.Tensor | None = None) -> torch.Tensor:
    """Plain torch; fp64 in, fp64 out. Its gradients are torch.autograd's."""
    y = F.linear(x, w, bias)
    return y if residual is None else y + residual


def dgrad_swiglu_ref(dy: torch.Tensor, w: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch: d_gate_up [M, 2F] and act [M, F]."""
    gate, up = gate_up.chunk(2, dim=1)
    da, s = dy @ w, torch.sigmoid(gate)
    return torch.cat((da * up * s * (1 + gate * (1 - s)), da * gate * s), dim=1), gate * s * up


@triton.jit
def _typed(addr, dtype: tl.constexpr):
    # int_to_ptr forgets alignment: the hint goes on the pointer
    return tl.multiple_of(addr.to(tl.pointer_type(dtype)), 16)


@triton.jit
def _matrix(base, rows, cols, stride, BROWS: tl.constexpr, BCOLS: tl.constexpr):
    return tl.make_tensor_descriptor(base, [rows, cols], [stride, 1], [BROWS, BCOLS])


@triton.jit
def _tile_index(tile, num_i, num_j, GROUP: tl.constexpr):
    """Row and column of tiles: down GROUP rows, then one column on, so that neighbours in time share operands in L2."""
    group = tile // (GROUP * num_j)
    high = min(num_i - group * GROUP, GROUP)
    within = tile % (GROUP * num_j)
    return group * GROUP + within % high, within // high


@triton.jit
def _halves(acc):
    """Left and right half of the columns; they are different registers of the same threads, so nothing moves."""
    return acc.reshape(acc.shape[0], 2, acc.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _linear_store(acc, out, residual, bias_addr, i, j, N, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr):
    """Stores acc at row i, column j in pieces as wide as out's descriptor: whole, they would not fit shared memory."""
    if acc.shape[1] > out.block_shape[1]:
        left, right = _halves(acc)
        _linear_store(left, out, residual, bias_addr, i, j, N, HAS_BIAS, HAS_RESIDUAL)
        _linear_store(right, out, residual, bias_addr, i, j + acc.shape[1] // 2, N, HAS_BIAS, HAS_RESIDUAL)
    else:
        if HAS_BIAS:
            n = j + tl.arange(0, acc.shape[1])
            bias = _typed(bias_addr, out.dtype)
            acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            acc += residual.load([i, j]).to(tl.float32)
        out.store([i, j], acc.to(out.dtype))


@triton.jit
def _linear_fwd(x, w_addr, bias_addr, residual, out, M, N, K, x_stride, residual_stride, out_stride,
                HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
                GROUP: tl.constexpr, FLATTEN: tl.constexpr):
    x_tiles = _matrix(x, M, K, x_stride, BM, BR)
    w_tiles = _matrix(_typed(w_addr, x.dtype.element_ty), N, K, K, BN, BR)
    out_tiles = _matrix(out, M, N, out_stride, BM, BE)
    residual_tiles = out_tiles
    if HAS_RESIDUAL:
        residual_tiles = _matrix(residual, M, N, residual_stride, BM, BE)
    num_i, num_j = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), num_i * num_j, tl.num_programs(0), flatten=FLATTEN):
        i, j = _tile_index(tile, num_i, num_j, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BR):
            acc = tl.dot(x_tiles.load([i * BM, k]), w_tiles.load([j * BN, k]).T, acc, input_precision="ieee")
        _linear_store(acc, out_tiles, residual_tiles, bias_addr, i * BM, j * BN, N, HAS_BIAS, HAS_RESIDUAL)


@triton.jit
def _linear_dgrad_bwd(dy, w_addr, out, M, N, K, dy_stride, out_stride,
                      BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
                      GROUP: tl.constexpr, FLATTEN: tl.constexpr):
    dy_tiles = _matrix(dy, M, N, dy_stride, BM, BR)
    w_tiles = _matrix(_typed(w_addr, dy.dtype.element_ty), N, K, K, BR, BN)
    out_tiles = _matrix(out, M, K, out_stride, BM, BE)
    num_i, num_j = tl.cdiv(M, BM), tl.cdiv(K, BN)
    for tile in tl.range(tl.program_id(0), num_i * num_j, tl.num_programs(0), flatten=FLATTEN):
        i, j = _tile_index(tile, num_i, num_j, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for n in range(0, N, BR):
            acc = tl.dot(dy_tiles.load([i * BM, n]), w_tiles.load([n, j * BN]), acc, input_precision="ieee")
        _linear_store(acc, out_tiles, out_tiles, 0, i * BM, j * BN, K, False, False)


@triton.jit
def _wgrad_store(acc, dw, i, j, ACCUMULATE: tl.constexpr):
    if acc.shape[1] > dw.block_shape[1]:
        left, right = _halves(acc)
        _wgrad_store(left, dw, i, j, ACCUMULATE)
        _wgrad_store(right, dw, i, j + acc.shape[1] // 2, ACCUMULATE)
    else:
        if ACCUMULATE:
            acc += dw.load([i, j])
        dw.store([i, j], acc)


@triton.jit
def _load_transposed(x, i, j, rows, cols, stride, BI: tl.constexpr, BJ: tl.constexpr):
    """[BJ, BI] of columns j.. and rows i.. of x [rows, cols], by pointers; zero outside."""
    row, col = i + tl.arange(0, BI), j + tl.arange(0, BJ)
    at = row.to(tl.int64)[None, :] * stride + col[:, None]
    return tl.load(x + at, mask=(row < rows)[None, :] & (col < cols)[:, None], other=0.0)


@triton.jit
def _linear_wgrad_bwd(dy, x, dw_addr, M, N, K, dy_stride, x_stride, ACCUMULATE: tl.constexpr,
                      BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
                      GROUP: tl.constexpr, FLATTEN: tl.constexpr, TMA: tl.constexpr):
    dy_tiles = _matrix(dy, M, N, dy_stride, BR, BM)
    x_tiles = _matrix(x, M, K, x_stride, BR, BN)
    dw_tiles = _matrix(_typed(dw_addr, tl.float32), N, K, K, BM, BE)
    num_i, num_j = tl.cdiv(N, BM), tl.cdiv(K, BN)
    for tile in tl.range(tl.program_id(0), num_i * num_j, tl.num_programs(0), flatten=FLATTEN):
        i, j = _tile_index(tile, num_i, num_j, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for m in range(0, M, BR):
            if TMA:
                b_dy = dy_tiles.load([m, i * BM]).T
            else:
                # a tile that is transposed after its load would not be loaded asynchronously there
                b_dy = _load_transposed(dy, m, i * BM, M, N, dy_stride, BR, BM)
            acc = tl.dot(b_dy, x_tiles.load([m, j * BN]), acc, input_precision="ieee")
        _wgrad_store(acc, dw_tiles, i * BM, j * BN, ACCUMULATE)


@triton.jit
def _swiglu_store(da, gate, up, d_gate, d_up, act, i, j):
    """Reads a piece of gate and up before it writes that of d_gate and d_up, which may be the same memory."""
    if da.shape[1] > act.block_shape[1]:
        left, right = _halves(da)
        _swiglu_store(left, gate, up, d_gate, d_up, act, i, j)
        _swiglu_store(right, gate, up, d_gate, d_up, act, i, j + da.shape[1] // 2)
    else:
        b_g, b_u = gate.load([i, j]).to(tl.float32), up.load([i, j]).to(tl.float32)
        b_s = 1.0 / (1.0 + tl.exp(-b_g))
        b_silu = b_g * b_s
        act.store([i, j], (b_silu * b_u).to(act.dtype))
        d_up.store([i, j], (da * b_silu).to(act.dtype))
        d_gate.store([i, j], (da * b_u * b_s * (1.0 + b_g * (1.0 - b_s))).to(act.dtype))


@triton.jit
def _linear_dgrad_swiglu_bwd(dy, w_addr, gate_up, d_gate_up, act, M, D, F, dy_stride, gate_up_stride, d_gate_up_stride,
                             act_stride, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, BE: tl.constexpr,
                             GROUP: tl.constexpr, FLATTEN: tl.constexpr):
    dy_tiles = _matrix(dy, M, D, dy_stride, BM, BR)
    w_tiles = _matrix(_typed(w_addr, dy.dtype.element_ty), D, F, F, BR, BN)
    # gate and up are two matrices: a tile that overhangs gate's columns must not reach up's
    gate = _matrix(gate_up, M, F, gate_up_stride, BM, BE)
    up = _matrix(gate_up + F, M, F, gate_up_stride, BM, BE)
    d_gate = _matrix(d_gate_up, M, F, d_gate_up_stride, BM, BE)
    d_up = _matrix(d_gate_up + F, M, F, d_gate_up_stride, BM, BE)
    act_tiles = _matrix(act, M, F, act_stride, BM, BE)
    num_i, num_j = tl.cdiv(M, BM), tl.cdiv(F, BN)
    for tile in tl.range(tl.program_id(0), num_i * num_j, tl.num_programs(0), flatten=FLATTEN):
        i, j = _tile_index(tile, num_i, num_j, GROUP)
        acc = tl.zeros([BM, BN], tl.float32)
        for d in range(0, D, BR):
            acc = tl.dot(dy_tiles.load([i * BM, d]), w_tiles.load([d, j * BN]), acc, input_precision="ieee")
        _swiglu_store(acc, gate, up, d_gate, d_up, act_tiles, i * BM, j * BN)


@triton.jit
def _bias_grad_partial_bwd(dy, partials, M, N, dy_stride, BT: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    rows = tl.cdiv(M, tl.num_programs(1))
    first = tl.program_id(1) * rows
    last = min(first + rows, M)
    acc = tl.zeros([BT, BN], tl.float32)
    for row in range(first, last, BT):
        t = (row + tl.arange(0, BT))[:, None]
        inside = (t < last) & (n < N)[None, :]
        acc += tl.load(dy + t.to(tl.int64) * dy_stride + n[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partials + tl.program_id(1) * N + n, tl.sum(acc, 0), mask=n < N)


@triton.jit
def _bias_grad_sum_bwd(partials, db_addr, N, NUM_PARTIALS: tl.constexpr, ACCUMULATE: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    db = _typed(db_addr, tl.float32)
    acc = tl.zeros([BN], tl.float32)
    for p in range(NUM_PARTIALS):
        acc += tl.load(partials + p * N + n, mask=n < N, other=0.0)
    if ACCUMULATE:
        acc += tl.load(db + n, mask=n < N, other=0.0)
    tl.store(db + n, acc, mask=n < N)


class Tile(NamedTuple):
    """One way to cut an output. `rate`: speed of a full wave of these tiles, the fastest being 1."""
    BM: int
    BN: int
    BR: int
    BE: int
    stages: int
    warps: int
    flatten: bool
    rate: float


# rows of tiles that share the operands of a column of tiles in L2
GROUP = 8

# 16-bit inputs where a block has 227 KB of shared memory. Wide epilogues and three stages beat narrow ones and four by 1 to 2 %
HOPPER_TILES = {
    "linear": (Tile(128, 256, 64, 128, 3, 8, True, 1.0), Tile(128, 128, 64, 64, 4, 8, True, 0.93)),
    "dgrad": (Tile(128, 256, 64, 128, 3, 8, True, 1.0), Tile(128, 128, 64, 64, 4, 8, True, 0.9)),
    "wgrad": (Tile(128, 256, 64, 64, 3, 8, True, 1.0), Tile(128, 128, 64, 32, 4, 8, True, 0.82)),
    "dgrad_swiglu": (Tile(128, 256, 64, 64, 4, 8, True, 1.0), Tile(128, 128, 64, 32, 4, 8, True, 0.8)),
}
# the same by launch.tile_class; but for Hopper's, compiled and not measured: about the largest that fit and do not spill
_WIDE, _SQUARE = Tile(128, 256, 32, 32, 4, 8, False, 1.0), Tile(128, 128, 64, 32, 4, 8, False, 0.8)
TILES = {
    "sm_90": HOPPER_TILES,
    "sm_80": {"linear": (_WIDE, _SQUARE), "dgrad": (_WIDE, _SQUARE), "wgrad": (_SQUARE._replace(BR=32),), "dgrad_swiglu": (_SQUARE,)},
    "sm_89": dict.fromkeys(HOPPER_TILES, (_SQUARE._replace(stages=3),)),
    "sm_120": dict.fromkeys(HOPPER_TILES, (_SQUARE._replace(stages=3),)),
    # warps of 64; two stages are one in shared memory and one in registers
    "gfx942": dict.fromkeys(HOPPER_TILES, (Tile(128, 128, 64, 64, 2, 8, False, 1.0),)),
}
# no tensor cores under input_precision="ieee"; 4 warps spill
FP32_TILES = (Tile(64, 64, 32, 32, 2, 8, False, 1.0),)
INTERPRETER_TILES = (Tile(32, 64, 64, 32, 1, 1, False, 1.0),)


def candidate_tiles(op: str, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Tiles that this GPU can run `op` with on inputs of `dtype`."""
    if INTERPRET:
        return INTERPRETER_TILES
    if dtype == torch.float32:
        return FP32_TILES
    return TILES[tile_class()][op]


def choose_tile(op: str, dtype: torch.dtype, rows: int, cols: int) -> Tile:
    """The tile that computes an output of `rows` x `cols` soonest: whole waves of tiles, each at its rate."""
    def cost(tile: Tile) -> float:
        waves = triton.cdiv(triton.cdiv(rows, tile.BM) * triton.cdiv(cols, tile.BN), num_sms())
        return waves * tile.BM * tile.BN / tile.rate
    return min(candidate_tiles(op, dtype), key=cost)


# found once: a layer launches thirty kernels, and waving this through again costs more than a launch
@functools.cache
def launch_options(op: str, dtype: torch.dtype, rows: int, cols: int) -> tuple[tuple[int], dict]:
    """Grid and keyword arguments of a persistent kernel that writes an output of `rows` x `cols`."""
    tile = choose_tile(op, dtype, rows, cols)
    num_tiles = triton.cdiv(rows, tile.BM) * triton.cdiv(cols, tile.BN)
    options = {"BM": tile.BM, "BN": tile.BN, "BR": tile.BR, "BE": tile.BE, "GROUP": GROUP, "FLATTEN": tile.flatten,
               "num_stages": tile.stages, "num_warps": tile.warps}
    return (min(num_sms(), num_tiles),), options


def check_matrix(name: str, x: torch.Tensor, rows: int, cols: int, dtype: torch.dtype) -> None:
    """Raises ValueError, naming the tensor, unless it is [rows, cols] of dtype with dense rows that a descriptor can read."""
    if x.dtype != dtype or dtype not in DTYPES or tuple(x.shape) != (rows, cols):
        raise ValueError(f"{name}: {x.dtype} {tuple(x.shape)}; wanted {dtype if dtype in DTYPES else DTYPES} {(rows, cols)}")
    if (x.stride(1) != 1 and cols > 1) or x.stride(0) < cols or x.stride(0) * x.element_size() % ALIGNMENT_BYTES:
        raise ValueError(f"{name}: strides {x.stride()}; wanted dense rows, {ALIGNMENT_BYTES}-byte multiples apart")
    check_address(name, x.data_ptr())


def check_weight(name: str, address: int, cols: int, element_size: int) -> None:
    """Raises ValueError unless a dense weight of `cols` columns at `address` can be read through a descriptor."""
    check_address(name, address)
    if cols * element_size % ALIGNMENT_BYTES:
        raise ValueError(f"{name}: rows of {cols} elements are not a multiple of {ALIGNMENT_BYTES} bytes")


def linear(x: torch.Tensor, w_addr: int, *, out: torch.Tensor, bias_addr: int = 0, residual: torch.Tensor | None = None) -> None:
    """Writes out [M, N] = x [M, K] W^T, W [N, K], plus bias [N] and residual [M, N] where given.

    Raises ValueError, naming the tensor, for a shape, dtype, stride or alignment that the kernel cannot take.
    """
    M, K, N = x.shape[0], x.shape[-1], out.shape[-1]
    check_matrix("x", x, M, K, x.dtype)
    check_matrix("out", out, M, N, x.dtype)
    check_weight("w", w_addr, K, x.element_size())
    check_address("bias", bias_addr)
    if residual is not None:
        check_matrix("residual", residual, M, N, x.dtype)
    grid, options = launch_options("linear", x.dtype, M, N)
    _linear_fwd[grid](x, w_addr, bias_addr, residual, out, M, N, K, x.stride(0),
                      0 if residual is None else residual.stride(0), out.stride(0),
                      HAS_BIAS=bias_addr != 0, HAS_RESIDUAL=residual is not None, **options)


def linear_swiglu(x: torch.Tensor, w_addr: int, *, gate_up: torch.Tensor, act: torch.Tensor) -> None:
    """Writes gate_up [M, 2F] = x [M, K] W^T, W [2F, K], and act [M, F] = silu(gate) up of what it stored; F a multiple of 16,
    both contiguous.

    One pass on Hopper (kernels/gemm_hopper.py), elsewhere two. Raises ValueError as `linear` does.
    """
    M, K, F = x.shape[0], x.shape[-1], act.shape[-1]
    check_matrix("x", x, M, K, x.dtype)
    for name, outputs, cols in (("gate_up", gate_up, 2 * F), ("act", act, F)):
        check_matrix(name, outputs, M, cols, x.dtype)
        check_rows(name, outputs, x.dtype, M, cols)
    check_weight("w", w_addr, K, x.element_size())
    if F % 16:
        raise ValueError(f"act: {F} columns; wanted a multiple of 16, so that up starts on {ALIGNMENT_BYTES} bytes")
    if capability()[0] == 9 and x.dtype != torch.float32 and not INTERPRET:
        gemm_hopper.linear_swiglu(x, w_addr, gate_up=gate_up, act=act)
    else:
        linear(x, w_addr, out=gate_up)
        swiglu(gate_up, out=act)


def linear_dgrad(dy: torch.Tensor, w_addr: int, *, out: torch.Tensor) -> None:
    """Writes out [M, K] = dy [M, N] W, W [N, K]. Raises ValueError as `linear` does."""
    M, N, K = dy.shape[0], dy.shape[-1], out.shape[-1]
    check_matrix("dy", dy, M, N, dy.dtype)
    check_matrix("out", out, M, K, dy.dtype)
    check_weight("w", w_addr, K, dy.element_size())
    grid, options = launch_options("dgrad", dy.dtype, M, K)
    _linear_dgrad_bwd[grid](dy, w_addr, out, M, N, K, dy.stride(0), out.stride(0), **options)


def linear_wgrad(dy: torch.Tensor, x: torch.Tensor, dw_addr: int, *, accumulate: bool) -> None:
    """Writes, or adds to, dW [N, K] fp32 = dy [M, N]^T x [M, K]. Raises ValueError as `linear` does."""
    M, N, K = dy.shape[0], dy.shape[-1], x.shape[-1]
    check_matrix("dy", dy, M, N, dy.dtype)
    check_matrix("x", x, M, K, dy.dtype)
    check_weight("dw", dw_addr, K, torch.float32.itemsize)
    grid, options = launch_options("wgrad", dy.dtype, N, K)
    _linear_wgrad_bwd[grid](dy, x, dw_addr, M, N, K, dy.stride(0), x.stride(0), ACCUMULATE=accumulate,
                            TMA=capability()[0] >= 9, **options)


def linear_dgrad_swiglu(dy: torch.Tensor, w_addr: int, gate_up: torch.Tensor, *, d_gate_up: torch.Tensor,
                        act: torch.Tensor) -> None:
    """The down projection's input gradient dy [M, D] W, W [D, F], taken through SwiGLU without being stored.

    gate_up [M, 2F]: gate in columns 0..F, up in F..2F. Writes d_gate_up [M, 2F] in the same order (it may be gate_up
    itself) and act [M, F], what the down projection read. Raises ValueError as `linear` does.
    """
    M, D, F = dy.shape[0], dy.shape[-1], act.shape[-1]
    check_matrix("dy", dy, M, D, dy.dtype)
    check_matrix("gate_up", gate_up, M, 2 * F, dy.dtype)
    check_matrix("d_gate_up", d_gate_up, M, 2 * F, dy.dtype)
    check_matrix("act", act, M, F, dy.dtype)
    check_weight("w", w_addr, F, dy.element_size())
    grid, options = launch_options("dgrad_swiglu", dy.dtype, M, F)
    _linear_dgrad_swiglu_bwd[grid](dy, w_addr, gate_up, d_gate_up, act, M, D, F, dy.stride(0), gate_up.stride(0),
                                   d_gate_up.stride(0), act.stride(0), **options)


def bias_grad_partials_shape(N: int) -> tuple[int, int]:
    """Shape of linear_bias_grad's fp32 scratch."""
    return BIAS_GRAD_PARTIALS, N


def linear_bias_grad(dy: torch.Tensor, db_addr: int, *, partials: torch.Tensor, accumulate: bool) -> None:
    """Writes, or adds to, db [N] fp32 = the column sums of dy [M, N], in an order that M and N alone decide.

    partials: fp32 scratch, `bias_grad_partials_shape(N)` or more. Raises ValueError as `linear` does.
    """
    M, N = dy.shape[0], dy.shape[-1]
    check_matrix("dy", dy, M, N, dy.dtype)
    check_partials(partials, *bias_grad_partials_shape(N))
    check_address("db", db_addr)
    # 64 columns of bf16 are a 128-byte line
    BN = 64
    _bias_grad_partial_bwd[(triton.cdiv(N, BN), BIAS_GRAD_PARTIALS)](dy, partials, M, N, dy.stride(0), BT=64, BN=BN, num_warps=4)
    _bias_grad_sum_bwd[(triton.cdiv(N, BN),)](partials, db_addr, N, NUM_PARTIALS=BIAS_GRAD_PARTIALS, ACCUMULATE=accumulate,
                                              BN=BN, num_warps=2)
