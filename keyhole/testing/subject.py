"""What the battery tests: a part in float64 with weights far from their first values, and what it says that it offers.

Legend: B rows, T tokens, W width, H heads, D head width.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, nearest
from keyhole.core.seeds import derive
from keyhole.model.guard import Guarded
from keyhole.model.registry import CATALOGUE, construct, find

LENGTHS = (1, 2, 7, 63, 64, 65, 129)
"""Short ones, and those around the sizes of blocks and chunks."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A part to be tested, and how: `make` builds it afresh, the same each time."""

    kind: str
    spec: Spec
    width: int = 24
    heads: int = 4
    block: int = 256
    lengths: tuple[int, ...] = LENGTHS
    seed: int = 0
    folder: Path = field(default_factory=Path.cwd)
    cls: type[nn.Module] | None = None

    def make(self, **others: Any) -> nn.Module:
        """The part in float64, in evaluation, with weights of its role's size, or away from those its constructor gave."""
        facts: dict[str, Any] = {
            "width": self.width,
            "heads": self.heads,
            "block": self.block,
            "layer": 0,
            "kv_heads": None,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(self.seed, "battery"))
            if self.cls is None:
                part = construct(self.kind, self.spec, self.folder, **facts, **others)
            else:
                part = Guarded(
                    _direct(self.cls, self.spec, {**facts, **others, "folder": self.folder}), self.kind, self.cls.__name__
                )
        return moved(part, self.seed)

    def normal(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """Reproducible float64 noise."""
        return _normal(self.seed, seed, *shape)

    def input(self, tokens: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
        """What this kind of part is given: a stream (B, T, W), or heads (B, T, H, D) for a merge."""
        shape = (batch, tokens, self.width)
        if self.kind == "merge":
            shape = (batch, tokens, self.heads, self.width // self.heads)
        return self.normal(*shape, seed=seed + 1)

    @property
    def usable(self) -> Subject:
        """The same, without lengths beyond the block, and with the block itself."""
        return replace(self, lengths=tuple(sorted({*(n for n in self.lengths if n <= self.block), self.block})))


def subject(part: str | type[nn.Module], kind: str, options: dict[str, Any], **settings: Any) -> Subject:
    """A subject by name ("linear", "my.py:Mine") or by class."""
    if kind not in CATALOGUE:
        raise InputError(f"there is no kind of part {kind!r}{nearest(kind, CATALOGUE)}")
    if isinstance(part, str) and part:
        found = Subject(kind=kind, spec=Spec(name=part, options=options), **settings).usable
        find(kind, part, found.folder)
        return found
    if not (inspect.isclass(part) and issubclass(part, nn.Module)):
        raise InputError(f"give a part by name or by its class, not {part!r}")
    return Subject(kind=kind, spec=Spec(name=part.__name__, options=options), cls=part, **settings).usable


def _normal(seed: int, stream: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(derive(seed, stream)))


def moved(module: nn.Module, seed: int) -> nn.Module:
    """The module in float64, in evaluation, its weights away from their start: one at zero hides faults."""
    module = in_double(module).eval()
    for name, weight in module.named_parameters():
        noise = _normal(seed, derive(seed, name), *weight.shape)
        if getattr(weight, "role", None):
            weight.data = noise * _scale(weight)
        elif weight.dtype in (torch.float64, torch.complex128):
            # A small step away from any start is enough where we do not know what the weight is for.
            weight.data = weight.data + 0.05 * noise * max(0.2, float(weight.detach().abs().square().mean().sqrt()))
    return module


def in_double(part: nn.Module) -> nn.Module:
    """Everything in float64; `Module.double` leaves complex numbers as they are."""
    for tensor in [*part.parameters(), *part.buffers()]:
        if tensor.dtype == torch.complex64:
            tensor.data = tensor.data.to(torch.complex128)
    return part.double()


def _scale(weight: torch.Tensor) -> float:
    return float(weight.shape[-1]) ** -0.5 if weight.ndim > 1 else 0.5


def _direct(cls: type[nn.Module], spec: Spec, facts: dict[str, Any]) -> nn.Module:
    named = inspect.signature(cls).parameters if cls.__init__ is not nn.Module.__init__ else {}
    return cls(**{key: value for key, value in facts.items() if key in named and key not in spec.options}, **spec.options)


def inside(part: nn.Module) -> nn.Module:
    """The part itself, without the guard around a user's."""
    return part.part if isinstance(part, Guarded) else part


def takes(part: nn.Module, argument: str) -> bool:
    """Whether a part's forward takes an argument: `impl` by name, or a mask by its place, the second."""
    given = list(inspect.signature(inside(part).forward).parameters.values())
    if argument == "mask":
        second = given[1] if len(given) > 1 else None
        return second is not None and second.kind is second.POSITIONAL_OR_KEYWORD and "mask" in second.name
    return argument in [p.name for p in given] or any(p.kind is p.VAR_KEYWORD for p in given)


def offers(part: nn.Module, method: str) -> bool:
    """Whether a part has a method."""
    return callable(getattr(part, method, None))
