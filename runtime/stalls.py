"""Where a step's time went: busy seconds of each stream, and every gap of compute with its cause.

A gap belongs to its earliest unfinished dependency: until the unit's update was through it is `update`, then until its
copy was `weights`, and so on; what no dependency explains is `launch`, and the end of the step is `norm`. So the step
is busy time plus gaps, exactly.
"""
import dataclasses
from collections import defaultdict

from runtime.streams import Span

CAUSES = ("weights", "slab", "update", "norm", "launch")


@dataclasses.dataclass
class StepTimes:
    """Seconds. busy: by stream, `update` among them. exposed: compute's gaps by cause. moved_bytes: by copy stream.
    timeline: (stream, what, begin, end) from the step's start."""
    step_s: float
    busy: dict[str, float]
    exposed: dict[str, float]
    moved_bytes: dict[str, int]
    timeline: list[tuple[str, str, float, float]]

    def metrics(self) -> dict[str, float]:
        """Rows of metrics.jsonl: streams/*."""
        row = {f"streams/{name}_busy_s": seconds for name, seconds in self.busy.items()}
        row |= {f"streams/exposed_{cause}_s": seconds for cause, seconds in self.exposed.items()}
        row["streams/exposed_s"] = sum(self.exposed.values())
        for name, moved in self.moved_bytes.items():
            if self.busy[name] > 0:
                row[f"streams/{name}_gbps"] = moved / self.busy[name] / 1e9
        return row


def measure(clock, ended: float, updates: list[tuple[int, float, float]]) -> StepTimes:
    """Accounts for the step that clock.start() began and that ended at the host mark `ended`.

    updates: (unit, begin, end) host marks of the updates since the last call. Every span's marks must have fired.
    """
    spans: list[Span] = clock.spans
    timeline = [(s.stream, s.what, clock.seconds(s.begin), clock.seconds(s.end)) for s in spans]
    timeline += [("update", f"u{unit}", clock.seconds(begin), clock.seconds(end)) for unit, begin, end in updates]
    busy: dict[str, float] = dict.fromkeys(("compute", "h2d", "d2h", "update"), 0.0)
    moved: dict[str, int] = dict.fromkeys(("h2d", "d2h"), 0)
    # threads work on several updates at once: overlapping stretches count once
    for name in busy:
        now = float("-inf")
        for begin, end in sorted((begin, end) for stream, _, begin, end in timeline if stream == name):
            busy[name] += max(end - max(begin, now), 0.0)
            now = max(now, end)
    for span in spans:
        if span.num_bytes:
            moved[span.stream] += span.num_bytes
    exposed: dict[str, float] = defaultdict(float, dict.fromkeys(CAUSES, 0.0))
    now = 0.0
    for span in spans:
        if span.stream == "compute":
            begin = clock.seconds(span.begin)
            _explain(exposed, now, begin, [(cause, clock.seconds(mark)) for cause, mark in span.after if mark is not None], "launch")
            now = clock.seconds(span.end)
    last_copy = max((end for stream, _, _, end in timeline if stream == "d2h"), default=now)
    step_s = clock.seconds(ended)
    _explain(exposed, now, step_s, [("slab", last_copy)], "norm")
    return StepTimes(step_s, busy, dict(exposed), moved, timeline)


def _explain(exposed: dict[str, float], begin: float, end: float, dependencies: list[tuple[str, float]], rest: str) -> None:
    """Shares the gap between `begin` and `end` among those that were not through yet, the earliest first."""
    for cause, through in sorted(dependencies, key=lambda d: d[1]):
        until = min(through, end)
        if until > begin:
            exposed[cause] += until - begin
            begin = until
    exposed[rest] += max(end - begin, 0.0)
