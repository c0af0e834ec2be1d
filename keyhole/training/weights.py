"""Where a run's weights lie: in one flat float32 buffer, arranged so that whatever is treated alike lies side by side.

An optimizer then takes three tensors instead of a hundred (a few more where relative rates differ), clipping is one norm,
and the copy that the model computes with in bfloat16 is refreshed by one conversion. Every parameter is a view into the
buffer, so nothing is ever copied back.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn

from keyhole.training.optim import Group

Relative = Callable[[nn.Parameter], float]
"""By what a parameter multiplies the recipe's rate."""


KINDS = ("matrix", "table", "vector")


def kind_of(parameter: nn.Parameter) -> str:
    """How an optimizer sees a parameter: a "matrix" of the blocks, a "table" of rows to look up, or a "vector"."""
    role = getattr(parameter, "role", None)
    if role in ("embedding", "position", "head"):
        return "table"
    return "matrix" if parameter.ndim == 2 and role != "gain" else "vector"


def own_rate(parameter: nn.Parameter) -> float:  # noqa: ARG001
    """The recipe's rate as it is."""
    return 1.0


def treated_alike(model: nn.Module, relative: Relative) -> dict[tuple[str, float], list[str]]:
    """The names of a model's parameters by kind and relative rate, shared ones once, in a fixed order."""
    alike: dict[tuple[str, float], list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        alike[kind_of(parameter), relative(parameter)].append(name)
    return {key: alike[key] for kind in KINDS for key in alike if key[0] == kind}


class FlatWeights:
    """Master weights and gradients of a model in flat buffers, and the model that computes with them."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, relative: Relative = own_rate) -> None:
        named = dict(model.named_parameters())
        alike = {key: [named[name] for name in names] for key, names in treated_alike(model, relative).items()}
        ordered = [parameter for parameters in alike.values() for parameter in parameters]
        device = ordered[0].device
        size = sum(parameter.numel() for parameter in ordered)
        self.master = torch.empty(size, device=device)
        self.grad = torch.zeros(size, device=device)
        self.groups = self._lay_out(alike)
        self.compute, self._low = model, None
        self._computing = ordered
        if dtype != torch.float32:
            self.compute = _computing_copy(model, dtype)
            self._low = torch.empty(size, dtype=dtype, device=device)
            self._computing = _same_order(model, self.compute, ordered)
            for parameter, view in zip(self._computing, _views(self._low, ordered), strict=True):
                parameter.data = view
            self.refresh()
        self._grads = _views(self.grad, ordered)
        self._fresh = True

    def zero_grad(self) -> None:
        """Forget the gradient."""
        self._fresh = True

    def collect_grad(self) -> None:
        """Take over what a backward pass found, so that the pieces of a batch add up in float32.

        The model's own gradients start from nothing each time: autograd then hands its tensors over without adding.
        """
        missing = [p for p in self._computing if p.grad is None]
        for parameter in missing:  # a part of the user's may not use all it has
            parameter.grad = torch.zeros_like(parameter)
        found = [parameter.grad for parameter in self._computing]
        if self._fresh:
            torch._foreach_copy_(self._grads, found)
        else:
            torch._foreach_add_(self._grads, [grad.float() for grad in found])
        self._fresh = False
        for parameter in self._computing:
            parameter.grad = None

    def clip(self, limit: float) -> float:
        """Scale the gradient down to norm `limit` where it is larger; return the norm it had."""
        norm = float(torch.linalg.vector_norm(self.grad))
        if 0 < limit < norm < float("inf"):
            self.grad.mul_(limit / norm)
        return norm

    def refresh(self) -> None:
        """Bring the new weights to the model that computes."""
        if self._low is not None:
            self._low.copy_(self.master)

    @torch.no_grad()
    def _lay_out(self, alike: dict[tuple[str, float], list[nn.Parameter]]) -> list[Group]:
        groups, offset = [], 0
        for (kind, multiplier), parameters in alike.items():
            size = sum(parameter.numel() for parameter in parameters)
            part = self.master[offset : offset + size]
            for parameter, view in zip(parameters, _views(part, parameters), strict=True):
                view.copy_(parameter)
                parameter.data = view
            flat = nn.Parameter(part)
            flat.grad = self.grad[offset : offset + size]
            groups.append(Group(kind, [flat], _matrix_views(parameters), kind != "vector", multiplier))
            offset += size
        return groups


def _computing_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same model with parameters of lower precision. Buffers stay as they are: tables of angles want their digits."""
    replica = copy.deepcopy(model, {id(buffer): buffer for buffer in model.buffers()})  # buffers are shared
    for parameter in replica.parameters():
        parameter.data = parameter.data.to(dtype)
    return replica


def _same_order(model: nn.Module, replica: nn.Module, ordered: list[nn.Parameter]) -> list[nn.Parameter]:
    twin = {id(a): b for a, b in zip(model.parameters(), replica.parameters(), strict=True)}
    return [twin[id(parameter)] for parameter in ordered]


def _views(flat: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    views, offset = [], 0
    for parameter in parameters:
        views.append(flat[offset : offset + parameter.numel()].view(parameter.shape))
        offset += parameter.numel()
    return views


def _matrix_views(parameters: list[nn.Parameter]):
    """A function from a flat tensor to its matrices, stacked ones (queries, keys, values) one by one."""

    def views(flat: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for parameter, view in zip(parameters, _views(flat, parameters), strict=True):
            found += view.split(getattr(parameter, "stack", view.shape[0]))
        return found

    return views
