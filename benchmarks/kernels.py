"""Each kernel beside what torch offers for the same work, at the shapes of real layers.

    python -m benchmarks.kernels                         all operations, 14B shape, 4k and 32k tokens
    python -m benchmarks.kernels gemm attention --tokens 4096 16384 65536 --shape 7b 14b

Checked first, at the timed shape: outputs against the peer's, both against fp64 where rows of it can be computed. Then
ours and the peer are timed in turn. Share of the peer: its time over ours. Share of the bound: of 990 TFLOP/s of dense
bf16, or of the measured rate of a device copy.
"""
import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import report
from kernels.adamw import adamw
from kernels.attention import attention, attention_backward
from kernels.cross_entropy import linear_cross_entropy
from kernels.embedding import embedding, embedding_backward, embedding_partials_shape
from kernels.gemm import linear, linear_dgrad, linear_dgrad_swiglu, linear_wgrad
from kernels.norm2 import norm2, norm2_partials_shape
from kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_partials_shape
from kernels.rope import rope
from kernels.swiglu import swiglu
from runtime.host_adamw import adamw_step

# D, heads, kv heads, ffn, vocabulary; head width 128
SHAPES = {"7b": (3584, 28, 4, 18944, 152064), "14b": (5120, 40, 8, 13824, 152064), "32b": (5120, 40, 8, 27648, 152064),
          "72b": (8192, 64, 8, 29568, 152064), "120b": (12288, 96, 8, 32768, 128256)}
DH = 128
PEAK_TFLOPS = 990.0
BF16 = torch.bfloat16
# twice the error of bf16 products, relative to the whole result's norm
TOLERANCE = 1e-2


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


class Table:
    """Checks, times and collects rows."""

    def __init__(self, copy_gbps: float):
        self.copy_gbps, self.rows = copy_gbps, []

    def add(self, name: str, where: str, ours: Callable[[], torch.Tensor], peer: Callable[[], torch.Tensor], peer_name: str, *,
            flops: float = 0.0, num_bytes: float = 0.0, as_ours: Callable[[torch.Tensor], torch.Tensor] = lambda t: t) -> None:
        """ours, peer: do the work and return the result to compare, the peer's through `as_ours`; either flops or
        num_bytes counts the work."""
        got, expected = ours(), as_ours(peer())
        error = ((got.float() - expected.float()).norm() / expected.float().norm()).item()
        del got, expected
        if not error < TOLERANCE:
            print(f"error: {name} {where}: relative error {error:.3g} against {peer_name}", file=sys.stderr)
            sys.exit(1)
        times: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(3):
            for who, fn in (("ours", ours), ("peer", peer)):
                times[who].append(triton.testing.do_bench(fn, warmup=10, rep=60, return_mode="median"))
        mine, other = (statistics.median(times[who]) for who in ("ours", "peer"))
        rate = flops / mine / 1e9 if flops else num_bytes / mine / 1e6
        bound = PEAK_TFLOPS if flops else self.copy_gbps
        row = {"kernel": name, "shape": where, "ms": round(mine, 4), "spread_ms": round(max(times["ours"]) - min(times["ours"]), 4),
               "rate": round(rate, 1), "unit": "TFLOP/s" if flops else "GB/s", "peer": peer_name, "peer_ms": round(other, 4),
               "share_of_peer": round(other / mine, 3), "share_of_bound": round(rate / bound, 3), "error": float(f"{error:.2g}")}
        self.rows.append(row)
        print(f"{name:<18}{where:<22}{row['ms']:>10.3f} ms {row['rate']:>8.1f} {row['unit']:<8} "
              f"{row['share_of_peer']:>6.2f} of {peer_name:<14}{row['share_of_bound']:>6.2f} of the bound", flush=True)


def gemm(table: Table, label: str, N: int) -> None:
    D, H, K, ffn, _ = SHAPES[label]
    for name, rows, cols in (("qkv", (H + 2 * K) * DH, D), ("o", D, H * DH), ("gate_up", 2 * ffn, D), ("down", D, ffn)):
        x, w, dy = draw(N, cols), draw(rows, cols, scale=cols ** -0.5), draw(N, rows)
        y, dx, dw = draw(N, rows), draw(N, cols), torch.empty(rows, cols, device="cuda")
        where, flops = f"{label} {name} {N}", 2.0 * N * rows * cols
        table.add("linear", where, lambda: (linear(x, w.data_ptr(), out=y), y)[1], lambda: F.linear(x, w), "cuBLAS", flops=flops)
        table.add("dgrad", where, lambda: (linear_dgrad(dy, w.data_ptr(), out=dx), dx)[1], lambda: dy @ w, "cuBLAS", flops=flops)
        table.add("wgrad", where, lambda: (linear_wgrad(dy, x, dw.data_ptr(), accumulate=False), dw)[1], lambda: dy.T @ x, "cuBLAS",
                  flops=flops)
        if name == "o":
            residual = draw(N, rows)
            table.add("linear+residual", where, lambda: (linear(x, w.data_ptr(), out=y, residual=residual), y)[1],
                      lambda: torch.addmm(residual, x, w.T), "cuBLAS addmm", flops=flops)
        if name == "down":
            gate_up, d_gate_up, act = draw(N, 2 * ffn), draw(N, 2 * ffn), draw(N, ffn)
            dy = draw(N, D)

            def peer():
                return compiled(dy @ w, gate_up)
            table.add("dgrad+swiglu", where, lambda: (linear_dgrad_swiglu(dy, w.data_ptr(), gate_up, d_gate_up=d_gate_up, act=act),
                                                      d_gate_up)[1], peer, "cuBLAS+compile", flops=flops)


@torch.compile
def compiled(d_act: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's backward as torch.compile fuses it; act is made too, as down's weight gradient needs it."""
    gate, up = gate_up.float().chunk(2, -1)
    s = torch.sigmoid(gate)
    act = (gate * s * up).to(BF16)
    grad = torch.cat([d_act * up * s * (1 + gate * (1 - s)), d_act * gate * s], -1).to(BF16)
    # kept alive without a pass of its own
    grad[0, 0] += act[0, 0] * 0
    return grad


def attention_rows(table: Table, label: str, N: int) -> None:
    D, H, K, _, _ = SHAPES[label]
    T = N
    qkv, dout = draw(N, (H + 2 * K) * DH), draw(N, H * DH)
    start, end = torch.zeros(N, dtype=torch.int32, device="cuda"), torch.full((N,), T, dtype=torch.int32, device="cuda")
    out, lse, delta = draw(N, H * DH), torch.empty(H, N, device="cuda"), torch.empty(H, N, device="cuda")
    dqkv = torch.empty_like(qkv)
    q, k, v = (t.transpose(0, 1)[None].contiguous().requires_grad_() for t in qkv.view(N, H + 2 * K, DH).split([H, K, K], 1))
    flops = 2.0 * N * T * H * DH
    scale = DH ** -0.5

    def forward():
        attention(qkv, start, end, H, K, DH, scale, out=out, lse=lse)
        return out

    def backward():
        attention_backward(qkv, out, lse, dout, start, end, H, K, DH, scale, delta=delta, dqkv=dqkv)
        return dqkv

    def peer():
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    with torch.no_grad():
        table.add("attention", f"{label} {T}", forward, peer, "cuDNN", flops=flops,
                  as_ours=lambda t: t[0].transpose(0, 1).reshape(N, -1))
    made, grad = peer(), dout.view(N, H, DH).transpose(0, 1)[None].contiguous()

    forward()
    table.add("attention backward", f"{label} {T}", backward,
              lambda: torch.autograd.grad(made, (q, k, v), grad, retain_graph=True), "cuDNN", flops=2.5 * flops,
              as_ours=lambda grads: torch.cat([g[0].transpose(0, 1) for g in grads], 1).reshape(N, -1))


def elementwise(table: Table, label: str, N: int) -> None:
    D, H, K, ffn, _ = SHAPES[label]
    x, y, w = draw(N, D), draw(N, D), draw(D)
    rstd = torch.empty(N, device="cuda")
    rms = torch.compile(lambda x: F.rms_norm(x, (D,), w, 1e-5))
    table.add("rmsnorm", f"{label} {N}", lambda: (rmsnorm(x, w.data_ptr(), 1e-5, out=y, rstd=rstd), y)[1], lambda: rms(x), "compile",
              num_bytes=4.0 * N * D)
    dy, residual, dw = draw(N, D), draw(N, D), torch.empty(D, device="cuda")
    partials = torch.empty(rmsnorm_partials_shape(D), device="cuda")
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    made = rms_grad(x_leaf, w_leaf, D)

    def norm_backward():
        rmsnorm_backward(dy, x, w.data_ptr(), rstd, residual, dx=y, dw_addr=dw.data_ptr(), partials=partials, accumulate=False)
        return y
    table.add("rmsnorm backward", f"{label} {N}", norm_backward,
              lambda: torch.autograd.grad(made, (x_leaf, w_leaf), dy, retain_graph=True)[0] + residual, "compile", num_bytes=8.0 * N * D)
    gate_up, act = draw(N, 2 * ffn), draw(N, ffn)
    peer = torch.compile(lambda g: F.silu(g[:, :ffn]) * g[:, ffn:])
    table.add("swiglu", f"{label} {N}", lambda: (swiglu(gate_up, out=act), act)[1], lambda: peer(gate_up), "compile",
              num_bytes=6.0 * N * ffn)
    qkv = draw(N, (H + 2 * K) * DH)
    cos, sin = torch.ones(N, DH // 2, device="cuda"), torch.zeros(N, DH // 2, device="cuda")
    positions = torch.arange(N, dtype=torch.int32, device="cuda")
    rotate = torch.compile(turned)
    table.add("rope", f"{label} {N}", lambda: (rope(qkv, cos, sin, positions, H, K, DH, out=qkv), qkv)[1],
              lambda: rotate(qkv, cos, sin, H + K), "compile", num_bytes=4.0 * N * (H + K) * DH)


def rms_grad(x: torch.Tensor, w: torch.Tensor, D: int) -> torch.Tensor:
    return torch.compile(lambda x, w: F.rms_norm(x, (D,), w, 1e-5))(x, w)


def turned(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    x = qkv.view(qkv.shape[0], -1, DH)
    a, b = x[:, :heads].float().chunk(2, -1)
    c, s = cos[:, None], sin[:, None]
    x[:, :heads] = torch.cat([a * c - b * s, b * c + a * s], -1).to(BF16)
    return qkv


def loss(table: Table, label: str, N: int) -> None:
    D, _, _, _, V = SHAPES[label]
    x, w, dx = draw(N, D), draw(V, D, scale=D ** -0.5), draw(N, D)
    labels = torch.randint(0, V, (N,), device="cuda", dtype=torch.int32)
    dw, losses, logits = torch.empty(V, D, device="cuda"), torch.empty(N, device="cuda"), draw(min(N, 8192), V)

    def ours():
        linear_cross_entropy(x, w.data_ptr(), labels, 1 / N, V=V, logits=logits, losses=losses, dx=dx, dw_addr=dw.data_ptr())
        return dx
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    chunk_loss = torch.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y, reduction="sum") / N)

    def peer():
        x_leaf.grad = w_leaf.grad = None
        for i in range(0, N, 8192):
            chunk_loss(x_leaf[i:i + 8192], w_leaf, labels[i:i + 8192].long()).backward()
        return x_leaf.grad
    table.add("linear+loss", f"{label} {N}", ours, peer, "compile chunks", flops=6.0 * N * V * D)


def embedding_rows(table: Table, label: str, N: int) -> None:
    D, _, _, _, V = SHAPES[label]
    labels, w, dw = torch.randint(0, V, (N,), device="cuda", dtype=torch.int32), draw(V, D), torch.empty(V, D, device="cuda")
    out, order = draw(N, D), torch.argsort(labels, stable=True).int()
    table.add("embedding", f"{label} {N}", lambda: (embedding(labels, w.data_ptr(), out=out), out)[1], lambda: F.embedding(labels, w),
              "torch", num_bytes=4.0 * N * D)
    partials = torch.empty(embedding_partials_shape(N, D), device="cuda")

    def scatter():
        dw.zero_()
        embedding_backward(out, labels, order, dw.data_ptr(), partials=partials)
        return dw
    table.add("embedding backward", f"{label} {N}", scatter, lambda: torch.zeros_like(dw).index_add_(0, labels, out.float()), "torch",
              num_bytes=4.0 * V * D + 10.0 * N * D)


def optimizer(table: Table, label: str, N: int) -> None:
    D, H, K, ffn, _ = SHAPES[label]
    n = D * ((2 * H + 2 * K) * DH + 3 * ffn)
    grad, out = torch.randn(n, device="cuda"), torch.empty(n, dtype=BF16, device="cuda")
    partials, result = torch.empty(norm2_partials_shape(), device="cuda"), torch.empty(2, dtype=torch.float64, device="cuda")

    def plain():
        out.copy_(grad)
        return torch.linalg.vector_norm(grad).square()[None]
    table.add("norm2", label, lambda: (norm2(grad, out=out, partials=partials, result=result), result[:1])[1], plain, "torch, 2 passes",
              num_bytes=6.0 * n)
    master, m, v = torch.randn(n, device="cuda") * 0.02, torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    hi, lo = master.to(BF16), torch.zeros(n, dtype=torch.int16, device="cuda")
    factor, step = torch.ones(1, device="cuda"), adamw_step(1e-4, 0.9, 0.95, 1e-8, 0.1, 10)
    g = grad.to(BF16)

    def peer():
        torch._fused_adamw_([master], [grad], [m], [v], [], [factor], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
                            amsgrad=False, maximize=False)
        return master
    m2, v2 = torch.zeros_like(m), torch.zeros_like(v)
    table.add("adamw, 26 B", label, lambda: (adamw(hi, lo, m2, v2, g, factor, step), hi)[1], peer, "torch, 28 B", num_bytes=26.0 * n)


GROUPS = {"gemm": gemm, "attention": attention_rows, "elementwise": elementwise, "loss": loss, "embedding": embedding_rows,
          "optimizer": optimizer}


def copy_rate() -> float:
    """GB/s of a device copy, read and written bytes both counted."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.nbytes / triton.testing.do_bench(lambda: b.copy_(a), return_mode="median") / 1e6


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="default: all")
    p.add_argument("--shape", nargs="+", choices=SHAPES, default=["14b"])
    p.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768])
    p.add_argument("--out", help="folder of the result (benchmarks/results)")
    a = p.parse_args()
    if not torch.cuda.is_available():
        print("error: benchmarks.kernels: no GPU here; tests/kernels checks the kernels in the interpreter", file=sys.stderr)
        return 2
    print(" ".join(f"{name} {value}" for name, value in report.machine().items()))
    table = Table(copy_rate())
    print(f"device copy {table.copy_gbps:.0f} GB/s")
    for name in a.groups or GROUPS:
        for label in a.shape:
            for N in a.tokens[:1] if name == "optimizer" else a.tokens:
                GROUPS[name](table, label, N)
    report.finish("kernels", {"copy_gbps": round(table.copy_gbps), "rows": table.rows}, Path(a.out) if a.out else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
