"""One seed, many independent streams: every use of chance names its stream, so that none disturbs another."""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream `names` of `seed`: a pure function, the same on every machine."""
    text = "/".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """A NumPy generator of its own for the stream `names` of `seed`."""
    return np.random.default_rng(derive(seed, *names))
