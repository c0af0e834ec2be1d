"""Writing a run as a folder that others can read.

The form is `gpt2` where the architecture is GPT-2's, and `safetensors` otherwise:

    gpt2          config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json: what
                  transformers loads without any code of ours; and keyhole.json, so that an import loses nothing
    safetensors   model.safetensors, recipe.toml, tokenizer.json, code/, and KEYHOLE.md, which says why and how
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from keyhole.core.files import read_json, whole_folder, write_atomically, write_json
from keyhole.model.lm import LM
from keyhole.record.run import Run, named_tensors
from keyhole.text import Tokenizer
from keyhole.text.contract import PAD, START, STOP, UNKNOWN
from keyhole.use.gpt2_form import gpt2_config, gpt2_logits, gpt2_tensors, what_gpt2_lacks

OURS = "keyhole.json"
"""What a GPT-2 folder has no place for: our tokenizer's state and how rows were cut."""

TOLERANCE = 1e-3
"""How far the logits of the two forms may be apart, relative to the largest: rounding in float32 stays far below it."""

_NOTE = """\
# A model made with Keyhole

This folder is not a Hugging Face model: {reason}.
The weights are in `model.safetensors` under Keyhole's own names; `recipe.toml` says how the model is built.

Load it in Python, from within this folder:

```python
from pathlib import Path
import keyhole as kh
from keyhole.record.run import load_weights
from keyhole.text import load_tokenizer
from safetensors.torch import load_file

tokenizer = load_tokenizer(Path("."))
model = kh.build(kh.Recipe.load("recipe.toml"), vocab=tokenizer.vocab).eval()
load_weights(model, load_file("model.safetensors"), "model.safetensors")
```

`model(torch.tensor([tokenizer.encode("...").tolist()]))` then gives logits of the shape (1, tokens, {vocab}).
"""


@dataclass(frozen=True)
class Exported:
    """What was written, and why in this form."""

    path: Path
    form: Literal["gpt2", "safetensors"]
    reason: str
    files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {"path": str(self.path), "form": self.form, "reason": self.reason, "files": list(self.files)}


def export_run(run: Run, folder: str | Path) -> Exported:
    """Write a run's newest weights into a new folder, as a GPT-2 if they are one."""
    folder = Path(folder)
    with whole_folder(folder, "exporting to") as temporary:
        lacking = what_gpt2_lacks(run.model)
        reason = f"GPT-2 has no {lacking}" if lacking else _write_gpt2(run, temporary)
        if reason:
            _write_safetensors(run, temporary, reason)
        files = tuple(sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()))
    if reason:
        return Exported(folder, "safetensors", reason, files)
    return Exported(folder, "gpt2", "every part of the model has a form in GPT-2", files)


def _write_gpt2(run: Run, folder: Path) -> str | None:
    """Fill a Hugging Face GPT-2 folder; or, should its logits be others than ours, write nothing and say so."""
    model, tokenizer = run.model, run.tokenizer
    config, tensors = gpt2_config(model, tokenizer), gpt2_tensors(model)
    if fault := _difference(model, config, tensors):
        return fault
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    data = run.recipe.model_dump()["data"]
    ours = {
        "data": {key: data[key] for key in ("tokenizer", "rows")},
        "tokenizer": read_json(run.path / "tokenizer.json"),
    }
    _save_tensors(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special)
    write_atomically(folder / "tokenizer.json", tokenizer.to_hugging_face())
    write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, model.block_size))
    write_json(folder / OURS, ours)
    return None


def _difference(model: LM, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str | None:
    """Why the tensors are no GPT-2 after all, if they are not: a proof of each export rather than a promise."""
    ids_BT = torch.arange(min(model.block_size, 64)).remainder(model.vocab)[None]
    with torch.no_grad():
        ours = model.eval()(ids_BT)
    apart = (gpt2_logits(config, tensors, ids_BT) - ours).abs().max().item()
    if apart <= TOLERANCE * ours.abs().max().item():
        return None
    return f"GPT-2 computes other logits with the same weights (up to {apart:.3g} apart)"


def _tokenizer_config(tokenizer: Tokenizer, block: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": block,
        "clean_up_tokenization_spaces": False,
    }
    roles = {"bos_token": START, "eos_token": STOP, "unk_token": UNKNOWN, "pad_token": PAD}
    config |= {role: token for role, token in roles.items() if token in tokenizer.specials}
    if tokenizer.specials:
        # Our encode never reads a special token out of text; without this transformers would.
        config["split_special_tokens"] = True
    return config


def _write_safetensors(run: Run, folder: Path, reason: str) -> None:
    """Fill a folder with our own form and a note on how to load it."""
    _save_tensors(named_tensors(run.model), folder / "model.safetensors")
    for name in ("recipe.toml", "tokenizer.json"):
        shutil.copyfile(run.path / name, folder / name)
    if (run.path / "code").is_dir():
        shutil.copytree(run.path / "code", folder / "code", ignore=shutil.ignore_patterns("__pycache__"))
    write_atomically(folder / "KEYHOLE.md", _NOTE.format(reason=reason, vocab=run.model.vocab))


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        # transformers refuses a file that does not say whose tensors it holds.
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:
        # The library hides the system's reason in its text.
        raise OSError(str(error)) from error
    path.chmod(0o644)  # the library keeps its files to their owner
