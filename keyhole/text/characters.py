"""Tokenizers that need no words: bytes and characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from keyhole.core.errors import InputError
from keyhole.text.contract import PAD, START, STOP, UNKNOWN, Ids, Tokenizer, utf8


class Bytes(Tokenizer):
    """Every UTF-8 byte is a token: 256 of them, any text in any language."""

    name = "bytes"

    def __init__(self, specials: bool = False) -> None:
        super().__init__(256, (START, STOP, PAD) if specials else ())

    def encode(self, text: str) -> Ids:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int32)

    def _text(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def piece(self, token: int) -> str:
        if token >= 256:
            return list(self.specials)[token - 256]
        return chr(token) if 32 <= token < 127 else f"\\x{token:02x}"

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        return np.array([1] * 256 + [0] * len(self.specials), dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "specials": bool(self.specials)}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        return cls(bool(state["specials"]))

    def to_hugging_face(self) -> str:
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers

        vocabulary = {letter: byte for byte, letter in enumerate(byte_letters())} | self.specials
        fast = Fast(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        return fast.to_str()


class Chars(Tokenizer):
    """Every distinct character of the corpus is a token, in the order of code points."""

    name = "chars"

    def __init__(self, characters: Sequence[str], specials: bool = False) -> None:
        self.characters = list(characters)
        super().__init__(len(self.characters), (START, STOP, UNKNOWN, PAD) if specials else ())
        self._pieces = [*self.characters, *self.specials]
        points = np.array([ord(character) for character in self.characters], dtype=np.int64)
        # From code point to id; the last entry stands for every code point above those of the vocabulary.
        self._table = np.full(points.max(initial=0) + 2, -1, dtype=np.int32)
        self._table[points] = np.arange(len(points), dtype=np.int32)

    @classmethod
    def learn(cls, texts: Iterable[str], specials: bool = False) -> Self:
        """The tokenizer of all characters that occur in the texts."""
        return cls(sorted(set().union(*texts)), specials)

    def encode(self, text: str) -> Ids:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
        ids = self._table[np.minimum(points, len(self._table) - 1)]
        outside = ids < 0
        if outside.any():
            if self.unknown is None:
                at = int(outside.argmax())
                raise InputError(
                    f"character {text[at]!r} at position {at} is outside the vocabulary of {self.vocab} characters; "
                    "leave it out, or use the tokenizer bytes, which knows every character"
                )
            ids[outside] = self.unknown
        return ids

    def _text(self, ids: list[int]) -> str:
        return "".join([self._pieces[token] for token in ids])

    def piece(self, token: int) -> str:
        return self._pieces[token]

    @cached_property
    def token_bytes(self) -> NDArray[np.int64]:
        ordinary = [len(character.encode("utf-8", "surrogatepass")) for character in self.characters]
        return np.array(ordinary + [0] * len(self.specials), dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "characters": "".join(self.characters), "specials": bool(self.specials)}

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        return cls(list(state["characters"]), bool(state["specials"]))

    def to_hugging_face(self) -> str:
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Fast

        vocabulary = {piece: token for token, piece in enumerate(self._pieces)}
        fast = Fast(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
        fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        fast.decoder = decoders.Fuse()
        return fast.to_str()


def byte_letters() -> list[str]:
    """The printable letter that byte-level vocabularies (GPT-2's and all after it) write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
