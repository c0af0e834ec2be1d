"""One door: `audit` takes a part, a run, a Hugging Face model or any function from ids to logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.audits.model import audit_model, block_of
from keyhole.audits.part import audit_part
from keyhole.audits.prefix import dev_windows, prefix_loss
from keyhole.audits.recipe import audit_parts, dishonest
from keyhole.core.errors import InputError
from keyhole.core.findings import Finding
from keyhole.record.run import Run, open_run
from keyhole.text import open_dataset

Target = str | Path | Run | type[nn.Module] | Callable[[torch.Tensor], Any]


def audit(
    target: Target,
    *,
    kind: str | None = None,
    vocab: int | None = None,
    block: int | None = None,
    canary: bool = True,
    options: dict[str, Any] | None = None,
    folder: str | Path | None = None,
) -> list[Finding]:
    """Is it honest, and does it do what it says? One finding a probe.

    A part is a built-in name, `"my.py:Mine"` or a class (`kind`, `options`, `canary` and `folder` are about parts); a model
    is a run or its path, a Hugging Face model or its folder, or a function from ids (B, T) to logits (B, T, V), of which
    `vocab` must be told and `block`, the longest text that it reads, may be.
    """
    is_folder = isinstance(target, str | Path) and Path(target).is_dir()
    is_part = inspect.isclass(target) or (isinstance(target, str) and not is_folder)
    if (kind or options) and not is_part:
        raise InputError(f"kind and options are a part's, and {target} is a model; leave them out")
    if isinstance(target, Run):
        return audit_run(target, block)
    if isinstance(target, str | Path) and is_folder:
        path = Path(target)
        if (path / "recipe.toml").is_file():
            return audit_run(open_run(path), block)
        if (path / "config.json").is_file():
            return _hugging_face(path, block)
        raise InputError(f"{path} is neither a run (it has no recipe.toml) nor a Hugging Face model (no config.json)")
    if isinstance(target, Path) or (isinstance(target, str) and "/" in target and ":" not in target):
        raise InputError(f"there is no folder {target}; give a run, a Hugging Face folder, or a part such as my.py:Mine")
    if isinstance(target, str) or inspect.isclass(target):
        where = None if folder is None else Path(folder)
        return audit_part(target, kind, options=options, canary=canary, folder=where)
    if not callable(target):
        raise InputError(f"give a part, a run, or a function from token ids to logits, not {target!r}")
    vocab = vocab if vocab is not None else vocab_of(target)
    if vocab is None:
        raise InputError("the vocabulary of a function is not known; say it: audit(logits, vocab=256)")
    return audit_model(target, vocab, block=block, name=getattr(target, "__name__", type(target).__name__))


def vocab_of(model: object) -> int | None:
    """How many tokens a model says it knows."""
    for known in (model, getattr(model, "config", None)):
        for key in ("vocab", "vocab_size"):
            if isinstance(size := getattr(known, key, None), int):
                return size
    return None


def audit_run(run: Run, block: int | None = None) -> list[Finding]:
    """A run's trained model: every probe, and what its leak, if it has one, was worth on its own dev windows."""
    block = block or run.recipe.data.block
    findings = audit_model(run.model, run.model.vocab, block=block, name=str(run), full_block=True)
    try:
        windows = dev_windows(open_dataset(run.recipe.data, run.recipe.folder, tokenizer=run.tokenizer))
        findings.append(prefix_loss(run.model, *windows).finding(str(run)))
    except InputError as error:  # an imported model brings no text
        findings.append(_unpriced(run, error))
    # A model says that it leaks, its parts say which of them does.
    return [*findings, *audit_parts(run.recipe, built_in=True)] if dishonest(findings) else findings


def _unpriced(run: Run, error: InputError) -> Finding:
    return Finding(
        name="prefix loss",
        statement=f"{run}: each token is predicted from its prefix alone as well as from the whole window",
        expected="an answer",
        measured="nothing",
        verdict="undecided",
        remedy=f"its dev text could not be read: {error}",
        aspect="honesty",
    )


def _hugging_face(folder: Path, block: int | None) -> list[Finding]:
    """A folder with config.json: read from the disk alone, and no code of the folder's is run."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        said = str(error).strip().splitlines()
        raise InputError(f"{folder} could not be read as a causal language model: {said[0] if said else error}") from error
    vocab = vocab_of(model)
    if vocab is None:
        raise InputError(f"{folder}: its config.json does not say vocab_size")
    return audit_model(model, vocab, block=block or block_of(model), name=str(folder))
