"""Embedding: out[i] = w[tokens[i]], and the gradient of w added up in a fixed order, without atomics.

    tokens order  [N] int32         out dout  [N, D] bf16, fp16 or fp32, contiguous
    w   [V, D], dtype of out, a raw address        dw  [V, D] fp32, a raw address

Backward walks the rows in the order of their tokens, in chunks of CHUNK rows. A run (all rows of one token) belongs to
the chunk that it begins in, whose program adds its part of the sum to dw. What later chunks have of it is the head of
each: at most one a chunk, kept in `partials`, and added to dw by a second kernel, in order.

    sorted tokens   5 5 7 9 | 9 9 9 9 | 9 9 12 12 | 12 15
    added to dw     5   7 9           |     12    |    15       first kernel
    partials                  9         9           12
    added to dw               9 + 9                 12          second kernel

A space is 15 % of the rows of byte-level text: without chunks one program would add 5,000 rows while the others wait.
"""
import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, check_address, check_partials, check_rows


def embedding_ref(tokens: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Plain torch; fp64 in, fp64 out, so that it can judge the kernel (and, through autograd, its backward)."""
    return w[tokens.long()]


@triton.jit
def _embedding_fwd(tokens, w_addr, out, D: tl.constexpr, BD: tl.constexpr):
    blocks: tl.constexpr = (D + BD - 1) // BD
    # N * D and V * D pass 2^31
    row = (tl.program_id(0) // blocks).to(tl.int64)
    d = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
    # int_to_ptr forgets alignment: without the hint, 2-byte loads instead of 16
    w = tl.multiple_of(w_addr.to(tl.pointer_type(out.dtype.element_ty)), 16)
    token = tl.load(tokens + row).to(tl.int64)
    tl.store(out + row * D + d, tl.load(w + token * D + d, mask=d < D), mask=d < D)


@triton.jit
def _embedding_bwd(dout, tokens, order, dw_addr, partials, N, D: tl.constexpr, CHUNK: tl.constexpr, BD: tl.constexpr):
    blocks: tl.constexpr = (D + BD - 1) // BD
    chunk = tl.program_id(0) // blocks
    d = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
    inside = d < D
    dw = tl.multiple_of(dw_addr.to(tl.pointer_type(tl.float32)), 16)
    first = chunk * CHUNK
    end = min(first + CHUNK, N)
    row = tl.load(order + first)
    token = tl.load(tokens + row)
    # a run that began in an earlier chunk is this one's head
    is_head = tl.load(tokens + tl.load(order + max(first - 1, 0))) == token and first > 0
    b_sum = tl.zeros([BD], tl.float32)
    for i in range(first, end):
        # looked up before it is needed, so that only dout is waited for
        next_row = tl.load(order + min(i + 1, end - 1))
        next_token = tl.load(tokens + next_row)
        b_sum += tl.load(dout + row.to(tl.int64) * D + d, mask=inside, other=0.0).to(tl.float32)   # [BD]
        if next_token != token or i + 1 == end:
            if is_head:
                tl.store(partials + chunk.to(tl.int64) * D + d, b_sum, mask=inside)
            else:
                at = dw + token.to(tl.int64) * D + d
                tl.store(at, tl.load(at, mask=inside, other=0.0) + b_sum, mask=inside)
            b_sum = tl.zeros([BD], tl.float32)
            is_head = False
        row = next_row
        token = next_token


@triton.jit
def _embedding_heads_bwd(tokens, order, dw_addr, partials, N, D: tl.constexpr, CHUNK: tl.constexpr, BC: tl.constexpr,
                         BD: tl.constexpr):
    blocks: tl.constexpr = (D + BD - 1) // BD
    chunk = tl.program_id(0) // blocks + 1
    d = (tl.program_id(0) % blocks) * BD + tl.arange(0, BD)
    first = chunk * CHUNK
    token = tl.load(tokens + tl.load(order + first))
    has_head = tl.load(tokens + tl.load(order + first - 1)) == token
    # the head of the chunk before is of the same run: its program adds this one too
    is_later = chunk > 1 and tl.load(tokens + tl.load(order + max(first - CHUNK - 1, 0))) == token
    if has_head and not is_later:
        dw = tl.multiple_of(dw_addr.to(tl.pointer_type(tl.float32)), 16) + token.to(tl.int64) * D + d
        b_sum = tl.load(dw, mask=d < D, other=0.0)                             # [BD]
        num_same = BC
        while num_same == BC:
            c = chunk + tl.arange(0, BC)
            c_first = tl.load(order + c * CHUNK, mask=c * CHUNK < N, other=0)
            same = (tl.load(tokens + c_first) == token) & (c * CHUNK < N)      # [BC]
            at = c.to(tl.int64)[:, None] * D + d[None, :]
            b_sum += tl.sum(tl.load(partials + at, mask=same[:, None] & (d < D)[None, :], other=0.0), 0)
            num_same = tl.sum(same.to(tl.int32))
            chunk += BC
        tl.store(dw, b_sum, mask=d < D)


# sorted rows that one program adds
CHUNK = 64
# columns and warps of a tile: forward, backward, heads (with HEADS_TILE_CHUNKS of them added at once)
FORWARD_TILE, FORWARD_WARPS = 4096, 4
BACKWARD_TILE, BACKWARD_WARPS = 512, 2
HEADS_TILE, HEADS_TILE_CHUNKS, HEADS_WARPS = 128, 32, 4


def embedding_partials_shape(N: int, D: int) -> tuple[int, int]:
    """fp32 scratch that `embedding_backward` needs: one row a chunk of CHUNK rows."""
    return triton.cdiv(N, CHUNK), D


def embedding(tokens: torch.Tensor, w_addr: int, *, out: torch.Tensor) -> None:
    """Writes `out` [N, D]: row i is the row tokens[i] of w, copied.

    tokens: [N] int32, each a row of w (unchecked). w_addr: address of w [V, D], dtype of out. Raises ValueError, naming
    the tensor, on a wrong shape, stride, dtype or alignment.
    """
    N, D = out.shape[0], out.shape[-1]
    check_rows("out", out, out.dtype, N, D)
    check_rows("tokens", tokens, torch.int32, N)
    check_address("w", w_addr)
    BD = min(triton.next_power_of_2(D), FORWARD_TILE)
    _embedding_fwd[N * triton.cdiv(D, BD),](tokens, w_addr, out, D=D, BD=BD, num_warps=FORWARD_WARPS)


def embedding_backward(dout: torch.Tensor, tokens: torch.Tensor, order: torch.Tensor, dw_addr: int, *,
                       partials: torch.Tensor) -> None:
    """dw [V, D] fp32 += for each token, the sum of its rows of `dout` [N, D]; other rows of dw are not touched.

    order: [N] int32, the stable argsort of tokens. partials: fp32 scratch, `embedding_partials_shape(N, D)` or more.
    The bits depend on tokens and dout alone. Raises ValueError as `embedding` does.
    """
    N, D = dout.shape[0], dout.shape[-1]
    check_rows("dout", dout, DTYPES, N, D)
    check_rows("tokens", tokens, torch.int32, N)
    check_rows("order", order, torch.int32, N)
    check_address("dw", dw_addr)
    check_partials(partials, *embedding_partials_shape(N, D))
    num_chunks = triton.cdiv(N, CHUNK)
    BD = min(triton.next_power_of_2(D), BACKWARD_TILE)
    _embedding_bwd[num_chunks * triton.cdiv(D, BD),](
        dout, tokens, order, dw_addr, partials, N, D=D, CHUNK=CHUNK, BD=BD, num_warps=BACKWARD_WARPS)
    # the first chunk has no head
    if num_chunks > 1:
        BD = min(triton.next_power_of_2(D), HEADS_TILE)
        _embedding_heads_bwd[(num_chunks - 1) * triton.cdiv(D, BD),](
            tokens, order, dw_addr, partials, N, D=D, CHUNK=CHUNK, BC=HEADS_TILE_CHUNKS, BD=BD, num_warps=HEADS_WARPS)
