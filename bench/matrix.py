"""This machine's matrix rate, and how much of it one training step reaches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.report import Section, Settings, Table, spread
from bench.workers import ContenderError, Shape, Worker, contenders

SIZES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 384, 1536))
"""Rows, inner size, columns; the last is a feed-forward product of the shape below."""
SHAPE = Shape(6, 6, 384, 256, 16, 65)
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
AIM = 0.9


def median_seconds(call: Callable[[], Any], seconds: float, *, fewest: int = 3) -> float:
    """The median time of a call that is repeated for about `seconds`; the first, which sets things up, is left out."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < fewest or time.perf_counter() < end:
        before = time.perf_counter()
        call()
        times.append(time.perf_counter() - before)
    return statistics.median(times)


def rate(dtype: torch.dtype, size: tuple[int, int, int], seconds: float) -> float:
    """GFLOP/s of one matrix product laid out as in a linear layer, on the threads that torch now has."""
    rows, inner, columns = size
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(columns, inner).to(dtype)
    with torch.no_grad():
        taken = median_seconds(lambda: torch.nn.functional.linear(x, weight), seconds)
    return 2 * rows * inner * columns / taken / 1e9


def best_rate(dtype: torch.dtype, seconds: float) -> float:
    """The best GFLOP/s over all sizes: what the machine can do at most."""
    return max(rate(dtype, size, seconds / len(SIZES)) for size in SIZES)


def rates(settings: Settings) -> tuple[Table, dict[str, list[float]]]:
    """Every type, size and number of threads, alternated."""
    whole = torch.get_num_threads()
    figures: dict[str, list[float]] = {}
    for _ in range(settings.rounds):
        for threads in sorted({1, whole}):
            torch.set_num_threads(threads)
            for kind, dtype in DTYPES.items():
                for size in SIZES:
                    key = f"{kind}, threads: {threads}, {'x'.join(map(str, size))}"
                    figures.setdefault(key, []).append(rate(dtype, size, settings.seconds / 20))
    torch.set_num_threads(whole)
    table = Table("Matrix rate of this machine", ("product", "GFLOP/s", "range"))
    table.rows.extend((key, *spread(values, ".0f")) for key, values in figures.items())
    return table, figures


def fraction(settings: Settings, failures: list[str]) -> tuple[Table, list[dict[str, float]]]:
    """The share of the bf16 rate that our training step reaches, the rate measured right before and after the step."""
    table = Table(f"Training step against the matrix rate: {SHAPE}", ("figure", "median", "range"))
    with contenders(("keyhole",), SHAPE, failures) as workers:
        try:
            found = [_one_round(workers[0], settings.seconds) for _ in range(settings.rounds)] if workers else []
        except (ContenderError, ImportError) as error:
            failures.append(f"fraction of the matrix rate: {error}")
            found = []
    for key in found[0] if found else ():
        form = ".3f" if key == "fraction" else ",.0f"
        table.rows.append((key, *spread([one[key] for one in found], form)))
    table.notes.append(
        f"fraction = tokens/s x FLOPs per token (forward and twice that backward) / best bf16 rate; the aim is {AIM}. "
        "The rate is the mean of one measured before and one after the step, both cores."
    )
    return table, found


def _one_round(worker: Worker, seconds: float) -> dict[str, float]:
    before = best_rate(torch.bfloat16, seconds / 4)
    tokens = worker.run(seconds)["tokens_per_second"]
    after = best_rate(torch.bfloat16, seconds / 4)
    per_token = training_flops(SHAPE)
    gigaflops = (before + after) / 2
    return {
        "tokens/s": tokens,
        "FLOPs per token": per_token,
        "bf16 GFLOP/s": gigaflops,
        "fraction": tokens * per_token / gigaflops / 1e9,
    }


def training_flops(shape: Shape) -> float:
    """FLOPs of one trained token: the backward pass multiplies twice where the forward pass does once."""
    from bench.contender import keyhole_recipe
    from keyhole.model.count import flops  # forward FLOPs per token; the library's tests hold it to the real module

    return 3 * flops(keyhole_recipe(shape).model, shape.vocab, shape.time)


def measure(settings: Settings) -> Section:
    """The machine alone, then the step against it."""
    failures: list[str] = []
    alone, rate_figures = rates(settings)
    against, step_figures = fraction(settings, failures)
    return Section([alone, against], {"rates": rate_figures, "step": step_figures}, failures)
