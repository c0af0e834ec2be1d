"""What kind of leak is it? From how earlier results change when later tokens do; and the code that mends it.

    one factor a channel, or one linear map, at all earlier tokens     a norm over the whole text
    one constant at all earlier tokens                                  a mean over the whole text
    only the last N tokens before the cut                               reads N tokens ahead
    back to the beginning of the block that is cut                      sums over whole blocks
    the beginning most of all                                           a circular convolution
    some tokens wholly, others not at all                               routing that compares tokens
    nothing, unless tokens are left out                                 the text's length is used
    nothing, unless texts are loud                                      a mask that adds a finite number
    nothing but the gradient                                            a gradient of its own

Legend: T tokens, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from keyhole.testing import remedies

if TYPE_CHECKING:
    from keyhole.testing.probes import Probed

CUTS = (24, 29, 33, 40, 47, 50, 61, 64, 79, 91, 96, 101, 117)
NEAR = 12
"""A leak that reaches no further back than this reads ahead; one that reaches further reads everything."""
LOUDLY = 1e-8
"""How far results may move in a loud text and mean nothing."""
FIT = 1e-7
"""How much of a change a simple rule may leave unexplained."""


@dataclass(frozen=True)
class Diagnosis:
    """A kind of leak: what was seen, what to do, and the code."""

    told: str
    remedy: str
    code: str


_MASKED = Diagnosis(
    "earlier results change each in their own way: a sum or softmax over time holds later tokens",
    "mask the future out before the softmax, and let the softmax run over the keys",
    remedies.MASK,
)
_SOMEWHERE = Diagnosis(
    "all earlier results change: a part of it reads the whole text",
    "audit its parts one by one: keyhole audit my.py:Mine says what kind of leak it is",
    "",
)
_LENGTH = Diagnosis(
    "nothing changes until tokens are left out: it uses how long the whole text is",
    "use each token's own place, or a length fixed when the part is built",
    remedies.OWN_PLACE,
)
_FINITE = Diagnosis(
    "only loud texts leak: the mask adds a finite number such as -1e4, which a large score outweighs",
    "mask with -inf",
    remedies.MASK,
)
_GRADIENT = Diagnosis(
    "results are honest, their gradient is not: it comes from later tokens",
    "let autograd follow what was computed",
    remedies.DETACH,
)
_CIRCULAR = Diagnosis(
    "the beginning changes most: the end comes round to it, as in a convolution by FFT without padding",
    "pad the transform to twice the length",
    remedies.PADDED_FFT,
)
_ROUTED = Diagnosis(
    "some earlier tokens change wholly, others not at all: tokens compete with later ones to be chosen",
    "let each token choose its experts, not each expert its tokens",
    remedies.TOKEN_CHOICE,
)
_MEAN = Diagnosis(
    "one constant is added at all earlier tokens: a mean over the whole text",
    "use the running form: the mean over the tokens so far (cumsum instead of sum)",
    remedies.RUNNING_MEAN,
)
_MOMENTS = Diagnosis(
    "one factor and one constant a channel at all earlier tokens: mean and variance over the whole text",
    "use the running form of both, or norm over the channels of one token",
    remedies.RUNNING_MOMENTS,
)


@torch.no_grad()
def diagnose(probed: Probed) -> Diagnosis:
    """The kind of leak of a function that is known to have one."""
    tokens = max([n for n in probed.lengths if n <= 129], default=max(probed.lengths))
    x = probed.draw(tokens, 1, 0)
    places = [cut for cut in CUTS if cut < tokens] or list(range(1, tokens))
    changes = _changes(probed, x, probed.change(x), places)
    if not _any(changes):
        if any(
            _moved(probed, probed.call(x[:, :cut]), probed.call(x)[:, :cut], probed.reshaped) is not None for cut in places
        ):
            return _LENGTH
        if probed.loudness:
            other = probed.change(x) * probed.loudness
            if any(_any(_changes(probed, text, other, places, LOUDLY)) for text in (x, x * probed.loudness)):
                return _FINITE
        longer = max(probed.lengths)
        if longer > tokens:
            x = probed.draw(longer, 1, 0)
            if _any(_changes(probed, x, probed.change(x), list(range(tokens, longer, 9)))):
                return _SOMEWHERE if probed.whole else _MASKED
        return _GRADIENT
    return _by_shape(probed, x, changes)


def _any(changes: dict[int, torch.Tensor | None]) -> bool:
    return any(moved is not None for moved in changes.values())


def _moved(probed: Probed, after: torch.Tensor, before: torch.Tensor, limit: float = 0.0) -> torch.Tensor | None:
    """(T,) how much each token's result moved, relative to their size; None where none did."""
    size = float(before.square().mean().sqrt()) or 1.0
    if limit == LOUDLY:
        size = max(size, float(after.square().mean().sqrt()))
    moved_T = (after - before).abs().flatten(2).amax(-1)[0] / size
    return moved_T if bool((moved_T > (limit or probed.limit)).any()) else None


def _changes(
    probed: Probed, x: torch.Tensor, other: torch.Tensor, places: list[int], limit: float = 0.0
) -> dict[int, torch.Tensor | None]:
    """How much each earlier token moved, by where the text was cut."""
    before = probed.call(x)
    return {
        cut: _moved(probed, probed.call(torch.cat((x[:, :cut], other[:, cut:]), 1))[:, :cut], before[:, :cut], limit)
        for cut in places
    }


def _by_shape(probed: Probed, x: torch.Tensor, changes: dict[int, torch.Tensor | None]) -> Diagnosis:
    seen = {cut: moved > probed.limit for cut, moved in changes.items() if moved is not None}
    firsts = {cut: int(moved.nonzero()[0]) for cut, moved in seen.items()}
    reach = max(cut - first for cut, first in firsts.items())
    block = math.gcd(*firsts.values()) if len(firsts) > 1 else 0
    aligned = [cut for cut in changes if cut not in seen]
    if block > 1 and reach < block and all(cut % block == 0 for cut in aligned):
        return Diagnosis(
            f"earlier results change back to the last multiple of {block}: sums over whole blocks of {block} tokens",
            "within a block read only the block so far",
            remedies.BLOCKS,
        )
    if reach <= min(NEAR, min(firsts) - 1):
        told = f"only the last {reach} token{'s' * (reach > 1)} before the cut change: it reads {reach} ahead"
        return Diagnosis(told, "shift the other way, or mask", remedies.SHIFT)
    if probed.whole:
        return _SOMEWHERE
    cut, moved = max(seen.items())
    if float(moved.double().mean()) < 0.9:
        return _ROUTED
    if (simple := _simple(probed, x, cut)) is not None:
        return simple
    how_much, quarter = changes[cut], max(1, cut // 4)
    assert how_much is not None
    if float(how_much[:quarter].mean()) > 10 * float(how_much[-quarter:].mean()):
        return _CIRCULAR
    return _MASKED


def _simple(probed: Probed, x: torch.Tensor, cut: int) -> Diagnosis | None:
    """Whether one factor, one constant or one linear map explains the change at all earlier tokens."""
    after = probed.call(torch.cat((x[:, :cut], probed.change(x)[:, cut:]), 1))[0, :cut].flatten(1)
    y_TC = probed.call(x)[0, :cut].flatten(1)
    if cut < 4 or not bool(y_TC.isfinite().all() & after.isfinite().all()):
        return None
    change_TC = after - y_TC
    if _small(change_TC - change_TC.mean(0), change_TC):
        return _MEAN
    one_T = torch.ones_like(y_TC[:, :1])
    centred, moved = y_TC - y_TC.mean(0), change_TC - change_TC.mean(0)
    slope_C = (centred * moved).sum(0) / centred.square().sum(0).clamp_min(1e-300)
    if _small(moved - centred * slope_C, change_TC):
        if not _small(change_TC - y_TC * slope_C, change_TC):
            return _MOMENTS
        factors = len({f"{float(slope):.6g}" for slope in slope_C})
        kinds = "one factor" if factors == 1 else f"{factors} factors, one for each group of channels,"
        return _norm(f"{kinds} at all earlier tokens: a norm over the whole text")
    known = torch.cat((y_TC, one_T), 1)
    if cut <= known.shape[1] + 4:
        return None
    explained = known @ torch.linalg.lstsq(known, change_TC).solution
    if _small(change_TC - explained, change_TC):
        return _norm("one linear map at all earlier tokens: a norm over the whole text before an output projection")
    return None


def _norm(told: str) -> Diagnosis:
    return Diagnosis(
        told, "use its running form: the norm over the tokens so far (cumsum instead of sum)", remedies.RUNNING_NORM
    )


def _small(rest: torch.Tensor, whole: torch.Tensor) -> bool:
    return float(rest.abs().max()) <= FIT * float(whole.abs().max())
