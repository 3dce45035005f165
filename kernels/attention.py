"""Causal attention within documents, forward and backward, grouped query heads, the score matrix never in memory.

    s_ij = scale q_i . k_j  for doc_start[i] <= j <= i       p_ij = exp(s_ij - ln sum_j exp(s_ij))       o_i = sum_j p_ij v_j
    delta_i = o_i . do_i       ds_ij = p_ij (do_i . v_j - delta_i)
    dv_j = sum_i p_ij do_i     dk_j = scale sum_i ds_ij q_i      dq_i = scale sum_j ds_ij k_j

    qkv dqkv            [N, (H + 2K) Dh] bf16, fp16 or fp32, contiguous: H query heads, K key heads, K value heads
    out dout            [N, H Dh], dtype of qkv; query head h reads key head h // (H / K)
    lse                 [H, N] fp32, log2 of the sum of exponentials, kept for backward        delta [H, N] fp32
    doc_start doc_end   [N] int32, first row of a row's document and one past its last, both nondecreasing

Blocks of keys that every row of a tile sees whole run without a mask; those cut by the diagonal or by a document's border run
first, masked; all others are never touched. Backward computes the scores twice: a program of dK and dV owns a block of
keys and walks over the rows and the query heads that read it, a program of dQ owns a block of rows. So each output has one
writer and no atomics, and bits depend on shapes and documents alone.

Tiles of q, k, v and dout come through descriptors (TMA), which read zero behind row N, whatever the memory there holds.
On Hopper the wider heads in 16 bits take kernels/attention_hopper.py's kernels, which do the same with fewer waits.
Source: Dao 2023, arXiv 2307.08691 (FlashAttention-2), sections 3.1 and 3.2; scores in base 2 as there.
"""
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels import attention_hopper
from kernels.launch import DTYPES, INTERPRET, capability, check_address, check_rows, tile_class

HEAD_WIDTHS = (16, 32, 64, 128, 256)


def attention_ref(qkv: torch.Tensor, doc_start: torch.Tensor, H: int, K: int, Dh: int,
                  scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch with the whole score matrix: out [N, H Dh] and lse [H, N] (log2). fp64 in, fp64 out; autograd judges
    the backward."""
    N = qkv.shape[0]
    a = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).view(N, H + 2 * K, Dh).transpose(0, 1)
    q, k, v = a.split([H, K, K])
    k, v = (x.repeat_interleave(H // K, 0) for x in (k, v))
    key = torch.arange(N, device=qkv.device)
    seen = (key[None] <= key[:, None]) & (key[None] >= doc_start[:, None])
    s = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
    out = torch.softmax(s, -1) @ v
    return out.transpose(0, 1).reshape(N, H * Dh).to(qkv.dtype), torch.logsumexp(s, -1) / math.log(2)


@triton.jit
def _tiles(base, N, COLS: tl.constexpr, BR: tl.constexpr, Dh: tl.constexpr):
    """Descriptor of [BR, Dh] tiles in a contiguous [N, COLS]."""
    return tl.make_tensor_descriptor(base, [N, COLS], [COLS, 1], [BR, Dh])


@triton.jit
def _key_range(doc_start, first, N, BM: tl.constexpr, BN: tl.constexpr):
    """Keys that rows first..first+BM see, in blocks of BN: begin, end, and the part of it that all of them see whole."""
    last = min(first + BM, N) - 1
    begin = tl.load(doc_start + first) // BN * BN
    full_end = (first + 1) // BN * BN
    full_begin = min(tl.cdiv(tl.load(doc_start + last), BN) * BN, full_end)
    return begin, last + 1, full_begin, full_end


@triton.jit
def _fwd_blocks(acc, m, l, q, kv, rows, starts, begin, end, gap_begin, gap_end, k_col, v_col, qk_scale, MASKED: tl.constexpr):
    """Adds key blocks begin..gap_begin and gap_end..end to acc [BM, Dh], given the row maxima m and sums l so far."""
    BN: tl.constexpr = kv.block_shape[0]
    for t in tl.range(begin, end - (gap_end - gap_begin), BN):
        j = tl.where(t < gap_begin, t, t + gap_end - gap_begin)
        b_s = tl.dot(q, kv.load([j, k_col]).T, input_precision="ieee")         # [BM, BN]
        if MASKED:
            keys = j + tl.arange(0, BN)
            b_s = tl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None]), b_s, -float("inf"))
        m_new = tl.maximum(m, tl.max(b_s, 1) * qk_scale)
        # a row that has seen no key yet: -inf minus -inf is NaN
        base = tl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
        b_p = tl.exp2(b_s * qk_scale - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(b_p, 1)
        acc = tl.dot(b_p.to(q.dtype), kv.load([j, v_col]), acc * shrink[:, None], input_precision="ieee")
        m = m_new
    return acc, m, l


@triton.jit
def _attention_fwd(qkv, doc_start, out, lse, N, qk_scale, H: tl.constexpr, K: tl.constexpr, Dh: tl.constexpr,
                   BM: tl.constexpr, BN: tl.constexpr):
    # the heads of a group side by side, so that they share keys in L2; late rows, the longest, first
    h = tl.program_id(0) % H
    first = (tl.cdiv(N, BM) - 1 - tl.program_id(0) // H) * BM
    k_col = (H + h // (H // K)) * Dh
    v_col = k_col + K * Dh
    kv = _tiles(qkv, N, (H + 2 * K) * Dh, BN, Dh)
    q_tiles = kv if BM == BN else _tiles(qkv, N, (H + 2 * K) * Dh, BM, Dh)
    rows = first + tl.arange(0, BM)
    inside = rows < N
    starts = tl.load(doc_start + rows, mask=inside, other=0)
    begin, end, full_begin, full_end = _key_range(doc_start, first, N, BM, BN)
    q = q_tiles.load([first, h * Dh])                                          # [BM, Dh]
    m = tl.full([BM], -float("inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, Dh], tl.float32)
    acc, m, l = _fwd_blocks(acc, m, l, q, kv, rows, starts, begin, end, full_begin, full_end, k_col, v_col, qk_scale, True)
    acc, m, l = _fwd_blocks(acc, m, l, q, kv, rows, starts, full_begin, full_end, full_end, full_end, k_col, v_col, qk_scale,
                            False)
    # N * H * Dh passes 2^31 at 420k rows of 5120
    at = rows.to(tl.int64)[:, None] * (H * Dh) + h * Dh + tl.arange(0, Dh)[None, :]
    tl.store(out + at, (acc / l[:, None]).to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(lse + h.to(tl.int64) * N + rows, m + tl.log2(l), mask=inside)


@triton.jit
def _delta_bwd(out, dout, delta, N, H: tl.constexpr, Dh: tl.constexpr, BM: tl.constexpr):
    h = tl.program_id(0) % H
    rows = tl.program_id(0) // H * BM + tl.arange(0, BM)
    inside = rows < N
    at = rows.to(tl.int64)[:, None] * (H * Dh) + h * Dh + tl.arange(0, Dh)[None, :]
    b_out = tl.load(out + at, mask=inside[:, None], other=0.0).to(tl.float32)  # [BM, Dh]
    b_dout = tl.load(dout + at, mask=inside[:, None], other=0.0).to(tl.float32)
    tl.store(delta + h.to(tl.int64) * N + rows, tl.sum(b_out * b_dout, 1), mask=inside)


@triton.jit
def _dkv_blocks(dk, dv, k, v, q_tiles, dout_tiles, lse, delta, N, keys, ends, begin, end, gap_begin, gap_end, first_head,
                qk_scale, G: tl.constexpr, Dh: tl.constexpr, MASKED: tl.constexpr):
    """Adds what blocks of rows begin..gap_begin and gap_end..end (numbers of blocks) of the G heads give to dk, dv [BN, Dh]."""
    BM: tl.constexpr = q_tiles.block_shape[0]
    # one loop over blocks and heads, so that its pipeline of loads fills once
    for t in tl.range(begin * G, (end - (gap_end - gap_begin)) * G):
        i = t // G
        i = tl.where(i < gap_begin, i, i + gap_end - gap_begin) * BM
        h = first_head + t % G
        rows = i + tl.arange(0, BM)
        # scalars are added first, so that a thread holds one pointer and not one a column
        at = h.to(tl.int64) * N + i
        p_lse = lse + at + tl.arange(0, BM)
        p_delta = delta + at + tl.arange(0, BM)
        b_q = q_tiles.load([i, h * Dh])                                        # [BM, Dh]
        b_dout = dout_tiles.load([i, h * Dh])
        # scores and their gradient with keys down and rows across: P^T and dS^T are wanted, and a transpose of a product
        # goes through shared memory
        b_s = tl.dot(k, b_q.T, input_precision="ieee")                         # [BN, BM]
        b_dp = tl.dot(v, b_dout.T, input_precision="ieee")
        # statistics are loaded where they are used: at the top they would hold registers during the products
        b_lse = tl.load(p_lse, mask=rows < N, other=0.0) if MASKED else tl.load(p_lse)
        if MASKED:
            b_s = tl.where((rows[None, :] >= keys[:, None]) & (rows[None, :] < ends[:, None]), b_s, -float("inf"))
        b_p = tl.exp2(b_s * qk_scale - b_lse[None, :])
        dv = tl.dot(b_p.to(k.dtype), b_dout, dv, input_precision="ieee")
        b_delta = tl.load(p_delta, mask=rows < N, other=0.0) if MASKED else tl.load(p_delta)
        b_ds = b_p * (b_dp - b_delta[None, :])
        dk = tl.dot(b_ds.to(k.dtype), b_q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _attention_dkv_bwd(qkv, dout, lse, delta, doc_end, dqkv, N, scale, qk_scale, H: tl.constexpr, K: tl.constexpr,
                       Dh: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    # early keys, which most rows read, first
    g = tl.program_id(0) % K
    first = tl.program_id(0) // K * BN
    k_col = (H + g) * Dh
    kv = _tiles(qkv, N, (H + 2 * K) * Dh, BN, Dh)
    q_tiles = kv if BM == BN else _tiles(qkv, N, (H + 2 * K) * Dh, BM, Dh)
    dout_tiles = _tiles(dout, N, H * Dh, BM, Dh)
    keys = first + tl.arange(0, BN)
    inside = keys < N
    # keys behind the end belong to nobody: no row is below 0
    ends = tl.load(doc_end + keys, mask=inside, other=0)
    # blocks of rows: those from the diagonal to the end of the first key's document see every key
    begin = first // BM
    end = tl.cdiv(tl.load(doc_end + min(first + BN, N) - 1), BM)
    full_begin = min(tl.cdiv(first + BN - 1, BM), end)
    full_end = max(tl.load(doc_end + first) // BM, full_begin)
    k = kv.load([first, k_col])                                                # [BN, Dh]
    v = kv.load([first, k_col + K * Dh])
    dk = tl.zeros([BN, Dh], tl.float32)
    dv = tl.zeros([BN, Dh], tl.float32)
    dk, dv = _dkv_blocks(dk, dv, k, v, q_tiles, dout_tiles, lse, delta, N, keys, ends, begin, end, full_begin, full_end,
                         g * (H // K), qk_scale, H // K, Dh, True)
    dk, dv = _dkv_blocks(dk, dv, k, v, q_tiles, dout_tiles, lse, delta, N, keys, ends, full_begin, full_end, full_end, full_end,
                         g * (H // K), qk_scale, H // K, Dh, False)
    at = keys.to(tl.int64)[:, None] * ((H + 2 * K) * Dh) + k_col + tl.arange(0, Dh)[None, :]
    tl.store(dqkv + at, (dk * scale).to(dqkv.dtype.element_ty), mask=inside[:, None])
    tl.store(dqkv + at + K * Dh, dv.to(dqkv.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _dq_blocks(dq, q, b_dout, kv, b_lse, b_delta, rows, starts, begin, end, gap_begin, gap_end, k_col, v_col, qk_scale,
               MASKED: tl.constexpr):
    """Adds key blocks begin..gap_begin and gap_end..end to dq [BM, Dh]."""
    BN: tl.constexpr = kv.block_shape[0]
    for t in tl.range(begin, end - (gap_end - gap_begin), BN):
        j = tl.where(t < gap_begin, t, t + gap_end - gap_begin)
        b_k = kv.load([j, k_col])                                              # [BN, Dh]
        b_s = tl.dot(q, b_k.T, input_precision="ieee")                         # [BM, BN]
        b_dp = tl.dot(b_dout, kv.load([j, v_col]).T, input_precision="ieee")
        if MASKED:
            keys = j + tl.arange(0, BN)
            b_s = tl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None]), b_s, -float("inf"))
        b_p = tl.exp2(b_s * qk_scale - b_lse[:, None])
        b_ds = b_p * (b_dp - b_delta[:, None])
        dq = tl.dot(b_ds.to(q.dtype), b_k, dq, input_precision="ieee")
    return dq


@triton.jit
def _attention_dq_bwd(qkv, dout, lse, delta, doc_start, dqkv, N, scale, qk_scale, H: tl.constexpr, K: tl.constexpr,
                      Dh: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    h = tl.program_id(0) % H
    first = (tl.cdiv(N, BM) - 1 - tl.program_id(0) // H) * BM
    k_col = (H + h // (H // K)) * Dh
    v_col = k_col + K * Dh
    kv = _tiles(qkv, N, (H + 2 * K) * Dh, BN, Dh)
    q_tiles = kv if BM == BN else _tiles(qkv, N, (H + 2 * K) * Dh, BM, Dh)
    dout_tiles = _tiles(dout, N, H * Dh, BM, Dh)
    rows = first + tl.arange(0, BM)
    inside = rows < N
    starts = tl.load(doc_start + rows, mask=inside, other=0)
    b_lse = tl.load(lse + h.to(tl.int64) * N + rows, mask=inside, other=0.0)
    b_delta = tl.load(delta + h.to(tl.int64) * N + rows, mask=inside, other=0.0)
    begin, end, full_begin, full_end = _key_range(doc_start, first, N, BM, BN)
    q = q_tiles.load([first, h * Dh])                                          # [BM, Dh]
    b_dout = dout_tiles.load([first, h * Dh])
    dq = tl.zeros([BM, Dh], tl.float32)
    dq = _dq_blocks(dq, q, b_dout, kv, b_lse, b_delta, rows, starts, begin, end, full_begin, full_end, k_col, v_col, qk_scale,
                    True)
    dq = _dq_blocks(dq, q, b_dout, kv, b_lse, b_delta, rows, starts, full_begin, full_end, full_end, full_end, k_col, v_col,
                    qk_scale, False)
    at = rows.to(tl.int64)[:, None] * ((H + 2 * K) * Dh) + h * Dh + tl.arange(0, Dh)[None, :]
    tl.store(dqkv + at, (dq * scale).to(dqkv.dtype.element_ty), mask=inside[:, None])


class Tile(NamedTuple):
    """BM query rows by BN keys."""
    BM: int
    BN: int
    warps: int
    stages: int


# 16-bit inputs where a block has 227 KB of shared memory, by kernel and Dh; narrower heads take the tiles of 64. 128 was swept
# on an H200 with 8 documents of 4096 and 40 heads on 8 (LOG.md), the others are what compiles without spills
HOPPER_TILES = {
    "fwd": {64: Tile(128, 128, 8, 3), 128: Tile(128, 128, 8, 3), 256: Tile(128, 64, 8, 2)},
    # up to 64, two programs of one warpgroup share a multiprocessor: one multiplies while the other takes exponentials
    "dkv": {64: Tile(64, 64, 4, 2), 128: Tile(64, 128, 8, 3), 256: Tile(32, 64, 8, 2)},
    "dq": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 4, 2), 256: Tile(128, 32, 8, 2)},
}
# the same by launch.tile_class; but for Hopper's, compiled and not measured: about the largest that fit and do not spill
TILES = {
    "sm_90": HOPPER_TILES,
    "sm_80": {
        "fwd": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
        "dkv": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 3), 256: Tile(32, 32, 8, 2)},
        "dq": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 3), 256: Tile(64, 32, 8, 2)},
    },
    "sm_89": {
        "fwd": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
        "dkv": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
        "dq": {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    },
    # what the TMA unit brought goes to registers whole, and not, as on sm_89, a slice of Dh at a time
    "sm_120": {
        "fwd": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(32, 16, 8, 2)},
        "dkv": {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 8, 2), 256: Tile(16, 16, 8, 2)},
        "dq": {64: Tile(128, 32, 8, 2), 128: Tile(128, 16, 8, 2), 256: Tile(16, 16, 4, 2)},
    },
    # warps of 64, of which 8 find room on a multiprocessor at up to 256 registers
    "gfx942": {
        "fwd": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
        "dkv": {64: Tile(32, 64, 4, 2), 128: Tile(16, 64, 4, 2), 256: Tile(16, 32, 8, 2)},
        "dq": {64: Tile(128, 32, 8, 2), 128: Tile(128, 32, 8, 2), 256: Tile(64, 16, 8, 2)},
    },
}
# fp32 has no tensor cores under input_precision="ieee", and its products keep whole rows in registers
FP32_TILE = Tile(16, 16, 8, 1)
# unequal, so that a tile's border on one side is in the middle of one on the other
INTERPRETER_TILES = {"fwd": Tile(32, 16, 1, 1), "dkv": Tile(16, 32, 1, 1), "dq": Tile(32, 16, 1, 1)}
# rows of a program of the memory-bound pass
DELTA_ROWS = 64


def choose_tile(kernel: str, dtype: torch.dtype, Dh: int) -> Tile:
    """The tile of "fwd", "dkv" or "dq" on this GPU."""
    if INTERPRET:
        return INTERPRETER_TILES[kernel]
    if dtype == torch.float32:
        return FP32_TILE
    return TILES[tile_class()][kernel][max(Dh, 64)]


def launch_options(kernel: str, dtype: torch.dtype, H: int, K: int, Dh: int) -> tuple[Tile, dict]:
    """Tile and keyword arguments of a kernel."""
    tile = choose_tile(kernel, dtype, Dh)
    return tile, {"H": H, "K": K, "Dh": Dh, "BM": tile.BM, "BN": tile.BN, "num_warps": tile.warps, "num_stages": tile.stages}


def on_hopper(kernel: str, dtype: torch.dtype, Dh: int) -> bool:
    """Whether kernels/attention_hopper.py has "fwd", "dkv" or "dq" for this GPU, dtype and head width."""
    return not INTERPRET and capability()[0] == 9 and dtype != torch.float32 and Dh in attention_hopper.TILES[kernel]


def check_heads(H: int, K: int, Dh: int, scale: float) -> None:
    """Raises ValueError for heads that the kernels cannot take."""
    if K < 1 or H % K:
        raise ValueError(f"H: {H} query heads do not share {K} key heads evenly")
    if Dh not in HEAD_WIDTHS:
        raise ValueError(f"Dh: {Dh}; wanted one of {HEAD_WIDTHS}")
    # the maximum is taken before the scale is applied
    if not scale > 0:
        raise ValueError(f"scale: {scale}; wanted a positive number")


def check_tensor(name: str, x: torch.Tensor, dtypes: torch.dtype | tuple[torch.dtype, ...], *shape: int) -> None:
    """Raises ValueError, naming the tensor, unless it is as `check_rows` wants it and aligned for descriptors."""
    check_rows(name, x, dtypes, *shape)
    check_address(name, x.data_ptr())


def attention(qkv: torch.Tensor, doc_start: torch.Tensor, doc_end: torch.Tensor, H: int, K: int, Dh: int, scale: float, *,
              out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes out [N, H Dh] (dtype of qkv) and lse [H, N] fp32, log2 of the sum of exp(scale q.k).

    qkv: [N, (H + 2K) Dh] bf16, fp16 or fp32. doc_start, doc_end: int32 [N]; row i attends to rows doc_start[i]..i.
    scale: above 0. Raises ValueError, naming the tensor, for a shape, dtype, stride or alignment that the kernels cannot take.
    """
    N = qkv.shape[0]
    check_heads(H, K, Dh, scale)
    check_tensor("qkv", qkv, DTYPES, N, (H + 2 * K) * Dh)
    check_tensor("doc_start", doc_start, torch.int32, N)
    check_tensor("doc_end", doc_end, torch.int32, N)
    check_tensor("out", out, qkv.dtype, N, H * Dh)
    check_tensor("lse", lse, torch.float32, H, N)
    qk_scale = scale / math.log(2)
    if on_hopper("fwd", qkv.dtype, Dh):
        attention_hopper.forward(qkv, doc_start, H, K, Dh, qk_scale, out=out, lse=lse)
        return
    tile, options = launch_options("fwd", qkv.dtype, H, K, Dh)
    _attention_fwd[(triton.cdiv(N, tile.BM) * H,)](qkv, doc_start, out, lse, N, qk_scale, **options)


def attention_backward(qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor, doc_start: torch.Tensor,
                       doc_end: torch.Tensor, H: int, K: int, Dh: int, scale: float, *, delta: torch.Tensor,
                       dqkv: torch.Tensor) -> None:
    """Writes dqkv [N, (H + 2K) Dh] from dout [N, H Dh] and what `attention` read and wrote; delta [H, N] fp32 is scratch.

    Raises ValueError as `attention` does.
    """
    N = qkv.shape[0]
    check_heads(H, K, Dh, scale)
    check_tensor("qkv", qkv, DTYPES, N, (H + 2 * K) * Dh)
    check_tensor("dqkv", dqkv, qkv.dtype, N, (H + 2 * K) * Dh)
    for name, x in (("out", out), ("dout", dout)):
        check_tensor(name, x, qkv.dtype, N, H * Dh)
    for name, x in (("lse", lse), ("delta", delta)):
        check_tensor(name, x, torch.float32, H, N)
    for name, x in (("doc_start", doc_start), ("doc_end", doc_end)):
        check_tensor(name, x, torch.int32, N)
    qk_scale = scale / math.log(2)
    _delta_bwd[(triton.cdiv(N, DELTA_ROWS) * H,)](out, dout, delta, N, H=H, Dh=Dh, BM=DELTA_ROWS, num_warps=4)
    if on_hopper("dkv", qkv.dtype, Dh):
        attention_hopper.backward(qkv, dout, lse, delta, doc_start, doc_end, H, K, Dh, scale, qk_scale, dqkv=dqkv)
        return
    tile, options = launch_options("dkv", qkv.dtype, H, K, Dh)
    _attention_dkv_bwd[(triton.cdiv(N, tile.BN) * K,)](qkv, dout, lse, delta, doc_end, dqkv, N, scale, qk_scale, **options)
    tile, options = launch_options("dq", qkv.dtype, H, K, Dh)
    _attention_dq_bwd[(triton.cdiv(N, tile.BM) * H,)](qkv, dout, lse, delta, doc_start, dqkv, N, scale, qk_scale, **options)
