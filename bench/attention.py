"""The two causal attention kernels, forward and backward, over the shapes that the library has to choose between.

Shapes: B batch, T time, H heads, D width of a head.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from bench.matrix import DTYPES, median_seconds
from bench.report import Section, Settings, Table

TIMES = (64, 128, 256, 512, 1024, 2048)
WIDTHS = (16, 32, 64, 128)
HEADS = 6
TOKENS = 4096
"""In one batch, whatever the time: what a training step holds."""

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def heads_of(dtype: torch.dtype, time: int, width: int) -> list[Tensor]:
    """Queries, keys, values and the output's gradient, laid out as a projection leaves them: strided, not packed."""
    shape = (max(1, TOKENS // time), time, HEADS, width)
    return [torch.randn(shape).to(dtype).transpose(1, 2).requires_grad_() for _ in range(4)]


def milliseconds(kernel: Kernel, dtype: torch.dtype, time: int, width: int, seconds: float) -> float:
    """One forward and backward pass."""
    q_BHTD, k_BHTD, v_BHTD, grad_BHTD = heads_of(dtype, time, width)

    def once() -> tuple[Tensor, ...]:
        out_BHTD = kernel(q_BHTD, k_BHTD, v_BHTD)
        return torch.autograd.grad(out_BHTD, (q_BHTD, k_BHTD, v_BHTD), grad_BHTD.detach())

    return 1e3 * median_seconds(once, seconds, fewest=2)


def measure(settings: Settings) -> Section:
    """Both kernels alternated over every type, time and width."""
    from keyhole.mixers.kernels import blocked_attention, fused_attention

    kernels: dict[str, Kernel] = {"fused": fused_attention, "blocked": blocked_attention}
    title = f"Causal attention, forward and backward, {TOKENS} tokens, {HEADS} heads: milliseconds"
    table = Table(title, ("type, time, head width", "fused", "blocked", "fused / blocked", "choose"))
    figures = {}
    for kind, time, width in itertools.product(DTYPES, TIMES, WIDTHS):
        found: dict[str, list[float]] = {name: [] for name in kernels}
        for number in range(settings.rounds):
            for name in list(kernels)[:: 1 if number % 2 else -1]:
                found[name].append(milliseconds(kernels[name], DTYPES[kind], time, width, settings.seconds / 40))
        fused, blocked = (statistics.median(found[name]) for name in kernels)
        key = f"{kind}, {time}, {width}"
        chosen = "blocked" if blocked < fused else "fused"
        table.rows.append((key, f"{fused:.2f}", f"{blocked:.2f}", f"{fused / blocked:.2f}", chosen))
        figures[key] = {"fused": fused, "blocked": blocked}
    return Section([table], figures)
