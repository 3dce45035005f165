"""Each kernel beside what torch offers for the same work, at the shapes of real layers.

    python -m benchmarks.kernels                         all groups; shapes of 7B to 120b; 4k, 16k, 64k tokens
    python -m benchmarks.kernels gemm attention --shape 7b 14b --tokens 4096

Judged first, at the timed shape: rows of the output against fp64, at most twice as far from it as the peer. Then ours and the
peers are timed in turn (benchmarks/compare.py). The last lines are a Markdown table of geometric means, and one of JSON.
"""
import argparse
import random
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import report
from benchmarks.compare import Table, copy_gbps
from kernels.adamw import adamw
from kernels.attention import attention, attention_backward
from kernels.cross_entropy import linear_cross_entropy
from kernels.embedding import embedding, embedding_backward, embedding_partials_shape
from kernels.gemm import dgrad_swiglu_ref, linear, linear_dgrad, linear_dgrad_swiglu, linear_wgrad
from kernels.norm2 import norm2, norm2_partials_shape
from kernels.rmsnorm import rmsnorm, rmsnorm_backward, rmsnorm_partials_shape, rmsnorm_ref
from kernels.rope import rope, rope_ref
from kernels.swiglu import swiglu, swiglu_ref
from runtime.host_adamw import adamw_step

try:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as LigerLoss
except ImportError:
    LigerLoss = None
try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

# D, heads, kv heads, ffn, vocabulary; head width 128
SHAPES = {"7b": (3584, 28, 4, 18944, 152064), "14b": (5120, 40, 8, 13824, 152064), "32b": (5120, 40, 8, 27648, 152064),
          "72b": (8192, 64, 8, 29568, 152064), "120b": (12288, 96, 8, 32768, 128256)}
# attention alone, in one document
LONG = {"7b": (262144, 524288), "14b": (262144,)}
DH = 128
BF16 = torch.bfloat16
EPS = 1e-5
# rows of a result that are computed in fp64
NUM_JUDGED = 64
# tokens of a chunk of the loss
CHUNK = 8192


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(BF16)


def some(n: int) -> torch.Tensor:
    """Indices below n: the first, the last, and others between."""
    middle = torch.randint(n, (max(0, min(NUM_JUDGED, n) - 2),))
    return torch.cat((middle, torch.tensor([0, n - 1]))).cuda()


def gemm(table: Table, label: str, N: int) -> None:
    D, H, K, ffn, _ = SHAPES[label]
    rows = some(N)
    for name, outputs, inputs in (("qkv", (H + 2 * K) * DH, D), ("o", D, H * DH), ("gate_up", 2 * ffn, D), ("down", D, ffn)):
        x, w, dy = draw(N, inputs), draw(outputs, inputs, scale=inputs ** -0.5), draw(N, outputs)
        y, dx, dw = draw(N, outputs), draw(N, inputs), torch.empty(outputs, inputs, device="cuda")
        where, flops = f"{label} {name} {N}", 2.0 * N * outputs * inputs
        some_outputs = some(outputs)

        def wgrad_exact():
            return sum(dy[at:at + CHUNK, some_outputs].double().T @ x[at:at + CHUNK].double() for at in range(0, N, CHUNK))
        table.add("linear", where, lambda: (linear(x, w.data_ptr(), out=y), y)[1], {"cuBLAS": lambda: F.linear(x, w)}, flops=flops,
                  pick=lambda t: t[rows], exact=lambda: x[rows].double() @ w.double().T)
        table.add("dgrad", where, lambda: (linear_dgrad(dy, w.data_ptr(), out=dx), dx)[1], {"cuBLAS": lambda: dy @ w}, flops=flops,
                  pick=lambda t: t[rows], exact=lambda: dy[rows].double() @ w.double())
        table.add("wgrad", where, lambda: (linear_wgrad(dy, x, dw.data_ptr(), accumulate=False), dw)[1],
                  {"cuBLAS": lambda: dy.T @ x}, flops=flops, pick=lambda t: t[some_outputs], exact=wgrad_exact)
        if name == "o":
            residual = draw(N, outputs)
            table.add("linear+residual", where, lambda: (linear(x, w.data_ptr(), out=y, residual=residual), y)[1],
                      {"cuBLAS addmm": lambda: torch.addmm(residual, x, w.T)}, flops=flops, pick=lambda t: t[rows],
                      exact=lambda: x[rows].double() @ w.double().T + residual[rows].double())
        if name == "down":
            gate_up, d_gate_up, act = draw(N, 2 * ffn), draw(N, 2 * ffn), draw(N, ffn)
            swiglu_grad = torch.compile(swiglu_backward)
            table.add("dgrad+swiglu", where,
                      lambda: (linear_dgrad_swiglu(dy, w.data_ptr(), gate_up, d_gate_up=d_gate_up, act=act), d_gate_up)[1],
                      {"cuBLAS+compile": lambda: swiglu_grad(dy @ w, gate_up)[0]}, flops=flops, pick=lambda t: t[rows],
                      exact=lambda: dgrad_swiglu_ref(dy[rows].double(), w.double(), gate_up[rows].double())[0])


def swiglu_backward(d_act: torch.Tensor, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d_gate_up, and act, which down's weight gradient reads."""
    gate, up = gate_up.float().chunk(2, -1)
    s = torch.sigmoid(gate)
    return (torch.cat([d_act * up * s * (1 + gate * (1 - s)), d_act * gate * s], -1).to(BF16), (gate * s * up).to(BF16))


class Attention:
    """One packed row of documents for ours, and the same numbers as the peers take them."""

    def __init__(self, label: str, lengths: list[int]):
        _, self.H, self.K, _, _ = SHAPES[label]
        N, H, K = sum(lengths), self.H, self.K
        self.lengths, self.N = lengths, N
        self.flops = 2.0 * H * DH * sum(n * n for n in lengths)
        self.qkv, self.dout = draw(N, (H + 2 * K) * DH), draw(N, H * DH)
        n = torch.tensor(lengths)
        self.borders = F.pad(n.cumsum(0), (1, 0)).int().cuda()
        self.start, self.end = ((n.cumsum(0) - n * first).repeat_interleave(n).int().cuda() for first in (1, 0))
        self.out, self.dqkv = torch.empty_like(self.dout), torch.empty_like(self.qkv)
        self.lse, self.delta = (torch.empty(H, N, device="cuda") for _ in range(2))
        self.heads = [t.contiguous().requires_grad_() for t in self.qkv.view(N, H + 2 * K, DH).split([H, K, K], 1)]
        self.rows = some(N)

    def forward(self) -> torch.Tensor:
        attention(self.qkv, self.start, self.end, self.H, self.K, DH, DH ** -0.5, out=self.out, lse=self.lse)
        return self.out

    def backward(self) -> torch.Tensor:
        attention_backward(self.qkv, self.out, self.lse, self.dout, self.start, self.end, self.H, self.K, DH, DH ** -0.5,
                           delta=self.delta, dqkv=self.dqkv)
        return self.dqkv

    def peer(self, backend: SDPBackend) -> torch.Tensor:
        """torch's, on documents of one length."""
        q, k, v = (t.view(len(self.lengths), self.lengths[0], -1, DH).transpose(1, 2) for t in self.heads)
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(self.N, -1)

    def varlen(self) -> torch.Tensor:
        """torch's flash attention on packed documents; it wants as many key heads as query heads."""
        q, k, v = self.heads
        k, v = (t.repeat_interleave(self.H // self.K, 1) for t in (k, v))
        longest = max(self.lengths)
        return varlen_attn(q, k, v, self.borders, self.borders, longest, longest, window_size=(-1, 0)).reshape(self.N, -1)

    def exact(self, with_gradient: bool) -> torch.Tensor:
        """out, or dq, of `rows` in fp64; a key head at a time."""
        H, K, parts = self.H, self.K, []
        seen = torch.arange(self.N, device="cuda")[None]
        seen = (seen <= self.rows[:, None]) & (seen >= self.start[self.rows][:, None])
        dout = self.dout[self.rows].double().view(-1, H, DH)
        for g in range(K):
            k, v = (self.qkv[:, (H + at + g) * DH:][:, :DH].double() for at in (0, K))
            for h in range(g * (H // K), (g + 1) * (H // K)):
                q = self.qkv[self.rows, h * DH:(h + 1) * DH].double()
                p = torch.softmax((q @ k.T * DH ** -0.5).masked_fill(~seen, -torch.inf), -1)
                if with_gradient:
                    dp = dout[:, h] @ v.T
                    parts.append(p * (dp - (p * dp).sum(1, keepdim=True)) @ k * DH ** -0.5)
                else:
                    parts.append(p @ v)
        return torch.cat(parts, 1)

    def add(self, table: Table, name: str, where: str, peers: dict) -> None:
        """Two rows. peers: name to a function that gives the output, with a graph behind it."""
        def without_graph(fn):
            def run():
                with torch.no_grad():
                    return fn()
            return run

        def gradient(made):
            def run():
                grads = torch.autograd.grad(made, self.heads, self.dout, retain_graph=True)
                return torch.cat([g.flatten(1) for g in grads], 1)
            return run
        table.add(name, where, self.forward, {who: without_graph(fn) for who, fn in peers.items()}, flops=self.flops,
                  pick=lambda t: t[self.rows], exact=lambda: self.exact(with_gradient=False))
        table.add(f"{name} backward", where, self.backward, {who: gradient(fn()) for who, fn in peers.items()}, flops=2.5 * self.flops,
                  pick=lambda t: t[self.rows, :self.H * DH], exact=lambda: self.exact(with_gradient=True))


def attention_rows(table: Table, label: str, N: int) -> None:
    # the whole batch of short sequences, as a step has it
    for lengths in ([N], [4096] * (N // 4096)) if N == 16384 else ([N],):
        case = Attention(label, lengths)
        peers = {"cuDNN": lambda: case.peer(SDPBackend.CUDNN_ATTENTION), "flash": lambda: case.peer(SDPBackend.FLASH_ATTENTION)}
        if N in LONG.get(label, ()):
            # half the speed, and it takes minutes here
            del peers["flash"]
        case.add(table, "attention", f"{label} {len(lengths)} x {lengths[0]}", peers)


def packed_lengths(N: int) -> list[int]:
    """Lengths of documents of a real corpus, Python's own library at 4 bytes a token, packed into N rows."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(1).shuffle(files)
    lengths, left = [], N
    for file in files:
        lengths.append(min(max(1, file.stat().st_size // 4), left))
        left -= lengths[-1]
        if not left:
            return lengths
    return [*lengths, left]


def packed(table: Table, label: str, N: int) -> None:
    if varlen_attn is None:
        print("packed: skipped, this torch has no torch.nn.attention.varlen")
        return
    case = Attention(label, packed_lengths(N))
    case.add(table, "packed attention", f"{label} {len(case.lengths)} docs {N}", {"flash varlen": case.varlen})


def elementwise(table: Table, label: str, N: int) -> None:
    D, H, K, ffn, _ = SHAPES[label]
    rows, where = some(N), f"{label} {N}"
    x, y, w = draw(N, D), draw(N, D), draw(D)
    rstd = torch.empty(N, device="cuda")
    norm = torch.compile(lambda x, w: F.rms_norm(x, (D,), w, EPS))
    table.add("rmsnorm", where, lambda: (rmsnorm(x, w.data_ptr(), EPS, out=y, rstd=rstd), y)[1], {"compile": lambda: norm(x, w)},
              num_bytes=4.0 * N * D, pick=lambda t: t[rows], exact=lambda: rmsnorm_ref(x[rows].double(), w.double(), EPS))
    dy, residual, dw = draw(N, D), draw(N, D), torch.empty(D, device="cuda")
    partials = torch.empty(rmsnorm_partials_shape(D), device="cuda")
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    # the residual stream's second use, so that its gradient is added in the same pass
    both = torch.compile(lambda x, w: (F.rms_norm(x, (D,), w, EPS), x * 1.0))(*leaves)

    def norm_backward():
        rmsnorm_backward(dy, x, w.data_ptr(), rstd, residual, dx=y, dw_addr=dw.data_ptr(), partials=partials, accumulate=False)
        return y

    def norm_backward_exact():
        a = x[rows].double().requires_grad_()
        return torch.autograd.grad(rmsnorm_ref(a, w.double(), EPS), a, dy[rows].double())[0] + residual[rows].double()
    table.add("rmsnorm backward", where, norm_backward,
              {"compile": lambda: torch.autograd.grad(both, leaves, (dy, residual), retain_graph=True)[0]}, num_bytes=8.0 * N * D,
              pick=lambda t: t[rows], exact=norm_backward_exact)
    gate_up, act = draw(N, 2 * ffn), draw(N, ffn)
    gated = torch.compile(lambda t: F.silu(t[:, :ffn]) * t[:, ffn:])
    table.add("swiglu", where, lambda: (swiglu(gate_up, out=act), act)[1], {"compile": lambda: gated(gate_up)}, num_bytes=6.0 * N * ffn,
              pick=lambda t: t[rows], exact=lambda: swiglu_ref(gate_up[rows].double()))
    qkv = draw(N, (H + 2 * K) * DH)
    angle = torch.rand(N, DH // 2, device="cuda", dtype=torch.float64) * 6
    cos, sin = angle.cos().float(), angle.sin().float()
    positions = torch.arange(N, dtype=torch.int32, device="cuda")
    ours, peers = qkv.clone(), qkv.clone()
    rotate = torch.compile(turned)
    # both in place: each call turns what the one before it left
    table.add("rope", where, lambda: (rope(ours, cos, sin, positions, H, K, DH, out=ours), ours)[1],
              {"compile": lambda: rotate(peers, cos, sin, H + K)}, num_bytes=4.0 * N * (H + K) * DH, pick=lambda t: t[rows],
              exact=lambda: rope_ref(qkv[rows].double(), cos, sin, positions[rows], H, K, DH))


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
    dw, losses = torch.empty(V, D, device="cuda"), torch.empty(N, device="cuda")
    logits = torch.empty(min(N, CHUNK), V, device="cuda", dtype=BF16)
    rows = some(N)

    def ours():
        linear_cross_entropy(x, w.data_ptr(), labels, 1 / N, V=V, logits=logits, losses=losses, dx=dx, dw_addr=dw.data_ptr())
        return dx
    x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
    wide_labels = labels.long()
    chunk_loss = torch.compile(lambda x, w, y: F.cross_entropy(F.linear(x, w).float(), y, reduction="sum") / N)

    def compiled():
        x_leaf.grad = w_leaf.grad = None
        for i in range(0, N, CHUNK):
            chunk_loss(x_leaf[i:i + CHUNK], w_leaf, wide_labels[i:i + CHUNK]).backward()
        return x_leaf.grad

    def liger():
        x_leaf.grad = w_leaf.grad = None
        LigerLoss.apply(x_leaf, w_leaf, wide_labels)[0].backward()
        return x_leaf.grad

    def exact():
        z = x[rows].double() @ w.double().T
        dz = torch.softmax(z, 1)
        dz[torch.arange(len(rows)), labels[rows].long()] -= 1
        return dz @ w.double() / N
    peers = {"compile, chunks": compiled} | ({"Liger": liger} if LigerLoss else {})
    if LigerLoss is None:
        print("loss: Liger-Kernel is not installed, left out")

    def extra_gib(fn) -> float:
        """Most HBM that a call takes beyond its inputs; gradients are part of it."""
        fn()
        x_leaf.grad = w_leaf.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        torch.cuda.synchronize()
        return round((torch.cuda.max_memory_allocated() - before) / 2 ** 30, 2)
    own = round(sum(t.nbytes for t in (logits, dw, losses, dx)) / 2 ** 30, 2)
    table.add("linear+loss", f"{label} {N}", ours, peers, flops=6.0 * N * V * D, pick=lambda t: t[rows], exact=exact,
              extra_gib={"ours": own + extra_gib(ours), **{who: extra_gib(fn) for who, fn in peers.items()}})


def embedding_rows(table: Table, label: str, N: int) -> None:
    D, _, _, _, V = SHAPES[label]
    labels, w, dw = torch.randint(0, V, (N,), device="cuda", dtype=torch.int32), draw(V, D), torch.empty(V, D, device="cuda")
    out, order = draw(N, D), torch.argsort(labels, stable=True).int()
    table.add("embedding", f"{label} {N}", lambda: (embedding(labels, w.data_ptr(), out=out), out)[1],
              {"torch": lambda: F.embedding(labels, w)}, num_bytes=4.0 * N * D)
    partials = torch.empty(embedding_partials_shape(N, D), device="cuda")

    def scatter():
        dw.zero_()
        embedding_backward(out, labels, order, dw.data_ptr(), partials=partials)
        return dw
    table.add("embedding backward", f"{label} {N}", scatter, {"torch": lambda: torch.zeros_like(dw).index_add_(0, labels, out.float())},
              num_bytes=4.0 * V * D + 10.0 * N * D)


def optimizer(table: Table, label: str, _: int) -> None:
    D, H, K, ffn, _ = SHAPES[label]
    n = D * ((2 * H + 2 * K) * DH + 3 * ffn)
    grad, out = torch.randn(n, device="cuda"), torch.empty(n, dtype=BF16, device="cuda")
    partials, result = torch.empty(norm2_partials_shape(), device="cuda"), torch.empty(2, dtype=torch.float64, device="cuda")

    def plain():
        out.copy_(grad)
        return torch.linalg.vector_norm(grad).square()[None]
    table.add("norm2", label, lambda: (norm2(grad, out=out, partials=partials, result=result), result[:1])[1], {"torch, 2 passes": plain},
              num_bytes=6.0 * n)
    master, m, v = torch.randn(n, device="cuda") * 0.02, torch.zeros(n, device="cuda"), torch.zeros(n, device="cuda")
    hi, lo = master.to(BF16), torch.zeros(n, dtype=torch.int16, device="cuda")
    factor, step = torch.ones(1, device="cuda"), adamw_step(1e-4, 0.9, 0.95, 1e-8, 0.1, 10)
    g = grad.to(BF16)

    def fused():
        torch._fused_adamw_([master], [grad], [m], [v], [], [factor], lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8,
                            amsgrad=False, maximize=False)
        return master
    m2, v2 = torch.zeros_like(m), torch.zeros_like(v)
    table.add("adamw, 26 B", label, lambda: (adamw(hi, lo, m2, v2, g, factor, step), hi)[1], {"torch, 28 B": fused}, num_bytes=26.0 * n)


GROUPS = {"gemm": gemm, "attention": attention_rows, "packed": packed, "elementwise": elementwise, "loss": loss,
          "embedding": embedding_rows, "optimizer": optimizer}


def tokens_of(group: str, label: str, a: argparse.Namespace) -> list[int]:
    if group == "optimizer":
        return [0]
    return [*a.tokens, *LONG.get(label, ())] if group == "attention" and a.long else a.tokens


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="default: all")
    p.add_argument("--shape", nargs="+", choices=SHAPES, default=[*SHAPES])
    p.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384, 65536])
    p.add_argument("--long", action="store_true", help="attention also at 256k (7b, 14b) and 512k tokens (7b): minutes more")
    p.add_argument("--out", help="folder of the result (benchmarks/results)")
    a = p.parse_args()
    if not torch.cuda.is_available():
        print("error: benchmarks.kernels: no GPU here; tests/kernels checks the kernels in the interpreter", file=sys.stderr)
        return 2
    print(" ".join(f"{name} {value}" for name, value in report.machine().items()))
    table = Table(copy_gbps())
    print(f"device copy {table.copy_gbps:.0f} GB/s")
    for group in a.groups or GROUPS:
        for label in a.shape:
            for N in tokens_of(group, label, a):
                GROUPS[group](table, label, N)
                torch.cuda.empty_cache()
    print("\n".join(table.summary()))
    report.finish("kernels", {"copy_gbps": round(table.copy_gbps), "rows": table.rows}, Path(a.out) if a.out else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
