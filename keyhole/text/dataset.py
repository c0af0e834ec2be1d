"""What every dataset offers: training samples in one endless order, and the dev split in a fixed one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.core.errors import InputError
from keyhole.core.seeds import stream
from keyhole.text.contract import Tokenizer

NO_TARGET = -100
"""The target where nothing is asked: the value that cross-entropy leaves out."""

Ints = NDArray[np.int64]
Batch = tuple[Ints, Ints]
"""Inputs and targets, both (rows, time)."""


class Dataset(ABC):
    """Numbers to train on. Whoever trains keeps one integer, the next sample's number, and can go on from there."""

    tokenizer: Tokenizer
    block: int
    hash: str
    """Identifies text, tokenizer and split."""
    samples: int | None
    """Training samples in one epoch; None where they never come again."""
    description: dict[str, Any]
    """What was read and how it was cut, for people and for the record."""
    dev_bytes: int | None
    """UTF-8 bytes of all dev targets, for bits per byte; None where the tokens do not keep the spelling."""

    @property
    def vocab(self) -> int:
        """How many tokens the tokenizer knows."""
        return self.tokenizer.vocab

    @abstractmethod
    def batch(self, start: int, count: int) -> Batch:
        """Training samples number start .. start + count - 1, whatever batches came before."""

    @abstractmethod
    def dev(self, rows: int, tokens: int = 0) -> Iterator[Batch]:
        """The dev split in a fixed order, at most `rows` rows at a time.

        With `tokens`, a part of it that is spread evenly over the split and has at least so many targets, and few
        more. It depends on nothing but the split and `tokens`: every model is measured on the same part.
        """

    def target_bytes(self, targets: Ints) -> int | None:
        """The UTF-8 bytes that targets stand for, or None where the tokens do not keep the spelling."""
        lengths = self.tokenizer.token_bytes
        asked = targets[targets != NO_TARGET]
        if lengths is None or (self.tokenizer.unknown is not None and (asked == self.tokenizer.unknown).any()):
            return None
        return int(lengths[asked].sum())


class EpochOrder:
    """A fresh permutation for each epoch: sample n is item n % items of the permutation of epoch n // items."""

    def __init__(self, seed: int, items: int) -> None:
        self.items = items
        self._seed = seed
        self._recent: dict[int, Ints] = {}

    def parts(self, start: int, count: int) -> Iterator[tuple[int, Ints]]:
        """The items of samples start .. start + count - 1, epoch by epoch."""
        while count > 0:
            epoch, place = divmod(start, self.items)
            chosen = self._permutation(epoch)[place : place + count]
            yield epoch, chosen
            start, count = start + len(chosen), count - len(chosen)

    def _permutation(self, epoch: int) -> Ints:
        if epoch not in self._recent:
            # Neighbouring batches are of one epoch or of two: keep the two latest.
            if len(self._recent) > 1:
                del self._recent[next(iter(self._recent))]
            self._recent[epoch] = stream(self._seed, "epoch", epoch, "order").permutation(self.items)
        return self._recent[epoch]


def check_batch(start: int, count: int) -> None:
    """Refuse a batch that cannot be."""
    if start < 0 or count < 1:
        raise InputError(f"batch(start={start}, count={count}) has no samples; give start >= 0 and count >= 1")


def spread(items: int, count: int) -> Ints:
    """`count` of `items` places, evenly spread, in order."""
    return (np.arange(count) * items + items // 2) // count if count < items else np.arange(items)
