"""First values, drawn at the scales of the one table in `keyhole.model.parameterization`.

Each parameter draws from a random stream of its own name, so that exchanging one part leaves the first values of all others
as they were: arms of a study are paired. A user's parameter without a role keeps the value that its constructor gave it.
"""

from __future__ import annotations

import torch
from torch import nn

from keyhole.core.config import Model
from keyhole.core.seeds import derive
from keyhole.model.parameterization import scale


@torch.no_grad()
def initialise(module: nn.Module, model: Model, seed: int) -> None:
    """Give every parameter that has a role its first values."""
    for name, parameter in module.named_parameters():
        role = getattr(parameter, "role", None)
        if role is None:
            continue
        fan_in, fan_out = parameter.shape[-1], parameter.shape[0]
        size = scale(role, fan_in, model, fan_out=fan_out, multiplier=getattr(parameter, "multiplier", 1.0))
        if role in ("gain", "bias") or size == 0:
            parameter.fill_(size)
        else:
            generator = torch.Generator().manual_seed(derive(seed, "init", name))
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
