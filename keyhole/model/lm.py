"""The decoder language model: an embedding, blocks on one residual stream, a final norm and a head.

    x = embed(ids) + position;   x += mixer(norm(x));   x += feed(norm(x));   logits = m norm(x) head^T

The multiplier m is 1 but where `model.init` is "mup" or "unit".

Legend: B rows, T tokens, W width, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.core.config import Model, Recipe
from keyhole.core.errors import InputError
from keyhole.core.seeds import derive
from keyhole.model.guard import rehearse
from keyhole.model.init import initialise
from keyhole.model.loss import summed_loss
from keyhole.model.parameterization import logit_multiplier, set_multipliers
from keyhole.model.registry import accepts, construct, find, is_builtin
from keyhole.parts.contract import parameter


class Block(nn.Module):
    """One layer: x += mixer(norm(x)), then x += feed(norm(x))."""

    def __init__(self, model: Model, block: int, layer: int, position: nn.Module, folder: Path) -> None:
        super().__init__()
        facts: dict[str, Any] = {"width": model.width, "heads": model.heads, "block": block, "layer": layer}
        merge = construct("merge", model.merge, folder, **facts)
        self.mixer_norm = construct("norm", model.norm, folder, **facts)
        self.mixer = construct(
            "mixer", model.mixers[layer], folder, **facts, kv_heads=model.kv_heads, position=position, merge=merge
        )
        self.feed_norm = construct("norm", model.norm, folder, **facts)
        self.feed = construct("feed", model.feed, folder, **facts)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x_BTW: torch.Tensor, *mask_BT: torch.Tensor) -> torch.Tensor:
        """Mix, then feed. A mask is passed on only when there is one: not every mixer takes one."""
        x_BTW = x_BTW + self.dropout(self.mixer(self.mixer_norm(x_BTW), *mask_BT))
        return x_BTW + self.dropout(self.feed(self.feed_norm(x_BTW)))

    def step(self, x_BTW: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """The next tokens, the mixer going on from its state."""
        mixed, state = self.mixer.step(self.mixer_norm(x_BTW), state)
        x_BTW = x_BTW + mixed
        return x_BTW + self.feed(self.feed_norm(x_BTW)), state


class LM(nn.Module):
    """A decoder language model built of parts."""

    def __init__(self, model: Model, vocab: int, block: int, folder: Path) -> None:
        super().__init__()
        self.config, self.vocab, self.block_size = model, vocab, block
        _check_combination(model, folder)
        self.embedding = parameter(vocab, model.width, role="embedding")
        facts: dict[str, Any] = {"width": model.width, "heads": model.heads, "block": block}
        self.position = construct("position", model.position, folder, **facts)
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(Block(model, block, i, self.position, folder) for i in range(model.layers))
        self.norm = construct("norm", model.norm, folder, **facts)
        self.head = self.embedding if model.tie else parameter(vocab, model.width, role="head")
        self.logit_scale = logit_multiplier(model)
        set_multipliers(self, model)

    def forward(
        self, ids_BT: torch.Tensor, targets_BT: torch.Tensor | None = None, mask_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits (B, T, V); with targets, the sum of their losses instead (targets of -100 do not count)."""
        hidden = self.hidden(ids_BT, mask_BT)
        if targets_BT is None:
            return hidden @ self.head.T
        return summed_loss(hidden.flatten(0, 1), self.head, targets_BT.flatten())

    def hidden(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None = None) -> torch.Tensor:
        """What the head reads: the normed residual stream after the last block, at the scale of the logits."""
        x_BTW = self.dropout(self._embed(ids_BT, start=0))
        for block in self.blocks:
            x_BTW = block(x_BTW, *(() if mask_BT is None else (mask_BT,)))
        return self._scaled(self.norm(x_BTW))

    def can_step(self) -> bool:
        """Whether decoding may go on from a state: every mixer has one, and no part needs the whole sequence."""
        whole = any(getattr(module, "needs_whole_sequence", False) for module in self.modules())
        return not whole and all(hasattr(block.mixer, "step") for block in self.blocks)

    def begin(self, batch: int) -> list[Any]:
        """The state before the first token, one entry a block."""
        return [block.mixer.begin(batch, self.embedding.detach()) for block in self.blocks]

    def step(self, ids_BT: torch.Tensor, state: list[Any], start: int) -> tuple[torch.Tensor, list[Any]]:
        """Logits (B, V) after the last of the next tokens, and the new state; `start` tokens were read before."""
        x_BTW = self._embed(ids_BT, start)
        after = []
        for block, before in zip(self.blocks, state, strict=True):
            x_BTW, new = block.step(x_BTW, before)
            after.append(new)
        return self._scaled(self.norm(x_BTW[:, -1])) @ self.head.T, after

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.logit_scale == 1.0 else x * self.logit_scale

    def _embed(self, ids_BT: torch.Tensor, start: int) -> torch.Tensor:
        if start + ids_BT.shape[1] > self.block_size:
            raise InputError(
                f"a text of {start + ids_BT.shape[1]} tokens is longer than this model's block of {self.block_size}"
            )
        x_BTW = nn.functional.embedding(ids_BT, self.embedding)
        return self.position.add(x_BTW, start) if hasattr(self.position, "add") else x_BTW


def build(recipe: Recipe, vocab: int) -> LM:
    """The model of a recipe for a vocabulary, freshly initialised: (batch, time) ids -> (batch, time, vocab) logits."""
    if vocab < 2:
        raise InputError(f"a vocabulary of {vocab} is too small; it needs at least 2 tokens")
    with torch.random.fork_rng(devices=[]):
        # What a user's part draws in its constructor depends on the seed alone, not on what this process did before.
        torch.default_generator.manual_seed(derive(recipe.train.seed, "parts"))
        model = LM(recipe.model, vocab, recipe.data.block, recipe.folder)
    initialise(model, recipe.model, recipe.train.seed)
    rehearse(model, vocab, recipe.data.block)
    return model


def _check_combination(model: Model, folder: Path) -> None:
    """Refuse what cannot work, with the reason."""
    position, merge = model.position, model.merge
    acts = _acts_on_scores(find("position", position.name, folder))
    for mixer in model.specs("mixer"):
        takes = getattr(find("mixer", mixer.name, folder), "positions", ("turn", "bias"))
        if acts and not accepts("mixer", mixer, folder, "position"):
            given = f"position {position.name} acts on queries and keys, and mixer {mixer.name}"
            if is_builtin("mixer", mixer.name):
                raise InputError(f"{given} has no scores for it to act on; use learned, sinusoidal or none")
            remedy = "give the mixer a `position` argument, or use learned, sinusoidal or none"
            raise InputError(f"{given} does not take it; {remedy}")
        if acts and not set(acts) & set(takes):
            what = "biases" if "bias" in acts else "turns"
            raise InputError(
                f"position {position.name} {what} scores before a softmax, and mixer {mixer.name} has none; "
                f"use {'rope, ' if 'turn' in takes else ''}learned, sinusoidal or none"
            )
        if merge.name != "concat" and not accepts("mixer", mixer, folder, "merge"):
            raise InputError(
                f"merge {merge.name} joins heads, and mixer {mixer.name} does not hand its heads out; "
                "give the mixer a `merge` argument, or use concat"
            )
        if model.kv_heads and not accepts("mixer", mixer, folder, "kv_heads"):
            raise InputError(f"kv_heads is set, and mixer {mixer.name} has no key-value heads to group; leave it out")


def _acts_on_scores(position: type[nn.Module]) -> list[str]:
    """How a position acts on scores, "turn" or "bias"; empty where it adds to the embedding."""
    return [] if hasattr(position, "add") else [how for how in ("turn", "bias") if hasattr(position, how)]
