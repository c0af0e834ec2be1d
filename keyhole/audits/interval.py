"""The mean of independent measurements and how well it is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.core.errors import InputError


def special() -> Any:
    """SciPy's special functions: what every interval is computed with."""
    try:
        from scipy import special
    except ImportError:
        raise InputError("intervals need scipy, which is not installed: pip install 'keyhole[study]'") from None
    return special


def mean_interval(values: NDArray[np.float64], miss: float = 0.025) -> tuple[float, float, float]:
    """(mean, low, high): Student's interval, which misses on either side with probability `miss` (95 % by default)."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, -math.inf, math.inf
    reach = -float(special().stdtrit(len(values) - 1, miss))
    half = reach * float(values.std(ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half
