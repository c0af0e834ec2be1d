"""Ridge attention in training: the exact chunk form beside Sherman-Morrison and beside conjugate gradients.

One row, 4 heads, T 1024, float32, one thread: forward and backward. Conjugate gradients are an oracle of this bench's own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from bench.matrix import median_seconds
from bench.report import Section, Settings, Table, verdict

HEADS, TOKENS, LAM, STEPS = 4, 1024, 1.0, 30
TARGET = 4.0


def conjugate_gradients(q: Tensor, k: Tensor, v: Tensor, steps: int = STEPS) -> Tensor:
    """(H_t + lam I) x_t = q_t for all t at once: H_t x_t is causal linear attention of x over (k, k), by chunks of 64."""
    from keyhole.mixers.linear import causal_product

    zero = q.new_zeros(*q.shape[:2], q.shape[-1], q.shape[-1])
    times = lambda x, values: causal_product(x, k, values, zero, 64)[0]  # noqa: E731 - as on paper
    x, residual = torch.zeros_like(q), q
    direction, size = residual, (residual * residual).sum(-1, keepdim=True)
    for _ in range(steps):
        moved = times(direction, k) + LAM * direction
        rate = size / (direction * moved).sum(-1, keepdim=True).clamp_min(1e-30)
        x, residual = x + rate * direction, residual - rate * moved
        after = (residual * residual).sum(-1, keepdim=True)
        direction, size = residual + after / size.clamp_min(1e-30) * direction, after
    return times(x, v)


def sherman_morrison(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token after another."""
    from keyhole.mixers.ridge import ridge_token

    eye = torch.eye(q.shape[-1]).expand(*q.shape[:2], -1, -1)
    memory, parts = (LAM * eye, eye / LAM, torch.zeros_like(eye)), []
    for t in range(q.shape[2]):
        o, memory = ridge_token(q[:, :, t], k[:, :, t], v[:, :, t], memory)
        parts.append(o)
    return torch.stack(parts, 2)


def chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The form that trains."""
    from keyhole.mixers.ridge import ridge_chunks

    eye = torch.eye(q.shape[-1]).expand(*q.shape[:2], -1, -1)
    return ridge_chunks(q, k, v, LAM * eye, torch.zeros_like(eye))[0]


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "chunks": chunks,
    "Sherman-Morrison": sherman_morrison,
    f"conjugate gradients, {STEPS} steps": conjugate_gradients,
}


def measure(settings: Settings) -> Section:
    """All forms alternated at two head widths."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [_at(channels, settings) for channels in (32, 64)]
    finally:
        torch.set_num_threads(threads)
    return Section(
        [table for table, _ in found], {f"D={D}": figures for D, (_, figures) in zip((32, 64), found, strict=True)}
    )


def _at(channels: int, settings: Settings) -> tuple[Table, dict[str, list[float]]]:
    from keyhole.mixers.ridge import ridge_weights

    q, k, v, upstream = (
        torch.randn(1, HEADS, TOKENS, channels, generator=torch.Generator().manual_seed(s)) for s in range(4)
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1).requires_grad_() for x in (q, k))
    v = v.requires_grad_()
    lam = torch.full((HEADS,), LAM, dtype=torch.float64)
    exact = ridge_weights(q.detach().double(), k.detach().double(), lam) @ v.detach().double()
    calls = {
        name: (lambda form=form: torch.autograd.grad(form(q, k, v), (q, k, v), upstream)) for name, form in FORMS.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    for number in range(settings.rounds):
        for name in list(FORMS)[:: 1 if number % 2 else -1]:
            seconds[name].append(median_seconds(calls[name], settings.seconds / 8, fewest=2))
    header = ("form", "milliseconds", "form / chunks", "target", "", "off by")
    table = Table(f"Ridge attention, forward and backward, D {channels}, {HEADS} heads, T {TOKENS}, one thread", header)
    for name, form in FORMS.items():
        ratios = [a / b for a, b in zip(seconds[name], seconds["chunks"], strict=True)]
        ratio = statistics.median(ratios)
        target = f"{TARGET:g}" if name != "chunks" and channels == 32 else "-"
        met = verdict(ratio, TARGET) if target != "-" else "-"
        error = float((form(q, k, v).detach().double() - exact).abs().max() / exact.abs().max())
        shown = f"{ratio:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
        table.rows.append((name, f"{1e3 * statistics.median(seconds[name]):.1f}", shown, target, met, f"{error:.0e}"))
    return table, seconds
