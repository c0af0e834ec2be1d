"""Random numbers by address: number `position` of sample `index` is a hash, so no sample depends on its batch.

The hash is the finalizer of splitmix64 (Steele, Lea & Flood 2014), applied to the sample and then to the position:

    h(k, i, p) = mix(mix(k + g i) + g p),   g = 2^64 / golden ratio,   arithmetic modulo 2^64
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def random_words(key: int, indices: NDArray[np.int64], count: int) -> NDArray[np.uint64]:
    """`count` random 64-bit words for each sample, (samples, count)."""
    samples = _mix(np.uint64(key) + indices.astype(np.uint64) * _GOLDEN)
    return _mix(samples[:, None] + np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def draw(key: int, indices: NDArray[np.int64], count: int, below: int) -> NDArray[np.int64]:
    """`count` independent numbers in [0, below) for each sample, (samples, count)."""
    # The upper half times the range: no number is more frequent than another by more than below / 2^32.
    upper = random_words(key, indices, count) >> np.uint64(32)
    return ((upper * np.uint64(below)) >> np.uint64(32)).astype(np.int64)


def shuffled(key: int, indices: NDArray[np.int64], count: int, of: int | None = None) -> NDArray[np.int64]:
    """`count` different numbers out of [0, of) in random order for each sample, (samples, count)."""
    return np.argsort(random_words(key, indices, of or count), axis=1)[:, :count]


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
