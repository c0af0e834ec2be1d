"""Every initial scale, every multiplier of the forward pass and every relative rate, in one table.

A parameter says what it is for (its role); the table says how large it starts, what its product is multiplied by, and by
what the recipe's rate is multiplied for it. n is the width, n0 = `model.base_width`, g = n / n0; i and o are the fan-in
and the fan-out of a matrix.

First values: the standard deviation (for a gain and a bias the value). Under `unit` a `Linear` starts at 1 and multiplies
its product; a weight that is no `Linear`'s starts at i^-1/2 and multiplies nothing.

| role | standard (GPT-2's) | quiet | mup | unit: first value, multiplier |
| --- | --- | --- | --- | --- |
| embedding | .02 | 1 (tied: .02, as it is the head too) | .1 (tied: .05) | 1, 1 |
| position | .02 | .02 | .1 | 1, 1 |
| in (queries, keys, values, up, gate) | .02 | i^-1/2 | i^-1/2 min(1, (o/i)^1/2) | 1, i^-1/2 |
| out (ends of residual branches) | .02 / sqrt(2 layers) | 0 | 0 | 1, i^-1/2 |
| head (untied) | .02 | 0 | .1 | 1 |
| the logits | | | multiplied by 1 / g | multiplied by 1 / n |
| gain, bias | 1, 0 | 1, 0 | 1, 0 | 1, 0 |

With `quiet` and `mup` every block starts as the identity; with `quiet` an untied head gives the first loss ln V exactly.

Rates relative to the recipe's. Under `standard` and `quiet` all are 1; under `mup` and `unit` all are 1 at n = n0.

| role | sgd | adam, adamw, adagrad, sign | muon |
| --- | --- | --- | --- |
| embedding, position, head, gain, bias | g | 1 | as adam, at its `adam_rate` |
| in, out: mup | 1 | 1 / g | 1 |
| in, out: unit | g | g^-1/2 | g^1/2 |

Derivation (Yang, Simon and Bernstein 2023; `unit` after Blake et al. 2023 and 2024). Vectors in the model have entries of
size 1, so their norm is the root of their length. A matrix makes such vectors of such vectors, and changes them by as much
in a step, when |W| and |dW| are both of the order (o/i)^1/2 in the spectral norm. The rest follows:

- *First values.* A random matrix of deviation s has |W| = s (i^1/2 + o^1/2), hence s = i^-1/2 min(1, (o/i)^1/2).
- *Adam and sign descent* move each entry by the rate, and a step has low rank: |dW| = rate (i o)^1/2, so rate ~ 1 / i.
- *SGD.* The loss changes by 1 when all of a product's o entries change by 1, so its gradient there has entries 1 / o and
  norm o^-1/2; with an input of norm i^1/2, |dW| = rate (i/o)^1/2, so rate ~ o / i. Momentum changes no power of n.
- *Muon* moves by an orthogonal matrix times max(1, o/i)^1/2: the right norm where o / i stays as it is, so rate ~ 1.
- *Looked up or entrywise.* A row of the embedding is a matrix that reads a one-hot vector; a gain or a bias is one that
  reads a single number. So i = 1: SGD ~ o, Adam ~ 1, and first values that do not depend on n.
- *A multiplier moves between the columns.* m W with first value s / m, and with rate c / m^2 (SGD: the gradient has the
  factor m too) or c / m (the others: the gradient's size does not matter), is the function of W with s and c, at first and
  after each step. So `unit` is `mup` with m = i^-1/2, and its rates are higher by the powers g and g^1/2.
- *The head* reads n channels and has a fixed number of outputs: SGD ~ 1 / n, Adam ~ 1 / n. With the multiplier m ~ 1 / n
  on the logits that is SGD ~ n, Adam ~ 1, and first values that do not depend on n: the embedding's own column, which is
  why one matrix may be both. A step moves the logits alike at every width; their first values fall as n^-1/2.
- *Zero at the ends of branches* (`mup`) is below the order asked of |W| only until the first step, which has that order;
  losses were lower than from s (LOG.md). `unit` starts there, so that all products have size 1 at once.

What is held fixed: the vocabulary, the block, the layers, the batch, and the width D of a head: let `heads` grow with
`width`, since scores are divided by D^1/2. A fan of at least the width is taken to grow with it, and a smaller one (a gain
over a head's channels, a low rank) to stay. Constants were chosen at n0 = 64; untied logits of `mup` start at .1 n0^1/2.

Decay is multiplied by the rate of its group, as in torch: with adamw under `mup` a hidden matrix decays by rate decay / g
a step, more slowly the wider it is. Decay added to the gradient (sgd, adagrad, adam) is no part of the derivation. Adam's
eps must stay below gradients, which fall as 1 / n. Of the published `unit` two things are left out: multipliers for the
backward pass alone (gradients here are those of the function), and a rate for embeddings that falls with the width. A
parameter without a role (a user's, or one that is no weight: ridge's lam, a state space's decays, a mixture of heads) keeps
its value and has the recipe's own rate. Grouped key-value heads are to grow with the heads; clipping by the norm of all
gradients is left out, which under SGD changes steps by a power of n.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from keyhole.core.config import Model
from keyhole.parts.contract import Linear

Rule = Literal["sgd", "adam", "muon"]
"""How far a step goes: by the gradient; by the rate in each entry; by the rate in each direction."""

TABLE, TIED = 0.1, 0.05
"""Where mup's tables start, and one that is the head as well: of .02 to .5 what trained best at widths 64 and 256."""


def scale(role: str, fan_in: int, model: Model, *, fan_out: int | None = None, multiplier: float = 1.0) -> float:
    """The standard deviation of a parameter's first values (for a gain, the value itself).

    `fan_out` is that of a square matrix when not given; `multiplier` is what its product is multiplied by.
    """
    if role in ("gain", "bias"):
        return 1.0 if role == "gain" else 0.0
    if model.init == "standard":
        return 0.02 / (2 * model.layers) ** 0.5 if role == "out" else 0.02
    if model.init == "quiet":
        return {"embedding": 0.02 if model.tie else 1.0, "position": 0.02, "in": fan_in**-0.5}.get(role, 0.0)
    hidden = role in ("in", "out")
    if model.init == "unit":
        return fan_in**-0.5 / multiplier if hidden else 1.0
    table = TIED if role == "embedding" and model.tie else TABLE
    return {"in": fan_in**-0.5 * min(1.0, ((fan_out or fan_in) / fan_in) ** 0.5), "out": 0.0}.get(role, table)


def logit_multiplier(model: Model) -> float:
    """What the logits are multiplied by."""
    if model.init == "unit":
        return 1 / model.width
    return model.base_width / model.width if model.init == "mup" else 1.0


def set_multipliers(module: nn.Module, model: Model) -> None:
    """Give every `Linear` its forward multiplier; its weight remembers it, for its first values and its rate."""
    if model.init != "unit":
        return
    for part in module.modules():
        if isinstance(part, Linear):
            part.multiplier = part.weight.multiplier = part.weight.shape[-1] ** -0.5  # type: ignore[attr-defined]


def rate_multiplier(parameter: nn.Parameter, model: Model, rule: Rule) -> float:
    """By what the recipe's rate is multiplied for a parameter that is moved by a rule."""
    role = getattr(parameter, "role", None)
    if role is None or model.init not in ("mup", "unit"):
        return 1.0
    fan_in, fan_out = fans(role, parameter.shape)
    into, out = _growth(fan_in, model), _growth(fan_out, model)
    multiplier = into**-0.5 if hasattr(parameter, "multiplier") else 1.0
    if role == "head":
        out, multiplier = 1.0, 1 / into  # a vocabulary does not grow, however large it is
    if rule == "sgd":
        return out / into / multiplier**2
    if rule == "adam":
        return 1 / into / multiplier
    # Muon itself sees to matrices that grow taller, and not to those that grow wider.
    return ((out / into) ** 0.5 if fan_out < fan_in else 1.0) / multiplier


def fans(role: str, shape: Sequence[int]) -> tuple[int, int]:
    """How many numbers each output reads, and how many outputs there are. A row that is looked up reads one."""
    if role in ("embedding", "position") or len(shape) < 2:
        return 1, shape[-1]
    return shape[-1], shape[0]


def _growth(fan: int, model: Model) -> float:
    """How much larger a fan is than at the base width: those below the width stay as they are."""
    return model.width / model.base_width if fan >= model.width else 1.0
