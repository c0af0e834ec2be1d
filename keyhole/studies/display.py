"""What a person sees of a study: a live table of all arms on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from keyhole.studies.plan import Plan
from keyhole.studies.trial import Event, Task
from keyhole.training.display import duration

if TYPE_CHECKING:
    from rich.table import Table

PLAIN_EVERY = 10.0
"""Seconds between plain lines of progress."""
AUDIT_WEIGHT = 0.05
"""What an audit counts in the time left, beside a training."""


@dataclass
class _Arm:
    """What is known of one arm so far."""

    audit: str = "waiting"
    trials: int = 0
    done: int = 0
    running: dict[str, float] = field(default_factory=dict)
    """Trainings in progress, by name: how far each is."""
    losses: dict[str, float] = field(default_factory=dict)
    last: float | None = None
    speed: float | None = None
    trouble: str = ""


class Board:
    """Told of everything that happens in a study; keeps count, shows nothing."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.where = ""
        self.arms: dict[str, _Arm] = {}
        self.done = self.total = 0.0
        self._began, self._at_first = time.monotonic(), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The study is over, or broken off."""

    def begin(self, plan: Plan, where: str, tasks: list[Task]) -> None:
        """What will be done, and where."""
        self.plan, self.where = plan, where
        self.arms = {arm.name: _Arm() for arm in plan.arms}
        for task in tasks:
            self.total += _weight(task)
            self.arms[task.arm].trials += task.kind == "trial"
        self._began = time.monotonic()

    def found(self, task: Task, result: dict[str, Any]) -> None:
        """A task that was carried out before."""
        self._at_first += _weight(task)
        self._ended(task, result)

    def event(self, task: Task, event: Event, result: dict[str, Any] | None) -> None:
        """Something happened to a task."""
        arm = self.arms[task.arm]
        if event.what == "started" and task.kind == "trial":
            arm.running[task.name] = 0.0
        elif event.what == "started":
            arm.audit = "asking"
        elif event.what == "progress":
            arm.running[task.name] = min(event.progress, 1.0)
            arm.speed = event.row.get("tokens_per_second")
            arm.last = event.row.get("dev_loss", event.row.get("loss"))
        elif event.what == "done" and result is not None:
            self._ended(task, result)
        elif event.what in ("failed", "moved"):
            arm.running.pop(task.name, None)
            arm.trouble = event.message
            self.done += _weight(task) if event.what == "failed" else 0.0

    def _ended(self, task: Task, result: dict[str, Any]) -> None:
        arm = self.arms[task.arm]
        arm.running.pop(task.name, None)
        self.done += _weight(task)
        if task.kind == "audit":
            unfair = [f["name"] for f in result["findings"] if f["aspect"] == "honesty" and f["verdict"] == "fails"]
            arm.audit = f"fails: {unfair[0]}" if unfair else "honest"
            return
        arm.done += 1
        if result["state"] == "diverged":
            arm.trouble = "diverged"
        elif task.name.startswith("runs/"):
            arm.losses[task.name] = result["dev_loss"]

    @property
    def progress(self) -> float:
        """How much of the whole study is done."""
        going = sum(sum(arm.running.values()) for arm in self.arms.values())
        return min(1.0, (self.done + going) / max(self.total, 1e-9))

    def left(self) -> str:
        """The time left, by the speed since this process began."""
        return time_left(self._began, self._at_first / max(self.total, 1e-9), self.progress)


class Plain(Board):
    """A line where something ends, and now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def begin(self, plan: Plan, where: str, tasks: list[Task]) -> None:
        """Say what begins."""
        super().begin(plan, where, tasks)
        self._say(f"study {plan.name}: {len(plan.arms)} arms, {len(plan.seeds)} seeds, {where}")

    def event(self, task: Task, event: Event, result: dict[str, Any] | None) -> None:
        """Say what ended, and how far the study is."""
        super().event(task, event, result)
        if event.what == "done" and result is not None:
            self._say(f"{self.progress:6.1%}  {task.name}: {_outcome(task, result)}  {self.left()}")
        elif event.what in ("failed", "moved"):
            self._say(f"{self.progress:6.1%}  {task.name}: {event.what}: {event.message}")
        elif time.monotonic() - self._last > PLAIN_EVERY:
            self._say(f"{self.progress:6.1%}  {self.left()}")

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        print(text.rstrip(), file=sys.stderr, flush=True)  # noqa: T201


class Live(Board):
    """A table of all arms that moves."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        super().__init__()
        self._live = RichLive(console=Console(stderr=True), refresh_per_second=4, get_renderable=self._table)

    def begin(self, plan: Plan, where: str, tasks: list[Task]) -> None:
        """Show the table."""
        super().begin(plan, where, tasks)
        self._live.start()

    def __exit__(self, *error: object) -> None:
        if self._live.is_started:
            self._live.stop()

    def _table(self) -> Table:
        from rich import box
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        name = self.plan.name if self.plan else ""
        seeds = len(self.plan.seeds) if self.plan else 0
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            title=f"study {name}: {len(self.arms)} arms, {seeds} seeds, {self.where}",
            title_justify="left",
            caption=f"{self.progress:.0%} done  {self.left() if self.progress < 1 else ''}",
            caption_justify="left",
        )
        for column in ("arm", "audit", "trained", "", "dev loss so far", "tokens/s", ""):
            table.add_column(column, justify="right" if column in ("trained", "dev loss so far", "tokens/s") else "left")
        for key, arm in self.arms.items():
            part = (arm.done + sum(arm.running.values())) / max(arm.trials, 1)
            loss = f"{statistics.fmean(arm.losses.values()):.4f}" if arm.losses else ""
            going = f"({arm.last:.3f})" if arm.running and arm.last else ""
            table.add_row(
                Text(key, no_wrap=True, overflow="ellipsis"),
                Text(arm.audit, _COLOUR.get(arm.audit.partition(":")[0], "dim")),
                f"{arm.done}/{arm.trials}",
                ProgressBar(total=1.0, completed=min(part, 1.0), width=16),
                Text(f"{going} {loss}".strip(), "strike dim" if arm.audit.startswith("fails") else ""),
                f"{arm.speed:,.0f}" if arm.speed and arm.running else "",
                Text(arm.trouble, "red", no_wrap=True, overflow="ellipsis"),
            )
        return table


_COLOUR = {"honest": "green", "fails": "bold red"}


def time_left(began: float, first: float, progress: float) -> str:
    """How long it will still take what began with `first` of it done and has come to `progress`; nothing at first."""
    if progress <= first + 1e-6:
        return ""
    return f"{duration((time.monotonic() - began) / (progress - first) * (1 - progress))} left"


def choose_board(quiet: bool) -> Board:
    """A live table on a terminal, plain lines elsewhere."""
    if quiet:
        return Board()
    return Live() if sys.stderr.isatty() else Plain()


def _weight(task: Task) -> float:
    return 1.0 if task.kind == "trial" else AUDIT_WEIGHT


def _outcome(task: Task, result: dict[str, Any]) -> str:
    if task.kind == "audit":
        unfair = [
            found["name"] for found in result["findings"] if found["aspect"] == "honesty" and found["verdict"] == "fails"
        ]
        return f"fails honesty: {', '.join(unfair)}" if unfair else "honest"
    if result["state"] == "diverged":
        return "diverged"
    return f"dev loss {result['dev_loss']:.4f} after {result['seconds']:.1f} s"
