"""Fast forms of causal softmax attention, and the measured table that chooses between them.

Legend: N = B * H (a head of a row), T tokens, D head width, C block of queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

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
    """Explicit products over blocks of C queries, each against only the keys it may read: about half the work at length T >> C."""
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
    """P = softmax(Q K^T / sqrt(D) + mask), O = P V; dV = P^T g, dS = P (g V^T - rowsum(P g V^T)), dQ = dS K, dK = dS^T Q."""

    @staticmethod
    def forward(ctx, q_NTD, k_NTD, v_NTD):  # noqa: ANN001, ANN205
        T, scale = q_NTD.shape[1], q_NTD.shape[2] ** -0.5
        o_NTD = torch.empty_like(v_NTD)
        weights = []
        for start, stop in _blocks(T):
            scores = torch.bmm(q_NTD[:, start:stop], k_NTD[:, :stop].transpose(1, 2)).mul_(scale)
            scores[:, :, start:].add_(_future(stop - start, scores.dtype, scores.device))
            weights.append(torch.softmax(scores, -1))
            o_NTD[:, start:stop] = torch.bmm(weights[-1], v_NTD[:, :stop])
        ctx.save_for_backward(q_NTD, k_NTD, v_NTD, *weights)
        return o_NTD

    @staticmethod
    def backward(ctx, grad_NTD):  # noqa: ANN001, ANN205
        q_NTD, k_NTD, v_NTD, *weights = ctx.saved_tensors
        T, scale = q_NTD.shape[1], q_NTD.shape[2] ** -0.5
        dq, dk, dv = torch.empty_like(q_NTD), torch.empty_like(k_NTD), torch.empty_like(v_NTD)
        # Last block first: it reads every key, so it fills dK and dV whole and the others only add.
        for (start, stop), weight in reversed(list(zip(_blocks(T), weights, strict=True))):
            grad = grad_NTD[:, start:stop]
            d_weight = torch.bmm(grad, v_NTD[:, :stop].transpose(1, 2))
            d_score = torch._softmax_backward_data(d_weight, weight, -1, weight.dtype).mul_(scale)
            dq[:, start:stop] = torch.bmm(d_score, k_NTD[:, :stop])
            dv_part = torch.bmm(weight.transpose(1, 2), grad)
            dk_part = torch.bmm(d_score.transpose(1, 2), q_NTD[:, start:stop])
            if stop == T:
                dv.copy_(dv_part)
                dk.copy_(dk_part)
            else:
                dv[:, :stop] += dv_part
                dk[:, :stop] += dk_part
        return dq, dk, dv
