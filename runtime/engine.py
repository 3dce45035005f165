"""One step: forward, head, backward, decide, hand to the optimizer. Layer-major: each weight crosses the link once
forward and once backward, however many micro-batches there are.

              forward                    backward                           next step
    compute | F0 | F1 | F2 | F3 | loss | B3 | B2 | B1 | B0 |    |    |    | F0 | F1 |
    h2d     | w1 | w2 | w3 |    |      |    | w1 | w0 |    |    |    | w0 | w1 | w2 |
    d2h     |    |    |    |    |      |    | g3 | g2 | g1 | g0 |    |    |    |    |
    host    | u2 | u3 |    |    |      |    |    |    |    |    | u0 | u1 | u2 | u3 |

Four layers, two slots: w copies in, g gradients out, u AdamW. The last two layers are still in their slots when
backward begins. The gap is the price of exact clipping: u0 needs the global norm, F0 needs u0 and its copy.

The launcher launches F(l), then waits for the update of l+1, then queues its copy: waiting never starves the GPU. It
reads one thing a step from the device, in `decide`. Steps are deterministic: same seed, same bits, whatever overlaps.

A resident unit's state lies on the device: nothing of it crosses the link, and compute updates it right in front of its next
use (with `--clip layer` or `none`, right behind its gradient). Resident units are the first ones, so that those behind them have
their forward's time to be updated in. The bits are the same wherever a unit's state lies.
"""
import dataclasses
import math
import types
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from model.block import Batch, Block
from model.head import Head
from model.layout import Weights, block_layout, embedding_layout, head_layout
from runtime.buffers import BATCH_ARRAYS, Buffers, Shape
from runtime.optimizer import NORM_EPS, HostOptimizer, clip_factor
from runtime.slabs import Slab, Slabs
from runtime.slots import Resident, Slots
from runtime.stalls import StepTimes, measure
from runtime.state import ModelState
from runtime.streams import Streams


class MicroBatch(Protocol):
    """int32 arrays [rows] of one micro-batch; see model.block.Batch."""
    tokens: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    doc_start: np.ndarray
    doc_end: np.ndarray
    order: np.ndarray


@dataclasses.dataclass
class StepResult:
    """loss: mean over the step's supervised tokens, nats. grad_norm: before clipping. lr: what this step's update uses.
    skipped: nothing was updated. not_finite: "layer 3 down"-like names of what was NaN or inf. times: of the streams."""
    loss: float
    grad_norm: float
    lr: float
    skipped: bool
    partial: bool
    not_finite: list[str]
    times: StepTimes


class Engine:
    """Launches steps over the state in host memory; owns slots and activations, not the state."""

    def __init__(self, shape: Shape, state: ModelState, optimizer: HostOptimizer, slabs: Slabs, streams: Streams,
                 buffers: Buffers, host_batch: torch.Tensor, host_verdicts: torch.Tensor, ops: types.ModuleType):
        """host_batch: pinned, like buffers.batch_memory. host_verdicts: pinned fp64 [units, 3]. ops: model.fused or
        model.reference."""
        c = shape.config
        self.shape, self.state, self.optimizer, self.slabs, self.streams = shape, state, optimizer, slabs, streams
        self.buffers, self.ops = buffers, ops
        self._host_batch, self._host_verdicts = host_batch, host_verdicts
        self.head_unit = c.layers + 1
        layouts = embedding_layout(c), block_layout(c), head_layout(c)
        self._embedding = Slots(layouts[0], buffers.embedding_slots, streams)
        self._layers = Slots(layouts[1], buffers.layer_slots, streams)
        self._head = Slots(layouts[2], buffers.head_slots, streams)
        self._resident = Resident({u: state.layouts[u].bind(each.masters[0]) for u, each in state.resident.items()}, streams)
        self._grads = [layout.bind(buffers.grads[:layout.numel]) for layout in layouts]
        self._tied_grads = layouts[0].bind(buffers.tied_grads) if c.tied else None
        self._block = Block(c, ops, buffers.workspace)
        self._final = Head(c, ops, buffers.head, buffers.workspace.partials)
        self._batch_here, self._computed, self._verdicts_here = streams.event(), streams.event(), streams.event()
        self._slab_of: dict[int, Slab] = {}
        # resident units whose update is decided and not yet launched, each with the updates the model had had
        self._pending: dict[int, int] = {}
        # what the launcher waited for on the host since the last span: (cause, host time it was through)
        self._waited: list[tuple[str, float]] = []
        self._micro_batches = 0

    # one step

    def begin(self, micro_batches: Sequence[MicroBatch], supervised: int) -> None:
        """Launches forward and backward; returns while they run. supervised: tokens with a label, of all micro-batches."""
        _check_supervised(micro_batches, supervised)
        self.streams.clock.start()
        self._upload(micro_batches)
        self._forward(keep=True)
        self._loss_backward(1.0 / supervised)
        for layer in reversed(range(self.shape.config.layers)):
            self._visit(1 + layer, f"B{layer}", self._layer_backward, layer)
            self._finish(1 + layer, self._grads[1])
        self._embedding_backward()
        self._supervised = supervised

    def decide(self) -> StepResult:
        """Reads norm, finite flags and loss, the step's one wait for the device; hands the gradients to the optimizer."""
        d2h = self.streams.d2h
        self.streams.compute.record(self._computed)
        d2h.wait(self._computed)
        d2h.copy(self._host_verdicts, self.buffers.verdicts)
        d2h.record(self._verdicts_here)
        self._verdicts_here.wait_host()
        ended = self.streams.clock.now()
        squares, not_finite, loss = self._host_verdicts.numpy().T
        units = range(len(squares))
        norm = math.sqrt(math.fsum(squares)) if np.isfinite(squares).all() else float(np.sqrt(squares.sum()))
        finite = [not not_finite[u] and math.isfinite(squares[u]) and math.isfinite(loss[u]) for u in units]
        adamw, applied = self.optimizer.adamw, self.state.applied_steps
        left_out = [u for u in units if not finite[u]]
        skipped = bool(left_out) if adamw.clip == "exact" else len(left_out) == len(finite)
        names = self._not_finite(left_out, loss[0])
        if adamw.clip == "exact":
            factor = clip_factor(norm, adamw.max_norm)
            if self.state.resident and not skipped:
                self.streams.compute.run(self.buffers.factors.fill_, factor)
            for unit in units:
                if unit in self.state.resident:
                    if not skipped:
                        self._pending[unit] = applied
                elif skipped:
                    self._slab_of[unit].release()
                else:
                    self.optimizer.submit(unit, self._slab_of[unit], factor, applied)
        if not skipped:
            self.state.applied_steps += 1
            for unit in self.state.resident:
                self.state.updates[unit] += finite[unit]
        times = measure(self.streams.clock, ended, self.optimizer.take_spans())
        return StepResult(float(loss[0]) / self._supervised, norm, adamw.schedule.at(applied), skipped,
                          bool(left_out) and not skipped, names, times)

    # reading only

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Sum of the losses of all supervised tokens, with settled weights; changes nothing. ValueError if there are none."""
        _check_supervised(micro_batches)
        self._upload(micro_batches)
        self._forward(keep=False)
        self._visit(self.head_unit, "loss", self._losses)
        self.settle()
        return self.buffers.losses[: self._micro_batches].sum().item()

    def logits(self, micro_batch: MicroBatch, row: int) -> torch.Tensor:
        """Logits [V] fp32 on the host, of one row of a micro-batch."""
        self._upload([micro_batch])
        self._forward(keep=False)
        out: list[torch.Tensor] = []
        self._visit(self.head_unit, "logits", lambda: out.append(
            self._final.logits(self._weights(self.head_unit), self._matrix(), self._boundary(-1, 0)[row:row + 1])))
        self.settle()
        return out[0][0].float().cpu()

    def settle(self) -> None:
        """Blocks until the state is that of one step, wherever it lies, and no copy or kernel is running."""
        self.optimizer.settle()
        for unit in list(self._pending):
            self._update_resident(unit)
        for stream in (self.streams.compute, self.streams.h2d, self.streams.d2h):
            event = self.streams.event()
            stream.record(event)
            event.wait_host()

    # forward

    def _upload(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Copies the arrays in. All micro-batches have the same number of rows, at most the plan's."""
        self._micro_batches, self._rows = len(micro_batches), len(micro_batches[0].tokens)
        host = self._host_batch.numpy()
        for i, batch in enumerate(micro_batches):
            for j, name in enumerate(BATCH_ARRAYS):
                host[i, j, : self._rows] = getattr(batch, name)
        h2d, used = self.streams.h2d, slice(0, self._micro_batches)
        h2d.span("batch", h2d.copy, self.buffers.batch_memory[used], self._host_batch[used])
        h2d.record(self._batch_here)
        self.streams.compute.wait(self._batch_here)

    def _batch(self, i: int) -> Batch:
        return Batch(*self.buffers.batch_memory[i, :, : self._rows])

    def _boundary(self, layer: int, i: int) -> torch.Tensor:
        """The residual stream [rows, D] that enters `layer`; -1 is what leaves the last one."""
        return self.buffers.boundaries[layer][i][: self._rows]

    def _forward(self, keep: bool) -> None:
        self._visit(0, "E", self._embed)
        for layer in range(self.shape.config.layers):
            self._visit(1 + layer, f"F{layer}", self._layer_forward, layer, keep)

    def _embed(self) -> None:
        table = self.ops.operand(self._weights(0), "embedding")
        for i in range(self._micro_batches):
            self.ops.embedding(self._batch(i).tokens, table, out=self._boundary(0, i))

    def _layer_forward(self, layer: int, keep: bool) -> None:
        w = self._weights(1 + layer)
        for i in range(self._micro_batches):
            saved = self.buffers.saved[layer][i] if keep else {}
            self._block.forward(w, self._boundary(layer, i), self._batch(i), saved, self._boundary(layer + 1, i))

    def _losses(self) -> None:
        for i in range(self._micro_batches):
            rows = self._final.loss(self._weights(self.head_unit), self._matrix(), self._boundary(-1, i), self._batch(i))
            self.buffers.losses[i] = rows.sum(dtype=torch.float64)

    # backward

    def _loss_backward(self, scale: float) -> None:
        self._visit(self.head_unit, "loss", self._head_backward, scale)
        self._finish(self.head_unit, self._grads[2])

    def _head_backward(self, scale: float) -> None:
        b, w, grads = self.buffers, self._weights(self.head_unit), self._grads[2]
        matrix_grads, name = (self._tied_grads, "embedding") if self._tied_grads else (grads, "head")
        for each in {grads, matrix_grads}:
            _zero_gaps(each)
        for i in range(self._micro_batches):
            rows = self._final.loss_backward(w, self._matrix(), self._boundary(-1, i), self._batch(i), scale, b.dx[i], grads,
                                             self.ops.operand(matrix_grads, name), accumulate=i > 0)
            b.losses[i] = rows.sum(dtype=torch.float64)
        b.verdicts[:, 2] = b.losses[: self._micro_batches].sum()

    def _layer_backward(self, layer: int) -> None:
        b, w = self.buffers, self._weights(1 + layer)
        _zero_gaps(self._grads[1])
        for i in range(self._micro_batches):
            self._block.backward(w, self._boundary(layer, i), self._batch(i), b.saved[layer][i], b.dx[i], self._grads[1],
                                 accumulate=i > 0)

    def _embedding_backward(self) -> None:
        grads = self._tied_grads or self._grads[0]

        def scatter():
            if not self._tied_grads:
                grads.flat.zero_()
            for i in range(self._micro_batches):
                batch = self._batch(i)
                self.ops.embedding_backward(self.buffers.dx[i], batch.tokens, batch.order, self.ops.operand(grads, "embedding"),
                                            partials=self.buffers.workspace.partials)
        self._span("dE", scatter)
        self._finish(0, grads)

    def _finish(self, unit: int, grads: Weights) -> None:
        """The unit's gradient is complete: takes its norm, rounds it into a stage, sends it to its slab; or keeps it here."""
        n, verdict = grads.flat.numel(), self.buffers.verdicts[unit]
        if unit in self.state.resident:
            self._span(f"n{unit}", self._round, grads.flat, self.state.resident[unit].gradient, verdict[:2])
            if self.optimizer.adamw.clip != "exact":
                self.streams.compute.run(self._own_factor, unit)
                self._pending[unit] = self.state.applied_steps
                self._update_resident(unit)
            return
        stage = self.slabs.stage()
        self.streams.compute.wait(stage.free)
        self._span(f"n{unit}", self._round, grads.flat, stage.buffer[:n], verdict[:2], after=[("slab", stage.free.mark)])
        slab = self.slabs.send(stage, n, verdict, f"g{unit}", self.optimizer.check)
        if slab.freed_at is not None:
            self._waited.append(("slab", slab.freed_at))
        self._slab_of[unit] = slab
        if self.optimizer.adamw.clip != "exact":
            self.optimizer.submit(unit, slab, None, self.state.applied_steps)

    def _own_factor(self, unit: int) -> None:
        """Writes the factor that the unit's own norm asks for, NaN where it or the loss is not finite: the fp64 arithmetic of
        runtime.optimizer.clip_factor, on the device."""
        squares, not_finite, loss = self.buffers.verdicts[unit]
        adamw = self.optimizer.adamw
        factor = (adamw.max_norm / (squares.sqrt() + NORM_EPS)).clamp_max(1.0) if adamw.clip == "layer" else torch.ones_like(squares)
        self.buffers.factors[unit] = torch.where((not_finite == 0) & squares.isfinite() & loss.isfinite(), factor, torch.nan)

    def _update_resident(self, unit: int) -> None:
        applied = self._pending.pop(unit)
        self._span(f"u{unit}", self._adamw, unit, applied)

    def _adamw(self, unit: int, applied: int) -> None:
        """AdamW of a resident unit, in place: norms and biases without decay, then matrices."""
        layout, state, factor = self.state.layouts[unit], self.state.resident[unit], self.buffers.factors[unit:unit + 1]
        for begin, end, decay in ((0, layout.decay_from, False), (layout.decay_from, layout.numel, True)):
            if begin < end:
                hi, lo, m, v, g = (None if t is None else t[begin:end] for t in (
                    state.masters[0], state.masters[1] if len(state.masters) == 2 else None, state.m, state.v, state.gradient))
                self.ops.adamw(hi, lo, m, v, g, factor, self.optimizer.adamw.step(applied, decay))

    def _round(self, gradient: torch.Tensor, out: torch.Tensor, result: torch.Tensor) -> None:
        self.ops.norm2(gradient, out=out, partials=self.buffers.workspace.partials, result=result)

    # the streams

    def _place(self, unit: int) -> tuple[Slots, int]:
        """The slots that a unit goes to, and its number among their users."""
        if unit in self.state.resident:
            return self._resident, unit
        if unit == 0:
            return self._embedding, 0
        return (self._head, 0) if unit == self.head_unit else (self._layers, unit - 1)

    def _weights(self, unit: int) -> Weights:
        """The unit's working weights, for what `_visit` launches."""
        slots, number = self._place(unit)
        return slots.weights(number)

    def _fetch(self, unit: int):
        """Queues the copy of the unit's newest weights once its update is through; returns slots and number."""
        self.optimizer.wait_updated(unit)
        slots, number = self._place(unit)
        slots.fetch(number, self.state.updates[unit], self.state.pieces[unit])
        return slots, number

    def _visit(self, unit: int, what: str, fn, *args) -> None:
        """Computes with a unit's weights: behind their copy, in front of the slot's next one."""
        units = [unit, 0] if unit == self.head_unit and self.shape.config.tied else [unit]
        for each in units:
            if each in self._pending:
                self._update_resident(each)
        used = [self._fetch(each) for each in units]
        after = [("update", self.optimizer.updated_at[each]) for each in units]
        for slots, number in used:
            self.streams.compute.wait(slots.ready(number))
            after.append(("weights", slots.ready(number).mark))
        self._span(what, fn, *args, after=after)
        for slots, number in used:
            slots.release(number)

    def _span(self, what: str, fn, *args, after=()) -> None:
        self.streams.compute.span(what, fn, *args, after=(*self._waited, *after))
        self._waited.clear()

    def _matrix(self):
        """The head's matrix as an operand."""
        tied = self.shape.config.tied
        return self.ops.operand(self._weights(0 if tied else self.head_unit), "embedding" if tied else "head")

    def _not_finite(self, units: list[int], loss: float) -> list[str]:
        """Names of what was not finite: the loss, and the tensors whose gradient in the slab says so."""
        names = [] if math.isfinite(loss) else ["loss"]
        for unit in units:
            if unit in self.state.resident:
                names += self.state.not_finite(unit, self.state.resident[unit].gradient)
            elif self.optimizer.adamw.clip == "exact":
                names += self.state.not_finite(unit, self._slab_of[unit].flat)
            else:
                # the updating thread has looked before it let the slab go
                self.optimizer.wait_updated(unit)
                names += self.optimizer.left_out.pop(unit)
        return names


def _check_supervised(micro_batches: Sequence[MicroBatch], claimed: int | None = None) -> None:
    """ValueError if nothing is supervised, or not as much as the caller divides by."""
    supervised = sum(int((batch.labels >= 0).sum()) for batch in micro_batches)
    if not supervised:
        raise ValueError("no token of these micro-batches is supervised: there is no loss to take a mean of")
    if claimed is not None and claimed != supervised:
        raise ValueError(f"{claimed} supervised tokens claimed, the labels have {supervised}")


def _zero_gaps(grads: Weights) -> None:
    """What lies between tensors is no gradient, whoever used the buffer before."""
    for begin, end in grads.layout.gaps():
        grads.flat[begin:end].zero_()

