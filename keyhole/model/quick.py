"""One token at a time, quickly: the same arithmetic as `LM.step` for one row, without the modules around it.

At batch 1 a small model's step is all overhead: Python's calls, weights read against their layout, gains and scales applied
to vectors. Here each matrix is stored transposed, with its norm's gain, its own multiplier and the 1/sqrt(D) of the queries
multiplied in, so that a layer is a dozen calls. It serves the built-in parts; every other model decodes through `LM.step`,
which is also the reference that tests hold this equal to.

Legend: W width, H heads, G key-value heads, S tokens so far, D head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keyhole.mixers.softmax import Cache, Softmax
from keyhole.model.lm import LM
from keyhole.parts.contract import Linear
from keyhole.parts.feed import Gelu, ReluSquared
from keyhole.parts.merge import Concat, Shuffle
from keyhole.parts.norm import LayerNorm, RMSNorm
from keyhole.parts.position import Learned, NoPosition, Rope, Sinusoidal

Rows = Callable[[torch.Tensor], torch.Tensor]
Affine = tuple[torch.Tensor, torch.Tensor | None]
"""A transposed matrix and what is added after it, if anything is."""


@dataclass(frozen=True)
class _Layer:
    qkv: Affine
    out: Affine
    up: Affine
    down: Affine


class QuickStep:
    """Steps a model of built-in parts by one token. `of` returns None where a part is not one it knows."""

    @classmethod
    def of(cls, model: LM) -> QuickStep | None:
        """The quick form of a model, made once for each text."""
        known = type(model.position) in (Learned, Sinusoidal, NoPosition, Rope) and type(model.norm) in (LayerNorm, RMSNorm)
        return cls(model) if known and all(_is_known(block) for block in model.blocks) else None

    @torch.no_grad()
    def __init__(self, model: LM) -> None:
        mixer, feed = model.blocks[0].mixer, model.blocks[0].feed
        self.heads, self.groups, self.channels = mixer.heads, mixer.groups, mixer.channels
        self.width = model.config.width
        self.unit = _unit(model.norm, self.width)
        self.act = _activation(feed)
        self.embedding = model.embedding
        self.added, self.turned = _position(model)
        self.layers = [_pack(block, mixer.channels**-0.5) for block in model.blocks]
        self.head = _folded(model.norm, model.head * model.logit_scale, None)

    def step(self, token: int, state: list[Cache]) -> torch.Tensor:
        """The logits (1, V) after one more token; the caches are written as `LM.step` writes them."""
        start = state[0].length
        x_1W = self.embedding[token : token + 1]
        if self.added is not None:
            x_1W = x_1W + self.added[start : start + 1]
        for layer, cache in zip(self.layers, state, strict=True):
            x_1W = self._mix(x_1W, layer, cache, start)
            x_1W = _add(x_1W, self.act(_apply(self.unit(x_1W), layer.up)), layer.down)
            cache.length = start + 1
        return _apply(self.unit(x_1W), self.head)

    def _mix(self, x_1W: torch.Tensor, layer: _Layer, cache: Cache, start: int) -> torch.Tensor:
        qkv = _apply(self.unit(x_1W), layer.qkv).view(-1, self.channels)
        if self.turned is not None:
            turning = qkv[: self.heads + self.groups]
            cos, sin, swap = self.turned
            turning.copy_(torch.addcmul(turning * cos[start], turning[:, swap], sin[start]))
        both = cache.both_2BGSD[:, 0]
        both[:, :, start] = qkv[self.heads :].view(2, self.groups, self.channels)
        k_GSD, v_GSD = both[:, :, : start + 1].unbind(0)
        q = qkv[: self.heads].view(self.groups, -1, self.channels)
        o = torch.bmm(torch.bmm(q, k_GSD.mT).softmax(-1), v_GSD).view(1, self.width)
        return _add(x_1W, o, layer.out)


def _apply(x: torch.Tensor, affine: Affine) -> torch.Tensor:
    matrix, bias = affine
    return torch.mm(x, matrix) if bias is None else torch.addmm(bias, x, matrix)


def _add(stream: torch.Tensor, x: torch.Tensor, affine: Affine) -> torch.Tensor:
    matrix, bias = affine
    return torch.addmm(stream if bias is None else stream + bias, x, matrix)


def _is_known(block: nn.Module) -> bool:
    mixer = block.mixer
    plain = type(mixer) is Softmax and mixer.qk_norm is None and type(mixer.merge) in (Concat, Shuffle, type(None))
    norms = all(type(norm) in (LayerNorm, RMSNorm) for norm in (block.mixer_norm, block.feed_norm))
    return plain and norms and type(block.feed) in (Gelu, ReluSquared)


def _unit(norm: nn.Module, width: int) -> Rows:
    """The norm without its gain and bias, which the next matrix has taken in."""
    eps, layer_norm, rms_norm = norm.eps, torch.layer_norm, torch.nn.functional.rms_norm
    if isinstance(norm, LayerNorm):
        return lambda x: layer_norm(x, (width,), None, None, eps)
    return lambda x: rms_norm(x, (width,), None, eps)


def _activation(feed: nn.Module) -> Rows:
    if isinstance(feed, Gelu):
        gelu, approximate = torch.nn.functional.gelu, feed.approximate
        return lambda h: gelu(h, approximate=approximate)
    return lambda h: h.relu_().square_()


def _position(model: LM) -> tuple[torch.Tensor | None, tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None]:
    """What is added to the embedding, and how queries and keys turn: cosines, sines and each channel's partner."""
    position = model.position
    if isinstance(position, Learned):
        return position.weight, None
    if isinstance(position, Sinusoidal):
        return position.table_TW.to(model.embedding.dtype), None
    if isinstance(position, Rope):
        dtype, channels = model.embedding.dtype, position.cos_TD.shape[1]
        index = torch.arange(channels)
        partner = index.roll(channels // 2) if position.pairs == "halves" else index ^ 1
        return None, (position.cos_TD.to(dtype), position.sin_TD.to(dtype), partner)
    return None, None


def _pack(block: nn.Module, scale: float) -> _Layer:
    mixer: Any = block.mixer
    matrix, bias = _folded(block.mixer_norm, mixer.qkv.effective, mixer.qkv.bias)
    queries = mixer.split[0]
    matrix[:, :queries] *= scale
    if bias is not None:
        bias[:, :queries] *= scale
    return _Layer(
        (matrix, bias),
        _transposed(mixer.out),
        _folded(block.feed_norm, block.feed.up.effective, block.feed.up.bias),
        _transposed(block.feed.down),
    )


def _folded(norm: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> Affine:
    """(W diag(gain))^T and W norm_bias + bias: what W norm(x) + bias is of the norm's bare result."""
    offset = None if bias is None else bias.clone()
    if getattr(norm, "bias", None) is not None:
        offset = weight @ norm.bias + (0 if offset is None else offset)
    return (weight * norm.gain).T.contiguous(), None if offset is None else offset.unsqueeze(0)


def _transposed(linear: Linear) -> Affine:
    return linear.effective.T.contiguous(), None if linear.bias is None else linear.bias.unsqueeze(0)
