"""How FLOPs are counted: by convention for each kind of operation, and by watching what really runs.

| operation | FLOPs |
| --- | --- |
| matrix product (m, k) x (k, n), convolution, attention | 2 m k n |
| Cholesky factor of n x n | n^3 / 3, rounded |
| triangular system of n x n with m right sides | n^2 m |
| real or half-complex FFT of length n | 2.5 n log2 n, rounded |
| complex FFT of length n | 5 n log2 n, rounded |

A complex matrix product counts as four real ones. Element-wise work is not counted, as is the custom.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def cholesky(n: int) -> int:
    """One factor of an n x n matrix."""
    return round(n**3 / 3)


def triangular(n: int, right_sides: int) -> int:
    """One triangular system."""
    return n * n * right_sides


def fft(length: int) -> int:
    """One real transform, there or back."""
    return round(2.5 * length * math.log2(length)) if length > 1 else 0


def complex_fft(length: int) -> int:
    """One complex transform, there or back."""
    return round(5 * length * math.log2(length)) if length > 1 else 0


def measure(call: Callable[[], Any]) -> int:
    """The FLOPs of whatever a call runs, forward only, each kind of operation by the table above."""
    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter, torch.no_grad():
        call()
    return int(counter.get_total_flops())


def _formulas() -> dict[Any, Any]:
    """What torch's counter does not know, or counts without looking at the type. Each formula is given the tensors."""
    aten = torch.ops.aten
    found = {
        aten.mm: lambda a, b, **_: _product(a, b),
        aten.bmm: lambda a, b, **_: _product(a, b),
        aten.addmm: lambda _, a, b, **__: _product(a, b),
        aten.baddbmm: lambda _, a, b, **__: _product(a, b),
        aten.mv: lambda a, b, **_: _product(a, b[:, None]),
        aten.linalg_cholesky_ex: lambda a, **_: math.prod(a.shape[:-2]) * cholesky(a.shape[-1]),
        aten.linalg_solve_triangular: lambda _, b, out_val, **__: _system(out_val, b),
        aten.triangular_solve: lambda b, _, out_val, **__: _system(out_val[0], b),
        aten.cholesky_solve: lambda b, _, out_val, **__: 2 * _system(out_val, b),
        aten.cholesky_inverse: lambda a, **_: 2 * math.prod(a.shape[:-1]) * a.shape[-1] ** 2,
        aten._fft_r2c: lambda x, dim, *_, **__: _transform(x, dim, fft),
        aten._fft_c2r: lambda _, dim, *__, out_val, **___: _transform(out_val, dim, fft),
        aten._fft_c2c: lambda x, dim, *_, **__: _transform(x, dim, complex_fft),
    }
    for formula in found.values():
        formula._get_raw = True  # type: ignore[attr-defined]
    return found


def _product(a: torch.Tensor, b: torch.Tensor) -> int:
    return (4 if a.is_complex() else 1) * 2 * a.numel() * b.shape[-1]


def _system(solution: torch.Tensor, right: torch.Tensor) -> int:
    return math.prod(solution.shape[:-2]) * triangular(right.shape[-2], right.shape[-1])


def _transform(x: torch.Tensor, dims: list[int], one: Callable[[int], int]) -> int:
    length = math.prod(x.shape[dim] for dim in dims)
    return x.numel() // length * one(length)
