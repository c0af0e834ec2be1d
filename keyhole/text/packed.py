"""Packed text: one long stream of tokens, cut into windows without gaps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keyhole.core.errors import InputError
from keyhole.core.seeds import stream
from keyhole.text.contract import Tokenizer
from keyhole.text.dataset import Batch, Dataset, EpochOrder, Ints, check_batch, spread
from keyhole.text.tokens import Tokens


class PackedText(Dataset):
    """Windows of `block` tokens. Each epoch moves the cuts by a fresh offset and visits the windows in a fresh order.

    Within an epoch every token is the target of exactly one window, but for those before the first cut and after the
    last: fewer than two blocks in all, other ones in each epoch.
    """

    def __init__(
        self,
        train: Tokens,
        dev: Tokens,
        tokenizer: Tokenizer,
        *,
        block: int,
        seed: int,
        hash: str,
        about: dict[str, Any],
    ) -> None:
        _check_lengths(len(train), len(dev), block)
        # Views without the memory map's own class, whose every slice costs microseconds.
        self._train, self._dev = np.asarray(train), np.asarray(dev)
        self.tokenizer, self.block, self.hash = tokenizer, block, hash
        self._seed = seed
        # As many windows as fit behind every offset, so that all epochs have the same number of samples.
        self.samples = max(1, (len(train) - block) // block)
        self._slack = len(train) - 1 - self.samples * block
        self._order = EpochOrder(seed, self.samples)
        self._offsets: dict[int, int] = {}
        self._window = np.arange(block + 1)
        self.dev_bytes = self.target_bytes(self._dev[1:])
        self.description = {
            **about,
            "tokens": len(train) + len(dev),
            "train_tokens": len(train),
            "dev_tokens": len(dev),
            "dev_rows": -(-(len(dev) - 1) // block),
            "dev_bytes": self.dev_bytes,
            "samples": self.samples,
        }

    def batch(self, start: int, count: int) -> Batch:
        check_batch(start, count)
        starts = [self._offset(epoch) + windows * self.block for epoch, windows in self._order.parts(start, count)]
        return self._cut(self._train, starts[0] if len(starts) == 1 else np.concatenate(starts))

    def dev(self, rows: int, tokens: int = 0) -> Iterator[Batch]:
        check_batch(0, rows)
        targets = len(self._dev) - 1
        whole = targets // self.block
        some = 0 < tokens <= whole * self.block
        chosen = spread(whole, -(-tokens // self.block)) if some else np.arange(whole)
        for first in range(0, len(chosen), rows):
            yield self._cut(self._dev, chosen[first : first + rows] * self.block)
        if not some and targets % self.block:
            rest = self._dev[whole * self.block :].astype(np.int64)[None]
            yield rest[:, :-1], rest[:, 1:]

    def _cut(self, tokens: Tokens, starts: Ints) -> Batch:
        windows = tokens[starts[:, None] + self._window].astype(np.int64)
        return windows[:, :-1], windows[:, 1:]

    def _offset(self, epoch: int) -> int:
        if epoch not in self._offsets:
            self._offsets[epoch] = int(stream(self._seed, "epoch", epoch, "offset").integers(self._slack + 1))
        return self._offsets[epoch]


def _check_lengths(train: int, dev: int, block: int) -> None:
    if min(train, dev) > block:
        return
    fits = min(train, dev) - 1
    advice = f"choose data.block of at most {fits}, or a longer text" if fits > 0 else "give a longer text"
    raise InputError(
        f"the text is too short for block {block}: the train split has {train} tokens and the dev split {dev}, "
        f"and each needs {block + 1}; {advice}"
    )
