"""Kernelized linear attention: o_t = S_t^T phi(q_t) / (eps + z_t . phi(q_t)) (Katharopoulos et al. 2020).

    S_t = S_{t-1} + phi(k_t) v_t^T,    z_t = z_{t-1} + phi(k_t);    phi = elu + 1, or a feature map of the user's

In weights: w_ts = phi(q_t).phi(k_s) / (eps + sum over r <= t of phi(q_t).phi(k_r)). The fast form, by chunks,

    O = Q S + tril(Q K^T) V,    S += K^T V    (Q, K after phi; a column of ones beside V makes the denominator)

with all chunks at once: S at the start of every chunk is a running sum. A padded token has neither value nor one, and so
leaves numerator and denominator alike. The eps makes the output of a token that may read nothing zero.

Per token and head 4 F M + 2 C (F + M) FLOPs, F features, M = D + 1; the state holds F M numbers.

Legend: B rows, T tokens, H heads, D head width, F features, N chunks, C tokens of a chunk, M = D + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from keyhole.core.errors import InputError, nearest
from keyhole.mixers.heads import check_chunk, in_chunks, sums_before
from keyhole.mixers.normalised import NormalisedMixer, divided, normalised_weights, with_ones
from keyhole.parts.loading import load_from

FEATURES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu+1": lambda x: nn.functional.elu(x) + 1,
    "relu": torch.relu,
    "exp": torch.exp,
    "softplus": nn.functional.softplus,
}


def linear_weights(fq_BHTF: torch.Tensor, fk_BHTF: torch.Tensor, mask_BT: torch.Tensor | None = None) -> torch.Tensor:
    """The definition: phi(q_t).phi(k_s) over its sum, for s <= t and s not padded."""
    return normalised_weights(fq_BHTF @ fk_BHTF.mT, mask_BT)


def causal_product(
    q_BHTF: torch.Tensor, k_BHTF: torch.Tensor, v_BHTM: torch.Tensor, state_BHFM: torch.Tensor, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums over s <= t of (q_t.k_s) v_s and what `state` holds of earlier tokens; and the state afterwards."""
    T = q_BHTF.shape[2]
    q, k, v = (in_chunks(x, min(chunk, T)) for x in (q_BHTF, k_BHTF, v_BHTM))
    before, after = sums_before(state_BHFM, (k.mT @ v).to(state_BHFM.dtype))
    o_BHNCM = (q @ k.mT).tril() @ v + q @ before.to(q.dtype)
    return o_BHNCM.flatten(2, 3)[:, :, :T], after


def product_flops(tokens: int, features: int, values: int, chunk: int) -> int:
    """FLOPs of `causal_product` for one head; the last chunk counts in full."""
    size = min(chunk, tokens)
    chunks = -(-tokens // size)
    return chunks * 2 * size * (2 * features * values + size * (features + values))


class Linear(NormalisedMixer):
    """Linear attention by feature maps: time and memory linear in the length, decoding from a state of fixed size.

    `feature` is "elu+1", "relu", "exp" (with qk_norm), "softplus", or a function of yours, "my.py:phi", from (..., D) to
    (..., F); it may not be negative. `qk_norm` norms queries and keys first.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,  # noqa: ARG002
        folder: Path | None = None,
        merge: nn.Module | None = None,
        feature: str = "elu+1",
        qk_norm: bool = False,
        chunk: int = 64,
    ) -> None:
        super().__init__(width, heads, merge=merge, qk_norm=qk_norm)
        self.chunk = check_chunk("linear", chunk)
        if feature == "exp" and not qk_norm:
            raise InputError("linear feature exp overflows where queries or keys grow; set qk_norm = true, or use elu+1")
        self.feature_name = feature
        self._feature = FEATURES.get(feature) or _users_feature(feature, folder)
        self.features = self._try_feature()

    def feature(self, x_BHTD: torch.Tensor) -> torch.Tensor:
        """phi, checked where it is the user's."""
        found = self._feature(x_BHTD)
        if self.feature_name not in FEATURES and not torch.is_grad_enabled():
            _check_feature(self.feature_name, found, x_BHTD)  # in training steps a check would cost a pass over the data
        return found

    def _try_feature(self) -> int:
        """How many features there are, found on noise of every size."""
        with torch.device("cpu"), torch.no_grad():
            noise = torch.randn(1, 1, 64, self.channels, generator=torch.Generator().manual_seed(0))
            found = self.feature(noise * torch.logspace(-2, 1, 64)[:, None])
        if found.shape[-1] < 1:
            raise InputError(f"linear feature {self.feature_name} returned no features; it must return one at least")
        return found.shape[-1]

    def weights(self, q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        """The definition."""
        return linear_weights(self.feature(q_BHTD), self.feature(k_BHTD), mask_BT)

    def mix(
        self,
        q_BHTD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        memory: tuple[torch.Tensor, ...],
        mask_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """By chunks, going on from S and z."""
        fq, fk = self.feature(q_BHTD), self.feature(k_BHTD)
        o_BHTM, after = causal_product(fq, fk, with_ones(v_BHTD, mask_BT), memory[0], self.chunk)
        return divided(o_BHTM), (after,)

    def mixing_flops(self, tokens: int) -> int:
        """4 F M + 2 C (F + M) a token and head."""
        return self.heads * product_flops(tokens, self.features, self.channels + 1, self.chunk)


def _users_feature(name: str, folder: Path | None) -> Callable[[torch.Tensor], torch.Tensor]:
    place, _, attribute = name.rpartition(":")
    if not (place and attribute):
        own = 'one of your own is written "my.py:phi"'
        raise InputError(f"linear feature = {name!r} is not valid{nearest(name, FEATURES)}; {own}")
    found = load_from(name, folder or Path.cwd())
    if not callable(found):
        raise InputError(f"linear feature {name} is not a function; write def phi(x): ...")
    return found


def _check_feature(name: str, found: object, given: torch.Tensor) -> None:
    if not isinstance(found, torch.Tensor) or found.shape[:-1] != given.shape[:-1]:
        shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise InputError(
            f"linear feature {name} returned {shape}; given {tuple(given.shape)} it must keep all but the last"
        )
    if not bool((found >= 0).all()):  # NaN is not >= 0 either
        bad = "NaN" if bool(found.isnan().any()) else f"negative values, down to {float(found.detach().min()):.3g}"
        raise InputError(
            f"linear feature {name} returned {bad}; weights need a map that is never negative, such as elu(x) + 1"
        )
