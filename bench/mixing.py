"""One mixer at one length in a process of its own, so that its peak memory is nobody else's.

    python -m bench.mixing NAME TOKENS SECONDS

Answers with one line of JSON: the median seconds of a forward and backward pass on one thread in float32, and the peak
memory that the passes added, in MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.contender import peak_mb, resident_mb
from bench.matrix import median_seconds
from bench.workers import ROOT

WIDTH = 128


class Contender(NamedTuple):
    """A mixer as a recipe names it, on so many heads, and the form that is measured."""

    spec: dict[str, Any]
    heads: int = 4
    impl: str | None = None


CONTENDERS = {
    "softmax, dense": Contender({"name": "softmax"}, impl="reference"),
    "softmax": Contender({"name": "softmax"}),
    "window": Contender({"name": "window"}),
    "linear": Contender({"name": "linear"}),
    "polynomial": Contender({"name": "polynomial"}, heads=8),
    "ridge": Contender({"name": "ridge"}),
    "statespace": Contender({"name": "statespace"}),
    "recurrent": Contender({"name": "recurrent"}),
    "average": Contender({"name": "average"}),
}


def build(name: str, block: int) -> nn.Module:
    """The mixer with its first values."""
    from keyhole.core.config import Model, Spec
    from keyhole.mixers.heads import HeadMixer
    from keyhole.model.init import initialise
    from keyhole.model.registry import CATALOGUE, find
    from keyhole.parts.merge import Concat

    contender = CONTENDERS[name]
    options = {key: value for key, value in contender.spec.items() if key != "name"}
    cls = find("mixer", contender.spec["name"], ROOT)
    assert contender.spec["name"] in CATALOGUE["mixer"]
    mixer = cls(WIDTH, contender.heads, block, merge=Concat(), **options)
    initialise(mixer, Model(mixer=Spec(name=contender.spec["name"])), seed=0)
    if isinstance(mixer, HeadMixer):
        mixer.qkv.weight.data *= 5  # scores of the size that a trained model has
    return mixer


def passes(mixer: nn.Module, tokens: int, impl: str | None) -> Callable[[], None]:
    """One forward and backward pass over one row."""
    x_BTW = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(0))
    upstream_BTW = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs: list[Tensor] = [x_BTW.requires_grad_(), *mixer.parameters()]
    form = {} if impl is None else {"impl": impl}

    def once() -> None:
        torch.autograd.grad(mixer(x_BTW, **form), inputs, upstream_BTW)

    return once


def in_a_process(name: str, tokens: int, seconds: float) -> dict[str, float]:
    """What a fresh process measures."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.mixing", name, str(tokens), str(seconds)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"{name} at {tokens} tokens: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and answer."""
    name, tokens, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)  # two threads wait for each other at every barrier, and for whoever else computes
    mixer = build(name, tokens)
    # A small pass first: what libraries take for themselves once is not the mixer's.
    passes(mixer, min(tokens, 256), CONTENDERS[name].impl)()
    once, before = passes(mixer, tokens, CONTENDERS[name].impl), resident_mb()
    taken = median_seconds(once, seconds, fewest=3)
    print(json.dumps({"seconds": taken, "mb": max(0.0, peak_mb() - before)}))


if __name__ == "__main__":
    main()
