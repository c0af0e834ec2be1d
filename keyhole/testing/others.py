"""What positions, merges, norms and feeds must be true to beyond `rules.COMMON`.

Legend: B rows, T tokens, W width, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import nn

from keyhole.mixers import flops
from keyhole.testing.rules import Measured, Rule, Worst, stepwise
from keyhole.testing.subject import Subject, offers


class Placed(nn.Module):
    """A position as a function of a stream, so that the common rules can be asked: added, or turning every head."""

    def __init__(self, position: nn.Module, heads: int) -> None:
        super().__init__()
        self.position, self.heads = position, heads

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:
        """The stream with its places known."""
        return self.begin_at(x_BTW, 0)

    def begin_at(self, x_BTW: torch.Tensor, start: int) -> torch.Tensor:
        """The same for tokens from a place on."""
        if offers(self.position, "add"):
            return self.position.add(x_BTW, start)
        if offers(self.position, "turn"):
            heads_BHTD = x_BTW.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            return self.position.turn(heads_BHTD, start).transpose(1, 2).flatten(2)
        time = torch.arange(start, start + x_BTW.shape[1])
        scores = torch.zeros(x_BTW.shape[1], start + x_BTW.shape[1], dtype=x_BTW.dtype)
        bias = self.position.bias(time, torch.arange(start + x_BTW.shape[1])) + scores
        weights = bias.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(start), float("-inf")).softmax(-1)
        return x_BTW * weights.diagonal(start, -2, -1).mean(0)[:, None]


class PlacedSubject(Subject):
    """A position that is asked as a function of a stream."""

    def make(self, **others: object) -> nn.Module:
        """The position inside its function."""
        return Placed(super().make(**others), self.heads).double().eval()


@torch.no_grad()
def continued(tested: Subject) -> Measured:
    """How far tokens read from a place on are from the same tokens read as part of the whole."""
    part, worst = tested.make(), Worst()
    if offers(part.position, "bias"):
        return _bias_continued(tested, part.position)
    for tokens in [n for n in tested.lengths if n > 1]:
        x = tested.input(tokens)
        for start in sorted({1, tokens // 2, tokens - 1}):
            where = f"{tokens} tokens from {start} on"
            worst.see(part.begin_at(x[:, start:], start), part(x)[:, start:], where)
    return worst.measured()


def _bias_continued(tested: Subject, position: nn.Module) -> Measured:
    worst = Worst()
    for tokens in tested.lengths:
        time = torch.arange(tokens)
        whole = position.bias(time, time)
        worst.see(
            position.bias(time[tokens // 2 :], time), whole[..., tokens // 2 :, :], f"{tokens} tokens, the later half"
        )
    return worst.measured()


@torch.no_grad()
def merge_steps(tested: Subject) -> Measured:
    """How far merging token by token is from merging all at once."""
    part, worst = tested.make(), Worst()
    if not offers(part, "step"):
        return Measured(0, missing="it has no begin and step; it must then work token by token")
    for tokens in tested.lengths:
        x = tested.input(tokens)
        worst.see(stepwise(part, x, list(range(1, tokens + 1))), part(x), f"{tokens} tokens, one at a time")
        worst.see(stepwise(part, x, sorted({max(1, tokens // 3), tokens})), part(x), f"{tokens} tokens in two pieces")
    return worst.measured()


@torch.no_grad()
def tokenwise(tested: Subject) -> Measured:
    """How far a token alone is from the same token among others."""
    part, worst = tested.make(), Worst()
    if tested.kind == "merge" and offers(part, "step"):
        return Measured(0, missing="it has a state, and so may read earlier tokens")
    for tokens in tested.lengths:
        x = tested.input(tokens)
        place = tokens // 2
        worst.see(part(x[:, place : place + 1]), part(x)[:, place : place + 1], f"{tokens} tokens, token {place} alone")
    return worst.measured()


def feed_cost(tested: Subject) -> Measured:
    """How far the declared FLOPs are from the counted ones, relatively."""
    part, worst = tested.make(), Worst()
    if not offers(part, "flops"):
        return Measured(0, missing="it declares no FLOPs, so studies cannot match budgets by them")
    for tokens in tested.lengths:
        x = tested.input(tokens, 1)
        said, counted = part.flops(tokens), flops.measure(lambda given=x: part(given))
        worst.note(abs(said - counted) / max(1, counted), f"{tokens} tokens: {said:,} FLOPs declared, {counted:,} counted")
    return worst.measured(0.0)


_TOKENWISE = Rule(
    "token by token",
    "a token alone gives what it gives among others",
    tokenwise,
    "what is decoded one token at a time must be what was trained",
    "sum and norm over channels, never over time; or give it begin and step",
)
_CONTINUED = Rule(
    "continued",
    "positions from a place on are those of the whole",
    continued,
    "decoding asks for one place at a time",
    "use `start`: the position of the first token given",
)
_MERGE = Rule(
    "recurrence",
    "merging one token at a time gives what all at once gives",
    merge_steps,
    "what writes is then another model than the one that was trained",
    "carry the running sum in the state",
)
_FEED = Rule(
    "cost",
    "the declared FLOPs are those counted",
    feed_cost,
    "a study that matches budgets believes the declaration",
    "count with keyhole.mixers.flops.measure and correct flops()",
)
OTHERS = {"position": (_CONTINUED,), "merge": (_MERGE, _TOKENWISE), "norm": (_TOKENWISE,), "feed": (_TOKENWISE, _FEED)}
