"""What a mixer must be true to beyond `rules.COMMON`: its forms agree, its state is all it needs.

Legend: B rows, T tokens, W width, H heads, D head width.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from keyhole.core.errors import InputError
from keyhole.mixers import flops
from keyhole.mixers.contract import Cost, Look
from keyhole.mixers.heads import held_bytes
from keyhole.parts.merge import Concat
from keyhole.parts.position import NoPosition
from keyhole.testing.rules import Measured, Rule, Worst, gradients, stepwise
from keyhole.testing.subject import Subject, inside, offers, takes


def mixer_of(tested: Subject) -> Any:
    """The mixer, its heads concatenated and without positions."""
    return tested.make(position=NoPosition(), merge=Concat())


def forms(tested: Subject) -> Measured:
    """How far the training form is from the definition, in results and all gradients."""
    part, worst = mixer_of(tested), Worst()
    if not takes(part, "impl"):
        return Measured(
            0, missing='forward takes no impl, so there is no readable definition to compare with; add impl="reference"'
        )
    weights = [weight for weight in part.parameters() if weight.requires_grad]
    for tokens in tested.lengths:
        for batch in (1, 3):
            x = tested.input(tokens, batch).requires_grad_()
            fast, slow = part(x), part(x, impl="reference")
            worst.see(fast.detach(), slow.detach(), f"batch {batch}, {tokens} tokens")
            pairs = zip(gradients(fast, [x, *weights]), gradients(slow, [x, *weights]), strict=True)
            for found, expected in pairs:
                worst.see(found, expected, f"batch {batch}, {tokens} tokens, gradients")
    return worst.measured()


@torch.no_grad()
def recurrent(tested: Subject) -> Measured:
    """How far stepping one token at a time is from reading all at once."""
    part, worst = mixer_of(tested), Worst()
    if not (offers(part, "begin") and offers(part, "step")):
        return Measured(0, missing="it has no begin and step, so decoding recomputes every prefix")
    for tokens in tested.lengths:
        x = tested.input(tokens, 3)
        worst.see(stepwise(part, x, list(range(1, tokens + 1))), part(x), f"{tokens} tokens")
    return worst.measured()


@torch.no_grad()
def resumed(tested: Subject) -> Measured:
    """How far reading in pieces is from reading all at once; and whether a copied state is one of its own."""
    part, worst = mixer_of(tested), Worst()
    if not (offers(part, "begin") and offers(part, "step")):
        return Measured(0, missing="it has no begin and step, so there is no state to resume")
    for tokens in [n for n in tested.lengths if n > 1]:
        x, expected = tested.input(tokens), part(tested.input(tokens))
        for cut in sorted({1, tokens // 3, tokens - 1} - {0}):
            worst.see(stepwise(part, x, [cut, tokens]), expected, f"{tokens} tokens in pieces of {cut} and {tokens - cut}")
        worst.see(_after_a_branch(part, x), expected, f"{tokens} tokens, from a copy of the state")
        found = _taking_turns(part, x, tested.input(tokens, seed=4) * 2)
        worst.see(found, expected, f"{tokens} tokens, another text read in turns with it")
    return worst.measured()


def _after_a_branch(part: Any, x: torch.Tensor) -> torch.Tensor:
    """The results where a copy of the state goes on after the state itself went elsewhere."""
    middle = x.shape[1] // 2
    first, state = part.step(x[:, :middle], part.begin(len(x), x))
    kept = copy.deepcopy(state) if isinstance(state, tuple | list | dict) or not hasattr(state, "copy") else state.copy()
    part.step(x[:, middle:].flip(1) * 2, state)
    rest, _ = part.step(x[:, middle:], kept)
    return torch.cat((first, rest), 1)


def _taking_turns(part: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A text read in two pieces, with another text begun and read between them, as two prompts that are served together."""
    middle = x.shape[1] // 2
    first, state = part.step(x[:, :middle], part.begin(len(x), x))
    between, other_state = part.step(other[:, :middle], part.begin(len(other), other))
    part.step(between, other_state)
    rest, _ = part.step(x[:, middle:], state)
    return torch.cat((first, rest), 1)


def cost(tested: Subject) -> Measured:
    """How far the declared parameters, FLOPs and bytes of state are from the counted ones, relatively."""
    part, worst = mixer_of(tested), Worst()
    if not offers(part, "cost"):
        return Measured(0, missing="it declares no cost, so studies cannot match budgets in FLOPs")
    form = {"impl": inside(part).counted_form} if hasattr(inside(part), "counted_form") else {}
    for tokens in tested.lengths:
        declared = part.cost(tokens)
        if not isinstance(declared, Cost):
            raise InputError("cost(tokens) must return a keyhole.mixers.contract.Cost(parameters, flops, state_bytes)")
        x = tested.input(tokens, 1)
        pairs = {
            "parameters": (declared.parameters, sum(p.numel() for p in part.parameters())),
            "FLOPs": (declared.flops, flops.measure(lambda given=x: part(given, **form))),
        }
        if offers(part, "begin"):
            with torch.no_grad():
                _, state = part.step(x, part.begin(1, x))
            pairs["bytes of state"] = (declared.state_bytes, held_bytes(state))
        for what, (said, counted) in pairs.items():
            worst.note(
                abs(said - counted) / max(1, counted), f"{tokens} tokens: {said:,} {what} declared, {counted:,} counted"
            )
    return worst.measured(0.0)


@torch.no_grad()
def look(tested: Subject) -> Measured:
    """How far what `look` shows is from what the mixer does."""
    part, worst = mixer_of(tested), Worst()
    if not offers(part, "look"):
        return Measured(0, missing="it has no look, so its patterns and heads cannot be shown")
    out = getattr(inside(part), "out", None)
    for tokens in tested.lengths:
        x = tested.input(tokens)
        seen = part.look(x)
        if not isinstance(seen, Look):
            raise InputError("look(x, mask) must return a keyhole.mixers.contract.Look(pattern_BHTT, heads_BTHD)")
        shape = (len(x), tested.heads, tokens, tokens)
        worst.note(float(tuple(seen.pattern_BHTT.shape) != shape), f"{tokens} tokens: the pattern is not (B, H, T, T)")
        worst.see(seen.pattern_BHTT.triu(1), torch.zeros_like(seen.pattern_BHTT), f"{tokens} tokens: weight on the future")
        if isinstance(out, nn.Module):
            worst.see(out(seen.heads_BTHD.flatten(2)), part(x), f"{tokens} tokens: heads that do not make the result")
    if takes(part, "mask"):
        x, mask = _padded(tested, tested.input(9), 2, 3)
        seen = part.look(x, mask)
        hidden = seen.pattern_BHTT[..., ~mask[0]]
        worst.see(hidden, torch.zeros_like(hidden), "weight on padding")
        if isinstance(out, nn.Module):
            worst.see(
                out(seen.heads_BTHD.flatten(2))[mask], part(x, mask)[mask], "padded: heads that do not make the result"
            )
    return worst.measured()


def _padded(tested: Subject, text: torch.Tensor, left: int, right: int) -> tuple[torch.Tensor, torch.Tensor]:
    noise = tested.input(left + right, len(text), seed=31) * 100
    x = torch.cat((noise[:, :left], text, noise[:, left:]), 1)
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[:, left : left + text.shape[1]] = True
    return x, mask


MIXING = (
    Rule(
        "forms",
        "the form that trains is the definition, in results and gradients",
        forms,
        "a fast form that is almost right trains almost the model that was meant",
        "compare both at the length named; look at the last, shorter chunk first",
    ),
    Rule(
        "recurrence",
        "one token at a time gives what all at once gives",
        recurrent,
        "what writes is then another model than the one that was trained",
        "carry everything over that the next token needs: sums, counts, positions",
    ),
    Rule(
        "resumed state",
        "reading in pieces, from a copied state or after other texts, gives what all at once gives",
        resumed,
        "prompts are read in pieces, and one prompt's state serves several answers",
        "keep everything in the state and nothing in the module; copy() must copy every tensor",
    ),
    Rule(
        "cost",
        "the declared parameters, FLOPs and bytes of state are those counted",
        cost,
        "a study that matches budgets believes the declaration",
        "count with keyhole.mixers.flops.measure and correct cost()",
    ),
    Rule(
        "look",
        "the pattern shown has no weight on the future, and the heads shown make the result",
        look,
        "a picture of something else than what ran misleads",
        "compute look from the same queries, keys and values as forward",
    ),
)
