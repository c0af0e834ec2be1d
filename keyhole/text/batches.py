"""From a recipe's `[data]` to batches: the one door to text, documents and tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.core.config import Data
from keyhole.core.errors import InputError
from keyhole.text.contract import Ids, Tokenizer
from keyhole.text.corpus import Corpus, content_hash, read_corpus
from keyhole.text.dataset import NO_TARGET, Batch, Dataset, check_batch
from keyhole.text.documents import documents
from keyhole.text.packed import PackedText
from keyhole.text.rows import Documents, check_specials
from keyhole.text.tasks import Task, build_task
from keyhole.text.tokenizers import build_tokenizer
from keyhole.text.tokens import Tokens, cache_folder, cache_key, token_file

DEV_SAMPLES = 512
"""How many samples of a task make its dev split."""

# Part of every cache key: raise it when the same text and tokenizer give other numbers than before.
_ENCODING = 1


def open_dataset(data: Data, folder: Path, *, tokenizer: Tokenizer | None = None) -> Dataset:
    """Read, tokenize, split and lay out what `data` describes.

    Relative paths are looked up in `folder` first. A `tokenizer` that is given (that of a saved run) is used as it is;
    otherwise the one that `data` names is built.
    """
    if data.source.name.startswith("task:"):
        return TaskSamples(build_task(data.source, data.block), data, tokenizer)
    corpus = read_corpus(data.source, folder)
    return _open_packed(data, corpus, tokenizer) if data.rows == "text" else _open_rows(data, corpus, tokenizer)


def _open_packed(data: Data, corpus: Corpus, tokenizer: Tokenizer | None) -> PackedText:
    """The text is cut once, by characters, and each side is encoded by itself: no token reaches over the cut."""
    cut = int(len(corpus.text) * data.split)
    train, dev = corpus.text[:cut], corpus.text[cut:]
    if tokenizer is None:
        tokenizer = build_tokenizer(data.tokenizer, [train], rest=[dev])
    tokens, lengths, key = _encode(tokenizer, [train, dev], 1, frame=False)
    return PackedText(
        tokens[: lengths[0]],
        tokens[lengths[0] :],
        tokenizer,
        block=data.block,
        seed=data.seed,
        hash=key,
        about=_about(data, corpus, tokenizer, tokens),
    )


def _open_rows(data: Data, corpus: Corpus, tokenizer: Tokenizer | None) -> Documents:
    """The documents are split as wholes, in the order of the text."""
    texts = documents(corpus, data.rows)
    train_rows = int(len(texts) * data.split)
    if not 0 < train_rows < len(texts):
        raise InputError(
            f"{corpus.name} has too few {data.rows}: {len(texts)}, of which split {data.split} leaves {train_rows} to "
            f"train and {len(texts) - train_rows} for dev; each needs one, so give more text or other data.rows"
        )
    train, dev = texts[:train_rows], texts[train_rows:]
    if tokenizer is None:
        tokenizer = build_tokenizer(data.tokenizer, train, specials=True, rest=dev)
    check_specials(tokenizer)
    tokens, lengths, key = _encode(tokenizer, texts, train_rows, frame=True)
    # A sentence such as "Thank you." may stand on both sides by its own right; how many do is worth knowing.
    seen = set(train)
    repeated = sum(text in seen for text in dev)
    return Documents(
        tokens,
        lengths,
        train_rows,
        tokenizer,
        block=data.block,
        seed=data.seed,
        hash=key,
        about={**_about(data, corpus, tokenizer, tokens), "dev_rows_also_in_train": repeated},
    )


def _encode(tokenizer: Tokenizer, texts: Sequence[str], train: int, *, frame: bool) -> tuple[Tokens, Tokens, str]:
    """All texts as one array of tokens, the length of each, and the name of both: taken from the cache if they can be.

    The first `train` texts train. With `frame`, each text stands between START and STOP.
    """
    key = cache_key(encoding=_ENCODING, text=content_hash(texts), tokenizer=tokenizer.hash, train=train, frame=frame)

    @cache
    def encoded() -> list[Ids]:
        ids = tokenizer.encode_all(texts)
        return [np.concatenate([[tokenizer.start], row, [tokenizer.stop]], dtype=np.int32) for row in ids] if frame else ids

    tokens = token_file(lambda: np.concatenate(encoded()), f"{key}-tokens")
    lengths = token_file(lambda: np.array([len(ids) for ids in encoded()]), f"{key}-lengths")
    return tokens, lengths, key


def _about(data: Data, corpus: Corpus, tokenizer: Tokenizer, tokens: Tokens) -> dict[str, Any]:
    """What is the same to say of packed text and of documents."""
    cached = isinstance(tokens, np.memmap)
    return {
        "source": str(data.source),
        "text_hash": corpus.hash,
        "characters": sum(map(len, corpus.documents)),
        "tokenizer": str(data.tokenizer),
        "vocab": tokenizer.vocab,
        "rows": data.rows,
        "block": data.block,
        "split": data.split,
        "cache": "file" if cached else f"memory, as {cache_folder()} cannot be written",
    }


class TaskSamples(Dataset):
    """A generated task: training samples that never come again, and a fixed number for dev from a stream of their own.

    Where a task has few possible samples (two symbols, length three) the same one can turn up in both streams.
    """

    samples = None
    dev_bytes = None

    def __init__(self, task: Task, data: Data, tokenizer: Tokenizer | None = None) -> None:
        if tokenizer is not None and tokenizer.hash != task.tokenizer.hash:
            raise InputError(
                f"{data.source} brings its own tokenizer of {task.tokenizer.vocab} symbols, and the given one "
                f"({tokenizer.name}, {tokenizer.vocab} tokens) is another; give none"
            )
        self.task, self.tokenizer, self.block = task, task.tokenizer, data.block
        self._seed = data.seed
        # The seed is part of the data itself here, not only of its order.
        self.hash = cache_key(task=task.hash, seed=data.seed)
        example, targets = task.samples(data.seed, "dev", np.arange(1))
        self._answers = int((targets != NO_TARGET).sum())
        self.description = {
            "source": data.source.name,
            **task.options,
            "tokenizer": self.tokenizer.name,
            "vocab": self.tokenizer.vocab,
            "block": data.block,
            "time": example.shape[1],
            "answers_per_sample": self._answers,
            "dev_rows": DEV_SAMPLES,
            "dev_tokens": DEV_SAMPLES * self._answers,
            "samples": None,
        }

    def batch(self, start: int, count: int) -> Batch:
        check_batch(start, count)
        return self.task.samples(self._seed, "train", np.arange(start, start + count))

    def dev(self, rows: int, tokens: int = 0) -> Iterator[Batch]:
        check_batch(0, rows)
        # The samples are independent of each other: the first ones are as good a part as any.
        wanted = min(DEV_SAMPLES, -(-tokens // self._answers)) if tokens > 0 else DEV_SAMPLES
        for first in range(0, wanted, rows):
            yield self.task.samples(self._seed, "dev", np.arange(first, min(first + rows, wanted)))
