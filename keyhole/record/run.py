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
from keyhole.core.errors import InputError, KeyholeError, StorageError
from keyhole.core.files import read_json
from keyhole.model.lm import LM
from keyhole.record import checkpoint
from keyhole.record.environment import RECIPE_DIGEST, text_digest
from keyhole.record.metrics import read_metrics
from keyhole.text.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Run:
    """One run. Nothing here changes it."""

    path: Path

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with every default filled in; one that is not as the run began with it is refused."""
        path = self.path / "recipe.toml"
        recipe = Recipe.load(path)
        known = self.environment.get(RECIPE_DIGEST) if (self.path / "environment.json").exists() else None
        if known not in (None, text_digest(path.read_text(encoding="utf-8"))):
            raise StorageError(
                f"{path} is damaged or was changed since this run began; put it back, or, if you changed it knowingly, "
                f"take {RECIPE_DIGEST!r} out of {self.path / 'environment.json'}"
            )
        return recipe

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


def list_runs(folder: str | Path = "runs") -> list[dict[str, Any]]:
    """A row for each run below a folder: where it stands, in words."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}; keyhole train RECIPE.toml makes the first run")
    return [_summary(path.parent) for path in _recipes(folder)]


def _recipes(folder: Path) -> list[Path]:
    """Every recipe that stands for a run; one among a run's copied code does not."""
    return [path for path in sorted(folder.rglob("recipe.toml")) if "code" not in path.relative_to(folder).parts]


def _summary(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"run": str(path)}
    try:
        run = open_run(path)
        metrics = run.metrics
        found, faults = checkpoint.latest(path / "checkpoints")
        dev = [entry["dev_loss"] for entry in metrics if "dev_loss" in entry]
        model, train = run.recipe.model, run.recipe.train
        mixers = "+".join(spec.name for spec in model.specs("mixer"))
        row |= {
            "recipe": run.recipe.hash,
            "source": run.recipe.data.source.name,
            "model": f"{model.layers}x{model.heads}x{model.width} {mixers} {model.position.name}",
            "optimizer": train.optimizer.name,
            "step": metrics[-1]["step"] if metrics else 0,
            "saved": found.step if found else 0,
            "train_loss": metrics[-1].get("loss") if metrics else None,
            "dev_loss": dev[-1] if dev else None,
            "state": _state(path, found, faults),
        }
    except KeyholeError as error:
        row["state"] = f"damaged: {error}"
    return row


def _state(path: Path, found: checkpoint.Checkpoint | None, faults: list[str]) -> str:
    if (path / "findings.json").is_file() and any(f["verdict"] == "fails" for f in read_json(path / "findings.json")):
        return "stopped by a finding"
    if faults:
        return "newest checkpoint damaged"
    if found is None:
        return "no checkpoint"
    return "done" if found.state.get("done") else "unfinished"
