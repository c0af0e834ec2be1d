"""Norms: bring a vector to a known size before it is read."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from keyhole.parts.contract import parameter


class LayerNorm(nn.Module):
    """y = g (x - mean x) / sqrt(var x + eps) + b, over the channels of one token; b only when asked for."""

    def __init__(self, width: int, bias: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain = parameter(width, role="gain")
        self.bias = parameter(width, role="bias") if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return nn.functional.layer_norm(x, self.gain.shape, self.gain, self.bias, self.eps)


class RMSNorm(nn.Module):
    """y = g x / sqrt(mean x^2 + eps), over the channels of one token (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.gain = parameter(width, role="gain")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return _UnitRMS.apply(x, self.eps) * self.gain


class _UnitRMS(torch.autograd.Function):
    """x r with r = (mean x^2 + eps)^(-1/2); the gradient is r (g - y mean(g y)). The mean is taken in float32 at least."""

    @staticmethod
    def forward(ctx, x, eps):
        wide = torch.promote_types(x.dtype, torch.float32)
        square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square()
        scale = torch.rsqrt(square / x.shape[-1] + eps).to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, scale = ctx.saved_tensors
        inner = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, inner, value=-1).mul_(scale), None
