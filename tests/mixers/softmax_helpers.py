"""Softmax mixers with weights far from their first values, and the definition spelt out position by position."""

import torch

from keyhole.mixers.softmax import Softmax
from keyhole.parts.merge import Concat, Reweight, ReweightRunning, Shift, Shuffle
from keyhole.parts.position import Alibi, Learned, NoPosition, Rope, Sinusoidal

WIDTH, HEADS, BLOCK = 24, 4, 200
POSITIONS = {
    "learned": lambda: Learned(WIDTH, BLOCK),
    "sinusoidal": lambda: Sinusoidal(WIDTH, BLOCK),
    "rope": lambda: Rope(WIDTH, HEADS, BLOCK),
    "rope, interleaved": lambda: Rope(WIDTH, HEADS, BLOCK, pairs="interleaved"),
    "alibi": lambda: Alibi(HEADS),
    "none": NoPosition,
}
MERGES = {
    "concat": Concat,
    "shuffle": Shuffle,
    "shift": Shift,
    "reweight": Reweight,
    "reweight-running": lambda: ReweightRunning(HEADS),
    "reweight-running, normalised": lambda: ReweightRunning(HEADS, normalise=True),
}


def make(position="none", merge="concat", block=BLOCK, **options) -> Softmax:
    position, merge = POSITIONS[position](), MERGES[merge]()
    mixer = Softmax(WIDTH, HEADS, block, position=position, merge=merge, **options).double().eval()
    for seed, parameter in enumerate(mixer.parameters()):
        parameter.data = normal(*parameter.shape, seed=seed) * 0.4
    return mixer


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def one_query_at_a_time(q_BHTD, k_BHTD, v_BHTD, bias=None):
    """o_t = sum over s <= t of softmax_s(q_t . k_s / sqrt(D) + bias_ts) v_s, with nothing masked and nothing shared."""
    rows = []
    for t in range(q_BHTD.shape[2]):
        score = torch.einsum("bhd,bhsd->bhs", q_BHTD[:, :, t], k_BHTD[:, :, : t + 1]) / q_BHTD.shape[3] ** 0.5
        if bias is not None:
            score = score + bias[..., t, : t + 1]
        weight = score.exp() / score.exp().sum(-1, keepdim=True)
        rows.append(torch.einsum("bhs,bhsd->bhd", weight, v_BHTD[:, :, : t + 1]))
    return torch.stack(rows, 2)


def gradients(function, inputs, weight):
    """The value, and the gradients of a weighted sum of it."""
    value = function()
    return [value.detach(), *torch.autograd.grad((value * weight).sum(), inputs, allow_unused=True)]


def assert_all_close(found, expected, tolerance):
    for ours, theirs in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs
            continue
        size = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance * size)
