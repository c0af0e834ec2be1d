"""One document a row: START, its tokens, STOP, and padding up to the longest row of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from keyhole.core.errors import InputError
from keyhole.text.contract import Tokenizer
from keyhole.text.dataset import NO_TARGET, Batch, Dataset, EpochOrder, Ints, check_batch, spread
from keyhole.text.tokens import Tokens

_MULTIPLE = 8
"""Row lengths are rounded up to this: fewer shapes, and vector units stay full."""


class Documents(Dataset):
    """Documents in rows of at most `block` tokens; what is longer is cut."""

    def __init__(
        self,
        tokens: Tokens,
        lengths: Tokens,
        train_rows: int,
        tokenizer: Tokenizer,
        *,
        block: int,
        seed: int,
        hash: str,
        about: dict[str, Any],
    ) -> None:
        """`tokens` holds all rows one after the other, with START and STOP; the first `train_rows` of them train."""
        self.tokenizer, self.block, self.hash = tokenizer, block, hash
        self._pad = check_specials(tokenizer)
        self._tokens = np.asarray(tokens)
        lengths = np.asarray(lengths).astype(np.int64)
        self._starts = np.cumsum(lengths) - lengths
        # One token more than a row has inputs: the last one is only a target.
        self._lengths = np.minimum(lengths, block + 1)
        self.samples = train_rows
        self._order = EpochOrder(seed, train_rows)
        dev = np.arange(train_rows, len(lengths))
        # By length, so that rows of a batch need little padding; equal ones stay in the order of the text.
        self._dev_rows = dev[np.argsort(self._lengths[dev], kind="stable")]
        self.dev_bytes = self._count_dev_bytes()
        self.description = {
            **about,
            "tokens": len(self._tokens),
            "train_tokens": int(lengths[:train_rows].sum()),
            "dev_tokens": int(lengths[train_rows:].sum()),
            "train_rows": train_rows,
            "dev_rows": len(dev),
            "cut_rows": int((lengths > block + 1).sum()),
            "dev_bytes": self.dev_bytes,
            "samples": train_rows,
        }

    def batch(self, start: int, count: int) -> Batch:
        check_batch(start, count)
        return self._lay_out(np.concatenate([rows for _, rows in self._order.parts(start, count)]))

    def dev(self, rows: int, tokens: int = 0) -> Iterator[Batch]:
        check_batch(0, rows)
        chosen = self._some_dev_rows(tokens) if tokens > 0 else self._dev_rows
        for first in range(0, len(chosen), rows):
            yield self._lay_out(chosen[first : first + rows])

    def _lay_out(self, rows: Ints) -> Batch:
        """The rows side by side. Where there is no target the input is padding as well."""
        lengths = self._lengths[rows][:, None]
        longest = int(lengths.max()) - 1
        width = min(self.block, -(-longest // _MULTIPLE) * _MULTIPLE)
        places = np.arange(width + 1)
        # Places behind a row's end are read somewhere harmless and then overwritten.
        found = np.minimum(self._starts[rows][:, None] + places, len(self._tokens) - 1)
        tokens = self._tokens[found].astype(np.int64)
        asked = places[1:] < lengths
        return np.where(asked, tokens[:, :-1], self._pad), np.where(asked, tokens[:, 1:], NO_TARGET)

    def _some_dev_rows(self, tokens: int) -> Ints:
        """Evenly spread over the lengths, as few as have the targets that are asked for."""
        targets = self._lengths[self._dev_rows] - 1
        count = max(1, int(tokens / targets.mean()))
        while count < len(targets) and targets[spread(len(targets), count)].sum() < tokens:
            count += 1
        return self._dev_rows[spread(len(targets), count)]

    def _count_dev_bytes(self) -> int | None:
        counted = [self.target_bytes(targets) for _, targets in self.dev(256)]
        known = [count for count in counted if count is not None]
        return sum(known) if len(known) == len(counted) else None


def check_specials(tokenizer: Tokenizer) -> int:
    """The number of PAD, if the tokenizer has what rows need."""
    if tokenizer.pad is None or tokenizer.start is None or tokenizer.stop is None:
        raise InputError(
            f"tokenizer {tokenizer.name!r} has no START, STOP and PAD, which documents in rows need; "
            "build it with the option specials = true"
        )
    return tokenizer.pad
