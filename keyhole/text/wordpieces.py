"""Tokenizers with larger pieces: words, the symbols of tasks, and byte-pair encoding."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from keyhole.core.errors import InputError, nearest
from keyhole.text.contract import PAD, START, STOP, UNKNOWN, Ids, Tokenizer, utf8

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Fast

# What str.split() takes for white space; written out because other regular expressions leave out \x1c to \x1f.
_WHITE_SPACE = r"[\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]+"


class Symbols(Tokenizer):
    """A fixed list of symbols, written with spaces between them: the language of generated tasks."""

    name = "symbols"

    def __init__(self, symbols: Sequence[str], specials: Sequence[str] = ()) -> None:
        super().__init__(len(symbols), specials)
        self.symbols = list(symbols)
        self._pieces = [*self.symbols, *self.specials]
        self._ids = {piece: token for token, piece in enumerate(self._pieces)}

    def encode(self, text: str) -> Ids:
        found = [self._ids.get(word, self.unknown) for word in text.split()]
        if None in found:
            at = found.index(None)
            word = text.split()[at]
            raise InputError(
                f"symbol {word!r} at position {at} is outside the vocabulary of {self.vocab} symbols"
                f"{nearest(word, self.symbols)}; write symbols with spaces between them, such as "
                f"{' '.join(self.symbols[:3])!r}"
            )
        return np.array(found, dtype=np.int32)

    def _text(self, ids: list[int]) -> str:
        return " ".join([self._pieces[token] for token in ids])

    def piece(self, token: int) -> str:
        return self._pieces[token]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "symbols": self.symbols}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        return cls(_strings(state["symbols"]))

    def to_hugging_face(self) -> str:
        from tokenizers import Regex, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast

        fast = Fast(models.WordLevel(vocab=self._ids, unk_token=UNKNOWN))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(_WHITE_SPACE), behavior="removed")
        return fast.to_str()


class Words(Symbols):
    """Words between white space that occur often enough, the most frequent first; all others are UNK."""

    name = "words"

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words, (START, STOP, UNKNOWN, PAD))

    @classmethod
    def learn(cls, texts: Iterable[str], count: int = 3) -> Self:
        """The tokenizer of all words that occur at least `count` times."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
        for special in (START, STOP, UNKNOWN, PAD):
            del counts[special]
        # Equal counts are ordered by the word, so that the numbers depend on nothing but the text.
        words = sorted((word for word in counts if counts[word] >= count), key=lambda word: (-counts[word], word))
        if not words:
            most = counts.most_common(1)
            often = f"the most frequent one occurs {most[0][1]} times" if most else "it has none"
            raise InputError(f"no word occurs {count} times in the text that trains ({often}); lower the option count")
        return cls(words)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "words": self.symbols}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        return cls(_strings(state["words"]))


class BytePairs(Tokenizer):
    """Byte-pair encoding on bytes: frequent pairs of pieces are merged until the vocabulary is full. Any text fits."""

    name = "bpe"

    def __init__(self, fast: Fast, specials: bool = False) -> None:
        self._fast = fast
        # The library is never told of special tokens: text that spells one stays text.
        super().__init__(fast.get_vocab_size(), (START, STOP, PAD) if specials else ())

    @classmethod
    def learn(cls, texts: Iterable[str], size: int = 1000, specials: bool = False) -> Self:
        """Learn at most `size` tokens, special ones included, from the texts."""
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers, trainers

        fast = Fast(models.BPE())
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size - 3 * specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        fast.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
        return cls(fast, specials)

    def encode(self, text: str) -> Ids:
        return np.concatenate([np.empty(0, dtype=np.int32), *self.encode_all(list(_parts(text)))])

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        for text in texts:
            utf8(text)
        encoded = self._fast.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encoded]

    def _text(self, ids: list[int]) -> str:
        return self._fast.decode(ids, skip_special_tokens=False)

    def piece(self, token: int) -> str:
        ordinary = self.vocab - len(self.specials)
        return list(self.specials)[token - ordinary] if token >= ordinary else self._fast.decode([token])

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        # A token of a byte-level vocabulary is written with one letter for each byte.
        ordinary = [len(self._fast.id_to_token(token)) for token in range(self.vocab - len(self.specials))]
        return np.array(ordinary + [0] * len(self.specials), dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "specials": bool(self.specials), "tokenizer": json.loads(self._fast.to_str())}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        from tokenizers import Tokenizer as Fast

        return cls(Fast.from_str(json.dumps(state["tokenizer"])), bool(state["specials"]))

    def to_hugging_face(self) -> str:
        state = json.loads(self._fast.to_str())
        state["model"]["vocab"] |= self.specials
        return json.dumps(state, ensure_ascii=False)


_PART = 1 << 16
_WORD_END = re.compile(r"\S(?=\s)")


def _parts(text: str) -> Iterator[str]:
    """The text in parts that are encoded at once on all cores, cut where the encoding is the same as in one piece.

    That is between a word and the white space after it: no piece of a byte-level vocabulary reaches over such a place.
    """
    start = 0
    while end := _WORD_END.search(text, start + _PART):
        yield text[start : end.end()]
        start = end.end()
    if start < len(text):
        yield text[start:]


def _strings(values: Any) -> list[str]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError("a vocabulary is a list of strings")
    return values
