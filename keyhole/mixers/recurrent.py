"""The recurrent network of old: h_t = tanh(W_h h_{t-1} + W_x x_t + b), and what it tells the stream is W_o h_t.

There is no form that is parallel in time. The one that trains does what can be done at once (W_x x before the loop, the
gradients of W_h after it) and keeps nothing but h; the definition is the loop as autograd sees it. A padded token leaves h
as it is.

2 W^2 FLOPs a token in the loop, as many for W_x and W_o each; the state is h, W numbers.

Legend: B rows, T tokens, W width, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from keyhole.mixers.contract import Cost, Look
from keyhole.mixers.heads import HeadOutput, State, check_impl
from keyhole.parts.contract import Linear


def reference_states(
    drive_BTW: torch.Tensor, W_WW: torch.Tensor, h_BW: torch.Tensor, real_BT1: torch.Tensor
) -> torch.Tensor:
    """The definition: one token after the other."""
    states = []
    for t in range(drive_BTW.shape[1]):
        new = torch.tanh(h_BW @ W_WW.T + drive_BTW[:, t])
        h_BW = torch.where(real_BT1[:, t], new, h_BW)
        states.append(h_BW)
    return torch.stack(states, 1)


class _States(torch.autograd.Function):
    """The same loop with its backward loop written out: the gradient of W_h is one product over all tokens at the end."""

    @staticmethod
    def forward(ctx, drive_BTW, W_WW, h_BW, real_BT1):
        T_first = drive_BTW.transpose(0, 1).contiguous()
        states_TBW = torch.empty_like(T_first)
        real_TB1 = None if real_BT1.all() else real_BT1.transpose(0, 1)
        turned, h = W_WW.T.contiguous(), h_BW
        for t in range(len(T_first)):
            new = torch.addmm(T_first[t], h, turned).tanh_()
            h = torch.where(real_TB1[t], new, h) if real_TB1 is not None else new
            states_TBW[t] = h
        ctx.save_for_backward(states_TBW, W_WW, h_BW, real_TB1)
        return states_TBW.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BTW):
        states_TBW, W_WW, first_BW, real_TB1 = ctx.saved_tensors
        grad_TBW = grad_BTW.transpose(0, 1)
        slope_TBW = 1 - states_TBW.square()
        drives_TBW = torch.empty_like(states_TBW)
        back = torch.zeros_like(first_BW)
        for t in range(len(states_TBW) - 1, -1, -1):
            dh = grad_TBW[t] + back
            drive = dh * slope_TBW[t]
            if real_TB1 is not None:
                drive = drive * real_TB1[t]
            drives_TBW[t] = drive
            back = drive @ W_WW
            if real_TB1 is not None:
                back = torch.where(real_TB1[t], back, dh)
        before_TBW = torch.cat((first_BW[None], states_TBW[:-1]))
        dW = drives_TBW.flatten(0, 1).T @ before_TBW.flatten(0, 1)
        return drives_TBW.transpose(0, 1), dW, back, None


class Recurrent(HeadOutput):
    """A tanh recurrent network over the width: everything it knows of the past passes through one vector."""

    drive: Linear
    recur: Linear

    def __init__(self, width: int, heads: int, block: int, merge: nn.Module | None = None) -> None:  # noqa: ARG002
        drive, recur = Linear(width, width, role="in", bias=True), Linear(width, width, role="in")
        super().__init__(width, heads, merge, projections={"drive": drive, "recur": recur})

    def forward(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None, impl: str | None = None) -> torch.Tensor:
        """Read all tokens in order; `mask_BT` is True at real tokens."""
        check_impl(impl)
        h = self._states(x_BTW, self._first(x_BTW), mask_BT, reference_states if impl == "reference" else _States.apply)
        return self.join(self.split_heads(h))[0]

    def begin(self, batch: int, like: torch.Tensor) -> State:
        """h = 0."""
        return State((like.new_zeros(batch, self.heads * self.channels),), 0, self.begin_merge(batch, like))

    def step(self, x_BTW: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Read the next tokens."""
        self.check_state(state, x_BTW)
        h_BTW = self._states(x_BTW, state.memory[0], None, _States.apply)
        y, merge = self.join(self.split_heads(h_BTW), state.merge)
        return y, State((h_BTW[:, -1].clone(),), state.length + x_BTW.shape[1], merge)

    def look(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None) -> Look:
        """An implicit pattern: how strongly token s still moves a head at t, ||d h_t / d (W_x x_s)||_F / sqrt(D)."""
        h_BTW = self._states(x_BTW, self._first(x_BTW), mask_BT, _States.apply)
        real_BT = x_BTW.new_ones(x_BTW.shape[:2]) if mask_BT is None else mask_BT.to(x_BTW)
        slope_BTW = 1 - h_BTW.square()
        B, T, W = h_BTW.shape
        pattern = x_BTW.new_zeros(B, self.heads, T, T)
        moved_BTWW = x_BTW.new_zeros(B, T, W, W)  # d h_t / d (W_x x_s) for every s
        for t in range(T):
            passed = slope_BTW[:, None, t, :, None] * (self.recur.effective @ moved_BTWW)
            passed[:, t] = torch.diag_embed(slope_BTW[:, t])
            real = real_BT[:, t, None, None, None]
            moved_BTWW = passed * real + moved_BTWW * (1 - real)
            size = moved_BTWW.unflatten(2, (self.heads, -1)).square().sum((-1, -2)) / self.channels
            pattern[:, :, t] = size.sqrt().mT
        return Look(pattern, self.merged(self.split_heads(h_BTW)))

    def cost(self, tokens: int) -> Cost:
        """Three matrices, one of them in the loop."""
        flops = sum(matrix.flops(tokens) for matrix in (self.drive, self.recur, self.out))
        return Cost(self.own_parameters(), flops, self.begin(1, self.out.weight).bytes)

    def _first(self, x_BTW: torch.Tensor) -> torch.Tensor:
        return x_BTW.new_zeros(len(x_BTW), x_BTW.shape[-1])

    def _states(self, x_BTW: torch.Tensor, h_BW: torch.Tensor, mask_BT: torch.Tensor | None, form) -> torch.Tensor:
        real = torch.ones(x_BTW.shape[:2], dtype=torch.bool, device=x_BTW.device) if mask_BT is None else mask_BT
        return form(self.drive(x_BTW), self.recur.effective, h_BW, real.unsqueeze(-1))
