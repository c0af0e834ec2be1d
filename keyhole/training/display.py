"""What a person sees of a training: a live line on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

PLAIN_EVERY = 5.0  # seconds between plain lines


class Display(Protocol):
    """Told of everything that happens; shows what it likes."""

    def note(self, text: str) -> None:
        """A line that stays."""

    def update(self, row: dict[str, Any], progress: float) -> None:
        """A logged row, and how far the run is."""

    def close(self) -> None:
        """The run is over, or broken off."""


class Quiet:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def update(self, row: dict[str, Any], progress: float) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to end."""


class Plain:
    """A line now and then, for logs and pipes."""

    def __init__(self) -> None:
        self._last = 0.0
        self._clock = _Clock()

    def note(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)  # noqa: T201

    def update(self, row: dict[str, Any], progress: float) -> None:
        """Print a row where the last one is old enough, where it holds a dev loss, and at the end."""
        now = time.monotonic()
        if now - self._last >= PLAIN_EVERY or "dev_loss" in row or progress >= 1:
            self._last = now
            self.note(f"{progress:6.1%}  {describe(row)}  {self._clock.left(progress)}")

    def close(self) -> None:
        """Nothing to end."""


class Live:
    """A bar that moves, with loss, speed and time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._clock = _Clock()
        self._progress = Progress(
            TextColumn("[bold]{task.percentage:3.0f}%"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            transient=False,
        )
        self._task = self._progress.add_task("preparing", total=1.0)
        self._started = False
        self._dev = ""

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, highlight=False, markup=False)

    def update(self, row: dict[str, Any], progress: float) -> None:
        """Move the bar."""
        if not self._started:
            self._progress.start()
            self._started = True
        if "dev_loss" in row:
            self._dev = f"  dev {row['dev_loss']:.4f}"
        shown = {key: value for key, value in row.items() if key != "dev_loss"}
        text = f"{describe(shown)}{self._dev}  {self._clock.left(progress)}"
        self._progress.update(self._task, completed=min(progress, 1.0), description=text)

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._started:
            self._progress.stop()


def choose_display(quiet: bool = False) -> Display:
    """A live bar on a terminal, plain lines elsewhere."""
    if quiet:
        return Quiet()
    return Live() if sys.stderr.isatty() else Plain()


def describe(row: dict[str, Any]) -> str:
    """A logged row in words."""
    parts = [f"step {row['step']:,}", f"loss {row['loss']:.4f}"]
    parts += [f"dev {row['dev_loss']:.4f}"] if "dev_loss" in row else []
    return "  ".join([*parts, f"{row['tokens_per_second']:,.0f} tokens/s"])


class _Clock:
    """Time left, by the speed since this process began (a resumed run has a past that says nothing of now)."""

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None

    def left(self, progress: float) -> str:
        now = time.monotonic()
        if self._first is None:
            self._first = (now, progress)
        began, done = self._first
        if progress >= 1:
            return "done"
        if progress <= done:
            return ""
        seconds = (now - began) / (progress - done) * (1 - progress)
        return f"{duration(seconds)} left"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
