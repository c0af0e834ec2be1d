"""Where text comes from: what every Python carries, a file, a folder, or a dataset of the hub."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, nearest
from keyhole.text.options import read_options

SEPARATOR = "\n\n"
"""What stands between two documents when they are packed into one text."""

FOLDER_ENDINGS = (".txt", ".md", ".py")
"""The files of a folder that count as text when no `pattern` is given."""

_SOURCES = 'give "builtin:python", a file, a folder, "data:FILE", "hf:NAME" or "hf:FOLDER"'


@dataclass(frozen=True)
class Corpus:
    """Text as its source gives it: one document, or several that stand on their own (files, topics, dataset rows)."""

    name: str
    documents: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """The whole text, documents separated by a blank line."""
        return SEPARATOR.join(self.documents)

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the content: equal text has an equal hash, wherever it lies."""
        return content_hash(self.documents)


def content_hash(documents: Iterable[str]) -> str:
    """The SHA-256 of documents in their order."""
    digest = hashlib.sha256()
    for document in documents:
        content = document.encode("utf-8", "surrogatepass")
        # The length first, so that where one document ends is part of the content.
        digest.update(len(content).to_bytes(8, "big"))
        digest.update(content)
    return digest.hexdigest()


def read_corpus(source: Spec, folder: Path) -> Corpus:
    """Read the text that `source` names; relative paths are looked up in `folder`, then in the working directory."""
    kind, colon, rest = source.name.partition(":")
    if colon and kind == "builtin":
        documents = _read_builtin(source, rest)
    elif colon and kind == "hf":
        documents = _read_dataset(source, rest, folder)
    elif colon and kind == "imported":
        raise InputError(f"this run was imported from {rest} and brings no text; set data.source ({_SOURCES})")
    elif colon and kind == "data":
        documents = _read_path(source.model_copy(update={"name": str(_in_data_folder(rest, folder))}), folder)
    elif colon and kind == "task":
        raise InputError(f"{source.name!r} is a generated task and has no text to read; {_SOURCES}")
    else:
        documents = _read_path(source, folder)
    kept = tuple(document for document in documents if document.strip())
    if not kept:
        raise InputError(f"{source.name} holds no text, only white space or nothing; {_SOURCES} with text in it")
    return Corpus(source.name, kept)


def _read_builtin(source: Spec, name: str) -> list[str]:
    """The topics of Python's own help, in the order of their names: English that needs no download."""
    if name != "python":
        raise InputError(f"there is no built-in text {name!r}{nearest(name, ['python'])}; write builtin:python")
    read_options("source", source, {})
    from pydoc_data.topics import topics

    return [topics[topic] for topic in sorted(topics)]


def _find(name: str, folder: Path) -> Path | None:
    path = os.path.expanduser(name)
    # An absolute path stays itself when joined. Other than Path.exists, this never raises on an impossible name.
    return next((place for place in (folder / path, Path.cwd() / path) if os.path.exists(place)), None)


def _in_data_folder(name: str, folder: Path) -> Path:
    """A file of the shared data folder, which is read in place: $KEYHOLE_DATA, or shared/data beside the project."""
    given = os.environ.get("KEYHOLE_DATA")
    beside = [base.resolve().parent / "shared" / "data" for base in (Path.cwd(), folder, folder.parent)]
    places = [Path(given)] if given else list(dict.fromkeys(beside))
    for place in places:
        if (place / name).exists():
            return place / name
    looked = " or ".join(map(str, places))
    raise InputError(
        f"there is no {name} in {looked}; set KEYHOLE_DATA to the folder that holds it, or name a file of your own"
    )


def _read_path(source: Spec, folder: Path) -> list[str]:
    found = _find(source.name, folder)
    if found is None:
        looked = dict.fromkeys([str(folder.resolve()), str(Path.cwd())])
        raise InputError(f"there is no file or folder {source.name} in {' or '.join(looked)}; {_SOURCES}")
    try:
        if not found.is_dir():
            options = read_options("source", source, {"encoding": "utf-8"})
            return [_read_file(found, options["encoding"])]
        options = read_options("source", source, {"encoding": "utf-8", "pattern": ""})
        return _read_folder(found, **options)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{error.filename or found} cannot be read ({reason}); {_SOURCES} that you may read") from None


def _read_folder(folder: Path, encoding: str, pattern: str) -> list[str]:
    """The folder's text files in the order of their paths; hidden ones are left out."""
    try:
        candidates = sorted(folder.rglob(pattern or "*"), key=lambda path: path.relative_to(folder).as_posix())
    except (ValueError, NotImplementedError):
        raise InputError(f'pattern {pattern!r} is no file pattern; write one such as pattern = "*.txt"') from None
    chosen = [
        path
        for path in candidates
        if path.is_file()
        and (pattern or path.suffix.lower() in FOLDER_ENDINGS)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not chosen:
        wanted = pattern or ", ".join(f"*{ending}" for ending in FOLDER_ENDINGS)
        raise InputError(f'folder {folder} has no file {wanted}; choose others with the option pattern = "*.rst"')
    return [_read_file(path, encoding) for path in chosen]


def _read_file(path: Path, encoding: str) -> str:
    """One file as text, line ends as "\\n", without a byte-order mark."""
    content = path.read_bytes()
    try:
        text = content.decode(encoding)
    except UnicodeError as error:
        _refuse_binary(path, content)
        at = getattr(error, "start", 0)
        raise InputError(
            f"{path} is not {encoding} text: byte {at} is 0x{content[at]:02x}; if it is text in another encoding, "
            f'write source = {{ name = "{path.name}", encoding = "latin-1" }}'
        ) from None
    except (LookupError, ValueError):
        raise InputError(
            f'there is no encoding {encoding!r}; write encoding = "utf-8", "latin-1" or another that Python knows'
        ) from None
    if "\0" in text:
        _refuse_binary(path, content)
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _refuse_binary(path: Path, content: bytes) -> None:
    """Text has no zero bytes, but in encodings of two or four bytes, which decode without them."""
    if b"\0" in content:
        raise InputError(
            f"{path} is not a text file: byte {content.index(0)} is zero, as in binary files; give a text file, "
            f'or its encoding as in {{ name = "{path.name}", encoding = "utf-16" }}'
        )


def _read_dataset(source: Spec, name: str, folder: Path) -> list[str]:
    """One column of a dataset, from a folder that `datasets` saved or from the hub."""
    options = read_options("source", source, {"column": "text", "part": "train", "config": ""})
    if not name:
        raise InputError("source 'hf:' names no dataset; write hf:NAME, or hf:FOLDER for one saved with save_to_disk")
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"source {source.name} needs the datasets library; install it with: pip install 'keyhole[data]'"
        ) from None
    rows = _open_dataset(datasets, name, _find(name, folder), options["part"], options["config"])
    column = options["column"]
    if column not in rows.column_names:
        raise InputError(
            f'{source.name} has no column {column!r}; choose one with column = "{rows.column_names[0]}" '
            f"(it has: {', '.join(rows.column_names)})"
        )
    return list(_strings(rows, column, source.name))


def _open_dataset(datasets: Any, name: str, found: Path | None, part: str, config: str) -> Any:
    """The rows of one part; whatever the library objects to becomes one sentence."""
    try:
        if found is None:
            return datasets.load_dataset(name, config or None, split=part)
        loaded = datasets.load_from_disk(str(found))
    except Exception as error:  # the library raises many kinds, some of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"hf:{name} cannot be opened: {reason.rstrip('.')}; give a dataset of the hub "
            "or a folder written by datasets.save_to_disk"
        ) from None
    if not isinstance(loaded, dict):
        return loaded
    if part not in loaded:
        raise InputError(f"hf:{name} has no part {part!r}{nearest(part, loaded)}")
    return loaded[part]


def _strings(rows: Any, column: str, name: str) -> Iterator[str]:
    for number, value in enumerate(rows[column]):
        if not isinstance(value, str):
            raise InputError(
                f"column {column!r} of {name} holds {type(value).__name__} in row {number}; choose a column of strings"
            )
        yield value
