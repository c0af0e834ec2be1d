"""What a person sees of a search: a live table of its trials on a terminal, plain lines elsewhere, always on stderr."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from keyhole.studies.display import PLAIN_EVERY, time_left
from keyhole.studies.search.engine import Proposal
from keyhole.studies.search.plan import SearchPlan
from keyhole.studies.search.sampler import Trial
from keyhole.studies.search.space import Settings, name_of
from keyhole.studies.trial import Event

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 12
"""So many trials fit a screen: those in progress, and the best."""


@dataclass
class _Running:
    """A trial in progress."""

    settings: Settings
    progress: dict[int, float] = field(default_factory=dict)
    """How far each repeat is."""
    last: float | None = None


class SearchBoard:
    """Told of everything that happens in a search; keeps count, shows nothing."""

    def __init__(self) -> None:
        self.name, self.where, self.objective, self.goal = "", "", "", "lowest"
        self.total = self.repeats = 1
        self.running: dict[int, _Running] = {}
        self.over: list[Trial] = []
        self._began, self._at_first = time.monotonic(), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """The search is over, or broken off."""

    def begin(self, plan: SearchPlan, name: str, where: str, trials: list[Trial]) -> None:
        """What will be done, where, and what was done before."""
        self.name, self.where, self.objective, self.goal = name, where, plan.search.objective, plan.goal
        self.total, self.repeats = max(plan.trials, 1), plan.search.repeats
        self.over = [trial for trial in trials if trial.state != "running"]
        self._began, self._at_first = time.monotonic(), self.progress

    def began(self, proposal: Proposal) -> None:
        """A trial begins, or goes on."""
        self.running[proposal.number] = _Running(proposal.settings)

    def event(self, number: int, repeat: int, event: Event) -> None:
        """Something happened to one of its trainings."""
        running = self.running[number]
        if event.what == "progress":
            running.progress[repeat] = min(event.progress, 1.0)
            running.last = event.row.get("dev_loss", running.last)

    def ended(self, trial: Trial) -> None:
        """A trial came to its end."""
        self.running.pop(trial.number, None)
        self.over.append(trial)

    @property
    def progress(self) -> float:
        """How much of the whole search is done; a trial that ended early is done as well."""
        going = sum(sum(running.progress.values()) / self.repeats for running in self.running.values())
        return min(1.0, (len(self.over) + going) / self.total)

    @property
    def best(self) -> list[Trial]:
        """The trials with a value, the best first."""
        return ranked(self.over, self.goal)

    def left(self) -> str:
        """The time left, by the speed since this process began."""
        return time_left(self._began, self._at_first, self.progress)


def ranked(trials: list[Trial], goal: str) -> list[Trial]:
    """The trials with a finite value, the best first; of equal ones the first."""
    sign = -1.0 if goal == "highest" else 1.0
    found = [trial for trial in trials if trial.state == "complete" and not trial.diverged]
    return sorted(found, key=lambda trial: (sign * (trial.value or 0.0), trial.number))


def state_of(trial: Trial) -> str:
    """Its state in one word."""
    return "diverged" if trial.diverged else trial.state


def shown(settings: Settings) -> str:
    """Settings in one line."""
    return ", ".join(f"{key.partition('.')[2]} {show_value(value)}" for key, value in settings.items())


def show_value(value: Any) -> str:
    """A value for a table."""
    if isinstance(value, dict) and "name" in value:
        options = ", ".join(f"{key}={show_value(item)}" for key, item in value.items() if key != "name")
        return f"{value['name']}({options})" if options else str(value["name"])
    if isinstance(value, list | tuple):
        return " + ".join(map(show_value, value))
    return f"{value:.4g}" if isinstance(value, float) else name_of(value)


class PlainSearch(SearchBoard):
    """A line where a trial ends, and now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def begin(self, plan: SearchPlan, name: str, where: str, trials: list[Trial]) -> None:
        """Say what begins."""
        super().begin(plan, name, where, trials)
        before = f", {len(self.over)} done before" if self.over else ""
        self._say(f"search {name}: {self.total} trials by {plan.search.sampler}, {where}{before}")

    def event(self, number: int, repeat: int, event: Event) -> None:
        """Say how far the search is."""
        super().event(number, repeat, event)
        if event.what == "moved":
            self._say(f"{self.progress:6.1%}  trial {number}: {event.message}")
        elif time.monotonic() - self._last > PLAIN_EVERY:
            self._say(f"{self.progress:6.1%}  {self.left()}")

    def ended(self, trial: Trial) -> None:
        """Say what a trial came to."""
        super().ended(trial)
        value = "" if trial.state != "complete" or trial.diverged else f" {self.objective} {trial.value:.4f}"
        came = value or f" {state_of(trial)}" + (f": {trial.failure}" if trial.failure else "")
        self._say(f"{self.progress:6.1%}  trial {trial.number} ({shown(trial.settings)}):{came}  {self.left()}")

    def _say(self, text: str) -> None:
        self._last = time.monotonic()
        print(text.rstrip(), file=sys.stderr, flush=True)  # noqa: T201


class LiveSearch(SearchBoard):
    """A table of the trials in progress and of the best so far, that moves."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__()
        self._live = Live(console=Console(stderr=True), refresh_per_second=4, get_renderable=self._table)

    def begin(self, plan: SearchPlan, name: str, where: str, trials: list[Trial]) -> None:
        """Show the table."""
        super().begin(plan, name, where, trials)
        self._live.start()

    def __exit__(self, *error: object) -> None:
        if self._live.is_started:
            self._live.stop()

    def _table(self) -> Table:
        from rich import box
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        over = {word: sum(state_of(trial) == word for trial in self.over) for word in ("pruned", "diverged", "failed")}
        said = "".join(f", {count} {word}" for word, count in over.items() if count)
        table = Table(
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            title=f"search {self.name}: {len(self.over)} of {self.total} trials{said}, {self.where}",
            title_justify="left",
            caption=f"{self.progress:.0%} done  {self.left()}",
            caption_justify="left",
        )
        for column in ("trial", "settings", "", self.objective, "state"):
            table.add_column(column, justify="right" if column in ("trial", self.objective) else "left")
        for number, running in sorted(self.running.items()):
            part = sum(running.progress.values()) / self.repeats
            last = f"({running.last:.4f})" if running.last is not None and self.objective == "dev_loss" else ""
            bar = ProgressBar(total=1.0, completed=min(part, 1.0), width=16)
            table.add_row(str(number), _cell(shown(running.settings)), bar, last, Text("running", "cyan"))
        for place, trial in enumerate(self.best[: max(3, SHOWN - len(self.running))]):
            state = Text("best so far" if place == 0 else "complete", "bold green" if place == 0 else "dim")
            table.add_row(str(trial.number), _cell(shown(trial.settings)), "", f"{trial.value:.4f}", state)
        return table


def _cell(text: str) -> Any:
    from rich.text import Text

    return Text(text, no_wrap=True, overflow="ellipsis")


def choose_search_board(quiet: bool) -> SearchBoard:
    """A live table on a terminal, plain lines elsewhere."""
    if quiet:
        return SearchBoard()
    return LiveSearch() if sys.stderr.isatty() else PlainSearch()
