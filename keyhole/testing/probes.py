"""Probes of honesty: does a result depend on what it may not know? Each asks a function of a text, a part or a whole model.

    score = largest change of what must stay / RMS of the results

Each probe proves its power: what it changed did reach the results it may reach. Where it reached none, it says so.
Besides usual texts, all are asked *loud* ones: scores then go beyond what a mask that adds -1e4 can hide.

Legend: B rows, T tokens; a text is (B, T, ...) numbers or (B, T) ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from keyhole.core.errors import KeyholeError
from keyhole.testing.diagnosis import diagnose
from keyhole.testing.remedies import OWN_ROW, PADDING
from keyhole.testing.rules import Measured

HONEST = 1e-12
"""How far honest results may move in float64 where a text keeps its shape: a transform mixes the rounding of all tokens."""
RESHAPED = 1e-10
"""How far they may where it does not: what solves a system, as ridge does, rounds otherwise at each shape."""
AUDIBLE = 1e-8
"""The least score that counts in a loud text, where rounding is as loud: what a finite mask lets through is about 1."""
ALIGNED = 8
"""Cuts at multiples of this are those at which blocks of 8, 16, 64 ... end."""
SPREAD = 15
"""Cuts of either kind that are tried in a long text; in one of up to 65 tokens all are."""
LOUD = (1e6, 1e4, 1e3)
"""How loud a text may be: the first of these at which all results are numbers."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """A function of a text, and the texts to ask it about."""

    call: Callable[[torch.Tensor], torch.Tensor]
    draw: Callable[[int, int, int], torch.Tensor]
    """A text by its tokens, rows and seed."""
    change: Callable[[torch.Tensor], torch.Tensor]
    """Another text of the same shape, other everywhere."""
    lengths: Sequence[int]
    limit: float = HONEST
    reshaped: float = RESHAPED
    loudness: float = 0.0
    """By how much a loud text is multiplied; 0 where texts cannot be loud (ids)."""
    slopes: Callable[[torch.Tensor, int], torch.Tensor | None] | None = None
    """The gradient, wrt each token, of a weighted sum of the results before a cut; None where there is none."""
    whole: bool = False
    """Whether it is a whole model: what its results do is then not what the leaking part's did."""
    padded: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """The results where a mask says which tokens are real."""

    def texts(self, tokens: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Pairs of a text and its change: both usual, the change loud, both loud."""
        x = self.draw(tokens, 1, 0)
        other = self.change(x)
        pairs = [("", x, other)]
        if self.loudness and tokens <= 65:  # what loud texts show does not depend on their length
            loud = other * self.loudness
            pairs += [(", loud", x, loud), (", all loud", x * self.loudness, loud)]
        return pairs

    def read(self, x: torch.Tensor, how: str) -> torch.Tensor | None:
        """The results; None where a loud text is too loud for numbers, which is no question of honesty."""
        if not how:
            return self.call(x)
        try:
            y = self.call(x)
        except (KeyholeError, RuntimeError):  # such as a matrix that has become singular
            return None
        return y if bool(y.isfinite().all()) else None


class Scores:
    """The worst score of a probe and where it was, beside the least and the largest of what proves its power."""

    def __init__(self) -> None:
        self.worst, self.where = 0.0, ""
        self.asked = 0
        self.writes = False
        self.reached: list[float] = []

    def see(self, after: torch.Tensor, before: torch.Tensor, size: float, where: str, audible: float = 0.0) -> None:
        """What must not have changed, at least not by more than what is audible."""
        self.asked += 1
        if before.numel() == 0:
            return
        moved = float((after - before).abs().max())
        score = 0.0 if moved == 0 else moved / size if size else float("inf")
        if not score <= max(self.worst, audible):  # NaN is not <= anything
            self.worst, self.where = (float("inf") if score != score else score), where

    def reach(self, after: torch.Tensor, before: torch.Tensor, size: float) -> None:
        """What must have changed, or the probe has shown nothing."""
        self.reached.append(float((after - before).abs().max()) / size if size and before.numel() else 0.0)

    def measured(self, limit: float, powerless: str) -> Measured:
        """What the probe found; undecided without power, unless the function writes nothing at all."""
        power = max(self.reached, default=0.0)
        evidence = {
            "changes": self.asked,
            "power": power,
            "least power": min(self.reached, default=0.0),
            "without power": sum(value == 0 for value in self.reached),
        }
        if self.worst <= limit and self.writes and power == 0:
            return Measured(0, missing=powerless, limit=limit, evidence=evidence)
        return Measured(self.worst, self.where, limit=limit, evidence=evidence)


def rms(*values: torch.Tensor) -> float:
    """The root mean square of the largest of several results."""
    return max(float(value.detach().square().mean().sqrt()) for value in values)


def cuts(tokens: int, *, aligned: bool) -> list[int]:
    """Where a text may be cut, early and late: at multiples of 8, or everywhere else."""
    found = [cut for cut in range(1, tokens) if (cut % ALIGNED == 0) == aligned]
    if len(found) <= SPREAD or tokens <= 65:
        return found
    chosen = torch.linspace(0, len(found) - 1, SPREAD).long().tolist()
    return sorted({*(found[place] for place in chosen), *(cut for cut in found if abs(cut % 64 - 32) == 31)})


@torch.no_grad()
def suffix(probed: Probed, *, aligned: bool) -> Measured:
    """How much earlier results move when all tokens from a cut on are others."""
    scores = Scores()
    for tokens in probed.lengths:
        places = cuts(tokens, aligned=aligned)
        for how, x, other in probed.texts(tokens) if places else []:
            if (before := probed.read(x, how)) is None:
                continue
            scores.writes = scores.writes or bool(before.any())
            for cut in places if not how else places[:: max(1, len(places) // 4)]:
                # One row at a time: a part whose rows see each other breaks another rule.
                if (after := probed.read(torch.cat((x[:, :cut], other[:, cut:]), 1), how)) is None:
                    continue
                size, where = rms(before, after), f"{tokens} tokens, those from {cut} on changed{how}"
                scores.see(after[:, :cut], before[:, :cut], size, where, AUDIBLE if how else 0.0)
                scores.reach(after[:, cut:], before[:, cut:], size)
    kind = "a multiple of 8" if aligned else "no multiple of 8"
    longest = max(probed.lengths)
    if not scores.asked:
        return Measured(0, missing=f"texts of at most {longest} tokens have no cut at {kind}", limit=probed.limit)
    found = scores.measured(probed.limit, "no change of later tokens reached any result, so it showed nothing")
    if found.missing and aligned:
        return Measured(
            1.0, "nothing moved at all: it does not read its input", limit=probed.limit, evidence=found.evidence
        )
    return _diagnosed(found, probed)


@torch.no_grad()
def truncation(probed: Probed) -> Measured:
    """How much earlier results move when all tokens from a cut on are left out."""
    scores = Scores()
    for tokens in [n for n in probed.lengths if n > 1]:
        x = probed.draw(tokens, 1, 0)
        other, before = probed.change(x), probed.call(x)
        scores.writes = scores.writes or bool(before.any())
        for cut in sorted({1, tokens // 4, tokens // 2, tokens // 2 // 8 * 8, tokens - 1} - {0}):
            after = probed.call(x[:, :cut])
            size = rms(before)
            scores.see(after, before[:, :cut], size, f"{tokens} tokens, those from {cut} on left out")
            read = probed.call(torch.cat((x[:, : cut - 1], other[:, cut - 1 : cut]), 1))
            scores.reach(read, after, size)
    if not scores.asked:
        return Measured(0, missing="a text of one token has nothing to leave out", limit=probed.limit)
    return _diagnosed(scores.measured(probed.reshaped, "what was left of the text reaches no result either"), probed)


def future_gradient(probed: Probed) -> Measured:
    """How large gradients wrt later tokens are, relative to those wrt earlier ones."""
    if probed.slopes is None:
        return Measured(0, missing="there is no gradient to take: it is not made of torch operations on an embedding")
    scores = Scores()
    for tokens in [n for n in probed.lengths if 1 < n <= 129]:
        x = probed.draw(tokens, 1, 0)
        places = [*cuts(tokens, aligned=True), *cuts(tokens, aligned=False)]
        for cut in sorted(set(places[:: max(1, len(places) // (4 if tokens <= 65 else 2))]) | {tokens - 1}):
            if (slope := probed.slopes(x, cut)) is None:
                continue
            size, ahead = rms(slope[:, :cut]), slope[:, cut:]
            scores.writes = True
            scores.see(ahead, torch.zeros_like(ahead), size, f"{tokens} tokens, results before {cut}")
            scores.reached.append(size)
    if not scores.asked:
        x = probed.draw(probed.lengths[-1], 1, 0)
        missing = "its results carry no gradient, so autograd cannot say what they depend on"
        return Measured(0, missing=missing if bool(probed.call(x).any()) else "", limit=probed.limit)
    found = scores.measured(probed.limit, "no gradient reaches earlier tokens either, so it showed nothing")
    return _diagnosed(found, probed)


@torch.no_grad()
def batch_mates(probed: Probed) -> Measured:
    """How much a row moves when the other rows are others, and when it stands alone."""
    scores, limit = Scores(), probed.reshaped
    for tokens in probed.lengths:
        x = probed.draw(tokens, 3, 0)
        other = probed.change(x)
        before = probed.call(x)
        scores.writes = scores.writes or bool(before.any())
        for row in (0, 1, 2):
            given = other.clone()
            given[row] = x[row]
            after = probed.call(given)
            size = rms(before, after)
            scores.see(after[row], before[row], size, f"{tokens} tokens, the rows beside row {row} changed")
            rest = [number for number in range(3) if number != row]
            scores.reach(after[rest], before[rest], size)
            alone = probed.call(x[row : row + 1])
            scores.see(alone[0], before[row], rms(before, alone), f"{tokens} tokens, row {row} alone")
    found = scores.measured(limit, "no change of the other rows reached any result, so it showed nothing")
    if found.worst <= limit:
        return found
    remedy = "sum and norm over the channels of one token, or over its own earlier tokens, never over rows"
    return Measured(found.worst, found.where, limit=limit, remedy=remedy, code=OWN_ROW, evidence=found.evidence)


@torch.no_grad()
def padding(probed: Probed) -> Measured:
    """How much real tokens move when padding of any content stands before or after them, or on both sides."""
    assert probed.padded is not None
    scores, longest, limit = Scores(), max(probed.lengths), probed.reshaped
    for tokens in [n for n in probed.lengths if n + 7 <= longest]:
        text = probed.draw(tokens, 2, 0)
        alone = probed.call(text)
        scores.writes = scores.writes or bool(alone.any())
        for left, right in ((5, 0), (0, 5), (3, 4)):
            mask = torch.zeros(2, left + tokens + right, dtype=torch.bool)
            mask[:, left : left + tokens] = True
            where = f"{tokens} tokens, {left} padded on the left, {right} on the right"
            for what, pad in _pads(probed, left + right, text):
                x = torch.cat((pad[:, :left], text, pad[:, left:]), 1)
                y, open_y = probed.padded(x, mask), probed.call(x)
                if what == "loud" and not bool(open_y.isfinite().all()):
                    continue
                kept = y[:, left : left + tokens]
                scores.see(kept, alone, rms(alone, open_y), f"{where} ({what})")
                scores.reach(open_y[:, left : left + tokens], alone, rms(alone, open_y))
                if not bool(y.isfinite().all()):
                    scores.see(torch.ones(1), torch.zeros(1), 1.0, f"{where}: a result at padding is not finite")
        _fully_padded(probed, scores, text, alone)
    if not scores.asked:
        return Measured(0, missing=f"texts of at most {longest} tokens leave no room for padding", limit=probed.limit)
    found = scores.measured(limit, "without the mask nothing changes either: it does not mix tokens")
    if found.worst <= limit:
        return found
    remedy = "take padded tokens out of numerator, denominator and state alike; mask scores with -inf"
    return Measured(found.worst, found.where, limit=limit, remedy=remedy, code=PADDING, evidence=found.evidence)


def _pads(probed: Probed, count: int, like: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """What may stand where padding is: any content. Ids are one ordinary id, as a pad is."""
    drawn = probed.draw(count, len(like), 31)
    if not drawn.is_floating_point():
        return [("an ordinary id", torch.full_like(drawn, int(drawn[0, 0]))), ("any ids", drawn)]
    pads = [("noise", drawn * 100), ("zeros", torch.zeros_like(drawn))]
    return [*pads, ("loud", drawn * probed.loudness)] if probed.loudness else pads


def _fully_padded(probed: Probed, scores: Scores, text: torch.Tensor, alone: torch.Tensor) -> None:
    """A row without any real token must be finite, and nothing to the row beside it."""
    assert probed.padded is not None
    none = torch.zeros(text.shape[:2], dtype=torch.bool)
    none[0] = True
    y, tokens = probed.padded(text, none), text.shape[1]
    if not bool(y.isfinite().all()):
        scores.see(torch.ones(1), torch.zeros(1), 1.0, f"{tokens} tokens: a fully padded row is not finite")
    scores.see(y[:1], alone[:1], rms(alone), f"{tokens} tokens beside a fully padded row")


def _diagnosed(found: Measured, probed: Probed) -> Measured:
    """A leak of the future, with what kind it is and the code that mends it."""
    if found.missing or found.worst <= found.limit:
        return found
    seen = diagnose(probed)
    evidence = {**found.evidence, "diagnosis": seen.told}
    return Measured(found.worst, found.where, "", found.limit, seen.told, seen.remedy, seen.code, evidence)
