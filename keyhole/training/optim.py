"""Optimizers: torch's own where they exist, sign descent and Muon here.

Each works on lists of tensors, whether a tensor is a single parameter or a flat slice that holds many. A group says what
kind its parameters are ("matrix", "table", "vector"), which parameters shall decay, and by what its rate is multiplied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, nearest
from keyhole.model.parameterization import Rule

# Options and their defaults. `decay` is decoupled (AdamW's way); in sgd, adagrad and adam torch adds it to the gradient.
# Either way it is multiplied by the rate of its group.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9, "nesterov": False, "decay": 0.0},
    "adagrad": {"eps": 1e-10, "decay": 0.0},
    "adam": {"betas": [0.9, 0.95], "eps": 1e-8, "decay": 0.0},
    "adamw": {"betas": [0.9, 0.95], "eps": 1e-8, "decay": 0.1},
    "sign": {"momentum": 0.9, "decay": 0.0},
    "muon": {"momentum": 0.95, "newton_steps": 5, "decay": 0.0, "adam_rate": 0.0, "betas": [0.9, 0.95], "eps": 1e-8},
}


@dataclass(frozen=True)
class Group:
    """Parameters that are treated alike. `matrices` finds in a tensor each matrix that an optimizer may take whole."""

    kind: str
    tensors: list[nn.Parameter]
    matrices: Callable[[torch.Tensor], list[torch.Tensor]]
    decays: bool
    multiplier: float = 1.0


def rule_of(name: str, kind: str) -> Rule:
    """How far a step of an optimizer moves parameters of a kind, on which their relative rates depend."""
    if name in ("sgd", "muon"):
        return "sgd" if name == "sgd" else "muon" if kind == "matrix" else "adam"
    return "adam"  # adagrad and sign descent too move each weight by about the rate


class Optimizer:
    """All of a run's optimizers as one: set the rate, step, save, restore."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        for part in parts:
            for group in part.param_groups:
                group.setdefault("base_rate", group["lr"])

    def step(self, factor: float) -> None:
        """One step at `factor` times the recipe's rate."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["base_rate"] * factor
            part.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The whole state as named tensors."""
        found = {}
        for i, part in enumerate(self.parts):
            parameters = [p for group in part.param_groups for p in group["params"]]
            for j, parameter in enumerate(parameters):
                for key, value in part.state.get(parameter, {}).items():
                    if value is not None:
                        found[f"{i}.{j}.{key}"] = torch.as_tensor(value)
        return found

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over a state that `tensors` gave."""
        for name, value in tensors.items():
            i, j, key = name.split(".", 2)
            part = self.parts[int(i)]
            parameters = [p for group in part.param_groups for p in group["params"]]
            part.state[parameters[int(j)]][key] = value.clone()


def build_optimizer(spec: Spec, rate: float, groups: list[Group], dtype: torch.dtype = torch.float32) -> Optimizer:
    """The optimizer of a recipe over grouped parameters; `dtype` is what Muon iterates in."""
    options = read_options(spec)
    decay = options["decay"]
    if spec.name == "muon":
        matrices = [group for group in groups if group.kind == "matrix"]
        rest = [group for group in groups if group.kind != "matrix"]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            params = _torch_groups(matrices, rate, decay)
            parts.append(Muon(params, momentum=options["momentum"], newton_steps=options["newton_steps"], dtype=dtype))
        if rest:
            parts.append(_adamw(_torch_groups(rest, options["adam_rate"] or rate / 5, decay), options))
        return Optimizer(parts)
    params = _torch_groups(groups, rate, decay)
    betas = tuple(options.get("betas", ()))
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(params, momentum=options["momentum"], nesterov=options["nesterov"]),
        "adagrad": lambda: torch.optim.Adagrad(params, eps=options["eps"]),
        "adam": lambda: torch.optim.Adam(params, betas=betas, eps=options["eps"], fused=True),
        "adamw": lambda: _adamw(params, options),
        "sign": lambda: Sign(params, momentum=options["momentum"]),
    }
    return Optimizer([makers[spec.name]()])


class Sign(torch.optim.Optimizer):
    """Sign descent: m = beta m + (1 - beta) g; w -= rate (sign(m) + decay w).

    Every weight moves by the rate, whatever the size of its gradient.
    """

    def __init__(self, params: list[dict[str, Any]], momentum: float) -> None:
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Move every weight by the rate."""
        for group in self.param_groups:
            for weight in group["params"]:
                average = _average(self.state[weight], weight.grad, group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])


class Muon(torch.optim.Optimizer):
    """Momentum, then the nearest orthogonal matrix: w -= rate sqrt(max(1, rows / columns)) NS(m) (Jordan et al. 2024).

    Nesterov momentum m' = g + beta m, m = beta m + g; NS is a quintic Newton-Schulz iteration from the Frobenius scale.
    Matrices of one shape are iterated together, tall ones transposed, so that a step is a handful of batched products.
    """

    def __init__(
        self, params: list[dict[str, Any]], momentum: float, newton_steps: int, dtype: torch.dtype = torch.float32
    ) -> None:
        defaults = {"lr": 0.02, "weight_decay": 0.0, "momentum": momentum, "newton_steps": newton_steps}
        super().__init__(params, defaults)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Move every matrix by an orthogonal one."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(weight)
                state["momentum"].mul_(group["momentum"]).add_(weight.grad)
                ahead = weight.grad.add(state["momentum"], alpha=group["momentum"])
                _orthogonalise_in_place(group["matrices"](ahead), group["newton_steps"], self.dtype)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(ahead, alpha=group["lr"])


QUINTIC = (3.4445, -4.7750, 2.0315)


def newton_schulz(x_NRC: torch.Tensor, steps: int) -> torch.Tensor:
    """Push the singular values of a batch of wide matrices towards 1: X <- a X + (b A + c A^2) X, A = X X^T."""
    a, b, c = QUINTIC
    x_NRC = x_NRC / (x_NRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x_NRC @ x_NRC.mT
        x_NRC = torch.baddbmm(x_NRC, torch.baddbmm(square, square, square, beta=b, alpha=c), x_NRC, beta=a)
    return x_NRC


def _orthogonalise_in_place(matrices: list[torch.Tensor], steps: int, dtype: torch.dtype) -> None:
    by_shape: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for matrix in matrices:
        wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
        by_shape[tuple(wide.shape)].append(wide)  # type: ignore[index]
    for alike in by_shape.values():
        for matrix, orthogonal in zip(alike, newton_schulz(torch.stack(alike).to(dtype), steps), strict=True):
            matrix.copy_(orthogonal)
    for matrix in matrices:
        if (tall := matrix.shape[0] / matrix.shape[1]) > 1:
            matrix.mul_(tall**0.5)


def _average(state: dict[str, Any], grad: torch.Tensor, momentum: float) -> torch.Tensor:
    if "average" not in state:
        state["average"] = torch.zeros_like(grad)
    return state["average"].lerp_(grad, 1 - momentum)


def _adamw(params: list[dict[str, Any]], options: dict[str, Any]) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, betas=tuple(options["betas"]), eps=options["eps"], fused=True)


def _torch_groups(groups: list[Group], rate: float, decay: float) -> list[dict[str, Any]]:
    return [
        {
            "params": group.tensors,
            "lr": rate * group.multiplier,
            "weight_decay": decay if group.decays else 0.0,
            "matrices": group.matrices,
        }
        for group in groups
    ]


def read_options(spec: Spec) -> dict[str, Any]:
    """An optimizer's options with defaults filled in, or what is wrong with them."""
    if spec.name not in OPTIONS:
        raise InputError(f"there is no optimizer {spec.name!r}{nearest(spec.name, OPTIONS)}")
    options = dict(OPTIONS[spec.name])
    for key, value in spec.options.items():
        if key not in options:
            raise InputError(f"unknown option {key!r} of optimizer {spec.name!r}{nearest(key, options)}")
        _check_option(spec.name, key, value, options[key])
        options[key] = value
    if options.get("nesterov") and not options["momentum"]:
        raise InputError(f"optimizer {spec.name!r}: nesterov = true needs a momentum above 0, such as 0.9")
    return options


def _check_option(name: str, key: str, value: Any, default: Any) -> None:
    """Numbers in their range, switches as switches."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        fine, allowed = isinstance(value, bool), "true or false"
    elif key == "betas":
        fine = isinstance(value, list) and len(value) == 2 and all(isinstance(b, float) and 0 <= b < 1 for b in value)
        allowed = "two numbers from 0 to below 1, such as [0.9, 0.95]"
    elif key == "newton_steps":
        fine, allowed = isinstance(value, int) and number and value >= 1, "a whole number of at least 1"
    elif key == "momentum":
        fine, allowed = number and 0 <= value < 1, "a number from 0 to below 1"
    else:
        fine, allowed = number and value >= 0, "a number of at least 0"
    if not fine:
        raise InputError(f"optimizer {name!r}: {key} = {value!r} is not valid; it takes {allowed}")
