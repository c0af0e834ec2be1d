"""Cutting a corpus into documents: lines, sentences, paragraphs or files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from keyhole.core.errors import InputError, nearest
from keyhole.text.corpus import Corpus

# A possible end: punctuation, closing quotes or brackets, white space, then something that may open a sentence.
_END = re.compile(r"""(?P<mark>[.!?…]+)["'”’)\]]*\s+(?=["'“‘(\[]*(?P<next>\w)|["“‘])""")
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_LAST_WORD = re.compile(r"[^\s\"'“‘(\[—-]+\Z")
_INITIALS = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]\Z")

_TITLES = "mr mrs ms messrs mx dr prof rev fr hon gov sen rep gen col maj capt cpt lt sgt adm cmdr pres supt jr sr esq"
_PLACES = "st mt ft no nos vol vols ch sec art fig figs eq pp ed eds dept est inc ltd co corp bros vs viz cf al ca approx"
_MONTHS = "jan feb mar apr jun jul aug sep sept oct nov dec"

ABBREVIATIONS = frozenset(f"{_TITLES} {_PLACES} {_MONTHS}".split())
"""Words after which a full stop ends no sentence, in small letters; initials such as J. and U.S. are known by form."""


def documents(corpus: Corpus, rows: str) -> list[str]:
    """The corpus as a list of documents; none is empty, none spans two files."""
    if rows == "text":
        return [corpus.text]
    if rows not in _CUTS:
        raise InputError(f"rows = {rows!r} is no way to cut a text{nearest(rows, ['text', *_CUTS])}")
    return [piece for document in corpus.documents for piece in _CUTS[rows](document) if piece]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, white space within them as single spaces.

    A sentence ends at `.`, `!` or `?` before white space and a capital or a quotation mark, but not after an
    abbreviation (Mr. Dr. No.) or initials (J. U.S.), and at every blank line.
    """
    for paragraph in paragraphs(text):
        start = 0
        for end in _END.finditer(paragraph):
            if _ends_sentence(paragraph, start, end):
                yield " ".join(paragraph[start : end.end()].split())
                start = end.end()
        yield " ".join(paragraph[start:].split())


def paragraphs(text: str) -> Iterator[str]:
    """The pieces between blank lines, without white space around them."""
    for piece in _BLANK_LINES.split(text):
        yield piece.strip()


def lines(text: str) -> Iterator[str]:
    """The lines of a text, without white space around them."""
    for line in text.split("\n"):
        yield line.strip()


def _ends_sentence(text: str, start: int, end: re.Match[str]) -> bool:
    following = end["next"]
    # Opening quotes count like a capital, whatever stands behind them.
    if following and not following.isupper() and text[end.end()] not in "\"'“‘":
        return False
    if end["mark"] != ".":
        return True
    # The longest abbreviation is short: no need to look further back.
    before = _LAST_WORD.search(text[max(start, end.start() - 24) : end.start()])
    if before is None:
        return True
    word = before.group()
    return word.lower() not in ABBREVIATIONS and (word == "I" or not _INITIALS.match(word))


def _whole(text: str) -> Iterator[str]:
    yield text.strip()


_CUTS: dict[str, Callable[[str], Iterator[str]]] = {
    "lines": lines,
    "sentences": sentences,
    "paragraphs": paragraphs,
    "files": _whole,
}
