"""A guard around a user's part: what it raises or returns wrongly is told as one sentence that names the part."""

from __future__ import annotations

from functools import partial
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
        self.rehearsing = False
        offered = [method for method in METHODS if callable(getattr(part, method, None))]
        for method in offered:
            # Looked up by name at each call: a copy of this module must call the copy's part.
            setattr(self, method, partial(self._offer, method))
        by_forward = kind == "position" and not {"add", "turn", "bias"} & set(offered)
        if by_forward:
            self.add = self._add_by_forward  # the least a position can be: forward(x) adds
        # Without a state or a word that it works token by token nothing may be cached: decoding recomputes each prefix.
        steps = "step" in offered or getattr(part, "tokenwise", False)
        self.needs_whole_sequence = not steps and (kind != "position" or by_forward)

    def forward(self, x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        """Call the part; its result must have the shape of its input."""
        return self._checked(self._call(self.part, x, *rest, **options), x)

    def _add_by_forward(self, x_BTW: torch.Tensor, start: int) -> torch.Tensor:  # noqa: ARG002
        return self(x_BTW)

    def _offer(self, method: str, *args: Any, **options: Any) -> Any:
        result = self._call(getattr(self.part, method), *args, **options)
        if method in ("add", "turn"):
            return self._checked(result, args[0])
        if method == "step":
            if not (isinstance(result, tuple) and len(result) == 2):
                raise InputError(f"{self.kind} {self.name}: step must return a result and the new state, (y, state)")
            return self._checked(result[0], args[0]), result[1]
        if method == "bias":
            wanted = (len(args[0]), len(args[1]))
            if not isinstance(result, torch.Tensor) or result.shape[-2:] != wanted:
                must = f"bias must return (heads, {wanted[0]}, {wanted[1]})"
                raise InputError(f"{self.kind} {self.name} returned {_shape(result)}; {must}")
        return result

    def _call(self, function: Any, *args: Any, **options: Any) -> Any:
        x = args[0] if args and isinstance(args[0], torch.Tensor) else None
        half = x is not None and x.dtype in (torch.bfloat16, torch.float16)
        try:
            if x is None or not half:
                return function(*args, **options)
            with torch.autocast(x.device.type, x.dtype):
                return function(*args, **options)
        except InputError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit() in a part must not pass for an end in order
            raise InputError(f"{self.kind} {self.name} raised {first_line(error)}") from error

    def _checked(self, y: Any, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            wanted = tuple(x.shape)
            raise InputError(f"{self.kind} {self.name} returned {_shape(y)}; it was given, and must return, {wanted}")
        if self.rehearsing and not torch.isfinite(y).all():
            raise InputError(
                f"{self.kind} {self.name} returned NaN or infinity at its first use; "
                "look for a division by zero, a logarithm of zero or an unset parameter (torch.empty)"
            )
        return y.to(x.dtype)


def first_line(error: BaseException) -> str:
    """What an exception says, without the lines that would break a sentence."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def _shape(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def rehearse(model: nn.Module, vocab: int, block: int) -> None:
    """One small forward pass that must give finite numbers, made only where a model holds parts of the user's."""
    guards = [module for module in model.modules() if isinstance(module, Guarded)]
    if not guards:
        return
    ids = torch.arange(min(block, 16)).remainder(vocab).repeat(2, 1)
    was_training = model.training
    try:
        for guard in guards:
            guard.rehearsing = True
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(ids)
    finally:
        model.train(was_training)
        for guard in guards:
            guard.rehearsing = False
