"""What is measured of a trained arm, always on the same tokens for all arms of a seed.

Legend: B rows, T tokens.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keyhole.audits.prefix import prefix_loss
from keyhole.core.config import Data
from keyhole.core.errors import InputError, KeyholeError, StorageError
from keyhole.model.count import count
from keyhole.model.lm import LM
from keyhole.record.run import Run, load_weights
from keyhole.studies.match import SAMPLES, TRAINING_FLOPS, read_per_target
from keyhole.text import NO_TARGET, Batch, Dataset, open_dataset
from keyhole.use.evaluate import Score, summary, text_batches, token_losses

PAST_TOKENS = 8192
"""About how many tokens beyond the trained length are foretold, whatever the length."""
SHOWN_POSITIONS = 128
"""Losses by position are averaged into at most so many stretches."""


class Peak:
    """The most memory that training held since the object was made: on the GPU where there is one, else of this process.

    What the process already holds counts, Python and torch first of all; what earlier tasks left over is given back before.
    """

    def __init__(self) -> None:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError, AttributeError):  # where the C library keeps what is free, it counts
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError):  # the peak is then that of the whole process
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def megabytes(self) -> float:
        """In MB."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() / 1e6
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            kibibytes = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
            return kibibytes * 1024 / 1e6
        except (OSError, StopIteration):
            usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return usage / 1e6 if sys.platform == "darwin" else usage * 1024 / 1e6


def measure(run: Run, asked: dict[str, Any], peak: Peak | None) -> dict[str, Any]:
    """Everything that a study's `[measure]` asks of a run."""
    data = open_dataset(run.recipe.data, run.recipe.folder, tokenizer=run.tokenizer)
    if not run.metrics:
        raise StorageError(
            f"{run.path / 'metrics.jsonl'} is damaged or gone; remove {run.path}, and --resume trains it anew"
        )
    model, last = run.model, run.metrics[-1]
    megabytes = None if peak is None else round(peak.megabytes, 1)
    dev, by_position = _dev(model, data, asked)
    found: dict[str, Any] = {
        "dev_loss": dev.loss,
        "dev_perplexity": dev.perplexity,
        "dev_sentence_perplexity": dev.sentence_perplexity,
        "dev_bits_per_byte": dev.bits_per_byte,
        "dev_tokens": dev.tokens,
        "train_loss": last["loss"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "seconds": last["seconds"],
        "tokens_per_second": last["tokens_per_second"],
        "memory_mb": megabytes,
        "hashes": hashes(data, asked["tokens"]),
    }
    found |= _size(model, data, last["tokens"])
    found |= by_position
    if asked["windows"]:
        found["prefix"] = _prefix(model, _windows(data, asked["windows"]))
    found["texts"] = {name: _text(run, text) for name, text in asked["texts"].items()}
    found["past"] = {f"{factor:g}": _past(run, factor) for factor in asked["past"]}
    return found


def hashes(data: Dataset, tokens: int) -> dict[str, str]:
    """What arms that are paired must have in common: the data, its order, and the tokens they are measured on."""
    evaluated = hashlib.sha256()
    for x, y in data.dev(rows=32, tokens=tokens):
        evaluated.update(x.tobytes() + y.tobytes())
    x, y = data.batch(0, SAMPLES)
    order = hashlib.sha256(x.tobytes() + y.tobytes())
    return {"data": data.hash[:16], "order": order.hexdigest()[:16], "evaluated": evaluated.hexdigest()[:16]}


def _size(model: LM, data: Dataset, tokens: int) -> dict[str, Any]:
    _, targets = data.batch(0, SAMPLES)
    counted = count(model, targets.shape[1])
    each = None if counted.flops is None else counted.flops / targets.shape[1]
    return {
        "parameters": counted.total,
        "flops_per_token": each,
        "flops": None if each is None else TRAINING_FLOPS * each * tokens * read_per_target(targets),
    }


def _dev(model: LM, data: Dataset, asked: dict[str, Any]) -> tuple[Score, dict[str, Any]]:
    """The score on the dev split, and beside it the share of answers that are right and the loss at each position."""
    rows, sizes, right = [], [], 0
    total_T, count_T = np.zeros(data.block), np.zeros(data.block)
    for x_BT, y_BT in data.dev(rows=32, tokens=asked["tokens"]):
        losses, likeliest = (found.cpu().numpy() for found in token_losses(model, (x_BT, y_BT)))
        losses, known = losses.astype(float), y_BT != NO_TARGET
        rows.append(np.stack((losses.sum(1), known.sum(1)), 1))
        sizes.append(data.target_bytes(y_BT))
        right += int((likeliest == y_BT)[known].sum())
        time = min(y_BT.shape[1], data.block)  # a task's samples are as long as they are
        total_T[:time] += losses[:, :time].sum(0)
        count_T[:time] += known[:, :time].sum(0)
    score = summary(np.concatenate(rows), None if None in sizes else sum(sizes))  # type: ignore[arg-type]
    found: dict[str, Any] = {"accuracy": right / score.tokens}
    return score, found | ({"positions": _stretches(total_T, count_T, 0)} if asked["positions"] else {})


def _stretches(total_T: np.ndarray, count_T: np.ndarray, first: int) -> list[list[float]]:
    """Pairs of a position, counted from 1, and the mean loss there; neighbours are taken together where there are many."""
    size = math.ceil(len(total_T) / SHOWN_POSITIONS)
    starts = np.arange(0, len(total_T), size)
    totals, counts = np.add.reduceat(total_T, starts), np.add.reduceat(count_T, starts)
    middle = first + starts + (np.minimum(starts + size, len(total_T)) - starts + 1) / 2
    return [[float(at), float(t / n)] for at, t, n in zip(middle, totals, counts, strict=True) if n]


def _windows(data: Dataset, count: int) -> Batch:
    """Dev windows, evenly spread."""
    return next(data.dev(rows=count, tokens=count * data.block))


def _prefix(model: LM, windows: Batch) -> dict[str, Any]:
    scored = prefix_loss(model, *windows)
    return {
        "full": scored.full,
        "prefix": scored.prefix,
        "gap": scored.gap,
        "worst": scored.worst,
        "windows": len(windows[0]),
    }


def _text(run: Run, text: str) -> dict[str, Any]:
    """A text's loss when it is read whole, and when each token is foretold from what stands before it alone."""
    try:
        batches = list(text_batches(text, run.tokenizer, run.recipe.data))
        full = prefix = 0.0
        tokens = sum(int((y != NO_TARGET).sum()) for _, y in batches)
        for x, y in batches:
            scored, answers = prefix_loss(run.model, x, y), int((y != NO_TARGET).sum())
            full += scored.full * answers / tokens
            prefix += scored.prefix * answers / tokens
    except KeyholeError as error:
        return {"reason": str(error)}
    return {
        "loss": full,
        "perplexity": _exp(full),
        "prefix_loss": prefix,
        "prefix_perplexity": _exp(prefix),
        "tokens": tokens,
    }


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None


def _past(run: Run, factor: float) -> dict[str, Any]:
    """The loss on windows `factor` times as long as those that trained, beyond the trained length and by position."""
    block = run.recipe.data.block
    longer = max(block + 1, round(block * factor))
    try:
        model = LM(run.recipe.model, run.tokenizer.vocab, longer, run.recipe.folder)
        load_weights(model, run.checkpoint.weights(), "the trained model")
        fields = {**run.recipe.data.model_dump(), "block": longer}
        data = open_dataset(Data.model_validate(fields), run.recipe.folder, tokenizer=run.tokenizer)
        batch = _windows(data, -(-PAST_TOKENS // (longer - block)))
        with torch.no_grad():
            losses = token_losses(model.eval(), batch)[0].double().cpu().numpy()
    except KeyholeError as error:
        return {"block": longer, "reason": _reason(error, longer)}
    known = batch[1] != NO_TARGET
    if not known[:, block:].any():
        return {"block": longer, "reason": f"no text on the dev split is longer than {block} tokens"}
    beyond = float(losses[:, block:].sum() / known[:, block:].sum())
    return {"block": longer, "loss": beyond, "positions": _stretches(losses.sum(0), known.sum(0), 0)}


def _reason(error: KeyholeError, longer: int) -> str:
    if isinstance(error, InputError):
        return str(error)
    return f"it has weights for each position of its block, and none for {longer}"
