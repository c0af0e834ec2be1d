"""State-space mixers with weights away from their first values, and ways to run and compare them."""

import itertools

import torch

from keyhole.mixers.statespace import StateSpace
from keyhole.parts.merge import Concat, Reweight, ReweightRunning, Shift

WIDTH, HEADS, STATE, BLOCK = 6, 3, 3, 200
STRUCTURES = ["diagonal", "rank-one", "dense"]
VARIANTS = list(itertools.product(STRUCTURES, ["channel", "head"]))
MERGES = {"concat": Concat, "shift": Shift, "reweight": Reweight, "reweight-running": lambda: ReweightRunning(HEADS)}


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make(structure="diagonal", inputs="channel", merge="concat", width=WIDTH, heads=HEADS, state=STATE) -> StateSpace:
    """Every weight shaken; A only so far that its powers stay bounded over a thousand tokens."""
    options = {"structure": structure, "inputs": inputs, "state": state}
    mixer = StateSpace(width, heads, BLOCK, merge=MERGES[merge](), **options).double().eval()
    for seed, (name, parameter) in enumerate(mixer.named_parameters()):
        small = {"system.move_GNN": 1e-4, "system.rank_2GN": 1e-3}.get(name, 0.3)
        parameter.data = parameter.data + small * normal(*parameter.shape, seed=seed)
    return mixer


def step_over(mixer, x, ends):
    state, pieces = mixer.begin(x.shape[0], x), []
    for start, stop in itertools.pairwise(ends):
        y, state = mixer.step(x[:, start:stop], state)
        pieces.append(y)
    return torch.cat(pieces, 1)


def value_and_gradients(function, inputs, weight):
    """The value, and the gradients of a weighted sum of it: zero for what is not used (one token never meets A)."""
    value = function()
    found = torch.autograd.grad((value * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
    return [value.detach(), *found]


def assert_all_close(found, expected, tolerance):
    """Relative to the largest number of each tensor, or to 1 where all are smaller."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.isfinite().all()
        size = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * size)


def explicit_powers(A_GNN, B_GND, C_GDN, tokens):
    """K_l = C A^l B with every power of A made on its own."""
    found = [(C_GDN @ torch.linalg.matrix_power(A_GNN, lag) @ B_GND).real for lag in range(tokens)]
    return torch.stack(found, -1)


def padded(x_BTW, left, right):
    """Rows with noise before and after the text, and the mask that is True at the text."""
    noise = normal(x_BTW.shape[0], left + right, x_BTW.shape[-1], seed=99) * 100
    x = torch.cat((noise[:, :left], x_BTW, noise[:, left:]), 1)
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[:, left : left + x_BTW.shape[1]] = True
    return x, mask
