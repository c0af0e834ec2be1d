"""Small models, and weights far from their first values so that nothing agrees by being near zero."""

import torch

from keyhole.core.config import Recipe
from keyhole.model.lm import LM, build

VOCAB = 11


def small(changes=None, folder=None) -> Recipe:
    recipe = Recipe.parse({"data": {"block": 16}, "model": {"layers": 2, "width": 16, "heads": 4}}, folder=folder)
    return recipe.replace(changes or {})


def shaken(recipe, vocab=VOCAB) -> LM:
    """The recipe's model in float64 with large random weights."""
    model, chance = build(recipe, vocab).double().eval(), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=chance, dtype=torch.float64) * 0.4
    return model


def some_ids(rows=2, tokens=16, vocab=VOCAB, seed=2):
    return torch.randint(vocab, (rows, tokens), generator=torch.Generator().manual_seed(seed))
