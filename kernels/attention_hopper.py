"""Attention for Hopper in Gluon, Triton's lower level: the formulas, layouts and order of blocks of kernels/attention.py.

Every program has two consumers and a producer, warps that run different code. The producer (one warp) asks the TMA unit for
tiles, into rings of slots in shared memory; each consumer (four warps) owns 64 rows, or keys, and multiplies with wgmma out of
those slots. A ring is (slots, full, empty): two barriers a slot, and nothing else, order the warps:

    full     bytes have arrived (and, where statistics come with them, their warp)     consumers wait for it
    empty    both consumers have read the slot                                          the producer waits for it

What makes it fast: products are asynchronous, so a block's exponentials are taken while the products of the block before it
run, and one consumer's exponentials while the other one multiplies. Scores never leave registers: they are computed such that
the accumulator's layout is that of the next product's left operand (keys down for dK and dV, rows down for O and dQ).

fwd and dq are persistent: program p takes tiles of 128 rows in order of falling length, each round of tiles in the other
direction than the one before, so that sums of lengths are nearly equal; the producer runs ahead into the next tile. dkv has one
program a block of 128 keys. fwd writes O, and dq and dkv their gradients, through the slots that q, k and v lay in.

Source: Shah et al. 2024, arXiv 2407.08608 (FlashAttention-3), sections 3.1 and 3.2, for warp specialization and the pipeline
within a warpgroup; dK, dV and dQ apart, so that every output has one writer, is kernels/attention.py's.
"""
from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.launch import num_sms

# triton 3.7 renamed both
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

# rows, or keys, of a program; a warpgroup's wgmma has 64
BLOCK, HALF = gl.constexpr(128), gl.constexpr(64)


@gluon.constexpr_function
def _mma_layout(cols):
    """Layout of a warpgroup's [64, cols] accumulator."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, cols, 16])


@gluon.jit
def _tiles(base, N, COLS: gl.constexpr, BR: gl.constexpr, Dh: gl.constexpr):
    """Descriptor of [BR, Dh] tiles in a contiguous [N, COLS]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BR, Dh], base.dtype.element_ty)
    return tma.make_tensor_descriptor(base, [N, COLS], [COLS, 1], [BR, Dh], layout)


@gluon.jit
def _slots(tiles, num: gl.constexpr):
    return gl.allocate_shared_memory(tiles.dtype, [num, tiles.block_shape[0], tiles.block_shape[1]], tiles.layout)


@gluon.jit
def _barriers(num: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [num, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(num):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


@gluon.jit
def _fill(ring, tiles, row, col, it, STAGES: gl.constexpr):
    """Asks for the tile at row, col as the it-th that goes through the ring, once its slot is free."""
    slots, full, empty = ring
    slot = it % STAGES
    # a fresh barrier counts as having passed phase 1: the first round waits for nobody
    mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(slot), tiles.block_type.nbytes)
    tma_load(tiles, [row, col], full.index(slot), slots.index(slot))


@gluon.jit
def _wait_full(ring, it, STAGES: gl.constexpr):
    slots, full, empty = ring
    mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
    return slots.index(it % STAGES)


@gluon.jit
def _release(ring, it, STAGES: gl.constexpr):
    slots, full, empty = ring
    mbarrier.arrive(empty.index(it % STAGES), count=1)


@gluon.jit
def _row_tile(t, num_tiles, H: gl.constexpr, N):
    """Head and first row of this program's t-th tile: late rows, the longest, first, the heads of a group side by side."""
    P = gl.num_programs(0)
    low = t // P * P
    # every other whole round runs backward
    back = ((t // P) % 2 == 1) & (low + P <= num_tiles)
    i = gl.where(back, 2 * low + P - 1 - t, t)
    return i % H, (gl.cdiv(N, BLOCK) - 1 - i // H) * BLOCK


@gluon.jit
def _key_blocks(doc_start, first, N, BN: gl.constexpr):
    """Keys that rows first..first+BLOCK see, in blocks of BN: begin, number of blocks, how many of them need a mask, and the
    part full_begin..full_begin+gap that all rows see whole."""
    last = gl.minimum(first + BLOCK, N) - 1
    begin = gl.load(doc_start + first) // BN * BN
    full_end = (first + 1) // BN * BN
    full_begin = gl.minimum(gl.cdiv(gl.load(doc_start + last), BN) * BN, full_end)
    num = gl.cdiv(last + 1 - begin, BN)
    gap = full_end - full_begin
    return begin, num, num - gap // BN, full_begin, gap


@gluon.jit
def _key_block(s, begin, masked, full_begin, gap, BN: gl.constexpr):
    """First key of the s-th block: those with a mask first, around the gap, then the gap."""
    j = begin + s * BN
    return gl.where(s < masked, gl.where(j < full_begin, j, j + gap), full_begin + (s - masked) * BN)


@gluon.jit
def _row_producer(row_tiles, row_slots, rows_full, rows_empty, kv_tiles, k_ring, v_ring, doc_start, N, H: gl.constexpr,
                  K: gl.constexpr, Dh: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    """Loads what a tile of rows needs: its own tiles (q; for dq also dout), then blocks of k and v."""
    it = 0
    num_done = 0
    num_tiles = gl.cdiv(N, BLOCK) * H
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        h, first = _row_tile(t, num_tiles, H, N)
        k_col = (H + h // (H // K)) * Dh
        begin, num, masked, full_begin, gap = _key_blocks(doc_start, first, N, BN)
        for s in range(num):
            j = _key_block(s, begin, masked, full_begin, gap, BN)
            _fill(k_ring, kv_tiles, j, k_col, it, STAGES)
            if s == 0:
                for w in gl.static_range(2):
                    mbarrier.wait(rows_empty.index(w), (num_done & 1) ^ 1)
                    mbarrier.expect(rows_full.index(w), len(row_tiles) * row_tiles[0].block_type.nbytes)
                    for i in gl.static_range(len(row_tiles)):
                        tma_load(row_tiles[i], [first + w * HALF, h * Dh], rows_full.index(w), row_slots[i].index(w))
            _fill(v_ring, kv_tiles, j, k_col + K * Dh, it, STAGES)
            it += 1
        num_done += 1


@gluon.jit
def _masked_keys(b_s, j, rows, starts):
    keys = j + gl.arange(0, b_s.shape[1], gl.SliceLayout(0, b_s.type.layout))
    return gl.where((keys[None, :] <= rows[:, None]) & (keys[None, :] >= starts[:, None]), b_s, -float("inf"))


@gluon.jit
def _softmax(b_s, m, j, rows, starts, qk_scale, MASKED: gl.constexpr):
    """Unnormalized probabilities of a block, the new row maxima, and what sums so far shrink by."""
    if MASKED:
        b_s = _masked_keys(b_s, j, rows, starts)
    m_new = gl.maximum(m, gl.max(b_s, 1) * qk_scale)
    # a row that has seen no key yet: -inf minus -inf is NaN
    base = gl.where(m_new == -float("inf"), 0.0, m_new) if MASKED else m_new
    return gl.exp2(b_s * qk_scale - base[:, None]), m_new, gl.exp2(m - base)


@gluon.jit
def _fwd_blocks(acc, p, m, l, it, q, k_ring, v_ring, rows, starts, s_begin, s_end, begin, masked, full_begin, gap, qk_scale,
                STAGES: gl.constexpr, MASKED: gl.constexpr):
    """Adds blocks s_begin-1 .. s_end-2 to acc and takes the probabilities of s_begin .. s_end-1: p is always one block ahead."""
    BN: gl.constexpr = k_ring[0].shape[1]
    zero = gl.zeros([HALF, BN], gl.float32, _mma_layout(BN))
    for s in range(s_begin, s_end):
        k = _wait_full(k_ring, it + 1, STAGES)
        s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        v = _wait_full(v_ring, it, STAGES)
        acc_token = warpgroup_mma(p, v, acc, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=[s_token])
        _release(k_ring, it + 1, STAGES)
        j = _key_block(s, begin, masked, full_begin, gap, BN)
        b_p, m, shrink = _softmax(b_s, m, j, rows, starts, qk_scale, MASKED)
        l = l * shrink + gl.sum(b_p, 1)
        # p goes in and comes out, so that its registers are not used again before the product has read them
        acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
        _release(v_ring, it, STAGES)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = gl.convert_layout(b_p.to(q.dtype), p.type.layout)
        it += 1
    return acc, p, m, l, it


@gluon.jit
def _fwd_consumer(q_slots, rows_full, rows_empty, k_ring, v_ring, out_tiles, lse, doc_start, N, qk_scale, w: gl.constexpr,
                  H: gl.constexpr, K: gl.constexpr, Dh: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    s_layout: gl.constexpr = _mma_layout(BN)
    acc_layout: gl.constexpr = _mma_layout(Dh)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, k_width=2)
    q = q_slots.index(w)
    it = 0
    num_done = 0
    num_tiles = gl.cdiv(N, BLOCK) * H
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        h, first = _row_tile(t, num_tiles, H, N)
        begin, num, masked, full_begin, gap = _key_blocks(doc_start, first, N, BN)
        rows = first + w * HALF + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))
        starts = gl.load(doc_start + rows, mask=rows < N, other=0)
        mbarrier.wait(rows_full.index(w), num_done & 1)
        # the diagonal's block is masked: there is always a first one with a mask
        k = _wait_full(k_ring, it, STAGES)
        s_token = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([HALF, BN], gl.float32, s_layout), use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(0, deps=[s_token])
        _release(k_ring, it, STAGES)
        m = gl.full([HALF], -float("inf"), gl.float32, gl.SliceLayout(1, s_layout))
        b_p, m, shrink = _softmax(b_s, m, _key_block(0, begin, masked, full_begin, gap, BN), rows, starts, qk_scale, True)
        l = gl.sum(b_p, 1)
        p = gl.convert_layout(b_p.to(q.dtype), p_layout)
        acc = gl.zeros([HALF, Dh], gl.float32, acc_layout)
        acc, p, m, l, it = _fwd_blocks(acc, p, m, l, it, q, k_ring, v_ring, rows, starts, 1, masked, begin, masked, full_begin,
                                       gap, qk_scale, STAGES, True)
        acc, p, m, l, it = _fwd_blocks(acc, p, m, l, it, q, k_ring, v_ring, rows, starts, masked, num, begin, masked, full_begin,
                                       gap, qk_scale, STAGES, False)
        v = _wait_full(v_ring, it, STAGES)
        acc_token = warpgroup_mma(p, v, acc, is_async=True)
        gl.store(lse + h.to(gl.int64) * N + rows, m + gl.log2(l), mask=rows < N)
        acc, p = warpgroup_mma_wait(0, deps=[acc_token, p])
        _release(v_ring, it, STAGES)
        it += 1
        q.store((acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc_layout))[:, None]).to(q.dtype))
        fence_async_shared()
        tma_store(out_tiles, [first + w * HALF, h * Dh], q)
        tma.store_wait(0)
        mbarrier.arrive(rows_empty.index(w), count=1)
        num_done += 1


@gluon.jit
def _attention_fwd(qkv, doc_start, out, lse, N, qk_scale, H: gl.constexpr, K: gl.constexpr, Dh: gl.constexpr, BN: gl.constexpr,
                   STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr):
    q_tiles = _tiles(qkv, N, (H + 2 * K) * Dh, HALF, Dh)
    kv_tiles = _tiles(qkv, N, (H + 2 * K) * Dh, BN, Dh)
    out_tiles = _tiles(out, N, H * Dh, HALF, Dh)
    q_slots = _slots(q_tiles, 2)
    rows_full, rows_empty = _barriers(2, 1), _barriers(2, 1)
    k_ring = (_slots(kv_tiles, STAGES), _barriers(STAGES, 1), _barriers(STAGES, 2))
    v_ring = (_slots(kv_tiles, STAGES), _barriers(STAGES, 1), _barriers(STAGES, 2))
    fence_async_shared()
    gl.warp_specialize([
        (_fwd_consumer, (q_slots, rows_full, rows_empty, k_ring, v_ring, out_tiles, lse, doc_start, N, qk_scale, 0, H, K, Dh, BN,
                         STAGES)),
        (_fwd_consumer, (q_slots, rows_full, rows_empty, k_ring, v_ring, out_tiles, lse, doc_start, N, qk_scale, 1, H, K, Dh, BN,
                         STAGES)),
        (_row_producer, ((q_tiles,), (q_slots,), rows_full, rows_empty, kv_tiles, k_ring, v_ring, doc_start, N, H, K, Dh, BN,
                         STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])


@gluon.jit
def _dq_ds(b_s, dp_token, b_lse, b_delta, j, rows, starts, qk_scale, dtype: gl.constexpr, NUM_LATER: gl.constexpr,
           MASKED: gl.constexpr, layout: gl.constexpr):
    """dS of a block, as the left operand of dQ's product; NUM_LATER products were issued behind dP's."""
    if MASKED:
        b_s = _masked_keys(b_s, j, rows, starts)
    b_p = gl.exp2(b_s * qk_scale - b_lse[:, None])
    b_dp = warpgroup_mma_wait(NUM_LATER, deps=[dp_token])
    return gl.convert_layout((b_p * (b_dp - b_delta[:, None])).to(dtype), layout)


@gluon.jit
def _dq_blocks(dq, ds, it, q, dout, k_ring, v_ring, b_lse, b_delta, rows, starts, s_begin, s_end, begin, masked, full_begin, gap,
               qk_scale, STAGES: gl.constexpr, MASKED: gl.constexpr):
    """Adds blocks s_begin-1 .. s_end-2 to dq and takes dS of s_begin .. s_end-1: ds is always one block ahead."""
    BN: gl.constexpr = k_ring[0].shape[1]
    ds_layout: gl.constexpr = ds.type.layout
    zero = gl.zeros([HALF, BN], gl.float32, _mma_layout(BN))
    for s in range(s_begin, s_end):
        k = _wait_full(k_ring, it + 1, STAGES)
        s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        v = _wait_full(v_ring, it + 1, STAGES)
        dp_token = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        # this block's k was waited for one step ago
        dq_token = warpgroup_mma(ds, k_ring[0].index(it % STAGES), dq, is_async=True)
        b_s = warpgroup_mma_wait(2, deps=[s_token])
        j = _key_block(s, begin, masked, full_begin, gap, BN)
        ds_new = _dq_ds(b_s, dp_token, b_lse, b_delta, j, rows, starts, qk_scale, q.dtype, 1, MASKED, ds_layout)
        _release(v_ring, it + 1, STAGES)
        dq, ds = warpgroup_mma_wait(0, deps=[dq_token, ds])
        _release(k_ring, it, STAGES)
        ds = ds_new
        it += 1
    return dq, ds, it


@gluon.jit
def _dq_consumer(row_slots, rows_full, rows_empty, k_ring, v_ring, dqkv_tiles, lse, delta, doc_start, N, scale, qk_scale,
                 w: gl.constexpr, H: gl.constexpr, K: gl.constexpr, Dh: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr):
    s_layout: gl.constexpr = _mma_layout(BN)
    dq_layout: gl.constexpr = _mma_layout(Dh)
    ds_layout: gl.constexpr = gl.DotOperandLayout(0, dq_layout, k_width=2)
    q, dout = row_slots[0].index(w), row_slots[1].index(w)
    it = 0
    num_done = 0
    num_tiles = gl.cdiv(N, BLOCK) * H
    for t in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        h, first = _row_tile(t, num_tiles, H, N)
        begin, num, masked, full_begin, gap = _key_blocks(doc_start, first, N, BN)
        rows = first + w * HALF + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))
        inside = rows < N
        starts = gl.load(doc_start + rows, mask=inside, other=0)
        at = h.to(gl.int64) * N + rows
        b_lse = gl.load(lse + at, mask=inside, other=0.0)
        b_delta = gl.load(delta + at, mask=inside, other=0.0)
        mbarrier.wait(rows_full.index(w), num_done & 1)
        zero = gl.zeros([HALF, BN], gl.float32, s_layout)
        k = _wait_full(k_ring, it, STAGES)
        s_token = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        v = _wait_full(v_ring, it, STAGES)
        dp_token = warpgroup_mma(dout, v.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_s = warpgroup_mma_wait(1, deps=[s_token])
        ds = _dq_ds(b_s, dp_token, b_lse, b_delta, _key_block(0, begin, masked, full_begin, gap, BN), rows, starts, qk_scale,
                    q.dtype, 0, True, ds_layout)
        _release(v_ring, it, STAGES)
        dq = gl.zeros([HALF, Dh], gl.float32, dq_layout)
        dq, ds, it = _dq_blocks(dq, ds, it, q, dout, k_ring, v_ring, b_lse, b_delta, rows, starts, 1, masked, begin, masked,
                                full_begin, gap, qk_scale, STAGES, True)
        dq, ds, it = _dq_blocks(dq, ds, it, q, dout, k_ring, v_ring, b_lse, b_delta, rows, starts, masked, num, begin, masked,
                                full_begin, gap, qk_scale, STAGES, False)
        dq_token = warpgroup_mma(ds, k_ring[0].index(it % STAGES), dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, deps=[dq_token, ds])
        _release(k_ring, it, STAGES)
        it += 1
        q.store((dq * scale).to(q.dtype))
        fence_async_shared()
        tma_store(dqkv_tiles, [first + w * HALF, h * Dh], q)
        tma.store_wait(0)
        mbarrier.arrive(rows_empty.index(w), count=1)
        num_done += 1


@gluon.jit
def _attention_dq_bwd(qkv, dout, lse, delta, doc_start, dqkv, N, scale, qk_scale, H: gl.constexpr, K: gl.constexpr,
                      Dh: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                      PRODUCER_REGISTERS: gl.constexpr):
    q_tiles = _tiles(qkv, N, (H + 2 * K) * Dh, HALF, Dh)
    dqkv_tiles = _tiles(dqkv, N, (H + 2 * K) * Dh, HALF, Dh)
    dout_tiles = _tiles(dout, N, H * Dh, HALF, Dh)
    kv_tiles = _tiles(qkv, N, (H + 2 * K) * Dh, BN, Dh)
    row_slots = (_slots(q_tiles, 2), _slots(dout_tiles, 2))
    rows_full, rows_empty = _barriers(2, 1), _barriers(2, 1)
    k_ring = (_slots(kv_tiles, STAGES), _barriers(STAGES, 1), _barriers(STAGES, 2))
    v_ring = (_slots(kv_tiles, STAGES), _barriers(STAGES, 1), _barriers(STAGES, 2))
    fence_async_shared()
    gl.warp_specialize([
        (_dq_consumer, (row_slots, rows_full, rows_empty, k_ring, v_ring, dqkv_tiles, lse, delta, doc_start, N, scale, qk_scale,
                        0, H, K, Dh, BN, STAGES)),
        (_dq_consumer, (row_slots, rows_full, rows_empty, k_ring, v_ring, dqkv_tiles, lse, delta, doc_start, N, scale, qk_scale,
                        1, H, K, Dh, BN, STAGES)),
        (_row_producer, ((q_tiles, dout_tiles), row_slots, rows_full, rows_empty, kv_tiles, k_ring, v_ring, doc_start, N, H, K,
                         Dh, BN, STAGES)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])


@gluon.jit
def _row_blocks(doc_end, first, N, BM: gl.constexpr):
    """Blocks of BM rows that read keys first..first+BLOCK, as numbers: begin, how many, how many of them need a mask, and the
    part full_begin..full_begin+gap that reads all of these keys."""
    begin = first // BM
    end = gl.cdiv(gl.load(doc_end + gl.minimum(first + BLOCK, N) - 1), BM)
    full_begin = gl.minimum(gl.cdiv(first + BLOCK - 1, BM), end)
    gap = gl.maximum(gl.load(doc_end + first) // BM, full_begin) - full_begin
    return begin, end - begin, end - begin - gap, full_begin, gap


@gluon.jit
def _row_block(t, begin, masked, full_begin, gap, BM: gl.constexpr, G: gl.constexpr):
    """First row of step t and its head within the group: one loop over blocks and heads, blocks with a mask first."""
    i = begin + t // G
    i = gl.where(t // G < masked, gl.where(i < full_begin, i, i + gap), full_begin + t // G - masked)
    return i * BM, t % G


@gluon.jit
def _dkv_producer(kv_tiles, k_slots, v_slots, kv_full, q_tiles, dout_tiles, q_slots, dout_slots, full, empty, doc_end, N,
                  H: gl.constexpr, K: gl.constexpr, Dh: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr):
    G: gl.constexpr = H // K
    g = gl.program_id(0) % K
    first = gl.program_id(0) // K * BLOCK
    k_col = (H + g) * Dh
    begin, num, masked, full_begin, gap = _row_blocks(doc_end, first, N, BM)
    mbarrier.expect(kv_full, 4 * kv_tiles.block_type.nbytes)
    for w in gl.static_range(2):
        tma_load(kv_tiles, [first + w * HALF, k_col], kv_full, k_slots.index(w))
        tma_load(kv_tiles, [first + w * HALF, k_col + K * Dh], kv_full, v_slots.index(w))
    for t in range(num * G):
        row, h = _row_block(t, begin, masked, full_begin, gap, BM, G)
        slot = t % STAGES
        mbarrier.wait(empty.index(slot), ((t // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(slot), 2 * q_tiles.block_type.nbytes)
        tma_load(q_tiles, [row, (g * G + h) * Dh], full.index(slot), q_slots.index(slot))
        tma_load(dout_tiles, [row, (g * G + h) * Dh], full.index(slot), dout_slots.index(slot))


@gluon.jit
def _dkv_statistics(lse, delta, lse_slots, delta_slots, full, empty, doc_end, N, H: gl.constexpr, K: gl.constexpr,
                    BM: gl.constexpr, STAGES: gl.constexpr):
    """A warp of its own for lse and delta: their rows are not multiples of 16 bytes apart, as the TMA unit wants them."""
    layout: gl.constexpr = gl.BlockedLayout([BM // 32], [32], [1], [0])
    G: gl.constexpr = H // K
    g = gl.program_id(0) % K
    begin, num, masked, full_begin, gap = _row_blocks(doc_end, gl.program_id(0) // K * BLOCK, N, BM)
    for t in range(num * G):
        row, h = _row_block(t, begin, masked, full_begin, gap, BM, G)
        rows = row + gl.arange(0, BM, layout)
        at = (g * G + h).to(gl.int64) * N + rows
        b_lse = gl.load(lse + at, mask=rows < N, other=0.0)
        b_delta = gl.load(delta + at, mask=rows < N, other=0.0)
        slot = t % STAGES
        mbarrier.wait(empty.index(slot), ((t // STAGES) & 1) ^ 1)
        lse_slots.index(slot).store(b_lse)
        delta_slots.index(slot).store(b_delta)
        mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _dkv_blocks(dk, dv, k, v, q_slots, dout_slots, lse_slots, delta_slots, full, empty, keys, ends, t_begin, t_end, begin, masked,
                full_begin, gap, qk_scale, G: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr):
    """Adds steps t_begin .. t_end to dk, dv [HALF, Dh]. Scores have keys down and rows across: P^T and dS^T are wanted."""
    BM: gl.constexpr = q_slots.shape[1]
    s_layout: gl.constexpr = _mma_layout(BM)
    left: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, k_width=2)
    zero = gl.zeros([HALF, BM], gl.float32, s_layout)
    for t in range(t_begin, t_end):
        slot = t % STAGES
        mbarrier.wait(full.index(slot), (t // STAGES) & 1)
        q, dout = q_slots.index(slot), dout_slots.index(slot)
        s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        dp_token = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
        b_lse = lse_slots.index(slot).load(gl.SliceLayout(0, s_layout))
        b_s = warpgroup_mma_wait(1, deps=[s_token])
        if MASKED:
            row, h = _row_block(t, begin, masked, full_begin, gap, BM, G)
            rows = row + gl.arange(0, BM, gl.SliceLayout(0, s_layout))
            b_s = gl.where((rows[None, :] >= keys[:, None]) & (rows[None, :] < ends[:, None]), b_s, -float("inf"))
        b_p = gl.exp2(b_s * qk_scale - b_lse[None, :])
        p = gl.convert_layout(b_p.to(q.dtype), left)
        dv_token = warpgroup_mma(p, dout, dv, is_async=True)
        b_dp = warpgroup_mma_wait(1, deps=[dp_token])
        b_delta = delta_slots.index(slot).load(gl.SliceLayout(0, s_layout))
        ds = gl.convert_layout((b_p * (b_dp - b_delta[None, :])).to(q.dtype), left)
        dk_token = warpgroup_mma(ds, q, dk, is_async=True)
        dv, dk, p, ds = warpgroup_mma_wait(0, deps=[dv_token, dk_token, p, ds])
        mbarrier.arrive(empty.index(slot), count=1)
    return dk, dv


@gluon.jit
def _dkv_consumer(k_slots, v_slots, kv_full, q_slots, dout_slots, lse_slots, delta_slots, full, empty, dqkv_tiles, doc_end, N,
                  scale, qk_scale, w: gl.constexpr, H: gl.constexpr, K: gl.constexpr, Dh: gl.constexpr, BM: gl.constexpr,
                  STAGES: gl.constexpr):
    G: gl.constexpr = H // K
    g = gl.program_id(0) % K
    first = gl.program_id(0) // K * BLOCK
    begin, num, masked, full_begin, gap = _row_blocks(doc_end, first, N, BM)
    keys = first + w * HALF + gl.arange(0, HALF, gl.SliceLayout(1, _mma_layout(BM)))
    # keys behind the end belong to nobody: no row is below 0
    ends = gl.load(doc_end + keys, mask=keys < N, other=0)
    mbarrier.wait(kv_full, 0)
    k, v = k_slots.index(w), v_slots.index(w)
    dk = gl.zeros([HALF, Dh], gl.float32, _mma_layout(Dh))
    dv = gl.zeros([HALF, Dh], gl.float32, _mma_layout(Dh))
    dk, dv = _dkv_blocks(dk, dv, k, v, q_slots, dout_slots, lse_slots, delta_slots, full, empty, keys, ends, 0, masked * G, begin,
                         masked, full_begin, gap, qk_scale, G, STAGES, True)
    dk, dv = _dkv_blocks(dk, dv, k, v, q_slots, dout_slots, lse_slots, delta_slots, full, empty, keys, ends, masked * G, num * G,
                         begin, masked, full_begin, gap, qk_scale, G, STAGES, False)
    k.store((dk * scale).to(k.dtype))
    v.store(dv.to(v.dtype))
    fence_async_shared()
    tma_store(dqkv_tiles, [first + w * HALF, (H + g) * Dh], k)
    tma_store(dqkv_tiles, [first + w * HALF, (H + g + K) * Dh], v)
    tma.store_wait(0)


@gluon.jit
def _attention_dkv_bwd(qkv, dout, lse, delta, doc_end, dqkv, N, scale, qk_scale, H: gl.constexpr, K: gl.constexpr,
                       Dh: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                       PRODUCER_REGISTERS: gl.constexpr):
    # early keys, which most rows read, first
    kv_tiles = _tiles(qkv, N, (H + 2 * K) * Dh, HALF, Dh)
    dqkv_tiles = _tiles(dqkv, N, (H + 2 * K) * Dh, HALF, Dh)
    q_tiles = _tiles(qkv, N, (H + 2 * K) * Dh, BM, Dh)
    dout_tiles = _tiles(dout, N, H * Dh, BM, Dh)
    statistics: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_slots, v_slots = _slots(kv_tiles, 2), _slots(kv_tiles, 2)
    q_slots, dout_slots = _slots(q_tiles, STAGES), _slots(dout_tiles, STAGES)
    lse_slots = gl.allocate_shared_memory(gl.float32, [STAGES, BM], statistics)
    delta_slots = gl.allocate_shared_memory(gl.float32, [STAGES, BM], statistics)
    kv_full = _barriers(1, 1).index(0)
    # the producer's bytes and the statistics' warp; both consumers
    full, empty = _barriers(STAGES, 2), _barriers(STAGES, 2)
    fence_async_shared()
    gl.warp_specialize([
        (_dkv_consumer, (k_slots, v_slots, kv_full, q_slots, dout_slots, lse_slots, delta_slots, full, empty, dqkv_tiles, doc_end,
                         N, scale, qk_scale, 0, H, K, Dh, BM, STAGES)),
        (_dkv_consumer, (k_slots, v_slots, kv_full, q_slots, dout_slots, lse_slots, delta_slots, full, empty, dqkv_tiles, doc_end,
                         N, scale, qk_scale, 1, H, K, Dh, BM, STAGES)),
        (_dkv_producer, (kv_tiles, k_slots, v_slots, kv_full, q_tiles, dout_tiles, q_slots, dout_slots, full, empty, doc_end, N,
                         H, K, Dh, BM, STAGES)),
        (_dkv_statistics, (lse, delta, lse_slots, delta_slots, full, empty, doc_end, N, H, K, BM, STAGES)),
    ], [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS])


class Tile(NamedTuple):
    """BN keys (fwd, dq) or BM rows (dkv) of a block, and slots of a ring."""
    block: int
    stages: int


# by kernel and Dh; those of 128 were swept on an H200 (LOG.md), the others compile without spills. Scores of a block that is
# twice as wide do not fit the registers of dq and dkv; 256 leaves no room for two accumulators
TILES = {
    "fwd": {64: Tile(128, 4), 128: Tile(128, 2), 256: Tile(64, 2)},
    "dq": {64: Tile(64, 4), 128: Tile(64, 4)},
    "dkv": {64: Tile(64, 4), 128: Tile(64, 2)},
}
# registers a thread: twice the first and once the second are the 504 that a multiprocessor has for three warpgroups
REGISTERS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}
# of the consumer that every program starts as; the others are extra
NUM_WARPS = 4


def forward(qkv: torch.Tensor, doc_start: torch.Tensor, H: int, K: int, Dh: int, qk_scale: float, *, out: torch.Tensor,
            lse: torch.Tensor) -> None:
    """Launches what kernels/attention.py's `attention` has checked; qk_scale is scale / ln 2."""
    N, tile = qkv.shape[0], TILES["fwd"][Dh]
    grid = min(num_sms(), triton.cdiv(N, BLOCK.value) * H)
    _attention_fwd[(grid,)](qkv, doc_start, out, lse, N, qk_scale, H=H, K=K, Dh=Dh, BN=tile.block, STAGES=tile.stages,
                            num_warps=NUM_WARPS, **REGISTERS)


def backward(qkv: torch.Tensor, dout: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, doc_start: torch.Tensor,
             doc_end: torch.Tensor, H: int, K: int, Dh: int, scale: float, qk_scale: float, *, dqkv: torch.Tensor) -> None:
    """Launches what kernels/attention.py's `attention_backward` has checked; delta [H, N] is there."""
    N, dkv, dq = qkv.shape[0], TILES["dkv"][Dh], TILES["dq"][Dh]
    _attention_dkv_bwd[(triton.cdiv(N, BLOCK.value) * K,)](
        qkv, dout, lse, delta, doc_end, dqkv, N, scale, qk_scale, H=H, K=K, Dh=Dh, BM=dkv.block, STAGES=dkv.stages,
        num_warps=NUM_WARPS, **REGISTERS)
    grid = min(num_sms(), triton.cdiv(N, BLOCK.value) * H)
    _attention_dq_bwd[(grid,)](qkv, dout, lse, delta, doc_start, dqkv, N, scale, qk_scale, H=H, K=K, Dh=Dh, BN=dq.block,
                               STAGES=dq.stages, num_warps=NUM_WARPS, **REGISTERS)
