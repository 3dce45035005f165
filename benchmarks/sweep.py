"""Which tiles the tables should hold: candidates put into them, one after the other, at the shapes of real layers.

    python -m benchmarks.sweep                        GEMM and attention, layers of 7B, 14B, 120b at 4k and 16k tokens
    python -m benchmarks.sweep gemm --tokens 32768

A line a candidate: geometric mean over the shapes of the first candidate's time over its own, and of cuBLAS' or cuDNN's. What is
in the tables came first here; nothing is tuned while a model trains.
"""
import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from benchmarks import report
from benchmarks.compare import mean, time_ms
from benchmarks.kernels import DH, SHAPES, Attention, draw
from kernels import attention_hopper, gemm
from kernels.gemm import Tile, linear, linear_dgrad, linear_dgrad_swiglu, linear_wgrad

# the first is what the table holds. BE is halved for wgrad, whose output is fp32
GEMM_TILES = [Tile(128, 256, 64, 128, 3, 8, True, 1.0), Tile(128, 256, 64, 64, 4, 8, True, 1.0),
              Tile(128, 256, 64, 128, 3, 8, False, 1.0)]
SWIGLU_TILES = [Tile(128, 256, 64, 64, 4, 8, True, 1.0), Tile(128, 256, 64, 64, 3, 8, True, 1.0),
                Tile(128, 256, 64, 32, 4, 8, True, 1.0), Tile(128, 256, 64, 64, 3, 8, False, 1.0)]
GROUPS = (8, 16)
ATTENTION_TILES = {"fwd": [attention_hopper.Tile(128, 2), attention_hopper.Tile(128, 3), attention_hopper.Tile(64, 4)],
                   "dq": [attention_hopper.Tile(64, 4), attention_hopper.Tile(64, 2)],
                   "dkv": [attention_hopper.Tile(64, 2), attention_hopper.Tile(64, 4)]}
ROUNDS = 2


def in_turn(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Least of a few medians, in ms, by name."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for fn in calls.values():
        fn()
    for _ in range(ROUNDS):
        for name, fn in calls.items():
            times[name].append(time_ms(fn, 2.0))
    return {name: min(values) for name, values in times.items()}


def with_gemm_tile(op: str, tile: Tile, group: int, fn: Callable[[], object]) -> Callable[[], object]:
    def run():
        gemm.HOPPER_TILES[op], gemm.GROUP = (tile,), group
        gemm.launch_options.cache_clear()
        fn()
    return run


def with_attention_tile(kernel: str, tile: attention_hopper.Tile, fn: Callable[[], object]) -> Callable[[], object]:
    def run():
        attention_hopper.TILES[kernel][DH] = tile
        fn()
    return run


def sweep_gemm(label: str, N: int, found: dict) -> None:
    D, H, K, ffn, _ = SHAPES[label]
    for name, outputs, inputs in (("qkv", (H + 2 * K) * DH, D), ("o", D, H * DH), ("gate_up", 2 * ffn, D), ("down", D, ffn)):
        x, w, dy = draw(N, inputs), draw(outputs, inputs, scale=inputs ** -0.5), draw(N, outputs)
        y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty(outputs, inputs, device="cuda")
        ops = {"linear": (lambda: linear(x, w.data_ptr(), out=y), lambda: F.linear(x, w)),
               "dgrad": (lambda: linear_dgrad(dy, w.data_ptr(), out=dx), lambda: dy @ w),
               "wgrad": (lambda: linear_wgrad(dy, x, dw.data_ptr(), accumulate=False), lambda: dy.T @ x)}
        if name == "down":
            gate_up, d_gate_up, act = draw(N, 2 * ffn), draw(N, 2 * ffn), draw(N, ffn)
            ops["dgrad_swiglu"] = (lambda: linear_dgrad_swiglu(dy, w.data_ptr(), gate_up, d_gate_up=d_gate_up, act=act), lambda: dy @ w)
        for op, (ours, peer) in ops.items():
            calls = {"peer": peer}
            for tile in SWIGLU_TILES if op == "dgrad_swiglu" else GEMM_TILES:
                for group in GROUPS:
                    fits = tile._replace(BE=tile.BE // 2) if op == "wgrad" else tile
                    calls[f"{tuple(fits)[:-1]} group {group}"] = with_gemm_tile(op, fits, group, ours)
            found.setdefault(op, {})[f"{label} {name} {N}"] = in_turn(calls)


def sweep_attention(label: str, N: int, found: dict) -> None:
    case = Attention(label, [N])
    with torch.no_grad():
        peer = {"peer": lambda: case.peer(SDPBackend.CUDNN_ATTENTION)}
        calls = {str(tuple(tile)): with_attention_tile("fwd", tile, case.forward) for tile in ATTENTION_TILES["fwd"]}
        found.setdefault("fwd", {})[f"{label} {N}"] = in_turn(peer | calls)
    made = case.peer(SDPBackend.CUDNN_ATTENTION)
    for kernel in ("dq", "dkv"):
        peer = {"peer": lambda: torch.autograd.grad(made, case.heads, case.dout, retain_graph=True)}
        calls = {str(tuple(tile)): with_attention_tile(kernel, tile, case.backward) for tile in ATTENTION_TILES[kernel]}
        found.setdefault(kernel, {})[f"{label} {N}"] = in_turn(peer | calls)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("groups", nargs="*", choices=["gemm", "attention", []], help="default: both")
    p.add_argument("--shape", nargs="+", choices=SHAPES, default=["7b", "14b", "120b"])
    p.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    p.add_argument("--out", help="folder of the result (benchmarks/results)")
    a = p.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("error: benchmarks.sweep: the tables it fills are Hopper's, and there is none here", file=sys.stderr)
        return 2
    print(" ".join(f"{name} {value}" for name, value in report.machine().items()))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for group in a.groups or ("gemm", "attention"):
        for label in a.shape:
            for N in a.tokens:
                {"gemm": sweep_gemm, "attention": sweep_attention}[group](label, N, found)
                torch.cuda.empty_cache()
    for op, shapes in found.items():
        candidates = [name for name in next(iter(shapes.values())) if name != "peer"]
        for name in candidates:
            against_first, against_peer = (mean(times[base] / times[name] for times in shapes.values()) for base in (candidates[0], "peer"))
            print(f"{op:<13}{name:<44}{against_first:>7.3f} of the first {against_peer:>7.3f} of the peer")
    report.finish("sweep", {"ms": found}, Path(a.out) if a.out else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
