"""Every microsecond of a step is compute's own, or a gap with one cause."""
import math

import pytest

from runtime.stalls import CAUSES, measure
from runtime.streams import HostClock, Span
from tests.late_streams import late_streams
from tests.models import TINY
from tests.runtime.make import batches, train, trainer


def measured(spans, ended, updates=()):
    """StepTimes of spans whose marks are seconds from the step's start."""
    clock = HostClock()
    clock.origin, clock.spans = 0.0, spans
    return measure(clock, ended, list(updates))


def test_a_gap_belongs_to_its_earliest_unfinished_dependency():
    """Idle until 1: the update was through at 0.25, the copy at 0.75, the launcher was late for the rest."""
    times = measured([Span("compute", "F0", 1.0, 2.0, after=(("update", 0.25), ("weights", 0.75)))], 2.5)
    assert times.exposed == {"update": 0.25, "weights": 0.5, "launch": 0.25, "norm": 0.5, "slab": 0.0}
    assert times.busy == {"compute": 1.0, "h2d": 0.0, "d2h": 0.0, "update": 0.0} and times.step_s == 2.5


def test_what_was_through_before_the_gap_explains_none_of_it():
    late = Span("compute", "F1", 1.5, 2.0, after=(("weights", 0.5), ("update", None)))
    times = measured([Span("compute", "F0", 0.0, 1.0), late], 2.0)
    assert times.exposed["launch"] == 0.5 and sum(times.exposed.values()) == 0.5


def test_a_dependency_that_ends_inside_computing_explains_the_gap_only():
    times = measured([Span("compute", "F0", 0.0, 1.0), Span("compute", "F1", 1.5, 2.0, after=(("weights", 1.25),))], 2.0)
    assert times.exposed["weights"] == 0.25 and times.exposed["launch"] == 0.25


def test_the_end_is_the_last_gradients_copy_and_then_the_norm():
    times = measured([Span("compute", "B0", 0.0, 1.0), Span("d2h", "g0", 1.0, 1.5, num_bytes=10)], 2.0)
    assert times.exposed["slab"] == 0.5 and times.exposed["norm"] == 0.5


def test_moved_bytes_and_rates_are_those_of_their_stream():
    times = measured([Span("h2d", "w0", 0.0, 0.5, num_bytes=3_000_000_000), Span("d2h", "g0", 1.0, 2.0, num_bytes=2_000_000_000),
                      Span("compute", "F0", 0.0, 2.0)], 2.0, updates=[(0, 0.5, 0.75)])
    row = times.metrics()
    assert row["streams/h2d_gbps"] == 6.0 and row["streams/d2h_gbps"] == 2.0 and row["streams/update_busy_s"] == 0.25
    assert ("update", "u0", 0.5, 0.75) in times.timeline


@pytest.mark.parametrize("late", ["nothing", "h2d", "d2h", "compute"])
def test_busy_and_exposed_add_up_to_the_step(late):
    delays = {} if late == "nothing" else {late: 0.02}
    with late_streams(**delays) as streams, trainer(TINY, streams=streams) as made:
        results = train(made, batches(TINY, 2))
    for times in (r.times for r in results):
        assert set(times.exposed) == set(CAUSES)
        assert all(seconds >= 0 for seconds in times.exposed.values())
        # a sum of some hundred differences of fp64 seconds
        assert math.isclose(times.busy["compute"] + sum(times.exposed.values()), times.step_s)
        assert math.isclose(times.metrics()["streams/exposed_s"], sum(times.exposed.values()))
        if late == "h2d":
            assert max(times.exposed, key=times.exposed.get) == "weights"
