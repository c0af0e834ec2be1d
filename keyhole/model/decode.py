"""Generation: one token at a time, going on from the mixers' state where they have one.

The state is a cache, never another model: with it or without, the logits are the same (a test holds them equal).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from keyhole.core.errors import InputError
from keyhole.model.lm import LM
from keyhole.model.quick import QuickStep


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the likeliest; `top_k` and `top_p` cut the tail first."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"temperature {self.temperature} is not valid; it is 0 (greedy) or more, for example 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"top-k {self.top_k} is not valid; it is 1 or more")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top-p {self.top_p} is not valid; it is above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed {self.seed} is not valid; it is a whole number from 0 to 2^63 - 1, for example 0")


class Decoder:
    """Reads tokens and tells the logits after them, going on from where it was.

    When the text outgrows the block, its last half block is read afresh and decoding goes on from there. Single tokens
    are read by the model's quick form where it has one; `quick=False` keeps to `LM.step`, the reference.
    """

    def __init__(self, model: LM, *, cached: bool = True, quick: bool = True) -> None:
        self.model = model
        self.cached = cached and model.can_step()
        self._quick = QuickStep.of(model) if quick and self.cached else None
        self._text: list[int] = []
        self._state: list[Any] | None = None
        self._read = 0

    @torch.inference_mode()
    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """The logits (V,) after all tokens read so far and these."""
        if not ids:
            raise InputError("there is no token to read; give a prompt of at least one token")
        _check_ids(ids, self.model.vocab)
        self._text += ids
        if len(self._text) > self.model.block_size:
            self._text = self._text[-max(1, self.model.block_size // 2) :]
            self._state, self._read = None, 0
        device = self.model.embedding.device
        if not self.cached:
            return self.model(torch.tensor([self._text], device=device))[0, -1]
        if self._state is not None and self._quick is not None and len(ids) == 1:
            self._read += 1
            return self._quick.step(ids[0], self._state)[0]
        new = torch.tensor([self._text[self._read :]], device=device)
        state = self.model.begin(1) if self._state is None else self._state
        logits, self._state = self.model.step(new, state, self._read)
        self._read = len(self._text)
        return logits[0]


def generate(
    model: LM,
    ids: Sequence[int],
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
    cached: bool = True,
) -> Iterator[int]:
    """Yield up to `tokens` new tokens as they are drawn; ends early at the token `stop`."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    if tokens < 0:
        raise InputError(f"tokens = {tokens} is not valid; it is 0 or more")
    was_training = model.training
    model.eval()
    try:
        generator = torch.Generator().manual_seed(seed)
        decoder = Decoder(model, cached=cached)
        unread: Sequence[int] = list(ids)
        for _ in range(tokens):
            token = _draw(decoder.read(unread), sampling, generator)
            yield token
            if token == stop:
                return
            unread = [token]
    finally:
        model.train(was_training)


def _draw(logits_V: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    chance = (logits_V.double().cpu() / sampling.temperature).softmax(-1)
    if sampling.top_k is not None and sampling.top_k < len(chance):
        # Keep exactly k, also where several are equally likely.
        kept = chance.topk(sampling.top_k).indices
        chance = torch.zeros_like(chance).index_copy_(0, kept, chance[kept])
    if sampling.top_p is not None and sampling.top_p < 1:
        ordered, index = chance.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        chance[index[before >= sampling.top_p * ordered.sum()]] = 0
    return int(torch.multinomial(chance, 1, generator=generator))


def _check_ids(ids: Sequence[int], vocab: int) -> None:
    for place, token in enumerate(ids):
        if not 0 <= token < vocab:
            raise InputError(
                f"token {token} at place {place} is outside this model's vocabulary of {vocab} (0 to {vocab - 1})"
            )
