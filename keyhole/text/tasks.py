"""Generated tasks with known answers. Each sample is a pure function of (seed, split, number).

    copy        a b c | a b c             the answer repeats the sequence
    reverse     a b c | c b a             the answer is the sequence backwards
    sort        c a b | a b c             the answer is the sequence in order (a symbol may occur twice)
    induction   d a c b e  a c b          a stretch of distinct symbols comes again: after its first symbol, what
                                          follows each symbol is what followed it before
    recall      k1 v1 k2 v2 | k2 v2 k1 v1 each key is asked once, in random order; the answer is its value
    noise       a c a d b                 independent and uniform: nothing can be learned, the loss is log(symbols)

Targets are -100 everywhere but at the answers; in noise every position is a target. Recall is multi-query associative
recall (Arora et al. 2023, Zoology); ours differs in that answers stand in the text after their key, so that a sample
is one text, and in that the queries are spread evenly, not by a power law.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, nearest
from keyhole.core.seeds import derive
from keyhole.text.chance import draw, shuffled
from keyhole.text.dataset import NO_TARGET, Ints
from keyhole.text.options import read_options
from keyhole.text.wordpieces import Symbols

_MOST_SYMBOLS = 1 << 16


class Task(ABC):
    """A kind of sequence: `tokens` makes it, `answers` says where it can be known."""

    name: ClassVar[str]
    defaults: ClassVar[Mapping[str, Any]]
    """Options and their defaults; None follows from the block."""

    def __init__(self, block: int, **options: Any) -> None:
        self.block = block
        self.options = options
        for key, value in options.items():
            if value is not None:
                self._at_least(key, value, 1)
        if (options["symbols"] or 0) > _MOST_SYMBOLS:
            raise InputError(f"option symbols of task {self.name!r} is {options['symbols']}; give at most {_MOST_SYMBOLS}")
        self.tokenizer = Symbols(self._fit())

    def samples(self, seed: int, split: str, indices: Ints) -> tuple[Ints, Ints]:
        """Inputs and targets of the samples with these numbers, both (samples, time)."""
        key = derive(seed, "task", self.name, split)
        tokens, answers = self._make(key, indices)
        targets = np.where(answers[1:], tokens[:, 1:], NO_TARGET)
        return np.ascontiguousarray(tokens[:, :-1]), targets

    @property
    def hash(self) -> str:
        """The SHA-256 of the task with its options."""
        return hashlib.sha256(json.dumps([self.name, self.options], sort_keys=True).encode()).hexdigest()

    @abstractmethod
    def _fit(self) -> list[str]:
        """Fill in the options that follow from the block, check them all, and list the symbols."""

    @abstractmethod
    def _make(self, key: int, indices: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Whole sequences (samples, time + 1), and which of their places are answers (time + 1)."""

    def _at_least(self, key: str, value: int, lowest: int) -> None:
        if value < lowest:
            raise InputError(f"option {key} of task {self.name!r} is {value}; give {lowest} or more")

    def _fill(self, key: str, best: int, lowest: int) -> int:
        """An option that follows from the block: the largest that fits unless the user chose less."""
        if best < lowest:
            raise InputError(f"block {self.block} is too short for task {self.name!r}; choose a longer data.block")
        value = best if self.options[key] is None else self.options[key]
        self._at_least(key, value, lowest)
        if value > best:
            raise InputError(
                f"option {key} of task {self.name!r} is {value}; at most {best} fits into a block of {self.block}"
            )
        self.options[key] = value
        return value

    def _different(self, needed: int, what: str) -> int:
        """The number of symbols, of which `needed` different ones occur at once."""
        if self.options["symbols"] is None:
            self.options["symbols"] = 2 * needed
        if self.options["symbols"] < needed:
            raise InputError(
                f"option symbols of task {self.name!r} is {self.options['symbols']}; give {needed} or more, "
                f"as its {needed} {what} are all different"
            )
        return self.options["symbols"]


class Copy(Task):
    """A sequence, a bar, and the sequence again."""

    name = "copy"
    defaults: ClassVar[Mapping[str, Any]] = {"symbols": 16, "length": None}

    def _fit(self) -> list[str]:
        self._fill("length", self.block // 2, 1)
        return [*_numbered("a", self.options["symbols"]), "|"]

    def _make(self, key: int, indices: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        question = draw(key, indices, self.options["length"], self.options["symbols"])
        bar = np.full((len(indices), 1), self.options["symbols"])
        tokens = np.concatenate([question, bar, self._answer(question)], axis=1)
        return tokens, np.arange(tokens.shape[1]) > self.options["length"]

    def _answer(self, question: Ints) -> Ints:
        return question


class Reverse(Copy):
    """A sequence, a bar, and the sequence backwards."""

    name = "reverse"

    def _answer(self, question: Ints) -> Ints:
        return question[:, ::-1]


class Sort(Copy):
    """A sequence, a bar, and the sequence in order."""

    name = "sort"

    def _answer(self, question: Ints) -> Ints:
        return np.sort(question, axis=1)


class Induction(Task):
    """Different symbols in random order, then a stretch of them again, from a random place."""

    name = "induction"
    defaults: ClassVar[Mapping[str, Any]] = {"symbols": None, "length": None}

    def _fit(self) -> list[str]:
        # The stretch is half as long as the sequence: together, without the last symbol, at most a block.
        length = self._fill("length", 2 * (self.block + 1) // 3, 4)
        return _numbered("a", self._different(length, "places"))

    def _make(self, key: int, indices: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        length = self.options["length"]
        again = length // 2
        first = shuffled(derive(key, "order"), indices, length, self.options["symbols"])
        start = draw(derive(key, "start"), indices, 1, length - again + 1)
        stretch = np.take_along_axis(first, start + np.arange(again), axis=1)
        return np.concatenate([first, stretch], axis=1), np.arange(length + again) > length


class Recall(Task):
    """Pairs of key and value, a bar, then each key again with its value."""

    name = "recall"
    defaults: ClassVar[Mapping[str, Any]] = {"symbols": None, "pairs": None}

    def _fit(self) -> list[str]:
        pairs = self._fill("pairs", self.block // 4, 1)
        symbols = self._different(pairs, "keys")
        return [*_numbered("k", symbols), *_numbered("v", symbols), "|"]

    def _make(self, key: int, indices: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        pairs, symbols = self.options["pairs"], self.options["symbols"]
        keys = shuffled(derive(key, "keys"), indices, pairs, symbols)
        values = symbols + draw(derive(key, "values"), indices, pairs, symbols)
        told = np.stack([keys, values], axis=2)
        order = shuffled(derive(key, "queries"), indices, pairs)
        asked = np.take_along_axis(told, order[:, :, None], axis=1)
        bar = np.full((len(indices), 1), 2 * symbols)
        tokens = np.concatenate([told.reshape(len(indices), -1), bar, asked.reshape(len(indices), -1)], axis=1)
        place = np.arange(tokens.shape[1])
        return tokens, (place > 2 * pairs) & (place % 2 == 0)


class Noise(Task):
    """Independent uniform symbols: what no model can predict."""

    name = "noise"
    defaults: ClassVar[Mapping[str, Any]] = {"symbols": 16, "length": None}

    def _fit(self) -> list[str]:
        self._fill("length", self.block, 1)
        return _numbered("a", self.options["symbols"])

    def _make(self, key: int, indices: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        tokens = draw(key, indices, self.options["length"] + 1, self.options["symbols"])
        return tokens, np.ones(tokens.shape[1], dtype=np.bool_)


TASKS: dict[str, type[Task]] = {task.name: task for task in (Copy, Reverse, Induction, Recall, Sort, Noise)}
"""Every task by name: a recipe writes `task:NAME`."""


def build_task(source: Spec, block: int) -> Task:
    """The task that `task:NAME` names, sized for a block."""
    name = source.name.removeprefix("task:")
    if name not in TASKS:
        raise InputError(f"there is no task {name!r}{nearest(name, TASKS)}; write, for example, task:copy")
    return TASKS[name](block, **read_options("task", Spec(name=name, options=source.options), TASKS[name].defaults))


def _numbered(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]
