"""A run directory, opened for reading: the recipe, the model with its latest weights, the tokenizer, the metrics.

runs/NAME/
    recipe.toml        complete, every default filled in; `keyhole train runs/NAME/recipe.toml` repeats the run
    environment.json   versions, machine, threads, data hash, command
    tokenizer.json     what the model reads
    metrics.jsonl      one object a logged step
    findings.json      what stopped the run, if anything did
    code/              the user's own parts, as they were
    checkpoints/       see `keyhole.record.checkpoint`
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.core.config import Recipe
from keyhole.core.errors import InputError, StorageError
from keyhole.core.files import read_json
from keyhole.model.lm import LM
from keyhole.record import checkpoint
from keyhole.record.environment import stored_recipe
from keyhole.record.metrics import read_metrics
from keyhole.text.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Run:
    """One run. Nothing here changes it."""

    path: Path

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with every default filled in; one that is not as the run began with it is refused."""
        return stored_recipe(self.path)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What turns text into the model's tokens and back."""
        return load_tokenizer(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """All logged rows, read afresh each time: the run may still be going on."""
        return read_metrics(self.path)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """What the run was made with."""
        return read_json(self.path / "environment.json")

    @cached_property
    def checkpoint(self) -> checkpoint.Checkpoint:
        """The newest checkpoint; a damaged one is refused rather than passed over."""
        found, faults = checkpoint.latest(self.path / "checkpoints")
        if faults:
            older = f"; remove that folder to use {found.path.name}" if found else ""
            raise StorageError(faults[0] + older)
        if found is None:
            raise InputError(f"{self.path} has no checkpoint yet; let keyhole train run until its first save")
        return found

    @cached_property
    def model(self) -> LM:
        """The model with the newest weights, in evaluation mode."""
        model = LM(self.recipe.model, self.tokenizer.vocab, self.recipe.data.block, self.recipe.folder)
        load_weights(model, self.checkpoint.weights(), str(self.checkpoint.path))
        return model.eval()

    @property
    def step(self) -> int:
        """How many steps the newest checkpoint has seen."""
        return self.checkpoint.step

    def __str__(self) -> str:
        return f"run {self.path}"


def open_run(path: str | Path) -> Run:
    """Open a run directory for reading."""
    path = Path(path)
    if not path.is_dir():
        raise InputError(f"there is no run {path}; keyhole runs lists those there are")
    if not (path / "recipe.toml").is_file():
        raise InputError(f"{path} is not a run: it has no recipe.toml; keyhole runs lists those there are")
    return Run(path)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and lasting buffers by name, shared ones once."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], where: str) -> None:
    """Fill a model in place; names and shapes must fit exactly."""
    wanted = named_tensors(model)
    if missing := wanted.keys() ^ weights.keys():
        raise StorageError(f"{where} does not fit the recipe: {', '.join(sorted(missing)[:3])} is on one side only")
    for name, tensor in wanted.items():
        if tensor.shape != weights[name].shape:
            shapes = f"{tuple(weights[name].shape)} instead of {tuple(tensor.shape)}"
            raise StorageError(f"{where} does not fit the recipe: {name} has shape {shapes}")
        tensor.copy_(weights[name])
