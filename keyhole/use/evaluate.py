"""How well a model predicts: loss, both perplexities, bits per byte. In float32 whatever the run was trained in.

    loss                  mean over tokens of -ln p(token | those before it), in nats
    perplexity            exp(loss)
    sentence perplexity   mean over rows of exp(mean loss in the row): the course notes' measure, ruled by hard rows
    bits per byte         loss summed / ln 2 / UTF-8 bytes predicted: comparable between tokenizers

Legend: B rows, T tokens, N targets, W width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyhole.core.config import Data, Spec
from keyhole.core.errors import InputError
from keyhole.model.lm import LM
from keyhole.record.run import Run
from keyhole.text import NO_TARGET, Batch, Dataset, Tokenizer, documents, open_dataset, read_corpus

LOGITS_AT_ONCE = 20_000_000


@dataclass(frozen=True)
class Score:
    """How well some rows were predicted."""

    loss: float
    perplexity: float
    sentence_perplexity: float
    bits_per_byte: float | None
    tokens: int
    rows: int

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Evaluation:
    """All texts together, and each by itself when texts were given."""

    total: Score
    texts: list[tuple[str, Score]]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {"total": self.total.to_dict(), "texts": [{"text": t, **s.to_dict()} for t, s in self.texts]}


def evaluate(run: Run, texts: str | Sequence[str] | None = None, file: str | Path | None = None) -> Evaluation:
    """Score a run on texts, on a file (cut into rows as its training data was), or else on its whole dev split."""
    given = [texts] if isinstance(texts, str) else list(texts or [])
    if file is not None:
        corpus = read_corpus(Spec(name=str(file)), Path.cwd())
        rows = run.recipe.data.rows
        given += [corpus.text] if rows == "text" else documents(corpus, rows)
    if not given:
        if texts is not None:
            raise InputError('there is no text to evaluate; give at least one, for example texts=["To be, or not"]')
        dataset = open_dataset(run.recipe.data, run.recipe.folder, tokenizer=run.tokenizer)
        return Evaluation(score_dev(run.model, dataset), [])
    scored, losses, sizes = [], [], []
    for text in given:
        batches = list(text_batches(text, run.tokenizer, run.recipe.data))
        row_losses = np.concatenate([_row_losses(run.model, batch) for batch in batches])
        size = run_bytes(run.tokenizer, batches)
        # A text longer than the block is read in several windows, and is still one text.
        losses.append(row_losses.sum(0, keepdims=True))
        sizes.append(size)
        scored.append((text, summary(losses[-1], size)))
    total_bytes = None if None in sizes else sum(sizes)  # type: ignore[arg-type]
    return Evaluation(summary(np.concatenate(losses), total_bytes), scored)


def score(model: LM, batches: Iterable[Batch], size: int | None) -> Score:
    """Score a model on batches of (inputs, targets) that stand for `size` bytes of text."""
    return summary(np.concatenate([_row_losses(model, batch) for batch in batches]), size)


def score_dev(model: LM, dataset: Dataset, tokens: int = 0) -> Score:
    """Score a model on a dev split, or with `tokens` on the part of it that has about so many."""
    losses, sizes = [], []
    for batch in dataset.dev(rows=32, tokens=tokens):
        losses.append(_row_losses(model, batch))
        sizes.append(dataset.target_bytes(batch[1]))
    return summary(np.concatenate(losses), None if None in sizes else sum(sizes))  # type: ignore[arg-type]


def run_bytes(tokenizer: Tokenizer, batches: Sequence[Batch]) -> int | None:
    """The UTF-8 bytes that all targets stand for, or None where tokens do not keep the spelling."""
    lengths = tokenizer.token_bytes
    if lengths is None:
        return None
    targets = np.concatenate([y[y != NO_TARGET] for _, y in batches])
    if tokenizer.unknown is not None and (targets == tokenizer.unknown).any():
        return None
    return int(lengths[targets].sum())


@torch.no_grad()
def token_losses(model: LM, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's loss, 0 where there is none, and the token that the model held likeliest; both (rows, time)."""
    x_BT, y_BT = (torch.from_numpy(np.ascontiguousarray(ids)).to(model.embedding.device) for ids in batch)
    was_training = model.training
    model.eval()
    try:
        hidden_NW = model.hidden(x_BT).flatten(0, 1)
    finally:
        model.train(was_training)
    head, target_N = model.head, y_BT.flatten()
    piece = max(1, LOGITS_AT_ONCE // model.vocab)
    losses, likeliest = [], []
    for hidden, target in zip(hidden_NW.split(piece), target_N.split(piece), strict=True):
        logits = hidden @ head.T
        losses.append(torch.nn.functional.cross_entropy(logits, target, ignore_index=NO_TARGET, reduction="none"))
        likeliest.append(logits.argmax(1))
    return torch.cat(losses).view(y_BT.shape), torch.cat(likeliest).view(y_BT.shape)


def _row_losses(model: LM, batch: Batch) -> np.ndarray:
    """(rows, 2): each row's summed loss and its number of targets."""
    loss_B = token_losses(model, batch)[0].double().sum(1).cpu().numpy()
    return np.stack((loss_B, (batch[1] != NO_TARGET).sum(1).astype(float)), 1)


def summary(rows: np.ndarray, size: int | None) -> Score:
    """The score of rows, each given by its summed loss and its number of targets; `size` is the bytes they stand for."""
    rows = rows[rows[:, 1] > 0]
    if not len(rows):
        raise InputError("there is nothing to predict; give a text of at least two tokens")
    total, tokens = rows.sum(0)
    loss = total / tokens
    return Score(
        loss=float(loss),
        perplexity=_exp(loss),
        sentence_perplexity=float(np.mean([_exp(row[0] / row[1]) for row in rows])),
        bits_per_byte=None if not size else float(total / math.log(2) / size),
        tokens=int(tokens),
        rows=len(rows),
    )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def text_batches(text: str, tokenizer: Tokenizer, data: Data) -> Iterator[Batch]:
    """One text as windows of a block, each its own batch; between START and STOP where the training data was rows."""
    ids = tokenizer.encode(text).astype(np.int64)
    if data.rows != "text" and tokenizer.start is not None:
        ids = np.concatenate(([tokenizer.start], ids, [tokenizer.stop]))
    if len(ids) < 2:
        raise InputError(f"the text {text!r} has {len(ids)} tokens; a text to evaluate needs at least two")
    for start in range(0, len(ids) - 1, data.block):
        window = ids[start : start + data.block + 1]
        yield window[None, :-1], window[None, 1:]
