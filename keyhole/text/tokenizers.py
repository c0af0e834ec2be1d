"""Tokenizers by name: building one from text, saving it, loading it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, StorageError, nearest
from keyhole.core.files import read_json, write_json
from keyhole.text.characters import Bytes, Chars
from keyhole.text.contract import Tokenizer
from keyhole.text.options import read_options
from keyhole.text.wordpieces import BytePairs, Symbols, Words

TOKENIZER_OPTIONS: dict[str, dict[str, Any]] = {
    "bytes": {"specials": False},
    "chars": {"specials": False},
    "words": {"count": 3},
    "bpe": {"size": 1000, "specials": False},
}
"""Every tokenizer that a recipe may name, with its options and their defaults."""

_KINDS: dict[str, type[Tokenizer]] = {kind.name: kind for kind in (Bytes, Chars, Words, BytePairs, Symbols)}
_FORMAT = "keyhole-tokenizer-1"
_FILE = "tokenizer.json"


def build_tokenizer(spec: Spec, texts: Sequence[str], specials: bool = False, *, rest: Sequence[str] = ()) -> Tokenizer:
    """Build the tokenizer that `spec` names.

    `texts` is what trains the model, `rest` what must be encodable as well (the dev split). With `specials` the
    vocabulary has START, STOP and PAD, which documents in rows need.
    """
    if spec.name not in TOKENIZER_OPTIONS:
        raise InputError(f"there is no tokenizer {spec.name!r}{nearest(spec.name, TOKENIZER_OPTIONS)}")
    options = read_options("tokenizer", spec, TOKENIZER_OPTIONS[spec.name])
    specials = specials or options.get("specials", False)
    if spec.name == "bytes":
        return Bytes(specials)
    if spec.name == "chars":
        # The alphabet of the whole text, or a character that only the dev split has could not be encoded. It tells
        # the model nothing about the order of the dev text; counted words and merged pairs would, so these two
        # learn from the training part alone.
        return Chars.learn([*texts, *rest], specials)
    if spec.name == "words":
        _at_least(spec.name, "count", options["count"], 1)
        return Words.learn(texts, options["count"])
    _at_least(spec.name, "size", options["size"], 256 + 3 * specials)
    return BytePairs.learn(texts, options["size"], specials)


def _at_least(name: str, key: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise InputError(f"option {key} of tokenizer {name!r} is {value}; give {lowest} or more")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` into a folder, whole or not at all."""
    write_json(folder / _FILE, {"format": _FORMAT, **tokenizer.to_dict()})


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that `save_tokenizer` wrote into a folder."""
    path = Path(folder) / _FILE
    state = read_json(path)
    if not isinstance(state, dict) or state.get("format") != _FORMAT or state.get("name") not in _KINDS:
        raise StorageError(f"{path} is not a tokenizer that Keyhole saved; give the folder of a run")
    try:
        return _KINDS[state["name"]].from_dict(state)
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise StorageError(f"{path} is damaged ({error}); restore it or remove its folder") from None
