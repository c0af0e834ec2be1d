"""Carrying out a search: trials are asked for as places become free, and told as they end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from keyhole.core.errors import KeyholeError
from keyhole.studies.sampler import Trial
from keyhole.studies.search import Proposal, Search


class Report(Protocol):
    """What an objective calls with each measurement on the way."""

    def __call__(self, step: int, value: float, *, repeat: int = 0) -> bool:
        """True: stop this trial now and return None."""
        ...


Objective = Callable[[Proposal, Report], float | Sequence[float] | None]
"""Trains the proposal's recipes and returns a value for each; None where a report asked it to stop."""


def carry_out(
    search: Search,
    objective: Objective,
    *,
    parallel: int = 1,
    on_event: Callable[[Proposal | Trial], None] | None = None,
) -> list[Trial]:
    """Run a search to its end, `parallel` trials at a time, each in a thread that waits for its training.

    `on_event` hears of each proposal that begins and each trial that ends. An objective that raises fails its trial alone.
    Interrupted, the objectives are asked to stop at their next report, and their trials are handed out again another time.
    """
    stopping = threading.Event()
    running: dict[Future[float | Sequence[float] | None], Proposal] = {}
    with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as pool:
        try:
            while True:
                for proposal in search.ask(parallel - len(running)):
                    if on_event:
                        on_event(proposal)
                    running[pool.submit(objective, proposal, _report(search, proposal.number, stopping))] = proposal
                if not running:
                    return search.trials()
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    trial = _tell(search, running.pop(future), future)
                    if on_event:
                        on_event(trial)
        finally:
            # Reached early only by an error or an interruption; the pool waits for its threads.
            stopping.set()


def _report(search: Search, number: int, stopping: threading.Event) -> Report:
    def report(step: int, value: float, *, repeat: int = 0) -> bool:
        return search.report(number, step, value, repeat=repeat) or stopping.is_set()

    return report


def _tell(search: Search, proposal: Proposal, future: Future[float | Sequence[float] | None]) -> Trial:
    error = future.exception()
    if isinstance(error, KeyholeError):
        return search.tell(proposal.number, failure=str(error))
    if isinstance(error, Exception):
        return search.tell(proposal.number, failure=f"{type(error).__name__}: {error}")
    values = future.result()
    return search.tell(proposal.number, pruned=True) if values is None else search.tell(proposal.number, values)
