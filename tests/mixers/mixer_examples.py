"""Built-in mixers by name, with weights far from their first values."""

import torch

from keyhole.mixers.average import Average
from keyhole.mixers.linear import Linear
from keyhole.mixers.polynomial import Polynomial
from keyhole.mixers.recurrent import Recurrent
from keyhole.mixers.ridge import Ridge
from keyhole.mixers.softmax import Softmax
from keyhole.mixers.window import Window

WIDTH, HEADS, BLOCK = 24, 4, 2048
KINDS = {
    "softmax": Softmax,
    "window": Window,
    "linear": Linear,
    "polynomial": Polynomial,
    "ridge": Ridge,
    "recurrent": Recurrent,
    "average": Average,
}


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_mixer(name, **options):
    mixer = KINDS[name](WIDTH, HEADS, BLOCK, **options).double().eval()
    for seed, weight in enumerate(mixer.parameters()):
        if getattr(weight, "role", None):
            weight.data = normal(*weight.shape, seed=seed) * weight.shape[-1] ** -0.5
    return mixer


def heads_of(mixer, x):
    """Queries, keys and values (B, H, T, D) by their own projections."""
    B, T, _ = x.shape
    both = x @ mixer.qkv.weight.T
    return [part.view(B, T, HEADS, -1).transpose(1, 2) for part in both.split(WIDTH, -1)]
