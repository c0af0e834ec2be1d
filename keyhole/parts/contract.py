"""What every part is told, and how its parameters say what they are for.

A part is an `nn.Module`. Its constructor names what it wants to know among `width`, `heads`, `block` and `layer`, in any
order; everything else it takes is an option of its own, which a recipe may set:

    class Mine(nn.Module):
        def __init__(self, width, heads, block, sharpness=1.0): ...

| kind | it must offer | it may offer |
| --- | --- | --- |
| mixer | `forward(x_BTW) -> y_BTW` | see `keyhole.mixers.contract` |
| position | one of `add(x_BTW, start)`, `turn(x_BHTD, start)`, `bias(queries, keys)`, or `forward(x_BTW)`, which adds | |
| merge | `forward(heads_BTHD) -> heads_BTHD` | `begin(batch, like)` and `step(heads_BTHD, state)` for cached decoding |
| norm, feed | `forward(x_BTW) -> y_BTW` | `flops(tokens)` |

B rows, T tokens, W width, H heads, D = W / H, `start` the position of the first of the T tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

Role = Literal["embedding", "position", "in", "out", "head", "gain", "bias"]


def parameter(*shape: int, role: Role) -> nn.Parameter:
    """An unset parameter. `model.init` gives it its first value by its role, from the one table of initial scales."""
    weight = nn.Parameter(torch.zeros(*shape))
    weight.role = role  # type: ignore[attr-defined]
    return weight


class Linear(nn.Module):
    """y = m x W^T + b, its parameters marked with what they are for.

    The multiplier m is 1 unless `model.init` is "unit". Who uses W without this module multiplies too: see `effective`.

    `stack` says that W is several matrices on top of each other (queries, keys, values), so that an optimizer
    which works on matrices takes them one by one.
    """

    def __init__(
        self, inputs: int, outputs: int, *, role: Role, bias: bool = False, stack: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.multiplier = 1.0
        self.weight = parameter(outputs, inputs, role=role)
        if stack:
            self.weight.stack = stack  # type: ignore[attr-defined]
        self.bias = parameter(outputs, role="bias") if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the map to the last dimension."""
        if self.multiplier == 1.0:
            return nn.functional.linear(x, self.weight, self.bias)
        if self.weight.shape[1] <= self.weight.shape[0]:  # the smaller side is multiplied
            return nn.functional.linear(x * self.multiplier, self.weight, self.bias)
        return self.finish(nn.functional.linear(x, self.weight))

    def finish(self, y: torch.Tensor) -> torch.Tensor:
        """m y + b: what is left to do where x W^T was computed elsewhere."""
        y = y if self.multiplier == 1.0 else y * self.multiplier
        return y if self.bias is None else y + self.bias

    @property
    def effective(self) -> torch.Tensor:
        """m W: the map itself."""
        return self.weight if self.multiplier == 1.0 else self.weight * self.multiplier

    def flops(self, tokens: int) -> int:
        """Two for each weight and token."""
        return 2 * tokens * self.weight.numel()

    def extra_repr(self) -> str:
        """Show the shape as torch's own Linear does."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}, bias={self.bias is not None}"
