"""Merges: how the heads' outputs join before the output projection.

Legend: B rows, T tokens, H heads, D head width. A merge maps (B, T, H, D) to the same shape.
"""

from __future__ import annotations

import torch
from torch import nn


class Concat(nn.Module):
    """Heads side by side, as they are."""

    def forward(self, heads_BTHD: torch.Tensor) -> torch.Tensor:
        """Leave the heads as they are."""
        return heads_BTHD


class Shuffle(nn.Module):
    """Heads in a fresh random order at each training step, the same for the whole batch; in their own order when used."""

    def forward(self, heads_BTHD: torch.Tensor) -> torch.Tensor:
        """Permute the heads while training."""
        if not self.training:
            return heads_BTHD
        return heads_BTHD[:, :, torch.randperm(heads_BTHD.shape[2], device=heads_BTHD.device)]


class Shift(nn.Module):
    """Head h takes the place of head h + 1, the last that of the first."""

    def forward(self, heads_BTHD: torch.Tensor) -> torch.Tensor:
        """Roll the heads by one."""
        return heads_BTHD.roll(1, dims=2)


class Reweight(nn.Module):
    """DISHONEST, kept because it must be caught: each head times the norm of its output over the whole sequence.

    o_h <- w_h o_h, w_h = sqrt(sum over all s of ||o_h(s)||^2): every position learns something of those after it, so the
    loss looks better than it is. `reweight-running` is the honest form. `normalise` divides w by its mean over the heads.
    """

    needs_whole_sequence = True

    def __init__(self, normalise: bool = False) -> None:
        super().__init__()
        self.normalise = normalise

    def forward(self, heads_BTHD: torch.Tensor) -> torch.Tensor:
        """Scale each head by its matrix norm over the sequence."""
        return heads_BTHD * _weights(_square(heads_BTHD).sum(1, keepdim=True), self.normalise, heads_BTHD.dtype)


class ReweightRunning(nn.Module):
    """Each head times the norm of its output so far: w_h(t) = sqrt(sum over s <= t of ||o_h(s)||^2).

    Its state is one number a head.
    """

    def __init__(self, heads: int, normalise: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.normalise = normalise

    def forward(self, heads_BTHD: torch.Tensor) -> torch.Tensor:
        """Scale each head by its running norm."""
        return self.step(heads_BTHD, self.begin(heads_BTHD.shape[0], like=heads_BTHD))[0]

    def begin(self, batch: int, like: torch.Tensor) -> torch.Tensor:
        """The state before the first token: no norm yet."""
        return like.new_zeros(batch, 1, self.heads, 1, dtype=_wide(like.dtype))

    def step(self, heads_BTHD: torch.Tensor, state_B1H1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale the next tokens' heads, carrying the sum of squares on."""
        total = state_B1H1 + _square(heads_BTHD).cumsum(1)
        return heads_BTHD * _weights(total, self.normalise, heads_BTHD.dtype), total[:, -1:]


class Talking(nn.Module):
    """Heads talk: each becomes a learned mixture of all, o_h <- sum over g of M_hg o_g, M the identity at first.

    Talking-heads attention (Shazeer et al. 2020) mixes the heads' scores and weights; this mixes what they found, which any
    mixer with heads has, also one without weights.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        # Three dimensions, as it is no matrix to an optimizer: neither to be made orthogonal nor to decay towards zero.
        self.mixture = nn.Parameter(torch.eye(heads)[None])

    def forward(self, heads_BTHD: torch.Tensor) -> torch.Tensor:
        """Mix the heads of each token."""
        return torch.einsum("hg,btgd->bthd", self.mixture[0], heads_BTHD)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _square(heads_BTHD: torch.Tensor) -> torch.Tensor:
    return heads_BTHD.to(_wide(heads_BTHD.dtype)).square().sum(-1, keepdim=True)


def _weights(total_BTH1: torch.Tensor, normalise: bool, dtype: torch.dtype) -> torch.Tensor:
    # The smallest normal number keeps the square root's slope finite where all outputs are zero.
    weight = total_BTH1.clamp_min(torch.finfo(total_BTH1.dtype).tiny).sqrt()
    if normalise:
        weight = weight / weight.mean(2, keepdim=True)
    return weight.to(dtype)
