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
    ratio = _bfloat16_ratio()
    if ratio > 1.2:
        return Precision("bfloat16", f"matrix products run {ratio:.1f} times as fast as in float32 here")
    return Precision("float32", f"bfloat16 matrix products run only {ratio:.2f} times as fast here")


@lru_cache
def _bfloat16_ratio() -> float:
    """How many times as fast as in float32 matrix products run in bfloat16.

    One thread: two of them wait for each other at the end of each product, and on a busy machine that alone is measured.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = matrix_rates((torch.float32, torch.bfloat16), 512)
    finally:
        torch.set_num_threads(threads)
    return rates[1] / rates[0]


def matrix_rates(dtypes: tuple[torch.dtype, ...], size: int, repeats: int = 7) -> list[float]:
    """FLOPs per second of square matrix products: the best of a few, since noise only slows; types take turns."""
    operands = [[torch.ones(size, size, dtype=dtype) for _ in range(2)] for dtype in dtypes]
    best = [float("inf")] * len(dtypes)
    for _ in range(repeats):
        for i, (a, b) in enumerate(operands):
            start = time.perf_counter()
            a @ b
            best[i] = min(best[i], time.perf_counter() - start)
    return [2 * size**3 / seconds for seconds in best]


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
