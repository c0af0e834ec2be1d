"""The training loop: data, steps, dev loss, metrics, checkpoints, and every way in which it can end.

    text ─► batches ─► engine.advance ─► metrics.jsonl, checkpoints ─► Run
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, KeyholeError, RunStopped
from keyhole.core.files import read_json, write_json
from keyhole.core.findings import Finding
from keyhole.model.count import count
from keyhole.model.lm import build
from keyhole.record import checkpoint
from keyhole.record.create import only_writer, refuse_if_changed, refuse_if_taken, start_record
from keyhole.record.metrics import NAME as METRICS
from keyhole.record.metrics import MetricsWriter
from keyhole.record.run import Run, open_run
from keyhole.text import Dataset, load_tokenizer, open_dataset
from keyhole.training.budget import Budget, Spent, due
from keyhole.training.display import Display, Quiet, choose_display
from keyhole.training.engine import Engine, Step
from keyhole.training.health import Watch, not_a_number
from keyhole.training.parallel import World, join_world
from keyhole.training.precision import Precision
from keyhole.training.schedule import build_schedule
from keyhole.training.snapshot import capture, restore, seed_chance

SAVE_SECONDS = 30.0
EVALS, LOGS = 10, 100  # how often in a run, where the recipe does not say


class Interrupted(KeyholeError):
    """The user stopped a run; everything is saved."""

    exit_code = 130


def train(
    recipe: Recipe, out: str | Path | None = None, *, resume: bool = False, quiet: bool = False, display: Display | None = None
) -> Run:
    """Carry a recipe out in the directory `out`; with `resume`, go on where it was stopped."""
    out = Path(out) if out is not None else Path("runs") / recipe.hash
    world = join_world()
    shown = (display or choose_display(quiet)) if world.writes else Quiet()
    try:
        if not world.writes:
            return _Training(recipe, out, world, resume, shown).run()
        with only_writer(out) if resume or not out.exists() else _checked(out):
            return _Training(recipe, out, world, resume, shown).run()
    finally:
        shown.close()


@contextmanager
def _checked(out: Path) -> Iterator[None]:
    refuse_if_taken(out)
    with only_writer(out):
        yield


class _Training:
    """One run in progress."""

    def __init__(self, recipe: Recipe, out: Path, world: World, resume: bool, display: Display) -> None:
        self.recipe, self.out, self.world, self.display = recipe, out, world, display
        if not resume and world.writes:
            refuse_if_taken(out)
        world.share(recipe.train.batch)  # refuse a batch that cannot be shared before anything is written
        self.budget = Budget.of(recipe.train)
        self.schedule = build_schedule(recipe.train.schedule, recipe.train.warmup)
        saved = self._find_checkpoint() if resume else None
        if resume and not (out / "recipe.toml").is_file():
            raise InputError(f"there is no run to resume in {out}; leave --resume out to start one")
        tokenizer = load_tokenizer(out) if resume else None
        self.data: Dataset = open_dataset(recipe.data, recipe.folder, tokenizer=tokenizer)
        if resume:
            refuse_if_changed(out, recipe, self.data.hash)
        # A run that began in one precision goes on in it, whatever a noisy probe would say now.
        known = read_json(out / "environment.json")["precision"] if resume else None
        model = build(recipe, self.data.vocab)
        device = f"cuda:{world.local}" if torch.cuda.is_available() else "cpu"
        size = count(model, recipe.data.block)
        precision = Precision(known["name"], "as this run began") if known else None
        self.engine = Engine(model, recipe.train, world=world, precision=precision, device=device)
        self.spent = Spent()
        self.window: list[float] = [0.0, 0]
        self.watch = Watch(math.log(self.data.vocab))
        seed_chance(recipe.train.seed, world)
        self._tell(size.total, resume)
        self._begin(saved, resume)

    def run(self) -> Run:
        """Train until the budget is spent, a finding stops the run, or the user does."""
        if self.budget.progress(self.spent) >= 1:
            self.display.note(f"{self.out} is already trained to the end of its budget")
            return open_run(self.out)
        with _signals() as stopped:
            last_save = time.monotonic()
            while (before := self.budget.progress(self.spent)) < 1:
                step = self._step(before)
                self._check(step)
                after = self.budget.progress(self.spent)
                self._log(step, before, after)
                if after >= 1:
                    break
                if self.world.any(bool(stopped)):
                    self._interrupt(stopped)
                if self._save_due(before, after, last_save):
                    self._save(done=False)
                    last_save = time.monotonic()
            self._save(done=True)
        self.metrics.close()
        return open_run(self.out) if self.world.writes else Run(self.out)

    def _step(self, progress: float) -> Step:
        began = time.perf_counter()
        batch = self.recipe.train.batch
        x, y = self.data.batch(self.spent.step * batch, batch)
        step = self.engine.advance(x, y, self.schedule.factor(self.spent.step, progress))
        self.spent.step += 1
        self.spent.tokens += step.targets
        seconds = time.perf_counter() - began
        # Clocks differ between processes; a budget of seconds must end at the same step in all of them.
        self.spent.seconds += self.world.first(seconds) if self.budget.unit == "seconds" else seconds
        self.window = [self.window[0] + step.loss, self.window[1] + 1]
        return step

    def _check(self, step: Step) -> None:
        finding = self.watch.see(step.loss) if step.finite else not_a_number(self.spent.step, step)
        if finding is None:
            return
        if self.world.writes:
            self.metrics.sync()
            write_json(self.out / "findings.json", [finding.to_dict()])
        raise RunStopped(finding)

    def _log(self, step: Step, before: float, after: float) -> None:
        train = self.recipe.train
        evaluate = due(train.eval_every, EVALS, self.spent.step, before, after)
        if not evaluate and not due(train.log_every, LOGS, self.spent.step, before, after):
            return
        row: dict[str, Any] = {
            "step": self.spent.step,
            "loss": self.window[0] / self.window[1],
            "grad_norm": step.grad_norm,
            "rate": train.rate * self.schedule.factor(self.spent.step - 1, before),
            "tokens": self.spent.tokens,
            "seconds": round(self.spent.seconds, 4),
            "tokens_per_second": round(self.spent.tokens / max(self.spent.seconds, 1e-9), 1),
        }
        if evaluate:
            row |= self._dev_loss()
        self.window = [0.0, 0]
        if self.world.writes:
            self.metrics.write(row)
        self.display.update(row, after)

    def _dev_loss(self) -> dict[str, float]:
        from keyhole.use.evaluate import score

        whole = self.recipe.train.eval_tokens == 0
        size = self.data.dev_bytes if whole else None
        measured = score(self.engine.model, self.data.dev(rows=32, tokens=self.recipe.train.eval_tokens), size)
        found = {"dev_loss": measured.loss, "dev_sentence_perplexity": measured.sentence_perplexity}
        return found | ({} if measured.bits_per_byte is None else {"dev_bits_per_byte": measured.bits_per_byte})

    def _save_due(self, before: float, after: float, last: float) -> bool:
        every = self.recipe.train.save_every
        if every:
            return due(every, 1, self.spent.step, before, after)
        return self.world.any(time.monotonic() - last >= SAVE_SECONDS)

    def _save(self, *, done: bool) -> None:
        weights, optimizer = capture(self.engine)
        if self.world.writes:
            self.metrics.sync()
            state = {
                "step": self.spent.step,
                "tokens": self.spent.tokens,
                "seconds": self.spent.seconds,
                "window": self.window,
                "watch": self.watch.state(),
                "metrics_offset": self.metrics.offset,
                "processes": self.world.size,
                "done": done,
            }
            checkpoint.save(self.out / "checkpoints", weights, optimizer, state)
        self.world.wait()

    def _interrupt(self, stopped: list[int]) -> None:
        self._save(done=False)
        self.metrics.close()
        name = signal.Signals(stopped[0]).name if stopped else "another process"
        raise Interrupted(
            f"stopped by {name} after step {self.spent.step:,}; everything is saved. "
            f"Go on with: keyhole train {self.out / 'recipe.toml'} --resume"
        )

    def _find_checkpoint(self) -> checkpoint.Checkpoint | None:
        folder = self.out / "checkpoints"
        saved, faults = checkpoint.latest(folder)
        for fault in faults:
            self.display.note(f"warning: {fault}")
        if faults and saved is None:
            raise InputError(f"no checkpoint in {folder} is whole ({faults[0]}); start a new run with another --out")
        if faults and saved is not None:
            self.display.note(f"warning: going on from the older {saved.path.name}")
        return saved

    def _begin(self, saved: checkpoint.Checkpoint | None, resume: bool) -> None:
        offset = 0
        if saved is not None:
            for note in restore(self.engine, saved):
                self.display.note(f"warning: {note}")
            state = saved.state
            self.spent = Spent(state["step"], state["tokens"], state["seconds"])
            self.window, offset = state["window"], state["metrics_offset"]
            self.watch.restore(state["watch"])
            self.display.note(f"going on after step {saved.step:,}")
        precision = {"name": self.engine.precision.name, "reason": self.engine.precision.reason}
        if self.world.writes:
            if not resume:
                start_record(self.out, self.recipe, self.data, {"precision": precision, "processes": self.world.size})
            (self.out / "findings.json").unlink(missing_ok=True)
            self.metrics = MetricsWriter(self.out / METRICS, offset)
        else:
            self.metrics = MetricsWriter(Path("/dev/null"))
        self.world.wait()

    def _tell(self, parameters: int, resume: bool) -> None:
        data, precision = self.data.description, self.engine.precision
        self.display.note(f"{'resuming' if resume else 'training'} {self.out}")
        self.display.note(f"data       {data['source']}: {data['train_tokens']:,} tokens train, {data['dev_tokens']:,} dev")
        self.display.note(f"model      {parameters:,} parameters, vocabulary {self.data.vocab:,}")
        self.display.note(f"precision  {precision.name}: {precision.reason}")
        if kernel := self.engine.kernel(self.recipe.data.block):
            self.display.note(f"attention  {kernel}")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and termination instead of dying of them; a second Ctrl-C is obeyed at once."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def remember(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
