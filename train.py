"""Trains a decoder language model on one GPU, or on a CPU, with its state in host memory.

    python train.py                                     a small model on Python's own sources, about a minute
    python train.py --model qwen2.5-7b --data *.txt     7.6 B parameters on one GPU
    python train.py --model 120b --plan                 what that would take
    python train.py --resume runs/tiny-1201-101500      goes on where a run stopped

Exit code 0: the run is complete. 2: something asked for is wrong, or does not fit. 3: too many steps in a row were not
finite. 130: stopped by Ctrl-C or SIGTERM, after the step was finished and saved; the second one stops at once.
"""
import argparse
import contextlib
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

from model.errors import UserError
from runtime.options import parser, resolve

# torch's CPU threads wait for each other spinning, which on a machine that others use too takes ten times as long; so they
# spin some microseconds and then sleep. libgomp looks once, when torch is imported
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

MAX_SKIPPED_IN_A_ROW = 10
# rows of validation text, and how a sample is drawn
VALIDATION_ROWS = 64
# of what was not finite in a step: metrics.jsonl has all names
NAMES_SHOWN = 6
PROMPT, TEMPERATURE = "def ", 0.7


def main(argv: list[str] | None = None) -> int:
    given = parser().parse_args(argv)
    # behind the parser: --help and a misspelt flag need no torch
    from data.sources import DataError
    from runtime.report import model_table
    if given.list_models:
        print(model_table())
        return 0
    try:
        return Run(given).main(plan_only=given.plan)
    except (UserError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped at once; what was not saved is lost", file=sys.stderr)
        return 130


class Run:
    """One run: what was asked for, the plan, and the loop."""

    def __init__(self, given: argparse.Namespace):
        from data.batches import Batches, evaluation_rows, split
        from data.sources import open_source
        from data.tokenizer import ByteTokenizer
        from model.config import preset
        from runtime import checkpoint, machine, plan
        from runtime.trainer import choose_ops
        if given.resume and given.run:
            raise UserError(f"--run {given.run}: --resume {given.resume} goes on in its own directory; leave one of them out")
        self.machine = machine.detect(machine.parse_bytes(given.host_memory, "--host-memory") if given.host_memory else None)
        self.saved, self.records = checkpoint.newest(given.resume) if given.resume else (None, None)
        o, self.changes = resolve(given, self.saved and self.saved["options"], self.machine.gpu_name is not None)
        self.options = o
        if self.saved and o.steps < self.saved["step"]:
            raise UserError(f"--steps {o.steps}: {given.resume} has made {self.saved['step']} already")
        if o.device == "cuda":
            if self.machine.gpu_name is None:
                raise UserError("--device cuda: there is no GPU that CUDA can use; leave it out to train on the CPU")
            machine.check_gpu(self.machine, o.precision)
        self.run_dir = Path(given.resume or given.run or f"runs/{o.model}-{time.strftime('%m%d-%H%M%S')}")
        tokenizer = ByteTokenizer()
        train_documents, validation_documents = split(open_source(o.data))
        self.batches = Batches(train_documents, tokenizer, o.seq, o.batch, o.seed, pack=o.pack)
        self.validation = evaluation_rows(validation_documents, tokenizer, o.seq, VALIDATION_ROWS)
        self.tokenizer, self.config = tokenizer, preset(o.model)
        if tokenizer.vocab_size > self.config.vocab:
            raise UserError(f"--model {o.model}: {self.config.vocab} tokens in its vocabulary, the tokenizer's largest id is "
                            f"{tokenizer.vocab_size - 1}")
        self.ops = choose_ops(o.device, o.precision)
        request = plan.Request(self.config, o.seq, o.batch, o.micro_batch, o.precision, o.grads, o.clip, o.device, resident=o.resident)
        self.plan = plan.make_plan(request, self.machine, self.ops)
        self.validates_on_training_text = validation_documents.validation_is_training_text
        self.step = self.skipped_in_a_row = self.skipped_steps = self.empty_steps = 0
        # of the newest checkpoint, and of the last row with a loss and rates
        self.saved_step = self.rated_step = 0
        self.complete = False
        self.progress = self.times = None

    def main(self, plan_only: bool) -> int:
        from runtime.plan import refuse_unless_fits
        print(self.plan.page(), self._data_line(), sep="\n", flush=True)
        refuse_unless_fits(self.plan, self.ops)
        if plan_only:
            return 0
        with _Interrupt() as stopped, contextlib.ExitStack() as opened:
            self._open(opened)
            while self.step < self.options.steps and not stopped and self.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW:
                self._one_step()
            return self._finish()

    # start

    def _data_line(self) -> str:
        o, data = self.options, self.batches.fingerprint
        passes = o.steps * o.batch * o.seq / data["tokens"]
        s = "" if data["documents"] == 1 else "s"
        line = f"data  {data['documents']} document{s}, {data['tokens']} tokens; {o.steps} steps take {o.steps * o.batch * o.seq}"
        line += f": {passes:.3g} times all of it" if o.pack else ", padding among them"
        if self.validates_on_training_text:
            line += "\n  validation is on the training text: there is too little to hold any out"
        return line

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Takes the run directory, host memory and the device; draws or loads the weights."""
        from runtime import checkpoint
        from runtime.host import CudaPinner, NoPinner
        from runtime.optimizer import AdamW, Schedule, update_threads
        from runtime.plan import STATE_BYTES
        from runtime.progress import Progress, taking_memory
        from runtime.state import unit_layouts
        from runtime.streams import cpu_streams, cuda_streams
        from runtime.telemetry import LossMean, MetricsLog, Wandb
        from runtime.trainer import Trainer
        o, cuda = self.options, self.options.device == "cuda"
        config = {"options": dataclasses.asdict(o), "model": dataclasses.asdict(self.config), "data": self.batches.fingerprint}
        # what is refused leaves nothing behind
        if self.saved:
            checkpoint.check_same_run(self.saved, config, ("model", "data"))
        if o.save:
            saves = 1 + (o.steps // o.save_every if o.save_every else 0)
            one = checkpoint.required_bytes(STATE_BYTES * layout.num_params for layout in unit_layouts(self.config))
            checkpoint.check_space(self.run_dir, one, keep=o.keep_checkpoints, saves=saves)
        lock = opened.enter_context(checkpoint.RunLock(self.run_dir))
        if lock.stale:
            self._say(f"{self.run_dir}: its last run ({lock.stale}) ended without letting go; taken over")
        checkpoint.claim(self.run_dir, config, resuming=self.saved is not None)
        adamw = AdamW(Schedule(o.schedule, o.lr, o.warmup, o.steps), o.beta1, o.beta2, o.eps, o.weight_decay, o.clip, o.max_norm)
        self.wandb = Wandb(o.wandb, self.run_dir, config, self.run_dir.name)
        opened.callback(lambda: self.wandb.close(ok=self.complete))
        self.trainer = Trainer(self.plan, adamw, self.ops, cuda_streams() if cuda else cpu_streams(), CudaPinner() if cuda else NoPinner(),
                               o.threads or update_threads(self.machine.cpu_cores), taking_memory())
        opened.callback(self.trainer.close)
        self.mean = LossMean()
        if self.saved:
            self._load()
        else:
            self.trainer.state.initialize(o.seed, o.device)
        self.metrics = MetricsLog(self.run_dir)
        opened.callback(self.metrics.close)
        self.progress = Progress(o.steps, start=self.step)
        opened.callback(self.progress.close)
        self._draw()
        self.row_began = time.perf_counter()

    def _load(self) -> None:
        self.trainer.load(self.records, self.saved["applied_steps"])
        self.batches.load_state(self.saved["position"])
        self.mean.steps = [tuple(pair) for pair in self.saved["losses"]]
        self.step = self.saved_step = self.rated_step = self.saved["step"]
        self._say(f"resumed at step {self.step} of {self.run_dir}" + "".join(f"; {change}" for change in self.changes))

    # loop

    def _draw(self) -> None:
        """The next step's rows; drawn while the device works on this one's. The position is that in front of them."""
        self.position = self.batches.state()
        self.batch = self.batches.next_rows()

    def _one_step(self) -> None:
        batch, o = self.batch, self.options
        row = {"train/step": self.step + 1, "data/epoch": batch.epoch, "data/supervised": batch.supervised}
        if batch.supervised == 0:
            # no loss, so no update and no place in any mean
            self.empty_steps += 1
            self._say(f"step {self.step + 1}: no token of its {o.batch} rows is supervised; left out "
                      f"({_some(self.batches.drawn_from())})")
            row |= {"train/loss": None, "train/grad_norm": None, "train/skipped": True}
            self._draw()
        else:
            micro = self.plan.shape.micro_rows
            result = self.trainer.step([batch.micro_batch(i, micro) for i in range(0, o.batch, micro)], batch.supervised, self._draw)
            self._note(result)
            self.times = result.times
            self.mean.add(result.loss, batch.supervised)
            row |= {"train/grad_norm": result.grad_norm, "train/lr": result.lr, "train/skipped": result.skipped}
            row |= result.times.metrics()
            if result.not_finite:
                row |= {"train/loss": result.loss, "train/not_finite_in": result.not_finite, "train/partial": result.partial}
        self.step += 1
        if self.step % o.log_every == 0 or self.step == o.steps:
            row |= self._rates(batch.sum_of_squares)
        if self.step == o.steps or (o.eval_every and self.step % o.eval_every == 0):
            row |= self._validate()
        self.wandb.log(self.metrics.write(row))
        if o.save and o.save_every and self.step % o.save_every == 0 and self.step < o.steps:
            self._save()

    def _note(self, result) -> None:
        """Says what was left out, and why."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        self.skipped_steps += result.skipped
        if result.not_finite:
            what = "skipped" if result.skipped else "partial: these were not updated"
            self._say(f"step {self.step + 1} {what}: not finite: {_some(result.not_finite)}")

    def _rates(self, sum_of_squares: int) -> dict:
        """Loss and speed of the steps since the last row that had them; attention's FLOPs by this step's documents."""
        from model.flops import step_flops
        from runtime.report import memory_metrics
        o, now = self.options, time.perf_counter()
        seconds = (now - self.row_began) / (self.step - self.rated_step)
        self.row_began, self.rated_step = now, self.step
        loss = self.mean.take()
        tokens = o.batch * o.seq
        self.progress.update(self.step, loss, tokens / seconds)
        flops = step_flops(self.config, tokens, sum_of_squares)
        row = {"perf/step_s": seconds, "perf/tokens_per_s": tokens / seconds, "perf/model_tflops": flops / seconds / 1e12}
        row |= memory_metrics()
        return row if loss is None else {"train/loss": loss} | row

    def _validate(self) -> dict:
        """Mean loss over the validation rows, in nats a token."""
        rows, shape, total = self.validation, self.plan.shape, 0.0
        for micro_batches in rows.groups(shape.micro_rows, shape.micro_batches):
            # the last rows may be an end and padding
            if any(micro_batch.supervised for micro_batch in micro_batches):
                total += self.trainer.engine.evaluate(micro_batches)
        loss = total / rows.supervised
        self._say(f"step {self.step}: validation loss {loss:.4f} nats a token")
        return {"val/loss": loss}

    # end

    def _finish(self) -> int:
        from runtime.report import stall_line
        o = self.options
        if self.step == o.steps and o.sample:
            self._say(f"sample: {self._sample(o.sample)}")
        if o.save and self.saved_step != self.step:
            self._save()
        if self.skipped_steps or self.empty_steps:
            print(f"left out since this start: {self.skipped_steps} not finite, {self.empty_steps} with nothing supervised",
                  file=sys.stderr)
        if self.times:
            print(f"report  last {stall_line(self.times)}")
        print(f"run     {self.run_dir}: metrics.jsonl, config.json" + (", checkpoints/" if o.save else ""))
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            print(f"error: {MAX_SKIPPED_IN_A_ROW} steps in a row were not finite: lower --lr, or look at the data of these steps",
                  file=sys.stderr)
            return 3
        if self.step < o.steps:
            print(f"stopped after step {self.step} of {o.steps}; go on with: python train.py --resume {self.run_dir}")
            return 130
        self.complete = True
        return 0

    def _save(self) -> None:
        from runtime import checkpoint
        from runtime.telemetry import strict
        began = time.perf_counter()
        meta = {"options": dataclasses.asdict(self.options), "model": dataclasses.asdict(self.config), "data": self.batches.fingerprint,
                "step": self.step, "applied_steps": self.trainer.state.applied_steps, "position": self.position,
                "losses": strict(self.mean.steps)}
        path = checkpoint.save(self.run_dir, self.step, self.trainer.records(), meta, self.options.keep_checkpoints)
        self.saved_step = self.step
        self._say(f"saved {path} in {time.perf_counter() - began:.1f} s")

    def _sample(self, length: int) -> str:
        """`length` tokens after PROMPT; the same for the same weights and seed."""
        import torch

        from data.batches import one_document
        generator = torch.Generator().manual_seed(self.options.seed)
        tokens = list(self.tokenizer.encode(PROMPT))
        for _ in range(length):
            context = one_document(tokens[-self.options.seq:])
            logits = self.trainer.engine.logits(context, len(context.tokens) - 1)[: self.tokenizer.vocab_size]
            token = torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1, generator=generator).item()
            if token == self.tokenizer.eos:
                break
            tokens.append(token)
        # what a model writes may hold control characters, which a terminal obeys
        return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in self.tokenizer.decode(tokens))

    def _say(self, line: str) -> None:
        self.progress.note(line) if self.progress else print(line, flush=True)


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else "")


class _Interrupt:
    """True from the first Ctrl-C or SIGTERM on: the step is finished and saved. The second one stops at once."""

    def __enter__(self) -> "_Interrupt":
        self._set = False
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self._set

    def _note(self, number, frame) -> None:
        if self._set:
            raise KeyboardInterrupt
        self._set = True
        # not print: the signal may have come in the middle of one
        os.write(2, b"\nstopping after this step; once more stops at once and loses what was not saved\n")


if __name__ == "__main__":
    sys.exit(main())
