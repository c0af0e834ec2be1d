"""Cached generation, one sequence, greedy: ours beside Hugging Face `generate`, alternated."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from bench.matrix import DTYPES
from bench.report import Section, Settings, Table, spread, verdict
from bench.workers import Shape

SHAPE = Shape(layers=6, heads=6, width=192, time=256, batch=1, vocab=65)
PROMPT = 16
TOKENS = 200
TARGET = 5.0

Generate = Callable[[list[int]], list[int]]


def gpt2(dtype: torch.dtype) -> Generate:
    """Hugging Face GPT-2 with its key-value cache."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=SHAPE.vocab,
        n_positions=SHAPE.time,
        n_embd=SHAPE.width,
        n_layer=SHAPE.layers,
        n_head=SHAPE.heads,
        bos_token_id=0,
        eos_token_id=None,  # nothing ends it early, and no check for an end costs it time
    )
    model = GPT2LMHeadModel(config).eval().to(dtype)

    def generate(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            use_cache=True,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
        )
        return out[0, len(prompt) :].tolist()

    return generate


def keyhole(dtype: torch.dtype) -> Generate:
    """Ours, built of the same parts as GPT-2."""
    import keyhole as kh
    from bench.contender import keyhole_recipe
    from keyhole.model.decode import generate

    changes = {"model.norm": "layer", "model.feed": {"name": "gelu", "approximate": "tanh"}}
    model: nn.Module = kh.build(keyhole_recipe(SHAPE, changes), vocab=SHAPE.vocab)
    model = copy.deepcopy(model).eval().to(dtype)
    return lambda prompt: list(generate(model, prompt, TOKENS, temperature=0.0))


class Contender(NamedTuple):
    """A library in one precision on so many threads: which is fastest differs, so each is given every choice."""

    build: Callable[[torch.dtype], Generate]
    kind: str
    threads: int


CONTENDERS = {
    f"{library} {kind}, threads: {threads}": Contender(build, kind, threads)
    for library, build in (("keyhole", keyhole), ("gpt2", gpt2))
    for kind in DTYPES
    for threads in sorted({1, torch.get_num_threads()})
}


def tokens_per_second(generate: Generate, prompt: list[int], threads: int) -> float:
    """Of one whole generation, the reading of the prompt included."""
    torch.set_num_threads(threads)
    before = time.perf_counter()
    ids = generate(prompt)
    taken = time.perf_counter() - before
    if len(ids) != TOKENS:
        raise RuntimeError(f"asked for {TOKENS} tokens, got {len(ids)}")
    return TOKENS / taken


def alternate(rounds: int, failures: list[str]) -> list[dict[str, float]]:
    """Every contender once a round, the order rotating; one that fails is left out from then on."""
    torch.manual_seed(0)
    prompt = torch.randint(SHAPE.vocab, (PROMPT,)).tolist()
    ready: dict[str, Generate] = {}
    for name, contender in CONTENDERS.items():
        try:
            ready[name] = contender.build(DTYPES[contender.kind])
            tokens_per_second(ready[name], prompt, contender.threads)
        except Exception as error:  # whatever a contender dies of, the others go on
            failures.append(f"{name}: {type(error).__name__}: {error}")
            ready.pop(name, None)
    names = list(ready)
    results = []
    for number in range(rounds):
        start = number % max(1, len(names))
        order = [*names[start:], *names[:start]]
        results.append({name: tokens_per_second(ready[name], prompt, CONTENDERS[name].threads) for name in order})
    return results


def best(results: list[dict[str, float]], prefix: str) -> str | None:
    """The fastest form of one library, by its median."""
    names = [name for name in results[0] if name.startswith(prefix)]
    return max(names, key=lambda name: statistics.median(one[name] for one in results)) if names else None


def measure(settings: Settings) -> Section:
    """Ours and theirs in every form; the ratio is between the fastest of each."""
    failures: list[str] = []
    whole = torch.get_num_threads()
    try:
        results = alternate(settings.rounds, failures)
    finally:
        torch.set_num_threads(whole)
    title = f"Cached generation: {SHAPE}, greedy, {TOKENS} tokens after {PROMPT}"
    table = Table(title, ("contender", "tokens/s", "range"))
    for name in CONTENDERS:
        values = [one[name] for one in results if name in one]
        table.rows.append((name, *spread(values, ",.0f")))
    ours, theirs = best(results, "keyhole"), best(results, "gpt2")
    ratios = [one[ours] / one[theirs] for one in results] if ours and theirs else []
    middle, extent = spread(ratios)
    reached = verdict(statistics.median(ratios) if ratios else None, TARGET)
    table.notes.append(f"{ours or 'keyhole'} / {theirs or 'gpt2'}: {middle} ({extent}), target {TARGET:g}: {reached}")
    return Section([table], {"rounds": results, "ratios": ratios}, failures)
