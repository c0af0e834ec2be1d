"""What every tokenizer offers: text to numbers and back, special tokens, a state that is plain JSON."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from keyhole.core.errors import InputError

START, STOP, UNKNOWN, PAD = "<START>", "<STOP>", "<UNK>", "<PAD>"

Ids = NDArray[np.int32]


class Tokenizer(ABC):
    """Text to token numbers and back. Ordinary tokens come first, the special ones (if any) after them.

    Special tokens are put in by whoever lays out rows: `encode` never adds START or STOP.
    """

    name: ClassVar[str]

    def __init__(self, ordinary: int, specials: Sequence[str] = ()) -> None:
        self.vocab = ordinary + len(specials)
        self.specials = {token: ordinary + place for place, token in enumerate(specials)}
        self.start = self.specials.get(START)
        self.stop = self.specials.get(STOP)
        self.unknown = self.specials.get(UNKNOWN)
        self.pad = self.specials.get(PAD)

    @abstractmethod
    def encode(self, text: str) -> Ids:
        """The token numbers of a text."""

    def encode_all(self, texts: Sequence[str]) -> list[Ids]:
        """The token numbers of many texts."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def piece(self, token: int) -> str:
        """One token as a person reads it, special tokens by name."""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """The whole state as plain JSON values."""

    @classmethod
    @abstractmethod
    def from_dict(cls, state: dict[str, Any]) -> Self:
        """The tokenizer that `to_dict` described."""

    @abstractmethod
    def to_hugging_face(self) -> str:
        """The text of a `tokenizer.json` for the `tokenizers` library that gives the same ids."""

    @abstractmethod
    def _text(self, ids: list[int]) -> str:
        """The text of tokens that are neither START, STOP nor PAD."""

    @cached_property
    def token_bytes(self) -> NDArray[np.int64] | None:
        """How many UTF-8 bytes of text each token stands for (special ones 0); None when the spelling is lost."""
        return None

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the state."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    def decode(self, ids: ArrayLike) -> str:
        """The text of token numbers; START, STOP and PAD are left out, UNK shows."""
        numbers = np.asarray(ids, dtype=np.int64).reshape(-1)
        outside = (numbers < 0) | (numbers >= self.vocab)
        if outside.any():
            at = int(outside.argmax())
            raise InputError(f"token {numbers[at]} at position {at} is outside the vocabulary; give 0 to {self.vocab - 1}")
        silent = [token for token in (self.start, self.stop, self.pad) if token is not None]
        return self._text(numbers[~np.isin(numbers, silent)].tolist() if silent else numbers.tolist())


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of a text, or one sentence about the half character that has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InputError(
            f"character {text[error.start]!r} at position {error.start} is half a surrogate pair and no text; "
            "give text that is valid Unicode"
        ) from None
