"""The head's matrix and cross-entropy in one: logits exist a chunk of rows at a time, and become their gradient in place.

    z = x W^T                                     loss = log(sum(exp(z))) - z[label]
    dz = scale (softmax(z) - onehot(label))       dx = dz W        dW (+)= dz^T x

    x dx      [N, D] bf16, fp16 or fp32, contiguous     W   [V, D], dtype of x, a raw address
    labels    [N] int32, 0..V-1, or negative: masked    dW  [V, D] fp32, a raw address
    losses    [N] fp32, 0 where masked                  logits  [chunk, >= V] scratch, dtype of x

One program a row: the maximum and the sum of exponentials in one reading, the gradient in a second one from the end of
the row backward, so that what was read last, and is still in L2, is read first. exp is taken of z - max in fp32.
"""
import torch
import triton
import triton.language as tl

from kernels.gemm import check_matrix, check_weight, linear, linear_dgrad, linear_wgrad
from kernels.launch import DTYPES, INTERPRET, check_rows


def linear_cross_entropy_ref(x: torch.Tensor, w: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Loss of each row [N], 0 where masked, in plain torch; fp64 in, fp64 out. Gradients are torch.autograd's."""
    z = x @ w.T
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    picked = z.gather(1, labels.clamp_min(0).long()[:, None])[:, 0]
    return (torch.logsumexp(z, 1) - picked).masked_fill(labels < 0, 0)


@triton.jit
def _cross_entropy(logits, labels, losses, scale, V, stride, BV: tl.constexpr, WITH_GRADIENT: tl.constexpr):
    dtype: tl.constexpr = logits.dtype.element_ty
    row = tl.program_id(0)
    label = tl.load(labels + row)
    # row * stride passes 2^31 at row 14,122 of 152,064 columns
    z = logits + row.to(tl.int64) * stride
    v = tl.arange(0, BV)
    if label < 0:
        tl.store(losses + row, 0.0)
        if WITH_GRADIENT:
            # whatever the logits are, NaN too
            for first in range(0, V, BV):
                tl.store(z + first + v, tl.zeros([BV], dtype), mask=first + v < V)
    else:
        # in front of the reductions, whose barriers keep it in front of the thread that overwrites it
        z_label = tl.load(z + label).to(tl.float32)
        z_max = float("-inf")
        b_sum = tl.zeros([BV], tl.float32)
        for first in range(0, V, BV):
            b_z = tl.load(z + first + v, mask=first + v < V, other=float("-inf")).to(tl.float32)      # [BV]
            new_max = tl.maximum(z_max, tl.max(b_z, 0))
            b_sum = b_sum * tl.exp(z_max - new_max) + tl.exp(b_z - new_max)
            z_max = new_max
        z_sum = tl.sum(b_sum, 0)
        tl.store(losses + row, tl.log(z_sum) + (z_max - z_label))
        if WITH_GRADIENT:
            factor = scale / z_sum
            for done in range(0, V, BV):
                at = (tl.cdiv(V, BV) - 1) * BV - done + v
                b_z = tl.load(z + at, mask=at < V, other=float("-inf")).to(tl.float32)
                b_dz = tl.exp(b_z - z_max) * factor - tl.where(at == label, scale, 0.0)
                tl.store(z + at, b_dz.to(dtype), mask=at < V)


# columns of a tile and warps: 16 elements a thread, two 16-byte loads of bf16
BV, NUM_WARPS = (8192, 16) if not INTERPRET else (1024, 1)


def linear_cross_entropy(x: torch.Tensor, w_addr: int, labels: torch.Tensor, scale: float, *, V: int,
                         logits: torch.Tensor, losses: torch.Tensor, dx: torch.Tensor | None = None, dw_addr: int = 0,
                         accumulate: bool = False) -> None:
    """Writes losses [N]; with dx, also dx [N, D] and dW (= or +=), the gradients of scale * sum(losses).

    Rows go in chunks of logits.shape[0]; each masked row costs its share of the products all the same. scale: one over
    the supervised tokens of the step. Labels of V or more are not looked for. x is not written to.
    Raises ValueError, naming the tensor, for a shape, dtype, stride or alignment that the kernels cannot take.
    """
    N, D = x.shape[0], x.shape[-1]
    check_rows("x", x, DTYPES, N, D)
    check_matrix("x", x, N, D, x.dtype)
    check_weight("w", w_addr, D, x.element_size())
    check_rows("labels", labels, torch.int32, N)
    check_rows("losses", losses, torch.float32, N)
    if logits.ndim != 2 or logits.shape[0] < 1 or logits.shape[1] < V:
        raise ValueError(f"logits: shape {tuple(logits.shape)}; wanted rows of {V} elements or more")
    check_matrix("logits", logits, *logits.shape, x.dtype)
    if dx is not None:
        check_rows("dx", dx, x.dtype, N, D)
        check_matrix("dx", dx, N, D, x.dtype)
        if not dw_addr:
            raise ValueError("dw: no address, but dx is wanted")
        check_weight("dw", dw_addr, D, torch.float32.itemsize)
    chunk = logits.shape[0]
    for begin in range(0, N, chunk):
        rows = slice(begin, min(begin + chunk, N))
        z = logits[: rows.stop - begin, :V]
        linear(x[rows], w_addr, out=z)
        _cross_entropy[z.shape[0],](z, labels[rows], losses[rows], scale, V, z.stride(0), BV=BV, WITH_GRADIENT=dx is not None,
                                    num_warps=NUM_WARPS)
        if dx is not None:
            linear_dgrad(z, w_addr, out=dx[rows])
            # the first chunk replaces what is in dW, if anything does
            linear_wgrad(z, x[rows], dw_addr, accumulate=accumulate or begin > 0)
