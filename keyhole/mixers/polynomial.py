"""Polynomial attention: w_ts = (c + q_t.k_s / sqrt(D))^2 over its sum, c = 1 or 0.

The square is a scalar product of features, phi(x) = [c, sqrt(2c) x_i, x_i^2, sqrt(2) x_i x_j], F = (D+1)(D+2)/2 of them
(c = 0: only the last two kinds, D(D+1)/2). Within a chunk the scores are squared as they are; phi is made for the state
alone, chunk by chunk, and made again in the backward pass, so that memory is O(T D + F D T / C) and never T F D:

    O = tril((c + Q K^T)^2) V + phi(Q) S,    S += phi(K)^T V    (a column of ones beside V makes the denominator)

Per token and head 4 F M + 2 C (D + M) FLOPs, M = D + 1; the state holds F M numbers.

Legend: B rows, T tokens, H heads, D head width, F features, C tokens of a chunk, M = D + 1.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from keyhole.core.errors import InputError
from keyhole.mixers.heads import check_chunk
from keyhole.mixers.normalised import NormalisedMixer, divided, normalised_weights, with_ones


def polynomial_weights(
    q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, offset: int, mask_BT: torch.Tensor | None = None
) -> torch.Tensor:
    """The definition, for queries already divided by sqrt(D)."""
    return normalised_weights((offset + q_BHTD @ k_BHTD.mT).square(), mask_BT)


def square_features(x: torch.Tensor, offset: int) -> torch.Tensor:
    """phi, such that phi(x).phi(y) = (offset + x.y)^2; the constant is a channel like any other."""
    if offset:
        x = torch.cat((torch.ones_like(x[..., :1]), x), -1)
    n, twice = x.shape[-1], x * 2**0.5
    # Pairs (i, i + shift) by slices: picking them by index costs three times as much, most of it in the backward pass.
    pairs = [x[..., : n - shift] * twice[..., shift:] for shift in range(1, n)]
    return torch.cat((x.square(), *pairs), -1)


def feature_count(channels: int, offset: int) -> int:
    """How many features phi has."""
    return (channels + offset) * (channels + offset + 1) // 2


def polynomial_chunk(
    q_BHCD: torch.Tensor, k_BHCD: torch.Tensor, v_BHCM: torch.Tensor, state_BHFM: torch.Tensor, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk: its outputs, undivided, and the state after it."""
    inside = (offset + q_BHCD @ k_BHCD.mT).square().tril() @ v_BHCM
    # Features are products of products: they are made and summed in the state's precision, float32 at least.
    fq, fk = (square_features(x.to(state_BHFM.dtype), offset) for x in (q_BHCD, k_BHCD))
    o_BHCM = inside + (fq @ state_BHFM).to(inside.dtype)
    return o_BHCM, state_BHFM + fk.mT @ v_BHCM.to(state_BHFM.dtype)


class Polynomial(NormalisedMixer):
    """Attention by the square of the scores: linear in the length, exactly, with D^2 / 2 features as its state.

    `offset` is 1 for (1 + q.k)^2 or 0 for (q.k)^2. `qk_norm` norms queries and keys first. Rope turns its
    scores as it does softmax's.
    """

    positions = ("turn",)

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,  # noqa: ARG002
        position: nn.Module | None = None,
        merge: nn.Module | None = None,
        offset: int = 1,
        qk_norm: bool = False,
        chunk: int = 128,
    ) -> None:
        super().__init__(width, heads, position=position, merge=merge, qk_norm=qk_norm)
        if offset not in (0, 1):
            raise InputError(f"polynomial offset = {offset} is not valid; it is 1 for (1 + q.k)^2 or 0 for (q.k)^2")
        self.offset, self.chunk = offset, check_chunk("polynomial", chunk)
        self.features = feature_count(self.channels, offset)

    def project(self, x_BTW: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries divided by sqrt(D), keys, values."""
        q, k, v = super().project(x_BTW, start)
        return q * self.channels**-0.5, k, v

    def weights(self, q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        """The definition."""
        return polynomial_weights(q_BHTD, k_BHTD, self.offset, mask_BT)

    def mix(
        self,
        q_BHTD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        memory: tuple[torch.Tensor, ...],
        mask_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Chunk by chunk, going on from S and z."""
        (state,), parts = memory, []
        split = [x.split(self.chunk, 2) for x in (q_BHTD, k_BHTD, with_ones(v_BHTD, mask_BT))]
        for q, k, v in zip(*split, strict=True):
            if torch.is_grad_enabled():
                # Kept: the chunk's inputs and the state before it. The features are made again when gradients flow back.
                o, state = checkpoint(
                    polynomial_chunk, q, k, v, state, self.offset, use_reentrant=False, preserve_rng_state=False
                )
            else:
                o, state = polynomial_chunk(q, k, v, state, self.offset)
            parts.append(o)
        return divided(torch.cat(parts, 2)), (state,)

    def mixing_flops(self, tokens: int) -> int:
        """4 F M + 2 C (D + M) a token and head."""
        D, M = self.channels, self.channels + 1
        sizes = [self.chunk] * (tokens // self.chunk) + [tokens % self.chunk]
        return self.heads * sum(2 * C * (C * (D + M) + 2 * self.features * M) for C in sizes)
