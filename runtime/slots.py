"""Slots: device buffers, each holding one unit's working weights while it computes. A unit is the embedding, a layer
or the head.

Two events a slot, and nothing else, order the streams:
    ready   recorded on h2d behind the copy           compute waits for it
    free    recorded on compute behind the last use   h2d waits for it
"""
import dataclasses
from typing import Any

import torch

from model.layout import Layout, Weights
from runtime.streams import Streams


@dataclasses.dataclass
class Slot:
    """buffer: flat working weights. holds: (unit, version) whose copy was queued last, or None."""
    buffer: torch.Tensor
    ready: Any
    free: Any
    holds: tuple[int, int] | None = None


class Slots:
    """Weight buffers of units that share a layout; unit u lives in slot u % len(slots)."""

    def __init__(self, layout: Layout, buffers: list[torch.Tensor], streams: Streams):
        self.streams = streams
        self.slots = [Slot(buffer, streams.event(), streams.event()) for buffer in buffers]
        self._bound = [layout.bind(buffer) for buffer in buffers]

    def __len__(self) -> int:
        return len(self.slots)

    def _slot(self, unit: int) -> Slot:
        return self.slots[unit % len(self.slots)]

    def fetch(self, unit: int, version: int, pieces: list[tuple[torch.Tensor, int]]) -> None:
        """Queues the copy of the unit's working weights into its slot; never waits.

        version: updates this unit has had; a slot never serves weights from before an update.
        pieces: (pinned host tensor, first element) of the flat buffer, each inside one registration.
        """
        slot = self._slot(unit)
        # backward begins with the units that forward ended on
        if slot.holds == (unit, version):
            return
        h2d = self.streams.h2d
        h2d.wait(slot.free)

        def copy():
            for host, begin in pieces:
                h2d.copy(slot.buffer[begin:begin + host.numel()], host)
        h2d.span(f"w{unit}", copy, num_bytes=slot.buffer.nbytes)
        h2d.record(slot.ready)
        slot.holds = (unit, version)

    def weights(self, unit: int) -> Weights:
        """Names for what the slot will hold; computing with them has to wait for `ready`."""
        return self._bound[unit % len(self.slots)]

    def ready(self, unit: int) -> Any:
        """The event behind the unit's copy."""
        return self._slot(unit).ready

    def release(self, unit: int) -> None:
        """After the last reader was launched: the next copy into the slot may start when it is through."""
        self.streams.compute.record(self._slot(unit).free)


class Resident:
    """What Slots is for units that stream, for those whose weights never leave the device: there is nothing to wait for, as
    compute itself updates them."""

    def __init__(self, bound: dict[int, Weights], streams: Streams):
        """bound: the units' working weights."""
        self._bound, self._never = bound, streams.event()

    def fetch(self, unit: int, version: int, pieces: list[tuple[torch.Tensor, int]]) -> None:
        pass

    def weights(self, unit: int) -> Weights:
        return self._bound[unit]

    def ready(self, unit: int) -> Any:
        return self._never

    def release(self, unit: int) -> None:
        pass
