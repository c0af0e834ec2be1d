"""Checkpoints that survive anything: safetensors and JSON, written beside the good ones and renamed when whole.

    checkpoints/step-00000200/
        weights.safetensors      the model in float32
        optimizer.safetensors    moments, and the state of chance
        state.json               step, data position, where metrics.jsonl ended, SHA-256 of the files above

Nothing is pickled. A checkpoint counts only when its state.json says the truth about its other files; one that was torn or
tampered with is passed over, loudly, for the one before it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from keyhole.core.errors import InputError, StorageError
from keyhole.core.files import fsync, read_json, sha256, storage_errors

if TYPE_CHECKING:
    import torch

FORMAT = 1
KEEP = 2
_NAME = re.compile(r"step-(\d{8})")


@dataclass(frozen=True)
class Checkpoint:
    """A whole and verified checkpoint."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """How many optimizer steps it has seen."""
        return self.state["step"]

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's tensors by name."""
        return _read(self.path / "weights.safetensors")

    def optimizer(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors and the state of chance."""
        return _read(self.path / "optimizer.safetensors")


def save(folder: Path, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], state: dict[str, Any]) -> Path:
    """Write a checkpoint whole or not at all, then drop all but the last few."""
    final = folder / f"step-{state['step']:08d}"
    with storage_errors(final, "saving the checkpoint"):
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
        try:
            _fill(temporary, weights, optimizer, state)
            if final.exists():
                # The same step again, after a resume. A whole one says the same already; a torn one gives way.
                if _is_whole(final, state):
                    shutil.rmtree(temporary)
                    return final
                shutil.rmtree(final)
            os.replace(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        fsync(folder)
    for old in _all(folder)[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """Open a checkpoint, or say what is wrong with it."""
    state = read_json(path / "state.json")
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("files"), dict):
        raise StorageError(f"{path / 'state.json'} is not a checkpoint of this version")
    for name, digest in state["files"].items():
        file = path / name
        if not file.is_file() or sha256(file) != digest:
            raise StorageError(f"{file} is missing, cut short or changed since it was written")
    return Checkpoint(path, state)


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and what was wrong with each newer one."""
    faults = []
    for path in reversed(_all(folder)):
        try:
            return load(path), faults
        except (StorageError, InputError) as error:
            faults.append(str(error))
    return None, faults


def load_file(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file. Torch is imported by those who read or write weights, not by those who list runs."""
    from safetensors import torch as library

    return library.load_file(file)


def save_file(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write tensors to a file."""
    from safetensors import torch as library

    library.save_file(tensors, file)


def set_aside(folder: Path, after: int) -> list[Path]:
    """Rename the damaged checkpoints of steps later than `after`: a run that goes on from there is damaged no more."""
    moved = []
    for path in _all(folder):
        if int(_NAME.fullmatch(path.name)[1]) > after:  # type: ignore[index]
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            with storage_errors(path, "setting aside"):
                os.replace(path, aside)
            moved.append(aside)
    return moved


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise StorageError(f"{file} cannot be read ({error})") from None


def _all(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _is_whole(path: Path, state: dict[str, Any]) -> bool:
    try:
        return load(path).state.get("done") == state.get("done")
    except (StorageError, InputError):
        return False


def _sweep(folder: Path) -> None:
    """Remove what an interrupted save left behind."""
    for left in folder.glob(".writing-*"):
        shutil.rmtree(left, ignore_errors=True)


def _fill(
    folder: Path, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], state: dict[str, Any]
) -> None:
    digests = {}
    for name, tensors in (("weights.safetensors", weights), ("optimizer.safetensors", optimizer)):
        file = folder / name
        try:
            save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, file)
        except SafetensorError as error:
            # The library hides the system's reason in its text; a full disk is the usual one.
            raise OSError(errno.ENOSPC, str(error)) from error
        os.chmod(file, 0o644)
        fsync(file)
        digests[name] = sha256(file)
    text = json.dumps({"format": FORMAT, **state, "files": digests}, indent=2)
    (folder / "state.json").write_text(text + "\n", encoding="utf-8")
    os.chmod(folder / "state.json", 0o644)
    os.chmod(folder, 0o755)  # others may read a run, as they may read all else in it
    fsync(folder / "state.json")
    fsync(folder)
