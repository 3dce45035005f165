"""Ours beside its peers: judged first, then timed in turn, then a row of the table.

A row's share of the peer is the best peer's time over ours; its share of the bound is of 990 TFLOP/s of dense bf16, or of the
measured rate of a device copy.
"""
import math
import statistics
import sys
from collections.abc import Callable, Mapping

import torch

from tests.judge import judge

PEAK_TFLOPS = 990.0
# relative error of a whole result against the peer's where no row of it was computed in fp64: twice that of bf16 products
TOLERANCE = 1e-2
ROUNDS = 3
# of one kernel in a round; a call that alone takes longer is timed once
ROUND_MS = 50.0


def time_ms(fn: Callable[[], object], estimate_ms: float) -> float:
    """Median of several calls, each on a cold L2 (a fill of four times its size goes in front)."""
    flush = torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.int8, device="cuda")
    pairs = []
    for _ in range(max(1, min(50, int(ROUND_MS / estimate_ms)))):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def copy_gbps() -> float:
    """GB/s of a device copy, read and written bytes both counted."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / time_ms(lambda: b.copy_(a), 1.0) / 1e6


class Table:
    """Checks, times and collects rows."""

    def __init__(self, copy_gbps: float):
        self.copy_gbps, self.rows = copy_gbps, []

    def add(self, kernel: str, shape: str, ours: Callable[[], torch.Tensor], peers: Mapping[str, Callable[[], torch.Tensor]], *,
            flops: float = 0.0, num_bytes: float = 0.0, pick: Callable[[torch.Tensor], torch.Tensor] | None = None,
            exact: Callable[[], torch.Tensor] | None = None, **more: object) -> None:
        """ours, peers: do the work and return results of one form. Either flops or num_bytes counts the work.

        exact: what `pick` takes of a result, in fp64: ours may be twice as far from it as the first peer is. Without it, ours
        has to agree with the first peer. more: further entries of the row. Leaves with 1 where the check fails.
        """
        got, other = ours(), next(iter(peers.values()))()
        error = ((got.float() - other.float()).norm() / other.float().norm()).item()
        try:
            assert error < TOLERANCE, f"relative error {error:.3g} against {next(iter(peers))}"
            if exact is not None:
                judge(pick(got), exact=exact(), peer=pick(other))
        except AssertionError as e:
            print(f"error: {kernel} {shape}: {e}", file=sys.stderr)
            sys.exit(1)
        del got, other
        calls = {"ours": ours, **peers}
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        estimates = {}
        for who, fn in calls.items():
            begin.record()
            fn()
            end.record()
            end.synchronize()
            estimates[who] = max(begin.elapsed_time(end), 0.01)
        # one round is enough for what takes seconds
        rounds = ROUNDS if max(estimates.values()) < 500 else 1
        times: dict[str, list[float]] = {who: [] for who in calls}
        for _ in range(rounds):
            for who, fn in calls.items():
                times[who].append(time_ms(fn, estimates[who]))
        medians = {who: statistics.median(values) for who, values in times.items()}
        mine, best = medians.pop("ours"), min(medians, key=medians.get)
        rate = flops / mine / 1e9 if flops else num_bytes / mine / 1e6
        bound = PEAK_TFLOPS if flops else self.copy_gbps
        row = {"kernel": kernel, "shape": shape, "ms": round(mine, 4), "spread_ms": round(max(times["ours"]) - min(times["ours"]), 4),
               "rate": round(rate, 1), "unit": "TFLOP/s" if flops else "GB/s", "peers_ms": {k: round(v, 4) for k, v in medians.items()},
               "best_peer": best, "share_of_peer": round(medians[best] / mine, 3), "share_of_bound": round(rate / bound, 3),
               "judged_in_fp64": exact is not None, "error": float(f"{error:.2g}"), **more}
        self.rows.append(row)
        print(f"{kernel:<19}{shape:<20}{row['ms']:>9.3f} ms {row['rate']:>7.1f} {row['unit']:<8}{row['share_of_peer']:>6.2f} of {best:<15}"
              f"{row['share_of_bound']:>5.2f} of the bound", flush=True)

    def summary(self) -> list[str]:
        """Lines of a Markdown table: a kernel a line, geometric means over its shapes."""
        lines = ["| kernel | rate | share of the best peer (least, most) | share of the bound | peer | shapes |",
                 "|---|---|---|---|---|---|"]
        for kernel in dict.fromkeys(row["kernel"] for row in self.rows):
            rows = [row for row in self.rows if row["kernel"] == kernel]
            shares = [row["share_of_peer"] for row in rows]
            lines.append(f"| {kernel} | {mean(row['rate'] for row in rows):.0f} {rows[0]['unit']} | {mean(shares):.2f} ({min(shares):.2f}, "
                         f"{max(shares):.2f}) | {mean(row['share_of_bound'] for row in rows):.2f} | "
                         f"{', '.join(dict.fromkeys(row['best_peer'] for row in rows))} | {len(rows)} |")
        return lines


def mean(values) -> float:
    """Geometric."""
    values = list(values)
    return math.exp(sum(map(math.log, values)) / len(values))
