"""What a trainer takes it gives back."""
import dataclasses
import threading

import pytest

from model import reference
from runtime.host import NoPinner
from runtime.plan import Request, make_plan
from runtime.streams import cpu_streams
from runtime.trainer import Trainer
from tests.models import TINY
from tests.runtime.make import MACHINE, adamw, trainer


class CountingPinner(NoPinner):
    """Knows what is pinned now."""

    def __init__(self):
        self.pinned = set()

    def register(self, address, num_bytes):
        self.pinned.add(address)

    def unregister(self, address):
        self.pinned.remove(address)


def test_a_closed_trainer_leaves_no_thread():
    before = threading.active_count()
    with trainer(TINY):
        assert threading.active_count() > before
    assert threading.active_count() == before


@pytest.mark.parametrize("wrong", ["device", "slabs"])
def test_a_trainer_that_cannot_be_built_leaves_no_thread_and_nothing_pinned(wrong):
    pinner, before = CountingPinner(), threading.active_count()
    plan = make_plan(Request(TINY, 24, 2, 1, "fp32", "fp32", "exact", "cpu"), MACHINE, reference)
    if wrong == "device":
        # less than what is going to be laid out
        plan = dataclasses.replace(plan, device={name: size // 2 for name, size in plan.device.items()})
    else:
        plan = dataclasses.replace(plan, num_slabs=0, request=dataclasses.replace(plan.request, clip="layer"))
    with pytest.raises((MemoryError, ValueError)):
        Trainer(plan, adamw(), reference, cpu_streams(), pinner, 1)
    assert threading.active_count() == before and not pinner.pinned
