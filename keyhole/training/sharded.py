"""Weights that no process holds whole: torch's FSDP2, behind the same interface as `FlatWeights`."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from keyhole.training.optim import Group
from keyhole.training.weights import Relative, own_rate, treated_alike


class ShardedWeights:
    """A model whose parameters are shared out over the processes, a block at a time."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, relative: Relative = own_rate) -> None:
        # Before sharding replaces the parameters, and with them what they say of themselves.
        alike = treated_alike(model, relative)
        lower = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        policy = MixedPrecisionPolicy() if dtype == torch.float32 else lower
        common = _in_several_places(model)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, ignored_params=common)
        fully_shard(model, mp_policy=policy)
        self.compute = model
        self._parameters = list(model.parameters())
        shares = dict(model.named_parameters())
        self.groups = [
            Group(kind, [shares[name] for name in names], lambda flat: [flat], kind != "vector", multiplier)
            for (kind, multiplier), names in alike.items()
        ]

    def zero_grad(self) -> None:
        """Forget the gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def collect_grad(self) -> None:
        """FSDP adds pieces up by itself."""

    def clip(self, limit: float) -> float:
        """Scale the gradient down to norm `limit` where it is larger; return the norm it had, over all processes."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        whole = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if 0 < limit < whole < float("inf"):
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / whole)
        return whole

    def refresh(self) -> None:
        """FSDP converts as it gathers."""


def _in_several_places(model: nn.Module) -> set[nn.Parameter]:
    """What blocks have in common, such as learned positions: the model as a whole shares it out."""
    places = [set(child.parameters()) for name, child in model.named_children() if name != "blocks"]
    places += [set(block.parameters()) for block in model.blocks]
    times = Counter(parameter for place in places for parameter in place)
    return {parameter for parameter, count in times.items() if count > 1}
