"""The gate and up projections with SwiGLU in their epilogue, for Hopper in Gluon (see kernels/attention_hopper.py for its terms).

    gate_up[M, 2F] = x[M, K] W[2F, K]^T        act[M, F] = silu(gate) up

A tile of 128 rows by 2 x 128 columns: the same columns of gate and of up, whose rows of W two TMA loads put one behind the other
in a slot, so that one product of width 256 makes both and neither leaves registers before act is there. Stock Triton needs two
accumulators and two narrower products for it, whose wgmma it serializes. One pass that reads gate and up is saved.

A producer warp fills the ring; two consumers of four warps own 64 rows each. Each consumer's outputs go out in pieces of 64 columns
through two buffers, one filled while the TMA unit empties the other. Tiles go in groups of GROUP rows, as in kernels/gemm.py.
"""
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention_hopper import NUM_WARPS, REGISTERS, tma_load, tma_store
from kernels.launch import num_sms

# rows of a tile and of a consumer; columns of gate, and of up, in a tile; what a slot sums over; columns of a stored piece
BM, HALF, BN, BR, BE = (gl.constexpr(n) for n in (128, 64, 128, 64, 64))
STAGES, BUFFERS = 4, 2
# rows of tiles that share the operands of a column of tiles in L2
GROUP = 8


@gluon.jit
def _tile_index(tile, num_i, num_j, ROWS: gl.constexpr):
    group = tile // (ROWS * num_j)
    high = gl.minimum(num_i - group * ROWS, ROWS)
    within = tile % (ROWS * num_j)
    return group * ROWS + within % high, within // high


@gluon.jit
def _producer(x_tiles, gate_w_tiles, up_w_tiles, x_slots, w_slots, full, empty, num_i, num_j, K, ROWS: gl.constexpr, SLOTS: gl.constexpr):
    it = 0
    for tile in range(gl.program_id(0), num_i * num_j, gl.num_programs(0)):
        i, j = _tile_index(tile, num_i, num_j, ROWS)
        for k in range(0, K, BR):
            slot = it % SLOTS
            mbarrier.wait(empty.index(slot), ((it // SLOTS) & 1) ^ 1)
            mbarrier.expect(full.index(slot), 2 * (x_tiles.block_type.nbytes + gate_w_tiles.block_type.nbytes))
            for w in gl.static_range(2):
                tma_load(x_tiles, [i * BM + w * HALF, k], full.index(slot), x_slots.index(2 * slot + w))
            # rows of gate, and the same rows of up behind them
            tma_load(gate_w_tiles, [j * BN, k], full.index(slot), w_slots.index(slot).slice(0, BN))
            tma_load(up_w_tiles, [j * BN, k], full.index(slot), w_slots.index(slot).slice(BN, BN))
            it += 1


@gluon.jit
def _pieces(acc):
    """Left and right half of the columns: other registers of the same threads."""
    return acc.reshape([HALF, 2, acc.shape[1] // 2]).permute([0, 2, 1]).split()


@gluon.jit
def _store(piece, tiles, coordinates, buffers, n: gl.constexpr):
    """Sends a piece [HALF, BE] out through buffer n, once the store before the last has been read out of it."""
    NUM: gl.constexpr = buffers.shape[0]
    buffer = buffers.index(n % NUM)
    tma.store_wait(NUM - 1)
    buffer.store(piece.to(buffer.dtype))
    fence_async_shared()
    tma_store(tiles, coordinates, buffer)


@gluon.jit
def _consumer(x_slots, w_slots, buffers, full, empty, gate_tiles, up_tiles, act_tiles, num_i, num_j, K, w: gl.constexpr,
              ROWS: gl.constexpr, SLOTS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * BN, 16])
    it = 0
    for tile in range(gl.program_id(0), num_i * num_j, gl.num_programs(0)):
        i, j = _tile_index(tile, num_i, num_j, ROWS)
        acc = gl.zeros([HALF, 2 * BN], gl.float32, layout)
        for k in range(0, K, BR):
            slot = it % SLOTS
            mbarrier.wait(full.index(slot), (it // SLOTS) & 1)
            acc = warpgroup_mma(x_slots.index(2 * slot + w), w_slots.index(slot).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # the product before this one has been read
            mbarrier.arrive(empty.index((it + SLOTS - 1) % SLOTS), count=1, pred=it > 0)
            it += 1
        gate, up = _pieces(warpgroup_mma_wait(0, deps=[acc]))
        gates, ups = _pieces(gate), _pieces(up)
        row = i * BM + w * HALF
        for h in gl.static_range(2):
            column = j * BN + h * BE
            b_g, b_u = gates[h], ups[h]
            _store(b_g, gate_tiles, [row, column], buffers, 3 * h)
            _store(b_u, up_tiles, [row, column], buffers, 3 * h + 1)
            # of what was stored, so that backward, which reads that, finds the same act
            b_g, b_u = b_g.to(buffers.dtype).to(gl.float32), b_u.to(buffers.dtype).to(gl.float32)
            _store(b_g / (1.0 + gl.exp(-b_g)) * b_u, act_tiles, [row, column], buffers, 3 * h + 2)
    tma.store_wait(0)


@gluon.jit
def _linear_swiglu_fwd(x, w_addr, gate_up, act, M, F, K, x_stride, gate_up_stride, act_stride, ROWS: gl.constexpr,
                       SLOTS: gl.constexpr, NUM_BUFFERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
                       PRODUCER_REGISTERS: gl.constexpr):
    dtype: gl.constexpr = x.dtype.element_ty
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BR], dtype)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BR], dtype)
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, BE], dtype)
    weight = w_addr.to(gl.pointer_type(dtype))
    x_tiles = tma.make_tensor_descriptor(x, [M, K], [x_stride, 1], [HALF, BR], x_layout)
    # gate and up are two matrices: a tile that overhangs gate's rows, or columns, must not reach up's
    gate_w_tiles = tma.make_tensor_descriptor(weight, [F, K], [K, 1], [BN, BR], w_layout)
    up_w_tiles = tma.make_tensor_descriptor(weight + F.to(gl.int64) * K, [F, K], [K, 1], [BN, BR], w_layout)
    gate_tiles = tma.make_tensor_descriptor(gate_up, [M, F], [gate_up_stride, 1], [HALF, BE], out_layout)
    up_tiles = tma.make_tensor_descriptor(gate_up + F, [M, F], [gate_up_stride, 1], [HALF, BE], out_layout)
    act_tiles = tma.make_tensor_descriptor(act, [M, F], [act_stride, 1], [HALF, BE], out_layout)
    x_slots = gl.allocate_shared_memory(dtype, [2 * SLOTS, HALF, BR], x_layout)
    w_slots = gl.allocate_shared_memory(dtype, [SLOTS, 2 * BN, BR], w_layout)
    # of each consumer
    first_buffers = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, HALF, BE], out_layout)
    second_buffers = gl.allocate_shared_memory(dtype, [NUM_BUFFERS, HALF, BE], out_layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=2)
    fence_async_shared()
    num_i, num_j = gl.cdiv(M, BM), gl.cdiv(F, BN)
    gl.warp_specialize([
        (_consumer, (x_slots, w_slots, first_buffers, full, empty, gate_tiles, up_tiles, act_tiles, num_i, num_j, K, 0, ROWS, SLOTS)),
        (_consumer, (x_slots, w_slots, second_buffers, full, empty, gate_tiles, up_tiles, act_tiles, num_i, num_j, K, 1, ROWS, SLOTS)),
        (_producer, (x_tiles, gate_w_tiles, up_w_tiles, x_slots, w_slots, full, empty, num_i, num_j, K, ROWS, SLOTS)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])


def linear_swiglu(x: torch.Tensor, w_addr: int, *, gate_up: torch.Tensor, act: torch.Tensor) -> None:
    """Launches what kernels/gemm.py's `linear_swiglu` has checked."""
    (M, K), F = x.shape, act.shape[1]
    grid = min(num_sms(), -(-M // BM.value) * -(-F // BN.value))
    _linear_swiglu_fwd[(grid,)](x, w_addr, gate_up, act, M, F, K, x.stride(0), gate_up.stride(0), act.stride(0), ROWS=GROUP,
                                SLOTS=STAGES, NUM_BUFFERS=BUFFERS, num_warps=NUM_WARPS, **REGISTERS)
