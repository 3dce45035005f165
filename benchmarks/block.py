"""One whole decoder layer, forward and backward with nothing recomputed, beside the same layer under torch.compile.

    python -m benchmarks.block                     14B's layer, 8 sequences of 4096; 7B's, one sequence
    python -m benchmarks.block --bytes             under ncu: HBM bytes of each of our kernels, counted and measured

The peer: torch.compile with cuDNN's attention, autograd's backward, weights and gradients in bf16. Ours: model/block.py on Triton
kernels, gradients in fp32. Judged first: both beside the plain-torch block of model/reference.py in fp32. `host` is what the
launches of a layer cost the launching thread, beside what the GPU takes for them.
"""
import argparse
import csv
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import report
from benchmarks.compare import Table, copy_gbps
from model import fused, reference
from model.block import SAVED, Batch, Block, Workspace, activation_shapes, rope_tables
from model.config import ModelConfig, preset
from model.flops import layer_passes
from model.layout import block_layout

BF16 = torch.bfloat16
# name of the layer's model, sequences, tokens of each
CASES = [("qwen2.5-14b", 8, 4096), ("qwen2.5-7b", 1, 4096)]
# one behind the other, as a step launches them: the first launch after a wait finds cold caches on the host
LAUNCHED_LAYERS = 8
BYTES_CASE = ("qwen2.5-14b", 2, 4096)


class Layer:
    """Ours: buffers and weights of one layer, with everything kept."""

    def __init__(self, c: ModelConfig, B: int, T: int, ops=fused, dtype: torch.dtype = BF16):
        N = B * T
        self.c, self.N = c, N
        self.layout = block_layout(c)
        torch.manual_seed(0)
        flat = torch.empty(self.layout.numel, device="cuda", dtype=dtype)
        self.w = self.layout.bind(flat)
        for name in self.layout.tensors:
            view = self.w.view(name)
            if "norm" in name:
                view.fill_(1.0)
            else:
                view.copy_(torch.randn(view.shape, device="cuda").to(BF16) * (view.shape[-1] ** -0.5 if view.ndim == 2 else 0.02))
        self.grads = self.layout.bind(torch.zeros(self.layout.numel, device="cuda"))
        start = torch.arange(N, device="cuda", dtype=torch.int32) // T * T
        positions = torch.arange(N, device="cuda", dtype=torch.int32) - start
        self.batch = Batch(positions, positions, positions, start, start + T, positions)

        def take(_name, shape, special=None):
            return torch.empty(shape, dtype=special or dtype, device="cuda")
        ws = Workspace.take(c, N, T, fused.partials_elements(c, N), take)
        ws.cos, ws.sin = rope_tables(c, T, "cuda")
        shapes = activation_shapes(c, N)
        names = [name for keep in SAVED.values() for name in keep]
        self.saved = {n: torch.empty(shapes[n], device="cuda", dtype=torch.float32 if n == "lse" else dtype) for n in names}
        # what a layer keeps lies in `saved`: the stand-ins of the workspace are not touched
        self.block = Block(c, ops, ws)
        self.x, self.dy = (torch.randn(N, c.hidden, device="cuda").to(BF16).to(dtype) for _ in range(2))
        self.y, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)

    def forward(self) -> torch.Tensor:
        self.block.forward(self.w, self.x, self.batch, self.saved, self.y)
        return self.y

    def run(self) -> torch.Tensor:
        """Forward and backward; the gradient of x. dy is copied first, as backward works in place: one pass that is ours to pay."""
        self.forward()
        self.dx.copy_(self.dy)
        self.block.backward(self.w, self.x, self.batch, self.saved, self.dx, self.grads, accumulate=False)
        return self.dx


class Compiled:
    """The peer, on the same weights and inputs."""

    def __init__(self, ours: Layer, B: int, T: int):
        c, w = ours.c, ours.w
        self.leaves = {name: w.view(name).clone().requires_grad_()
                       for name in ("norm1", "qkv", "qkv_bias", "o", "norm2", "gate_up", "down") if name in ours.layout}
        self.x, self.dy = ours.x.view(B, T, -1).clone().requires_grad_(), ours.dy.view(B, T, -1)
        cos, sin = (t.to(BF16) for t in (ours.block.ws.cos, ours.block.ws.sin))

        def layer(x, p):
            def rms(x, weight):
                return F.rms_norm(x, (c.hidden,), weight, c.norm_eps)

            def turned(t):
                a, b = t.chunk(2, -1)
                return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            qkv = F.linear(rms(x, p["norm1"]), p["qkv"], p.get("qkv_bias"))
            q, k, v = qkv.view(B, T, -1, c.head_dim).transpose(1, 2).split([c.heads, c.kv_heads, c.kv_heads], 1)
            attn = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
            x = x + F.linear(attn.transpose(1, 2).reshape(B, T, -1), p["o"])
            gate, up = F.linear(rms(x, p["norm2"]), p["gate_up"]).chunk(2, -1)
            return x + F.linear(F.silu(gate) * up, p["down"])
        self.layer = torch.compile(layer)

    def run(self) -> torch.Tensor:
        for leaf in (self.x, *self.leaves.values()):
            leaf.grad = None
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            self.layer(self.x, self.leaves).backward(self.dy)
        return self.x.grad.view(-1, self.x.shape[-1])


def compare(table: Table, name: str, B: int, T: int) -> dict:
    """Adds the layer's row; returns what its launches cost the host."""
    c = preset(name)
    ours = Layer(c, B, T)
    peer = Compiled(ours, B, T)
    flops = 6.0 * ours.layout.num_params * B * T + 6.0 * c.attention_width * B * T * T
    table.add("block", f"{name} {B} x {T}", ours.run, {"torch.compile": peer.run}, flops=flops)
    host, gpu = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        # the queue is kept busy, so that no launch waits for the GPU and none is waited for
        torch.cuda._sleep(100_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        at = time.perf_counter()
        for _ in range(LAUNCHED_LAYERS):
            ours.run()
        host.append((time.perf_counter() - at) * 1e3 / LAUNCHED_LAYERS)
        end.record()
        torch.cuda.synchronize()
        gpu.append(begin.elapsed_time(end) / LAUNCHED_LAYERS)
    result = {"layer": f"{name} {B} x {T}", "host_ms": round(sorted(host)[2], 3), "gpu_ms": round(sorted(gpu)[2], 3)}
    print(f"launches of a layer: {result['host_ms']:.2f} ms of the host's time for {result['gpu_ms']:.2f} ms of the GPU's "
          f"({result['host_ms'] / result['gpu_ms']:.2f})")
    return result


def judged(name: str, T: int) -> None:
    """Ours in bf16 beside the plain-torch block in fp32 on the same numbers: the relative error of y, dx and each gradient."""
    c = preset(name)
    ours, plain = Layer(c, 1, T), Layer(c, 1, T, reference, torch.float32)
    for layer in (ours, plain):
        layer.run()
    for what, got, want in [("y", ours.y, plain.y), ("dx", ours.dx, plain.dx),
                            *((name, ours.grads.view(name), plain.grads.view(name)) for name in ours.layout.tensors)]:
        error = ((got.float() - want).norm() / want.norm()).item()
        # bf16 rounds each of some ten steps by 2^-9
        if not error < 0.02:
            print(f"error: block {name}: {what}: relative error {error:.3g} against fp32", file=sys.stderr)
            sys.exit(1)


def measured_bytes(name: str, B: int, T: int) -> list[dict]:
    """HBM bytes of each kernel of a layer, by ncu on a run of this file, beside what model/flops.py counts."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--metrics",
               "dram__bytes_read.sum,dram__bytes_write.sum", "--print-units", "base",
               sys.executable, "-m", "benchmarks.block", "--once", name, str(B), str(T)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    header = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or header is None:
        print(f"error: ncu: {done.stderr.strip()[-500:] or done.stdout[-500:]}", file=sys.stderr)
        sys.exit(1)
    seen: dict[str, dict] = {}
    for row in csv.DictReader(lines[header:]):
        kernel = seen.setdefault(row["ID"], {"kernel": row["Kernel Name"].lstrip("_"), "read": 0.0, "written": 0.0})
        kernel["read" if "read" in row["Metric Name"] else "written"] += float(row["Metric Value"].replace(",", ""))
    return list(seen.values())


def bytes_table(name: str, B: int, T: int) -> dict:
    """Prints counted beside measured, bytes a token without the weights' share."""
    c, N = preset(name), B * T
    measured = measured_bytes(name, B, T)
    passes = layer_passes(c, BF16.itemsize)
    # the one copy is torch's
    ours = [m for m in measured if not m["kernel"].startswith("void")]
    if len(ours) != sum(each.num_kernels for each in passes):
        print(f"error: {len(ours)} kernels ran, more or less than counted: {[m['kernel'] for m in ours]}", file=sys.stderr)
        sys.exit(1)
    rows = []
    print("| pass | bytes a token, counted | measured, less the weights' |\n|---|---|---|")
    for each in passes:
        kernels, ours = ours[:each.num_kernels], ours[each.num_kernels:]
        total = (sum(m["read"] + m["written"] for m in kernels) - each.weight_bytes) / N
        rows.append({"pass": each.name, "kernels": [m["kernel"] for m in kernels], "counted": each.token_bytes,
                     "measured": round(total), "weight_bytes": each.weight_bytes})
        print(f"| {each.name} | {each.token_bytes:,} | {total:,.0f} |")
    print(f"| all | {sum(r['counted'] for r in rows):,} | {sum(r['measured'] for r in rows):,} |")
    return {"layer": f"{name} {B} x {T}", "rows": rows}


def once(name: str, B: int, T: int) -> None:
    """One layer between profiler marks, for ncu."""
    layer = Layer(preset(name), B, T)
    layer.run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    layer.run()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bytes", action="store_true", help="count HBM bytes with ncu instead of timing")
    p.add_argument("--once", nargs=3, metavar=("MODEL", "B", "T"), help="what --bytes runs under ncu")
    p.add_argument("--out", help="folder of the result (benchmarks/results)")
    a = p.parse_args()
    if not torch.cuda.is_available():
        print("error: benchmarks.block: no GPU here; tests/model checks the block", file=sys.stderr)
        return 2
    if a.once:
        once(a.once[0], int(a.once[1]), int(a.once[2]))
        return 0
    print(" ".join(f"{name} {value}" for name, value in report.machine().items()))
    judged(BYTES_CASE[0], 1024)
    if a.bytes:
        report.finish("block-bytes", bytes_table(*BYTES_CASE), Path(a.out) if a.out else None)
        return 0
    table = Table(copy_gbps())
    host = [compare(table, *case) for case in CASES]
    print("\n".join(table.summary()))
    report.finish("block", {"rows": table.rows, "host": host}, Path(a.out) if a.out else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
