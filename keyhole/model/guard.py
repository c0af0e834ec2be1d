"""A guard around a user's part: what it raises or returns wrongly is told as one sentence that names the part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keyhole.core.errors import InputError

# What a part may offer beyond forward; each is looked for on the part and passed through.
METHODS = ("add", "turn", "bias", "begin", "step", "look", "cost", "flops")


class Guarded(nn.Module):
    """The user's part with its shape checked at every call, its exceptions named, and its precision looked after.

    Where the model computes in bfloat16 the part runs under autocast, so that constants it keeps in float32 do no harm.
    """

    def __init__(self, part: nn.Module, kind: str, name: str) -> None:
        super().__init__()
        self.part, self.kind, self.name = part, kind, name
        if kind == "position" and not any(hasattr(part, method) for method in ("add", "turn", "bias")):
            self.add = self._add_by_forward  # the least a position can be: forward(x) adds
        # Without a state or a word that it works token by token, nothing may be cached: decoding recomputes each prefix.
        steps = hasattr(part, "step") or getattr(part, "tokenwise", False)
        self.needs_whole_sequence = not steps and (kind != "position" or hasattr(self, "add"))
        for method in METHODS:
            if callable(found := getattr(part, method, None)):
                setattr(self, method, self._named(found))

    def forward(self, x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        """Call the part; its result must have the shape of its input."""
        with torch.autocast(x.device.type, x.dtype, enabled=x.dtype in (torch.bfloat16, torch.float16)):
            y = self._named(self.part)(x, *rest, **options)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            got = f"shape {tuple(y.shape)}" if isinstance(y, torch.Tensor) else type(y).__name__
            raise InputError(f"{self.kind} {self.name} returned {got}; it was given, and must return, {tuple(x.shape)}")
        return y.to(x.dtype)

    def _add_by_forward(self, x_BTW: torch.Tensor, start: int) -> torch.Tensor:  # noqa: ARG002
        return self(x_BTW)

    def _named(self, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except InputError:
                raise
            except Exception as error:
                raise InputError(f"{self.kind} {self.name} raised {type(error).__name__}: {error}") from error

        return call


def rehearse(model: nn.Module, vocab: int, block: int) -> None:
    """One small forward pass that must give finite numbers, made only where a model holds parts of the user's."""
    guards = [module for module in model.modules() if isinstance(module, Guarded)]
    if not guards:
        return
    for guard in guards:
        guard.register_forward_hook(_must_be_finite)
    ids = torch.arange(min(block, 16)).remainder(vocab).repeat(2, 1)
    was_training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(ids)
    finally:
        model.train(was_training)
        for guard in guards:
            guard._forward_hooks.clear()


def _must_be_finite(guard: nn.Module, _: Any, y: torch.Tensor) -> None:
    if not torch.isfinite(y).all():
        raise InputError(
            f"{guard.kind} {guard.name} returned NaN or infinity at its first use; "
            "look for a division by zero, a logarithm of zero or an unset parameter (torch.empty)"
        )
