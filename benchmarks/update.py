"""Rate of the CPU's AdamW on split state, in parameters a second, by threads.

    python -m benchmarks.update --threads 8 12 14 --layer 275000000 --layers 4

Several layers, so that no cache holds one; ranges are taken by threads as the optimizer's do. Checked first:
one update of a million parameters, against the same fp32 operations in numpy.
"""
import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from benchmarks import report
from runtime.host import HostMemory, NoPinner
from runtime.host_adamw import adamw_step, join, split, update
from runtime.machine import cpu_cores
from runtime.optimizer import RANGE

# hi, lo, m, v read and written, the gradient read
BYTES = 26


def check() -> None:
    """Stops the benchmark unless an update has the bits of numpy's fp32."""
    n, rng = 1 << 20, np.random.default_rng(0)
    w, g = (rng.standard_normal((2, n)) * 0.02).astype(np.float32)
    m, v = np.zeros((2, n), np.float32)
    hi, lo = np.empty((2, n), np.int16)
    split(w, hi, lo)
    s = adamw_step(1e-3, 0.9, 0.95, 1e-8, 0.1, 1)
    update((hi, lo), m, v, g, np.float32(0.5), s, 0, n)
    x = g * np.float32(0.5)
    em, ev = s.one_minus_beta1 * x, s.one_minus_beta2 * (x * x)
    expected = s.decay * w - s.rate * (em / (np.sqrt(ev) * s.rbc2 + s.eps))
    got = np.empty(n, np.float32)
    join(hi, lo, got)
    if not np.array_equal(got, expected):
        print("error: the update is not that of fp32 operations one by one", file=sys.stderr)
        sys.exit(1)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, nargs="+", default=[cpu_cores()])
    p.add_argument("--layer", type=int, default=100_000_000, help="parameters")
    p.add_argument("--layers", type=int, default=3)
    p.add_argument("--range", type=int, nargs="+", default=[RANGE], help="parameters that a thread updates at a time")
    p.add_argument("--out", help="folder of the result (benchmarks/results)")
    a = p.parse_args()
    check()
    rows, step = [], adamw_step(1e-4, 0.9, 0.95, 1e-8, 0.1, 10)
    with HostMemory(NoPinner()) as memory:
        def region(purpose, dtype):
            return [t.view(dtype).numpy() for t in memory.allocate(purpose, [a.layer * dtype.itemsize] * a.layers)]
        hi, lo, g = (region(name, torch.int16) for name in ("hi", "lo", "g"))
        m, v = (region(name, torch.float32) for name in ("m", "v"))
        for threads in a.threads:
            for size in a.range:
                cuts = [(layer, begin, min(begin + size, a.layer)) for layer in range(a.layers) for begin in range(0, a.layer, size)]

                def one(cut):
                    layer, begin, end = cut
                    update((hi[layer], lo[layer]), m[layer], v[layer], g[layer], np.float32(1), step, begin, end)
                times = []
                with ThreadPoolExecutor(threads) as pool:
                    for _ in range(4):
                        began = time.perf_counter()
                        list(pool.map(one, cuts))
                        times.append(time.perf_counter() - began)
                rate = a.layer * a.layers / report.spread(times[1:])["median"]
                huge = report.peaks()
                rows.append({"threads": threads, "range": size, "gparam_s": round(rate / 1e9, 3), "gbps": round(rate * BYTES / 1e9, 1)})
                print(rows[-1], flush=True)
    report.finish("update", {"layer": a.layer, "layers": a.layers, "rows": rows} | huge, Path(a.out) if a.out else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
