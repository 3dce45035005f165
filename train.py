"""Trains a decoder language model on one GPU, or on a CPU, with its state in host memory.

    python train.py                                     a small model on Python's own sources, about a minute
    python train.py --model qwen2.5-7b --data *.txt     7.6 B parameters on one GPU
    python train.py --model 120b --plan                 what that would take
    python train.py --resume runs/tiny-1201-101500      goes on where a run stopped

Exit code 0: the run is complete. 2: something asked for is wrong, or does not fit. 3: too many steps in a row were not
finite. 130: stopped by Ctrl-C or SIGTERM, after the step was finished and saved.
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

# torch's CPU threads sleep while they wait for each other: spinning, a step takes ten times as long on a shared machine.
# libgomp looks once, when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

MAX_SKIPPED_IN_A_ROW = 10
# rows of validation text, and how a sample is drawn
VALIDATION_ROWS = 64
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


class Run:
    """One run: what was asked for, the plan, and the loop."""

    def __init__(self, given: argparse.Namespace):
        from data.batches import Batches, evaluation_rows, split
        from data.sources import open_source
        from data.tokenizer import ByteTokenizer
        from model.config import preset
        from runtime import checkpoint, machine, plan
        from runtime.trainer import choose_ops
        self.machine = machine.detect(machine.parse_bytes(given.host_memory, "--host-memory") if given.host_memory else None)
        self.saved, self.records = checkpoint.newest(given.resume) if given.resume else (None, None)
        o, self.changes = resolve(given, self.saved and self.saved["options"], self.machine.gpu_name is not None)
        self.options = o
        if o.device == "cuda":
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
        request = plan.Request(self.config, o.seq, o.batch, o.micro_batch, o.precision, o.grads, o.clip, o.device)
        self.plan = plan.make_plan(request, self.machine, self.ops)
        self.step = self.skipped_in_a_row = self.empty_steps = 0

    def main(self, plan_only: bool) -> int:
        from runtime.plan import refuse_unless_fits
        print(self.plan.page(), flush=True)
        refuse_unless_fits(self.plan, self.ops)
        if plan_only:
            return 0
        with _Interrupt() as stopped, contextlib.ExitStack() as opened:
            self._open(opened)
            while self.step < self.options.steps and not stopped and self.skipped_in_a_row < MAX_SKIPPED_IN_A_ROW:
                self._one_step()
            return self._finish(bool(stopped))

    # start

    def _open(self, opened: contextlib.ExitStack) -> None:
        """Takes the run directory, host memory and the device; draws or loads the weights."""
        from model.layout import num_params
        from runtime import checkpoint
        from runtime.host import CudaPinner, NoPinner
        from runtime.optimizer import AdamW, Schedule
        from runtime.plan import STATE_BYTES
        from runtime.progress import Progress, taking_memory
        from runtime.streams import cpu_streams, cuda_streams
        from runtime.telemetry import LossMean, MetricsLog, Wandb
        from runtime.trainer import Trainer
        o, cuda = self.options, self.options.device == "cuda"
        config = {"options": dataclasses.asdict(o), "model": dataclasses.asdict(self.config), "data": self.batches.fingerprint}
        opened.enter_context(checkpoint.RunLock(self.run_dir))
        checkpoint.claim(self.run_dir, config, resuming=self.saved is not None)
        if self.saved:
            checkpoint.check_same_run(self.saved, config, ("model", "data"))
        if o.save:
            saves = 1 + (o.steps // o.save_every if o.save_every else 0)
            checkpoint.check_space(self.run_dir, STATE_BYTES * num_params(self.config), keep=o.keep_checkpoints, saves=saves)
        adamw = AdamW(Schedule(o.schedule, o.lr, o.warmup, o.steps), o.beta1, o.beta2, o.eps, o.weight_decay, o.clip, o.max_norm)
        self.wandb = Wandb(o.wandb, self.run_dir, config, self.run_dir.name)
        opened.callback(self.wandb.close)
        self.trainer = Trainer(self.plan, adamw, self.ops, cuda_streams() if cuda else cpu_streams(), CudaPinner() if cuda else NoPinner(),
                               o.threads or self.machine.cpu_cores, taking_memory())
        opened.callback(self.trainer.close)
        if self.saved:
            self._load()
        else:
            self.trainer.state.initialize(o.seed, o.device)
        self.metrics = MetricsLog(self.run_dir)
        opened.callback(self.metrics.close)
        self.mean = LossMean()
        self.progress = Progress(o.steps, start=self.step)
        opened.callback(self.progress.close)
        self._draw()
        self.row_began = time.perf_counter()

    def _load(self) -> None:
        self.trainer.load(self.records, self.saved["applied_steps"])
        self.batches.load_state(self.saved["position"])
        self.step = self.saved["step"]
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
            where = "epoch {epoch}, document {document}, offset {offset}".format(**self.position)
            self._say(f"step {self.step + 1}: no token of its {o.batch} rows is supervised; left out ({where})")
            row |= {"train/loss": None, "train/skipped": True}
            self._draw()
        else:
            micro = self.plan.shape.micro_rows
            result = self.trainer.step([batch.micro_batch(i, micro) for i in range(0, o.batch, micro)], batch.supervised, self._draw)
            self._note(result)
            self.mean.add(None if result.skipped else result.loss, batch.supervised)
            row |= {"train/grad_norm": result.grad_norm, "train/lr": result.lr, "train/skipped": result.skipped}
            row |= result.times.metrics()
            if result.not_finite:
                row |= {"train/loss": result.loss, "train/not_finite_in": result.not_finite, "train/partial": result.partial}
        self.step += 1
        if self.step % o.log_every == 0 or self.step == o.steps:
            row |= self._rates()
        if self.step == o.steps or (o.eval_every and self.step % o.eval_every == 0):
            row |= self._validate()
        self.wandb.log(self.metrics.write(row))
        if o.save and o.save_every and self.step % o.save_every == 0 and self.step < o.steps:
            self._save()

    def _note(self, result) -> None:
        """Says what was left out, and why."""
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if result.not_finite:
            what = "skipped" if result.skipped else "partial: these were not updated"
            self._say(f"step {self.step + 1} {what}: not finite: {', '.join(result.not_finite)}")

    def _rates(self) -> dict:
        """Loss and speed of the steps since the last row that had them."""
        from model.flops import step_flops
        o, now = self.options, time.perf_counter()
        steps = o.log_every if self.step % o.log_every == 0 else self.step % o.log_every
        seconds, self.row_began = (now - self.row_began) / steps, now
        loss = self.mean.take()
        tokens = o.batch * o.seq
        self.progress.update(self.step, loss, tokens / seconds)
        flops = step_flops(self.config, tokens, self.batch.sum_of_squares)
        row = {"perf/step_s": seconds, "perf/tokens_per_s": tokens / seconds, "perf/model_tflops": flops / seconds / 1e12}
        return row if loss is None else {"train/loss": loss} | row

    def _validate(self) -> dict:
        """Mean loss over the validation rows, in nats a token."""
        rows, shape, total = self.validation, self.plan.shape, 0.0
        for micro_batches in rows.groups(shape.micro_rows, shape.micro_batches):
            total += self.trainer.engine.evaluate(micro_batches)
        loss = total / rows.supervised
        self._say(f"step {self.step}: validation loss {loss:.4f} nats a token")
        return {"val/loss": loss}

    # end

    def _finish(self, interrupted: bool) -> int:
        o = self.options
        if self.step == o.steps and o.sample:
            self._say(f"sample: {self._sample(o.sample)}")
        if o.save:
            self._save()
        print(f"run     {self.run_dir}: metrics.jsonl, config.json" + (", checkpoints/" if o.save else ""))
        if interrupted:
            print(f"stopped after step {self.step} of {o.steps}; go on with: python train.py --resume {self.run_dir}")
            return 130
        if self.step < o.steps:
            print(f"error: {MAX_SKIPPED_IN_A_ROW} steps in a row were not finite: lower --lr, or look at the data of these steps",
                  file=sys.stderr)
            return 3
        return 0

    def _save(self) -> None:
        from runtime import checkpoint
        began = time.perf_counter()
        meta = {"options": dataclasses.asdict(self.options), "model": dataclasses.asdict(self.config), "data": self.batches.fingerprint,
                "step": self.step, "applied_steps": self.trainer.state.applied_steps, "position": self.position}
        path = checkpoint.save(self.run_dir, self.step, self.trainer.records(), meta, self.options.keep_checkpoints)
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
        return self.tokenizer.decode(tokens)

    def _say(self, line: str) -> None:
        self.progress.note(line) if hasattr(self, "progress") else print(line, flush=True)


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
        print("\nstopping after this step; once more stops at once and loses what was not saved", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
