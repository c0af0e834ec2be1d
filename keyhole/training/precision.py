"""Which precision trains fastest here: probed, not believed. Where bfloat16 is emulated it can be 90 times slower."""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

Name = Literal["float32", "bfloat16"]
DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Precision:
    """The precision that a run computes in, and why. Weights are always kept in float32."""

    name: Name
    reason: str

    @property
    def dtype(self) -> torch.dtype:
        """Torch's name for it."""
        return DTYPE[self.name]


def choose_precision(asked: str, device: str = "cpu") -> Precision:
    """The precision asked for, or the faster one where "auto" is asked."""
    if asked != "auto":
        return Precision(asked, "asked for in the recipe")  # type: ignore[arg-type]
    if device != "cpu":
        native = torch.cuda.is_bf16_supported() if device.startswith("cuda") else False
        return Precision("bfloat16" if native else "float32", f"{device} {'runs' if native else 'lacks'} bfloat16")
    slow, fast = (matrix_rate(dtype, 512) for dtype in (torch.float32, torch.bfloat16))
    ratio = fast / slow
    if ratio > 1.2:
        return Precision("bfloat16", f"matrix products run {ratio:.1f} times as fast as in float32 here")
    return Precision("float32", f"bfloat16 matrix products run only {ratio:.2f} times as fast here")


@lru_cache
def matrix_rate(dtype: torch.dtype, size: int, repeats: int = 7) -> float:
    """FLOPs per second of a square matrix product: the best of a few, since noise only slows."""
    a, b = (torch.ones(size, size, dtype=dtype) for _ in range(2))
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def keep_freed_memory() -> bool:
    """Tell the C library to keep what a step frees for the next step: 10-20 % of a step is page faults otherwise.

    Only glibc can be told; elsewhere nothing changes. The limit of 32 MiB is the largest that glibc honours.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 32 << 20)) and bool(mallopt(trim_threshold, 2**31 - 1))
