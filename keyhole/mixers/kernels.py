"""Fast forms of causal softmax attention, and the measured table that chooses between them.

Legend: N = B * H (a head of a row), T tokens, D head width, C block of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch.autograd.function import once_differentiable

BLOCK = 64


@dataclass(frozen=True)
class Choice:
    """A kernel and why it was taken."""

    impl: Literal["blocked", "fused"]
    reason: str


# The longest text for which the blocked form trains faster than torch's fused kernel on a CPU: `python -m bench attention`.
BLOCKED_UP_TO = {torch.bfloat16: 1024, torch.float32: 128, torch.float64: 128}


@lru_cache
def choose_kernel(device: str, dtype: torch.dtype, tokens: int) -> Choice:
    """The faster kernel for this device, precision and length, by measurement."""
    name = str(dtype).removeprefix("torch.")
    if device != "cpu":
        return Choice("fused", f"torch's fused attention on {device}")
    limit = BLOCKED_UP_TO.get(dtype, 0)
    if tokens <= limit:
        return Choice("blocked", f"blocked attention: the faster up to {limit} tokens in {name}")
    return Choice("fused", f"torch's fused attention: the faster beyond {limit} tokens in {name}")


def fused_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Torch's own kernel; memory linear in T."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def blocked_attention(q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor) -> torch.Tensor:
    """Explicit products over blocks of queries, each against only the keys it may read: half the work of a long text."""
    shape = q_BHTD.shape
    q, k, v = (x.reshape(-1, *shape[-2:]) for x in (q_BHTD, k_BHTD, v_BHTD))
    return _Blocked.apply(q, k, v).view(shape)


def blocked_flops(tokens: int, channels: int) -> int:
    """The matrix products of one head of one row, forward."""
    return sum(4 * channels * (stop - start) * stop for start, stop in _blocks(tokens))


def _blocks(tokens: int) -> list[tuple[int, int]]:
    return [(start, min(start + BLOCK, tokens)) for start in range(0, tokens, BLOCK)]


@lru_cache(maxsize=64)
def _future(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """-inf above the diagonal, 0 elsewhere. Made outside of any graph so that it can be shared between them."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.full((size, size), float("-inf"), dtype=dtype, device=device).triu(1)


class _Blocked(torch.autograd.Function):
    """P = softmax(Q K^T / sqrt(D) + mask), O = P V; dV = P^T g, dS = P (g V^T - rowsum(P g V^T)), dQ = dS K, dK = dS^T Q.

    The scale goes into Q, which is smaller than the scores; so S = Q' K^T, dQ = dS K scale and dK = dS^T Q'.
    """

    @staticmethod
    def forward(ctx, q_NTD, k_NTD, v_NTD):
        q_NTD = q_NTD * q_NTD.shape[2] ** -0.5
        outputs, weights = [], []
        for start, stop in _blocks(q_NTD.shape[1]):
            scores = torch.bmm(q_NTD[:, start:stop], k_NTD[:, :stop].mT)
            scores[:, :, start:].add_(_future(stop - start, scores.dtype, scores.device))
            weights.append(torch.softmax(scores, -1))
            outputs.append(torch.bmm(weights[-1], v_NTD[:, :stop]))
        ctx.save_for_backward(q_NTD, k_NTD, v_NTD, *weights)
        return _joined(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_NTD):
        q_NTD, k_NTD, v_NTD, *weights = ctx.saved_tensors
        blocks = _blocks(q_NTD.shape[1])
        d_queries = []
        # Last block first: it reads every key, so it gives dK and dV whole and the others only add.
        for (start, stop), weight in reversed(list(zip(blocks, weights, strict=True))):
            grad = grad_NTD[:, start:stop]
            d_weight = torch.bmm(grad, v_NTD[:, :stop].mT)
            d_score = torch._softmax_backward_data(d_weight, weight, -1, weight.dtype)
            d_queries.append(torch.bmm(d_score, k_NTD[:, :stop]))
            dv_part, dk_part = torch.bmm(weight.mT, grad), torch.bmm(d_score.mT, q_NTD[:, start:stop])
            if (start, stop) == blocks[-1]:
                dk, dv = dk_part, dv_part
            else:
                dk[:, :stop] += dk_part
                dv[:, :stop] += dv_part
        return _joined(d_queries[::-1]).mul_(q_NTD.shape[2] ** -0.5), dk, dv


def _joined(parts_NTD: list[torch.Tensor]) -> torch.Tensor:
    return parts_NTD[0] if len(parts_NTD) == 1 else torch.cat(parts_NTD, 1)
