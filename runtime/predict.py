"""How long a step takes, from what it has to do and what the machine does a second: the plan chooses by it.

compute     each unit's forward, backward and, where it is resident, its update, one behind the other
link        a streamed unit's weights have to be there before it computes, forward and backward; its gradient goes out
update      units of the host are updated in the order of the forward pass, from the decision on (`exact`) or from their
            gradient's arrival on (`layer`, `none`); a unit's copy waits for its update, its forward for the copy
"""
import dataclasses

from model.flops import recompute_flops
from runtime.buffers import Shape
from runtime.state import unit_layouts


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the machine does a second: FLOPs of the kernels (not the data sheet's), parameters updated by the CPU beside a busy
    link, bytes over the link one way, bytes of HBM read and written."""
    flops: float
    update_params: float
    link_bytes: float
    hbm_bytes: float


# one H200 with 16 cores (LOG.md); other machines are planned as if they were one
H200 = Rates(flops=6.2e14, update_params=3.8e9, link_bytes=5.0e10, hbm_bytes=3.9e12)
# moved by an update in HBM, a parameter: hi, lo, m, v read and written, the gradient read
_UPDATE_BYTES = 26


def step_seconds(s: Shape, clip: str, rates: Rates) -> float:
    """Seconds of a step in the long run, when the one before it left its updates running."""
    c, tokens = s.config, s.N * s.micro_batches
    numels = [layout.numel for layout in unit_layouts(c)]
    units = range(len(numels))
    attention = 2.0 * c.attention_width * s.T * tokens / rates.flops
    forward = [0.0, *(2.0 * n * tokens / rates.flops + attention for n in numels[1:-1]),
               2.0 * c.vocab * c.hidden * tokens / rates.flops]
    again = [0.0, *(recompute_flops(c, keep, s.T) * tokens / rates.flops for keep in s.keep), 0.0]
    # attention's backward has 2.5 times the products of its forward, and all of them run at its rate
    backward = [0.0, *(2 * f + 0.5 * attention + r for f, r in zip(forward[1:-1], again[1:-1], strict=True)), 2 * forward[-1]]
    copy = [0.0 if u in s.resident else n * s.dtype.itemsize / rates.link_bytes for u, n in enumerate(numels)]
    send = [0.0 if u in s.resident else n * s.grad_dtype.itemsize / rates.link_bytes for u, n in enumerate(numels)]
    update = [0.0 if u in s.resident else n / rates.update_params for u, n in enumerate(numels)]
    here = [n * _UPDATE_BYTES / rates.hbm_bytes if u in s.resident else 0.0 for u, n in enumerate(numels)]

    # backward, from its begin on: a unit's weights stream in while the one before it computes
    now, sent, arrived = 0.0, 0.0, {}
    for u in reversed(units):
        now += max(backward[u] + here[u] * (clip != "exact"), copy[u])
        sent = max(sent, now) + send[u]
        arrived[u] = sent
    ended = max(now, sent)
    # updates, then the forward that waits for them
    through, host = {}, 0.0
    for u in units if clip == "exact" else reversed(units):
        if u not in s.resident:
            host = max(host, ended if clip == "exact" else arrived[u]) + update[u]
        through[u] = host
    now, copied = ended, 0.0
    for u in units:
        if u not in s.resident:
            copied = max(copied, through[u]) + copy[u]
            now = max(now, copied)
        now += forward[u] + here[u] * (clip == "exact")
    return now
