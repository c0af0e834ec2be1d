"""Three forms, one function: how far the form that trains and the one that decodes are from the definition in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.mixing import CONTENDERS, WIDTH, build
from bench.report import Section, Settings, Table

TOKENS = 1000
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest entry."""
    return float((found.double() - expected).abs().max() / expected.abs().max())


def decoded(mixer: nn.Module, x_BTW: Tensor) -> Tensor:
    """One token at a time."""
    state, parts = mixer.begin(1, x_BTW), []
    for token in x_BTW.split(1, 1):
        y, state = mixer.step(token, state)
        parts.append(y)
    return torch.cat(parts, 1)


def differences(name: str, dtype: torch.dtype, tokens: int) -> tuple[float, float, float]:
    """Of the training form, of its gradients, and of decoding, the definition asked at the same rounded weights."""
    mixer, exact = build(name, tokens), build(name, tokens).double()
    if dtype == torch.float64:
        mixer = mixer.double()
    for low, high in zip(mixer.parameters(), exact.parameters(), strict=True):
        low.data = low.data.to(dtype)  # tables stay as they are, as in training
        high.data = low.detach().double()
    x_BTW = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    wide_BTW = x_BTW.detach().double().requires_grad_()
    found, expected = mixer(x_BTW), exact(wide_BTW, impl="reference")
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    slopes = torch.autograd.grad(found, [x_BTW, *mixer.parameters()], upstream)
    wanted = torch.autograd.grad(expected, [wide_BTW, *exact.parameters()], upstream.double())
    gradient = max(apart(a, b) for a, b in zip(slopes, wanted, strict=True) if b.abs().max() > 0)
    with torch.no_grad():
        stepped = apart(decoded(mixer, x_BTW), expected.detach())
    return apart(found.detach(), expected.detach()), gradient, stepped


def measure(settings: Settings) -> Section:
    """Every mixer in every precision."""
    tokens = 65 if settings.quick else TOKENS
    header = ("mixer", *(f"{kind}: {form}" for kind in DTYPES for form in ("trains", "gradients", "decodes")))
    table, figures = Table(f"Largest difference from the float64 definition, relative, T {tokens}", header), {}
    for name in [name for name in CONTENDERS if name != "softmax, dense"]:
        row = [value for dtype in DTYPES.values() for value in differences(name, dtype, tokens)]
        table.rows.append((name, *(f"{value:.0e}" for value in row)))
        figures[name] = row
    return Section([table], figures)
