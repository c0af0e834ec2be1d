"""The mean of independent measurements and how well it is known."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def mean_interval(values: NDArray[np.float64], miss: float = 0.025) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval, which misses on either side with probability `miss` (95 % by default)."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, -math.inf, math.inf
    from scipy.stats import t

    half = float(t.isf(miss, len(values) - 1)) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
