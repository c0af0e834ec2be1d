"""One contender in a process of its own: builds a model, then trains whenever a line on standard input says so.

    python -m bench.contender NAME LAYERS HEADS WIDTH TIME BATCH VOCAB

`run SECONDS` trains for about that long and answers with one line of JSON; `quit`, or the end of the input, ends it.
Shapes: B batch, T time, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.workers import Shape

if TYPE_CHECKING:
    from keyhole.core.config import Recipe

Step = Callable[[Tensor, Tensor], Tensor]
RATE = 1e-3
FEWEST_STEPS = 3  # a median needs three, even where one step takes longer than the time given
BATCHES = 8

OTHER_PARTS = {"model.feed": "relu-squared", "model.norm": "rms"}
"""Parts that the peers' models are not made of."""


def gpt2(shape: Shape, *, bf16: bool) -> tuple[nn.Module, Step]:
    """Hugging Face GPT-2 with its default attention."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.time,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,  # the defaults lie outside a small vocabulary, which it warns about
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    return model, peer_step(model, lambda x_BT: model(input_ids=x_BT).logits, bf16=bf16)


def x_transformer(shape: Shape, *, bf16: bool) -> tuple[nn.Module, Step]:
    """x-transformers with its fused attention; the head is tied as in all other contenders, which makes it faster."""
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=shape.width,
        depth=shape.layers,
        heads=shape.heads,
        attn_dim_head=shape.width // shape.heads,
        attn_flash=True,
    )
    model = TransformerWrapper(num_tokens=shape.vocab, max_seq_len=shape.time, attn_layers=layers, tie_embedding=True)
    return model, peer_step(model, model, bf16=bf16)


def peer_step(model: nn.Module, logits: Callable[[Tensor], Tensor], *, bf16: bool) -> Step:
    """The fastest plain training step that torch offers a user of these libraries."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(x_BT: Tensor, y_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BTV = logits(x_BT)
            loss = functional.cross_entropy(logits_BTV.flatten(0, 1), y_BT.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def keyhole_recipe(shape: Shape, changes: dict[str, Any] | None = None) -> Recipe:
    """The same sizes in our library: AdamW without clipping as the peers have it, of the same parts."""
    from keyhole.core.config import Recipe

    return Recipe().replace(
        {
            "data.block": shape.time,
            "model.layers": shape.layers,
            "model.heads": shape.heads,
            "model.width": shape.width,
            "model.position": "learned",
            "model.norm": "layer",
            "model.feed": "gelu",
            "train.batch": shape.batch,
            "train.optimizer": "adamw",
            "train.rate": RATE,
            "train.schedule": "constant",
            "train.clip": 0.0,
            **(changes or {}),
        }
    )


def keyhole(shape: Shape, *, changes: dict[str, Any] | None = None) -> tuple[nn.Module, Step]:
    """Our own library, through the engine that its training loop runs on."""
    import keyhole as kh
    from keyhole.training.engine import Engine

    recipe = keyhole_recipe(shape, changes)
    model = kh.build(recipe, vocab=shape.vocab)
    return model, Engine(model, recipe.train).step


CONTENDERS: dict[str, Callable[[Shape], tuple[nn.Module, Step]]] = {
    "keyhole": keyhole,
    "keyhole-rms-relu2": partial(keyhole, changes=OTHER_PARTS),
    "keyhole-float32": partial(keyhole, changes={"train.precision": "float32"}),
    "gpt2-float32": partial(gpt2, bf16=False),
    "gpt2-bf16": partial(gpt2, bf16=True),
    "xt-float32": partial(x_transformer, bf16=False),
    "xt-bf16": partial(x_transformer, bf16=True),
}


def peak_mb() -> float:
    """The most memory ever resident, in MB, of this process and of any it has started."""
    return sum(_kilobytes(process, "VmHWM") for process in _family(os.getpid())) / 1024


def resident_mb() -> float:
    """The memory resident now, in MB."""
    return _kilobytes(os.getpid(), "VmRSS") / 1024


def _kilobytes(process: int, key: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(key + ":")), 0)


def _family(process: int) -> list[int]:
    found = [process]
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        for child in children.read_text().split():
            found.extend(_family(int(child)))
    return found


def train(step: Step, batches: Iterable[tuple[Tensor, Tensor]], tokens: int, seconds: float) -> dict[str, Any]:
    """Train for about `seconds`; the median over steps shrugs off the ones that something else interrupted."""
    times: list[float] = []
    started = time.perf_counter()
    for x_BT, y_BT in batches:
        before = time.perf_counter()
        loss = step(x_BT, y_BT)
        after = time.perf_counter()
        times.append(after - before)
        if after - started >= seconds and len(times) >= FEWEST_STEPS:
            break
    return {
        "tokens_per_second": tokens / statistics.median(times),
        "steps": len(times),
        "peak_mb": peak_mb(),
        "loss": float(loss),
    }


def serve(name: str, shape: Shape) -> None:
    """Build, then obey."""
    # Libraries print as they please: the answers get the real standard output for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.manual_seed(0)
    size = (BATCHES, 2, shape.batch, shape.time)
    batches = itertools.cycle([(pair[0], pair[1]) for pair in torch.randint(shape.vocab, size)])
    model, step = CONTENDERS[name](shape)
    facts = {"parameters": sum(p.numel() for p in model.parameters()), "before_training_mb": resident_mb()}
    print(json.dumps(facts), file=answers, flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command != "run":
            break
        print(json.dumps(train(step, batches, shape.tokens, float(argument))), file=answers, flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], Shape(*map(int, sys.argv[2:])))
