"""Kernels of one state space, K_l = C A^l B for l < L: each structure's fast form against the sequential definition.

The definition multiplies the state by A once a token; it is the same code for every structure, given A written out.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from bench.matrix import median_seconds
from bench.report import Section, Settings, Table, verdict

TOKENS, STATE = 4096, 64
TARGETS = {"dense": 10.0, "rank-one": 50.0, "diagonal": None}
FORMS = {
    "dense": "doubling, [X, A^(2^j) X]",
    "rank-one": "closed form of aI + u w^T",
    "diagonal": "factorised Vandermonde, complex pairs",
}


class Contenders(NamedTuple):
    """Both forms of one structure, and what they should give."""

    fast: Callable[[], Tensor]
    definition: Callable[[], Tensor]
    exact: Tensor


def contenders(structure: str) -> Contenders:
    """One system of one channel in float32, away from its first values as far as it stays stable."""
    from keyhole.mixers.statespace_kernels import reference_kernel
    from keyhole.mixers.statespace_structures import STRUCTURES

    torch.manual_seed(0)
    system = STRUCTURES[structure](1, 1, STATE, TOKENS)
    for parameter in system.parameters():
        parameter.data += 1e-4 * torch.randn(parameter.shape)
    definition = system.definition(torch.float32)
    return Contenders(
        lambda: system.kernel(TOKENS, torch.float32),
        lambda: reference_kernel(*definition, TOKENS),
        reference_kernel(*system.definition(torch.float64), TOKENS),
    )


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@torch.no_grad()
def measure(settings: Settings) -> Section:
    """Fast form and definition alternated, structure by structure."""
    title = f"Kernel of one state space, {TOKENS} tokens, {STATE} states, float32: milliseconds"
    header = (
        "fast form",
        "fast",
        "definition",
        "definition / fast",
        "target",
        "differ by",
        "fast off by",
        "definition off by",
    )
    table, figures = Table(title, header), {}
    for structure, form in FORMS.items():
        pair = contenders(structure)
        calls = {"fast": pair.fast, "definition": pair.definition}
        found: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(settings.rounds):
            for name in list(calls)[:: 1 if number % 2 else -1]:
                found[name].append(1e3 * median_seconds(calls[name], settings.seconds / 4))
        ratios = [slow / quick for slow, quick in zip(found["definition"], found["fast"], strict=True)]
        ratio, target = statistics.median(ratios), TARGETS[structure]
        fast, definition = pair.fast(), pair.definition()
        errors = (apart(fast, definition), apart(fast, pair.exact), apart(definition, pair.exact))
        times = [f"{statistics.median(found[name]):.3f}" for name in calls]
        met = "-" if target is None else f"{target:g}: {verdict(ratio, target)}"
        shown = f"{ratio:.0f} ({min(ratios):.0f} to {max(ratios):.0f})"
        table.rows.append((f"{structure}: {form}", *times, shown, met, *(f"{error:.0e}" for error in errors)))
        figures[structure] = {**found, "ratios": ratios, "differences": errors}
    table.notes.append("differences are relative to the largest entry; what a form is off by is against float64")
    return Section([table], figures)
