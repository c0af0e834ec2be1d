"""Cross entropy from the last hidden state, without ever holding all logits.

Legend: N targets, W width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

IGNORED = -100  # a target that does not count: padding, or a position without an answer

# Rows are taken so that a piece's logits stay in the processor's cache: about 10 million of them.
PIECE = 10_000_000


def reference_loss(hidden_NW: torch.Tensor, head_VW: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """The definition: the sum over targets of ln(sum_v exp z_v) - z_target, z = head hidden."""
    logits = hidden_NW @ head_VW.T
    return torch.nn.functional.cross_entropy(logits, target_N, ignore_index=IGNORED, reduction="sum")


def summed_loss(hidden_NW: torch.Tensor, head_VW: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """The same sum, piece by piece; the gradients are made in the forward pass, while a piece's logits are at hand."""
    return _SummedLoss.apply(hidden_NW, head_VW, target_N)


class _SummedLoss(torch.autograd.Function):
    """dz = softmax(z) - onehot(target), dhidden = dz head, dhead = dz^T hidden."""

    @staticmethod
    def forward(ctx, hidden_NW, head_VW, target_N):
        rows = max(64, PIECE // head_VW.shape[0])
        d_hidden = torch.empty_like(hidden_NW)
        wide = torch.promote_types(head_VW.dtype, torch.float32)
        d_head = torch.zeros(head_VW.shape, dtype=wide, device=head_VW.device)
        total = torch.zeros((), dtype=wide, device=head_VW.device)
        for start in range(0, len(target_N), rows):
            hidden, target = hidden_NW[start : start + rows], target_N[start : start + rows]
            dz, loss = _piece(hidden @ head_VW.T, target, wide)
            total += loss
            d_hidden[start : start + rows] = dz @ head_VW
            d_head += dz.T @ hidden
        ctx.save_for_backward(d_hidden, d_head.to(head_VW.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), d_head * grad.to(d_head.dtype), None


def _piece(logits_NV: torch.Tensor, target_N: torch.Tensor, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(z) - onehot(target), and the sum of the losses, of one piece."""
    index_N1 = target_N.clamp_min(0).unsqueeze(1)
    chance = torch.softmax(logits_NV, -1)
    hit_N1 = chance.gather(1, index_N1)
    # The floor stands for a probability that underflowed: the loss stays finite and large, and NaN stays NaN.
    loss_N1 = hit_N1.to(wide).clamp_min(1e-37).log().neg_()
    chance.scatter_(1, index_N1, hit_N1 - 1)
    if int(target_N.min()) < 0:
        counts_N1 = (target_N != IGNORED).unsqueeze(1)
        chance.mul_(counts_N1)
        loss_N1 = loss_N1.where(counts_N1, 0)
    return chance, loss_N1.sum()
