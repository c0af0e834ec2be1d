"""Carrying a search out: each trial is proposed when there is room for it, trained once for each seed, and told.

plan ─► prepare ─► ask ─► tasks ─► tell ─► ask ... ─► SearchResult

What a training found is a file in its run directory, what a trial came to stands in the search's storage. A search that is
stopped in any way goes on with the trials that were under way, each from its last checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keyhole.core.errors import InputError
from keyhole.record.create import has_begun, only_writer
from keyhole.studies.execute import Executor, build_executor, refuse_executor
from keyhole.studies.prepare import loss_alone
from keyhole.studies.search.display import SearchBoard, choose_search_board
from keyhole.studies.search.engine import KNOWN, Proposal, Search
from keyhole.studies.search.plan import SearchPlan
from keyhole.studies.search.prepare import SEARCH, prepare_search
from keyhole.studies.search.result import SearchResult, write_best
from keyhole.studies.search.sampler import Trial
from keyhole.studies.study import interruptible
from keyhole.studies.trial import Event, Task


def search(
    source: str | Path | SearchPlan,
    out: str | Path | None = None,
    *,
    trials: int | None = None,
    workers: int | None = None,
    on: str = "local",
    resume: bool = False,
    quiet: bool = False,
) -> SearchResult:
    """Carry a search out in the directory `out`; with `resume`, go on where it was stopped, or with more trials."""
    if isinstance(source, SearchPlan) and trials is not None:
        raise InputError("trials is for a search's file; a plan has its own: SearchPlan.load(path, trials=...)")
    if not isinstance(source, str | Path | SearchPlan):
        raise InputError(f"a search is a TOML file's path or a SearchPlan, not {source!r}; SearchPlan.parse makes one")
    plan = source if isinstance(source, SearchPlan) else SearchPlan.load(source, trials=trials)
    out = Path(out) if out is not None else _default_out(source)
    refuse_executor(on, workers)
    with only_writer(out, "search", "carrying out a search"), interruptible(out, "search", SEARCH, KNOWN):
        plan = prepare_search(plan, out, resume=resume)
        with (
            choose_search_board(quiet) as board,
            Search(plan, out) as engine,
            build_executor(on, out, workers) as executor,
        ):
            has_begun(out)
            _Conduct(engine, executor, board).run()
            result = SearchResult(out, plan, engine.trials())
        write_best(result)
    return result


def _default_out(source: str | Path | SearchPlan) -> Path:
    """The search.toml of a search's directory goes on there; any other search goes to runs/NAME."""
    if isinstance(source, SearchPlan):
        return Path("runs", "search")
    path = Path(source)
    return path.parent if path.name == SEARCH and (path.parent / KNOWN).is_file() else Path("runs", path.stem)


@dataclass
class _Going:
    """A trial in progress."""

    proposal: Proposal
    tasks: list[Task]
    """One for each seed."""
    open: set[str] = field(default_factory=set)
    """The tasks that an executor has, by name."""
    values: dict[int, float] = field(default_factory=dict)
    """The objective of each repeat that has ended."""


class _Conduct:
    """One search in progress: between those who propose, those who train, and those who watch."""

    def __init__(self, engine: Search, executor: Executor, board: SearchBoard) -> None:
        self.engine, self.executor, self.board = engine, executor, board
        self.plan, self.out = engine.plan, engine.folder
        self._going: dict[int, _Going] = {}
        self._owners: dict[str, tuple[int, int]] = {}
        """Task name -> number of its trial, and which repeat it is."""

    def run(self) -> None:
        """Until nothing is left to try."""
        self.board.begin(self.plan, self.out.name, self.executor.where, self.engine.trials())
        self.executor.run(self._tasks(), self._watch)

    def _tasks(self) -> Iterator[Task]:
        """The next training to do, thought of when it is asked for."""
        while asked := self.engine.ask():
            proposal = asked[0]
            going = self._going[proposal.number] = _Going(proposal, self._tasks_of(proposal))
            self.board.began(proposal)
            for repeat, task in enumerate(going.tasks):
                if proposal.number not in self._going:
                    break  # it was pruned, or failed, by one of its other trainings
                self._owners[task.name] = (proposal.number, repeat)
                if (found := task.result(self.out)) is not None:
                    self._found(going, repeat, found)
                else:
                    going.open.add(task.name)
                    yield task

    def _tasks_of(self, proposal: Proposal) -> list[Task]:
        return [
            Task(
                kind="trial",
                name=f"trials/{proposal.number}/seed-{seed}",
                study=self.out.name,
                arm=f"trial-{proposal.number}",
                seed=seed,
                recipe=recipe.model_dump(),
                processes=self.plan.search.processes,
                measure=loss_alone(self.plan.search.tokens),
            )
            for seed, recipe in zip(self.plan.seeds(), proposal.recipes, strict=True)
        ]

    def _watch(self, event: Event) -> None:
        number, repeat = self._owners[event.task]
        going = self._going.get(number)
        if going is None:
            return  # its trial has been told: the others of its trainings are given up
        if event.what == "progress":
            self._progress(going, repeat, event)
        elif event.what == "done":
            going.open.discard(event.task)
            self._found(going, repeat, going.tasks[repeat].result(self.out))
        elif event.what == "failed":
            going.open.discard(event.task)
            self._tell(going, failure=event.message)
        else:
            self.board.event(number, repeat, event)

    def _progress(self, going: _Going, repeat: int, event: Event) -> None:
        number, row = going.proposal.number, event.row
        self.board.event(number, repeat, event)
        # The last measurement is the result itself: whoever has come so far is not sent away.
        if (
            "dev_loss" in row
            and event.progress < 1
            and self.engine.report(number, row["step"], row["dev_loss"], repeat=repeat)
        ):
            self._tell(going, pruned=True)

    def _found(self, going: _Going, repeat: int, found: dict[str, Any] | None) -> None:
        """What one of its trainings came to."""
        if found is None:
            self._tell(going, failure=f"{going.tasks[repeat].name} is done, and its result cannot be read")
        elif found["state"] == "diverged":
            # Whatever the other seeds do: a point that may diverge is no point to choose.
            self._tell(going, [math.nan] * len(going.tasks), note=found["message"])
        elif not isinstance(value := found.get(self.plan.search.objective), int | float):
            self._tell(going, failure=f"it has no {self.plan.search.objective}")
        else:
            going.values[repeat] = float(value)
            if len(going.values) == len(going.tasks):
                self._tell(going, [going.values[number] for number in range(len(going.tasks))])

    def _tell(self, going: _Going, values: list[float] | None = None, **how: Any) -> None:
        """A trial is over, and so is whatever of it is still being trained."""
        number = going.proposal.number
        trial: Trial = self.engine.tell(number, values, **how)
        del self._going[number]
        for name in going.open:
            self.executor.stop(name)
        self.board.ended(trial)
