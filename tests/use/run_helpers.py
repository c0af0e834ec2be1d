"""A run of a small model whose weights are far from their first values, as if training had ended."""

import torch

from keyhole.core.config import Recipe
from keyhole.model.lm import build
from keyhole.record import checkpoint
from keyhole.record.run import Run, named_tensors, open_run
from keyhole.text import build_tokenizer, save_tokenizer

TEXT = "the cat sat on the mat; the dog sat on the cat. Größe: 5 €, naïve 😀\n\n it's 42. " * 40


def make_run(folder, changes=None, specials=False) -> Run:
    folder.mkdir(exist_ok=True)
    recipe = Recipe().replace({"model.layers": 2, "model.width": 32, "model.heads": 2, "data.block": 16})
    recipe = recipe.replace(changes or {})
    tokenizer = build_tokenizer(recipe.data.tokenizer, [TEXT], specials or recipe.data.rows != "text")
    save_tokenizer(tokenizer, folder)
    (folder / "recipe.toml").write_text(recipe.to_toml())
    (folder / "metrics.jsonl").touch()
    model, chance = build(recipe, tokenizer.vocab), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=chance) * 0.2
    checkpoint.save(folder / "checkpoints", named_tensors(model), {}, {"step": 7, "done": True})
    return open_run(folder)
