"""Carrying a study out: audit every arm, search rates if asked, train every arm with every seed, read the result.

plan ─► prepare ─► audits ─► rates ─► trials ─► StudyResult

Each stage is a list of tasks for an executor. What a task found is a file; a study that is stopped in any way goes on by
carrying out the tasks whose file is not there.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from keyhole.audits.interval import special
from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.files import write_json
from keyhole.record.create import only_writer
from keyhole.studies.display import Board, choose_board
from keyhole.studies.execute import Executor, build_executor, refuse_executor
from keyhole.studies.plan import Plan, load_plan
from keyhole.studies.prepare import KNOWN, STUDY, Prepared, prepare
from keyhole.studies.rates import settle
from keyhole.studies.result import FAILURES, StudyResult, open_study
from keyhole.studies.trial import Event, Task


class StudyInterrupted(KeyholeError):
    """The user stopped a study; everything is saved."""

    exit_code = 130


def study(
    source: str | Path | Plan,
    out: str | Path | None = None,
    *,
    seeds: int | None = None,
    workers: int | None = None,
    on: str = "local",
    resume: bool = False,
    quiet: bool = False,
) -> StudyResult:
    """Carry a study out in the directory `out`; with `resume`, go on where it was stopped, or with more seeds or arms."""
    if not isinstance(source, str | Path | Plan):
        raise InputError(f"a study is a TOML file's path or a Plan, not {source!r}; parse_plan makes one of nested values")
    plan = source if isinstance(source, Plan) else load_plan(source, seeds=seeds)
    if isinstance(source, Plan) and seeds is not None:
        raise InputError("seeds is for a study's file; a plan has its own: load_plan(path, seeds=...)")
    out = Path(out) if out is not None else default_out(source, plan)
    refuse_executor(on, workers)
    special()  # or else every trial would be trained first, and fail when it is measured
    with only_writer(out, "study", "carrying out a study"), interruptible(out, "study", STUDY, KNOWN):
        prepared = prepare(plan, out, resume=resume)
        board = choose_board(quiet)
        with board, build_executor(on, out, workers) as executor:
            _Conduct(prepared, executor, board).run()
    return open_study(out)


def default_out(source: str | Path | Plan, plan: Plan) -> Path:
    """The study.toml of a study's directory goes on there; any other study goes to runs/NAME."""
    path = None if isinstance(source, Plan) else Path(source)
    own = path is not None and path.name == STUDY and (path.parent / KNOWN).is_file()
    return path.parent if path is not None and own else Path("runs") / plan.name


class _Conduct:
    """One study in progress."""

    def __init__(self, prepared: Prepared, executor: Executor, board: Board) -> None:
        self.prepared, self.executor, self.board = prepared, executor, board
        self.failures: dict[str, str] = {}

    def run(self) -> None:
        """All stages, one after the other."""
        prepared = self.prepared
        audits, rates = prepared.audits(), prepared.rates()
        chosen: dict[str, float | None] = dict.fromkeys(arm.name for arm in prepared.plan.arms)
        trials = prepared.trials(chosen)
        self.board.begin(prepared.plan, self.executor.where, [*audits, *rates, *trials])
        self._carry_out(audits)
        unaudited = self._unaudited(audits, trials)
        self._carry_out([task for task in rates if task.arm not in unaudited])
        if rates:
            # An arm that diverges at every rate has nothing to be trained with; its search says so.
            chosen = {**settle(prepared.plan, prepared.out)}
        chosen = {arm: rate for arm, rate in chosen.items() if arm not in unaudited}
        self._carry_out(prepared.trials(chosen))
        write_json(prepared.out / FAILURES, self.failures)

    def _unaudited(self, audits: list[Task], trials: list[Task]) -> set[str]:
        """The arms whose audit failed to give an answer: they are not trained, and each of their trials says why."""
        why = {
            task.arm: self.failures.get(task.name, "it was stopped")
            for task in audits
            if task.result(self.prepared.out) is None
        }
        for task in trials:
            if task.arm in why and task.result(self.prepared.out) is None:
                self.failures[task.name] = f"not trained, as it could not be audited: {why[task.arm]}"
        return set(why)

    def _carry_out(self, tasks: list[Task]) -> None:
        todo = []
        for task in tasks:
            found = task.result(self.prepared.out)
            if found is None:
                todo.append(task)
            else:
                self.board.found(task, found)
        known = {task.name: task for task in todo}

        def watch(event: Event) -> None:
            task = known[event.task]
            if event.what == "failed":
                self.failures[task.name] = event.message
                write_json(self.prepared.out / FAILURES, self.failures)
            found = task.result(self.prepared.out) if event.what == "done" else None
            self.board.event(task, event, found)

        if todo:
            self.executor.run(todo, watch)


@contextmanager
def interruptible(out: Path, command: str, file: str, known: str) -> Iterator[None]:
    """Ctrl-C and termination end a study in order: what trains saves, and the message says how to go on."""
    main = threading.current_thread() is threading.main_thread()

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    # Both, as a process that was started in the background ignores Ctrl-C otherwise.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)} if main else {}
    try:
        yield
    except KeyboardInterrupt:
        if not (out / known).is_file():
            raise StudyInterrupted("stopped before anything was trained; begin again with the same command") from None
        place = shlex.quote(str(out / file))
        raise StudyInterrupted(f"stopped; everything is saved. Go on with: keyhole {command} {place} --resume") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
