"""Mixers whose weights are divided by their sum and whose state is that of features: linear and polynomial attention.

    w_ts = f(q_t, k_s) / (eps + sum over r <= t of f(q_t, k_r)),   f(q, k) = phi(q).phi(k) with F features

A column of ones beside the values counts the weights, so that one state S (F, M), M = D + 1, holds numerator and
denominator. At padding the value and the one are both zero. The eps makes the output of a token that may read nothing zero.

Legend: B rows, T tokens, H heads, D head width, F features, M = D + 1.
"""

from __future__ import annotations

import torch

from keyhole.mixers.heads import wide
from keyhole.mixers.weighted import WeightedMixer

EPS = 1e-6
"""Added to denominators."""


class NormalisedMixer(WeightedMixer):
    """A mixer that remembers the sums of its features' products with values, and with ones."""

    features: int

    def first(self, batch: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Numerator and denominator side by side, empty."""
        return (like.new_zeros(batch, self.heads, self.features, self.channels + 1, dtype=wide(like.dtype)),)


def normalised_weights(scores_BHTT: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
    """Each score over the sum of those that its token may read: earlier or its own, and not padded."""
    scores = scores_BHTT.tril()
    if mask_BT is not None:
        scores = scores * mask_BT[:, None, None, :]
    return scores / (EPS + scores.sum(-1, keepdim=True))


def with_ones(v_BHTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
    """Values with a column of ones, which counts the weights; at padding both are zero."""
    v_BHTM = torch.cat((v_BHTD, torch.ones_like(v_BHTD[..., :1])), -1)
    return v_BHTM if mask_BT is None else v_BHTM * mask_BT[:, None, :, None]


def divided(o_BHTM: torch.Tensor) -> torch.Tensor:
    """Divide by what the column of ones became."""
    return o_BHTM[..., :-1] / (EPS + o_BHTM[..., -1:])
