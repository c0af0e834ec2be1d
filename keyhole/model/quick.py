"""One more token of a built-in model, at a fraction of the cost of calling the modules around it.

At batch 1 a small model's step is all overhead: a call of torch costs 3-8 us and one of NumPy less than 1, and each layer
makes two dozen. Here everything between the matrices is NumPy, on the memory that the caches already have; the gains of
norms and the 1/sqrt(D) of queries are multiplied into the matrices. It serves the built-in parts on a CPU; every other
model decodes through `LM.step`, which is also the reference that tests hold this equal to.

Legend: W width, H heads, G key-value heads, S tokens so far, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from keyhole.mixers.softmax import Cache, Softmax
from keyhole.model.lm import LM
from keyhole.parts.feed import Gelu, ReluSquared
from keyhole.parts.merge import Concat, Shuffle
from keyhole.parts.norm import LayerNorm, RMSNorm
from keyhole.parts.position import Learned, NoPosition, Rope, Sinusoidal

Map = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Layer:
    """The four maps of a block, each with the norm before it, if there is one, folded in."""

    qkv: _Affine
    out: _Affine
    up: _Affine
    down: _Affine


@dataclass(frozen=True)
class _Affine:
    """M x + b. torch reads the matrix with all of its threads: what a step waits for is memory."""

    matrix: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: np.ndarray) -> np.ndarray:
        vector = torch.from_numpy(x)
        y = torch.mv(self.matrix, vector) if self.bias is None else torch.addmv(self.bias, self.matrix, vector)
        return y.numpy()


class QuickStep:
    """Steps a model of built-in parts by one token. `of` returns None where a part is not one it knows."""

    @classmethod
    def of(cls, model: LM) -> QuickStep | None:
        """The quick form of a model, made once for each text."""
        memory = model.embedding.device.type == "cpu" and model.embedding.dtype in (torch.float32, torch.float64)
        known = type(model.position) in (Learned, Sinusoidal, NoPosition, Rope) and type(model.norm) in (LayerNorm, RMSNorm)
        return cls(model) if memory and known and all(_is_known(block) for block in model.blocks) else None

    @torch.no_grad()
    def __init__(self, model: LM) -> None:
        mixer = model.blocks[0].mixer
        self.heads, self.groups, self.channels = mixer.heads, mixer.groups, mixer.channels
        self.unit = _unit(model.norm, model.config.width)
        self.act = _activation(model.blocks[0].feed)
        self.embedding = model.embedding.numpy()
        self.added, self.turned = _position(model)
        self.layers = [_pack(block, mixer.channels**-0.5) for block in model.blocks]
        self.head = _folded(model.norm, model.head, None)

    def step(self, token: int, state: list[Cache]) -> torch.Tensor:
        """The logits (1, V) after one more token; the caches are written as `LM.step` writes them."""
        start = state[0].length
        x_W = self.embedding[token].copy()
        if self.added is not None:
            x_W += self.added[start]
        for layer, cache in zip(self.layers, state, strict=True):
            x_W += layer.out(self._mix(layer.qkv(self.unit(x_W)), cache, start))
            x_W += layer.down(self.act(layer.up(self.unit(x_W))))
            cache.length = start + 1
        return torch.from_numpy(self.head(self.unit(x_W)))[None]

    def _mix(self, qkv: np.ndarray, cache: Cache, start: int) -> np.ndarray:
        """Write the token's key and value into the cache, and read all of it with the query."""
        qkv = qkv.reshape(-1, self.channels)
        if self.turned is not None:
            turning = qkv[: self.heads + self.groups]
            cos, sin, partner = self.turned
            turning[:] = turning * cos[start] + turning[:, partner] * sin[start]
        k_GSD, v_GSD = cache.both_2BGSD.numpy()[:, 0, :, : start + 1]
        k_GSD[:, start] = qkv[self.heads : self.heads + self.groups]
        v_GSD[:, start] = qkv[self.heads + self.groups :]
        q = qkv[: self.heads].reshape(self.groups, -1, self.channels)
        weights = q @ k_GSD.transpose(0, 2, 1)
        weights -= np.maximum.reduce(weights, axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= np.add.reduce(weights, axis=-1, keepdims=True)
        return (weights @ v_GSD).reshape(-1)


def _is_known(block: nn.Module) -> bool:
    mixer = block.mixer
    plain = type(mixer) is Softmax and mixer.qk_norm is None and type(mixer.merge) in (Concat, Shuffle, type(None))
    norms = all(type(norm) in (LayerNorm, RMSNorm) for norm in (block.mixer_norm, block.feed_norm))
    return plain and norms and type(block.feed) in (Gelu, ReluSquared)


def _unit(norm: nn.Module, width: int) -> Map:
    """The norm without its gain and bias, which the next matrix has taken in."""
    eps, centres = norm.eps, isinstance(norm, LayerNorm)

    def unit(x_W: np.ndarray) -> np.ndarray:
        if centres:
            x_W = x_W - np.add.reduce(x_W) / width
        return x_W * (1 / math.sqrt(float(x_W.dot(x_W)) / width + eps))

    return unit


def _activation(feed: nn.Module) -> Map:
    if isinstance(feed, Gelu):
        # NumPy has no error function; torch reads the same memory.
        gelu, approximate = torch.nn.functional.gelu, feed.approximate
        return lambda h: gelu(torch.from_numpy(h), approximate=approximate).numpy()
    return lambda h: np.square(np.maximum(h, 0, out=h), out=h)


def _position(model: LM) -> tuple[np.ndarray | None, tuple[np.ndarray, np.ndarray, np.ndarray] | None]:
    """What is added to the embedding, and how queries and keys turn: cosines, sines and each channel's partner."""
    position, dtype = model.position, model.embedding.dtype
    if isinstance(position, Learned):
        return position.weight.numpy(), None
    if isinstance(position, Sinusoidal):
        return position.table_TW.to(dtype).numpy(), None
    if isinstance(position, Rope):
        channels = position.cos_TD.shape[1]
        index = np.arange(channels)
        partner = np.roll(index, channels // 2) if position.pairs == "halves" else index ^ 1
        return None, (position.cos_TD.to(dtype).numpy(), position.sin_TD.to(dtype).numpy(), partner)
    return None, None


def _pack(block: nn.Module, scale: float) -> _Layer:
    mixer: Any = block.mixer
    qkv = _folded(block.mixer_norm, mixer.qkv.weight, mixer.qkv.bias)
    queries = mixer.split[0]
    for part in (qkv.matrix, qkv.bias):
        if part is not None:
            part[:queries] *= scale
    up = _folded(block.feed_norm, block.feed.up.weight, block.feed.up.bias)
    return _Layer(qkv, _affine(mixer.out.weight, mixer.out.bias), up, _affine(block.feed.down.weight, block.feed.down.bias))


def _folded(norm: nn.Module, weight: torch.Tensor, bias: torch.Tensor | None) -> _Affine:
    """W diag(gain) and W norm_bias + bias: what W norm(x) + bias is of the norm's bare result."""
    offset = None if bias is None else bias.clone()
    if getattr(norm, "bias", None) is not None:
        offset = weight @ norm.bias + (0 if offset is None else offset)
    return _affine(weight * norm.gain, offset)


def _affine(weight: torch.Tensor, bias: torch.Tensor | None) -> _Affine:
    return _Affine(weight.detach(), None if bias is None else bias.detach())
