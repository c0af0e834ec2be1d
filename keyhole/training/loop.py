"""The training loop: data, steps, dev loss, metrics, checkpoints, and every way in which it can end.

text ─► batches ─► engine.advance ─► metrics.jsonl, checkpoints ─► Run
"""

from __future__ import annotations

import math
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, KeyholeError, RunStopped
from keyhole.core.files import read_json, write_json
from keyhole.model.count import count
from keyhole.model.lm import LM, build
from keyhole.record import checkpoint
from keyhole.record.create import only_writer, refuse_if_changed, refuse_if_none, refuse_if_taken, start_record
from keyhole.record.environment import differences
from keyhole.record.metrics import NAME as METRICS
from keyhole.record.metrics import MetricsWriter
from keyhole.record.run import Run, load_weights, open_run
from keyhole.text import Dataset, load_tokenizer, open_dataset
from keyhole.training.budget import Budget, Spent, due
from keyhole.training.display import Display, Quiet, choose_display
from keyhole.training.engine import Engine, Step
from keyhole.training.health import Watch, not_a_number
from keyhole.training.optim import read_options
from keyhole.training.parallel import Parted, World, join_world
from keyhole.training.precision import Precision, choose_precision
from keyhole.training.schedule import build_schedule
from keyhole.training.snapshot import capture, is_sharded, restore, seed_chance

SAVE_SECONDS = 30.0
EVALS, LOGS = 10, 100  # how often in a run, where the recipe does not say


class Interrupted(KeyholeError):
    """The user stopped a run; everything is saved."""

    exit_code = 130


def train(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    display: Display | None = None,
) -> Run:
    """Carry a recipe out in the directory `out`; with `resume`, go on where it was stopped."""
    out = Path(out) if out is not None else Path("runs") / recipe.hash
    world = join_world()
    shown = (display or choose_display(quiet)) if world.writes else Quiet()
    with ExitStack() as open_things:
        open_things.callback(shown.close)
        with world.together():
            if world.writes:
                (refuse_if_none if resume else refuse_if_taken)(out)
                open_things.enter_context(only_writer(out))
            training = _Training(recipe, out, world, resume, shown)
        open_things.callback(training.close)
        with _company(world, out):
            training.begin()
            return training.run()


class _Training:
    """One run in progress. Making one checks all that can be checked, and writes nothing."""

    def __init__(self, recipe: Recipe, out: Path, world: World, resume: bool, display: Display) -> None:
        self.recipe, self.out, self.world, self.resume, self.display = recipe, out, world, resume, display
        world.refuse(recipe.train)
        self.budget = Budget.of(recipe.train)
        self.schedule = build_schedule(recipe.train.schedule, recipe.train.warmup)
        read_options(recipe.train.optimizer)  # its options are checked before anything is read
        tokenizer = load_tokenizer(out) if resume else None
        self.data: Dataset = open_dataset(recipe.data, recipe.folder, tokenizer=tokenizer)
        if resume:
            refuse_if_changed(out, recipe, self.data.hash)
        self.known: dict[str, Any] | None = read_json(out / "environment.json") if resume else None
        self.model = build(recipe, self.data.vocab)
        self.saved = self._find_checkpoint() if resume else None
        self.spent = Spent()
        self.window: list[float] = [0.0, 0]
        self.watch = Watch(math.log(self.data.vocab))
        self.metrics: MetricsWriter | None = None
        self.parameters = 0

    def begin(self) -> None:
        """Put everything where the run starts or goes on."""
        device = f"cuda:{self.world.local}" if torch.cuda.is_available() else "cpu"
        size = count(self.model, self.recipe.data.block)
        train = self.recipe.train
        self.engine = Engine(self.model, train, world=self.world, precision=self._precision(device), device=device)
        seed_chance(train.seed, self.world)
        self.parameters = size.total
        self._tell(size.total)
        if self.saved is not None:
            self._go_on_from(self.saved)
        elif self.resume:
            self.display.note("there is no checkpoint yet: starting from the first step")
        with self.world.together():
            if self.world.writes:
                self._open_record()

    def run(self) -> Run:
        """Train until the budget is spent, a finding stops the run, or the user does."""
        if self.budget.progress(self.spent) >= 1:
            self.display.note(f"{self.out} is already trained to the end of its budget")
            return Run(self.out)
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
        return open_run(self.out) if self.world.writes else Run(self.out)

    def close(self) -> None:
        """Close what is open."""
        if self.metrics is not None:
            self.metrics.close()

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
        if self.metrics is not None:
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
        if self.metrics is not None:
            self.metrics.write(row)
        self.display.update(row, after)

    def _dev_loss(self) -> dict[str, float]:
        from keyhole.use.evaluate import score_dev

        measured = score_dev(self._whole_model(), self.data, self.recipe.train.eval_tokens)
        found = {"dev_loss": measured.loss, "dev_sentence_perplexity": measured.sentence_perplexity}
        return found | ({} if measured.bits_per_byte is None else {"dev_bits_per_byte": measured.bits_per_byte})

    def _whole_model(self) -> LM:
        """The model in float32, whole in this process."""
        if not is_sharded(self.engine):
            return self.engine.model
        weights, _ = capture(self.engine)
        with torch.random.fork_rng(devices=[]):
            model = LM(self.recipe.model, self.data.vocab, self.recipe.data.block, self.recipe.folder).to(
                self.engine.device
            )
        load_weights(model, weights, "the shared model")
        return model

    def _save_due(self, before: float, after: float, last: float) -> bool:
        every = self.recipe.train.save_every
        if every:
            return due(every, 1, self.spent.step, before, after)
        return self.world.any(time.monotonic() - last >= SAVE_SECONDS)

    def _save(self, *, done: bool) -> None:
        weights, optimizer = capture(self.engine)
        with self.world.together():
            if self.metrics is None:
                return
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

    def _interrupt(self, stopped: list[int]) -> None:
        self._save(done=False)
        name = signal.Signals(stopped[0]).name if stopped else "another process"
        raise Interrupted(
            f"stopped by {name} after step {self.spent.step:,}; everything is saved. "
            f"Go on with: keyhole train {shlex.quote(str(self.out / 'recipe.toml'))} --resume"
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

    def _precision(self, device: str) -> Precision:
        """The precision that this run began in, whatever a noisy probe would say now; process 0 chooses for a new one."""
        if self.known is not None:
            return Precision(self.known["precision"]["name"], "as this run began")
        chosen = choose_precision(self.recipe.train.precision, device)
        low = self.world.first(float(chosen.name == "bfloat16"))
        return Precision("bfloat16" if low else "float32", chosen.reason)

    def _go_on_from(self, saved: checkpoint.Checkpoint) -> None:
        for note in [*differences(self.known or {}), *restore(self.engine, saved)]:
            self.display.note(f"warning: {note}")
        state = saved.state
        self.spent = Spent(state["step"], state["tokens"], state["seconds"])
        self.window = state["window"]
        self.watch.restore(state["watch"])
        self.display.note(f"going on after step {saved.step:,}")

    def _open_record(self) -> None:
        """Write the start of a new record, or cut an old one back to where its checkpoint was."""
        if not self.resume:
            precision = {"name": self.engine.precision.name, "reason": self.engine.precision.reason}
            notes = {"precision": precision, "processes": self.world.size, "parameters": self.parameters}
            start_record(self.out, self.recipe, self.data, notes)
        else:
            (self.out / "findings.json").unlink(missing_ok=True)
            for path in checkpoint.set_aside(self.out / "checkpoints", after=self.spent.step):
                self.display.note(f"warning: the damaged checkpoint is now {path}")
        self.metrics = MetricsWriter(self.out / METRICS, self.saved.state["metrics_offset"] if self.saved else 0)
        if self.metrics.lost:
            self.display.note(
                f"warning: {self.out / METRICS} has been cut short; rows before step {self.spent.step:,} are lost"
            )

    def _tell(self, parameters: int) -> None:
        data, precision = self.data.description, self.engine.precision
        self.display.note(f"{'resuming' if self.resume else 'training'} {self.out}")
        train = f"{data['train_tokens']:,} tokens train" if "train_tokens" in data else "samples that never come again"
        self.display.note(f"data       {data['source']}: {train}, {data['dev_tokens']:,} dev")
        self.display.note(f"model      {parameters:,} parameters, vocabulary {self.data.vocab:,}")
        self.display.note(f"precision  {precision.name}: {precision.reason}")
        if kernel := self.engine.kernel(self.recipe.data.block):
            self.display.note(f"attention  {kernel}")


@contextmanager
def _company(world: World, out: Path) -> Iterator[None]:
    """Where several processes train, say in a sentence that another one is gone."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not any(word in str(error) for word in ("Connection", "gloo", "NCCL")):
            raise
        raise Parted(
            "another process of this run ended, which says why if it could; "
            f"go on with: torchrun --nproc-per-node {world.size} -m keyhole train "
            f"{shlex.quote(str(out / 'recipe.toml'))} --resume"
        ) from error


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
