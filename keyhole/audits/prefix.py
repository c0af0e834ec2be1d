"""What a leak was worth: each token scored from its prefix alone, against the whole window as training scripts score it.

    full    -ln p(y_t | the whole window)         prefix    -ln p(y_t | x_1 .. x_t)         gap = prefix - full

For a model that cannot see the future the two are equal to rounding. For one that does, the prefix loss is the true one.

Legend: N windows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from keyhole.audits.interval import mean_interval
from keyhole.core.errors import InputError
from keyhole.core.findings import Finding
from keyhole.model.lm import LM
from keyhole.text import NO_TARGET, Batch, Dataset
from keyhole.text.dataset import Ints

ROUNDED = 1e-4
"""Nats that the losses of a window may differ by rounding in float32."""
LOGITS_AT_ONCE = 5_000_000
WINDOWS, LONGEST = 64, 64
"""How many dev windows are taken, and how much of each: the cost grows with the square of their length."""


@dataclass(frozen=True)
class PrefixLoss:
    """Losses in nats a token over the same windows, and the 95 % interval of their difference."""

    full: float
    prefix: float
    gap: float
    interval: tuple[float, float]
    windows: int
    worst: float
    """The largest difference of a window."""
    gaps: tuple[float, ...]
    """The difference of each window."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)

    def finding(self, name: str) -> Finding:
        """Whether the model uses more than prefixes, and what that was worth."""
        honest = self.worst <= ROUNDED
        low, high = self.interval
        told = f"{self.full:.4f} from whole windows, {self.prefix:.4f} from prefixes"
        told += "" if honest else f": worth {self.gap:.4f} nats [{low:.4f}, {high:.4f}]"
        return Finding(
            name="prefix loss",
            statement=f"{name}: each token is predicted from its prefix alone as well as from the whole window",
            expected=f"equal to {ROUNDED:g} nats in each of {self.windows} windows",
            measured=told,
            tolerance=f"{ROUNDED:g}",
            score=self.worst,
            limit=ROUNDED,
            verdict="holds" if honest else "fails",
            why="when writing there is no window, only a prefix: the prefix loss is the true one",
            remedy="" if honest else "believe the prefix loss; the other probes say which part reads the future",
            aspect="honesty",
            evidence={key: value for key, value in self.to_dict().items() if key != "gaps"},
        )


def prefix_loss(model: Callable[[torch.Tensor], Any], windows_x: Any, windows_y: Any) -> PrefixLoss:
    """Score windows (N, T) both ways. `model` is an LM or any function from ids to logits; targets of -100 do not count.

    A text of one sentence is one window: `prefix_loss(model, ids[None, :-1], ids[None, 1:])` shows a collapse.
    """
    x_NT, y_NT = (torch.as_tensor(np.asarray(ids)).long() for ids in (windows_x, windows_y))
    if x_NT.shape != y_NT.shape or x_NT.ndim != 2 or not len(x_NT):
        shapes = f"{tuple(x_NT.shape)} and {tuple(y_NT.shape)}"
        raise InputError(f"prefix_loss takes inputs and targets of one shape (windows, time), not {shapes}")
    asked_NT = y_NT != NO_TARGET
    if not bool(asked_NT.any(1).all()):
        raise InputError("each window of prefix_loss must have a target; leave out those that have none")
    full_NT, prefix_NT = (torch.cat(both) for both in zip(*_pieces(model, x_NT, y_NT), strict=True))
    count_N = asked_NT.sum(1)
    gap_N = ((prefix_NT - full_NT) * asked_NT).sum(1) / count_N
    _, low, high = mean_interval(gap_N.numpy())
    return PrefixLoss(
        full=float(full_NT[asked_NT].mean()),
        prefix=float(prefix_NT[asked_NT].mean()),
        gap=float((prefix_NT - full_NT)[asked_NT].mean()),
        interval=(low, high),
        windows=len(x_NT),
        worst=float(gap_N.abs().max()),
        gaps=tuple(gap_N.tolist()),
    )


def dev_windows(dataset: Dataset, count: int = WINDOWS, longest: int = LONGEST) -> Batch:
    """Windows that are spread evenly over a dev split: inputs and targets (count, time), padded where rows are short."""
    batches = list(dataset.dev(rows=count, tokens=count * dataset.block))
    time = min(longest, max(x.shape[1] for x, _ in batches))
    x, y = (
        np.concatenate([_fitted(batch[side], time, filler) for batch in batches])
        for side, filler in ((0, 0), (1, NO_TARGET))
    )
    asked = np.flatnonzero((y != NO_TARGET).any(1))
    kept = asked[np.linspace(0, len(asked) - 1, min(count, len(asked))).astype(int)]
    return x[kept], y[kept]


def _fitted(ids: Ints, time: int, filler: int) -> Ints:
    """Rows cut or filled up on the right to a length."""
    return np.pad(ids[:, :time], ((0, 0), (0, max(0, time - ids.shape[1]))), constant_values=filler)


@torch.no_grad()
def _pieces(model: Callable[[torch.Tensor], Any], x_NT: torch.Tensor, y_NT: torch.Tensor) -> list[tuple[Any, Any]]:
    """(full, prefix) losses of each token, some rows at a time."""
    was_training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    try:
        rows = max(1, LOGITS_AT_ONCE // (x_NT.shape[1] * _logits(model, x_NT[:1, :1]).shape[-1]))
        return [_both(model, x, y) for x, y in zip(x_NT.split(rows), y_NT.split(rows), strict=True)]
    finally:
        if isinstance(model, nn.Module):
            model.train(was_training)


def _both(model: Callable[[torch.Tensor], Any], x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    one_by_one = [_losses(_last(model, x[:, :t]), y[:, t - 1 : t]) for t in range(1, x.shape[1] + 1)]
    return _losses(_logits(model, x), y), torch.cat(one_by_one, 1)


def _losses(logits_NTV: torch.Tensor, y_NT: torch.Tensor) -> torch.Tensor:
    logits = logits_NTV.double().flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, y_NT.flatten(), ignore_index=NO_TARGET, reduction="none")
    return loss.view(y_NT.shape)


def _last(model: Callable[[torch.Tensor], Any], x_NT: torch.Tensor) -> torch.Tensor:
    """Logits (N, 1, V) after the last token; ours need not make the others."""
    if isinstance(model, LM):
        return (model.hidden(x_NT.to(model.embedding.device))[:, -1:] @ model.head.T).cpu()
    return _logits(model, x_NT)[:, -1:]


def _logits(model: Callable[[torch.Tensor], Any], x_NT: torch.Tensor) -> torch.Tensor:
    device = next((w.device for w in model.parameters()), None) if isinstance(model, nn.Module) else None
    found = model(x_NT if device is None else x_NT.to(device))
    found = getattr(found, "logits", found)
    return torch.as_tensor(found[0] if isinstance(found, tuple | list) else found).cpu()
