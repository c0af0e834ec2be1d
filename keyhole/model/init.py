"""Every initial scale, in one table.

A parameter says what it is for (its role); the table says how large it starts. Each parameter draws from a random
stream of its own name, so that exchanging one part leaves the first values of all others as they were: arms of a study
are paired.

| role | standard (GPT-2's) | quiet |
| --- | --- | --- |
| embedding | .02 | 1 (tied: .02, as it is the head too) |
| position | .02 | .02 |
| in (queries, keys, values, up, gate) | .02 | 1 / sqrt(fan-in) |
| out (ends of residual branches) | .02 / sqrt(2 layers) | 0 |
| head (untied) | .02 | 0 |
| gain | 1 | 1 |
| bias | 0 | 0 |

With `quiet`, every block starts as the identity; an untied head starts at 0, so that the first loss is ln V exactly.
A user's parameter without a role keeps the value that its own constructor gave it.
"""

from __future__ import annotations

import torch
from torch import nn

from keyhole.core.config import Model
from keyhole.core.seeds import derive


def scale(role: str, fan_in: int, model: Model) -> float:
    """The standard deviation of a parameter's first values (for a gain, the value itself)."""
    if role in ("gain", "bias"):
        return 1.0 if role == "gain" else 0.0
    if model.init == "standard":
        return 0.02 / (2 * model.layers) ** 0.5 if role == "out" else 0.02
    quiet = {"embedding": 0.02 if model.tie else 1.0, "position": 0.02, "in": fan_in**-0.5}
    return quiet.get(role, 0.0)


@torch.no_grad()
def initialise(module: nn.Module, model: Model, seed: int) -> None:
    """Give every parameter that has a role its first values."""
    for name, parameter in module.named_parameters():
        role = getattr(parameter, "role", None)
        if role is None:
            continue
        size = scale(role, parameter.shape[-1], model)
        if role in ("gain", "bias") or size == 0:
            parameter.fill_(size)
        else:
            generator = torch.Generator().manual_seed(derive(seed, "init", name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
