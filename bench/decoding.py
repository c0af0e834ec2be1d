"""Decoding from a state: time and memory of one more token, after 100 tokens and after 10,000."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from bench.mixing import CONTENDERS, WIDTH, build
from bench.report import Section, Settings, Table, verdict

EARLY, LATE = 100, 10_000
WINDOW = 50
"""Tokens that are timed one by one around each place."""


def measure(settings: Settings) -> Section:
    """Every mixer with a state; softmax beside them, whose cache grows."""
    late = 1_000 if settings.quick else LATE
    header = ("mixer", f"us at {EARLY:,}", f"us at {late:,}", "ratio", "target", "", f"bytes at {EARLY:,}", f"at {late:,}")
    table, figures = Table(f"One more token, width {WIDTH}, batch 1, float32, one thread", header), {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in [name for name in CONTENDERS if name != "softmax, dense"]:
            row, figures[name] = _row(name, late, settings.rounds)
            table.rows.append(row)
    finally:
        torch.set_num_threads(threads)
    table.notes.append("bytes are those of the tokens read; softmax keeps room for its whole block besides")
    return Section([table], figures)


@torch.no_grad()
def _row(name: str, late: int, rounds: int) -> tuple[tuple[str, ...], dict[str, Any]]:
    mixer = build(name, late + 2 * WINDOW)
    x_BTW = torch.randn(1, late + 2 * WINDOW, WIDTH, generator=torch.Generator().manual_seed(0))
    found: dict[str, list[float]] = {"early": [], "late": []}
    sizes: dict[str, int] = {}
    for _ in range(rounds):
        state = mixer.begin(1, x_BTW)
        _, state = mixer.step(x_BTW[:, :EARLY], state)
        taken, state = _timed(mixer, x_BTW, state, EARLY)
        found["early"].append(taken)
        sizes["early"] = _bytes(state, EARLY + WINDOW)
        _, state = mixer.step(x_BTW[:, EARLY + WINDOW : late], state)
        taken, state = _timed(mixer, x_BTW, state, late)
        found["late"].append(taken)
        sizes["late"] = _bytes(state, late + WINDOW)
    ratio = statistics.median(b / a for a, b in zip(found["early"], found["late"], strict=True))
    target, met = ("-", "-") if name == "softmax" else ("at most 1.2", verdict(ratio, 1.2, at_most=True))
    times = [f"{1e6 * statistics.median(found[place]):.0f}" for place in found]
    row = (name, *times, f"{ratio:.2f}", target, met, *(f"{size:,}" for size in sizes.values()))
    return row, {**found, "bytes": sizes}


def _timed(mixer: Any, x_BTW: torch.Tensor, state: Any, place: int) -> tuple[float, Any]:
    taken = []
    for t in range(place, place + WINDOW):
        before = time.perf_counter()
        _, state = mixer.step(x_BTW[:, t : t + 1], state)
        taken.append(time.perf_counter() - before)
    return statistics.median(taken), state


def _bytes(state: Any, length: int) -> int:
    """Of a state: all it holds, or of a cache with room to spare the part that is filled."""
    if hasattr(state, "bytes"):
        return state.bytes
    full = state.both_2BGSD
    return full.numel() * full.element_size() * length // full.shape[3]
