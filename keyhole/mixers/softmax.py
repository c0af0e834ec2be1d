"""Softmax attention: o_t = sum over s <= t of softmax_s(q_t . k_s / sqrt(D) + bias_ts) v_s.

Three forms of one definition: `reference_attention` reads like the formula; `blocked_attention` is the training form on a
CPU; `fused_attention` is torch's own kernel. `attention` chooses by a measured table and says why.

Legend: B rows, T tokens, W width, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from keyhole.core.errors import InputError, nearest
from keyhole.mixers.contract import Cost, Impl, Look
from keyhole.mixers.heads import HeadMixer, check_impl
from keyhole.mixers.kernels import blocked_attention, blocked_flops, choose_kernel, fused_attention


def reference_weights(
    q_BHTD: torch.Tensor,
    k_BHSD: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask_BS: torch.Tensor | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Who reads whom: (B, H, T, S) weights of the last T of S positions. A row that may read nothing is all zero.

    With a window each reads at most so many positions, its own the last of them.
    """
    T, S = q_BHTD.shape[-2], k_BHSD.shape[-2]
    scores = q_BHTD @ k_BHSD.transpose(-1, -2) * q_BHTD.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    allowed = torch.ones(T, S, dtype=torch.bool, device=scores.device).tril(S - T)
    if window is not None:
        allowed = allowed.triu(S - T - window + 1)
    if mask_BS is not None:
        allowed = allowed & mask_BS[:, None, None, :]
    # A row with nothing to read is left unmasked for the softmax and zeroed after it, so that no NaN is ever made.
    reads_something = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed & reads_something, float("-inf"))
    return scores.softmax(-1) * reads_something


def reference_attention(
    q_BHTD: torch.Tensor,
    k_BHSD: torch.Tensor,
    v_BHSD: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask_BS: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition. Queries are the last T of the S positions."""
    return reference_weights(q_BHTD, k_BHSD, bias, mask_BS) @ v_BHSD


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, impl: Impl = "auto") -> torch.Tensor:
    """Causal attention without bias or padding, (B, H, T, D) each, by the named form; "auto" reads the measured table."""
    if impl == "auto":
        impl = choose_kernel(q.device.type, q.dtype, q.shape[-2]).impl
    if impl == "reference":
        return reference_attention(q, k, v)
    return blocked_attention(q, k, v) if impl == "blocked" else fused_attention(q, k, v)


@dataclass
class Cache:
    """Keys and values read so far, in one tensor. `step` writes into it: a state passed on is used up; `copy` keeps one."""

    both_2BGSD: torch.Tensor
    length: int = 0
    merge: Any = None

    def copy(self) -> Cache:
        """The same state in memory of its own."""
        return Cache(self.both_2BGSD.clone(), self.length, copy.deepcopy(self.merge))


class Softmax(HeadMixer):
    """Attention with any number of heads. `impl` fixes the kernel.

    Options in a recipe: `qk_norm = true` (RMS norm over each head's channels), `bias = true` (as GPT-2 has).
    Grouped key-value heads are set by `model.kv_heads`.
    """

    counted_form: Impl = "reference"
    """Which form trains depends on the machine; what is declared does not, so that budgets mean the same everywhere."""

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,
        kv_heads: int | None = None,
        position: nn.Module | None = None,
        merge: nn.Module | None = None,
        qk_norm: bool = False,
        bias: bool = False,
        impl: Impl = "auto",
    ) -> None:
        super().__init__(width, heads, kv_heads=kv_heads, position=position, merge=merge, qk_norm=qk_norm, bias=bias)
        if impl not in get_args(Impl):
            raise InputError(f"softmax impl = {impl!r} is not valid{nearest(str(impl), get_args(Impl))}")
        self.block = block
        self.impl: Impl = impl

    def forward(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None, impl: Impl | None = None) -> torch.Tensor:
        """Read all tokens at once; `mask_BT` is True at real tokens."""
        check_impl(impl, get_args(Impl))
        q, k, v = self.project(x_BTW, start=0)
        k, v = self._share(k), self._share(v)
        bias = self._bias(0, q.shape[-2], q)
        if bias is None and mask_BT is None:
            o = attention(q, k, v, impl or self.impl)
        else:
            o = reference_attention(q, k, v, bias, mask_BT)
        return self.join(o)[0]

    def begin(self, batch: int, like: torch.Tensor) -> Cache:
        """An empty cache with room for `block` tokens."""
        both = like.new_empty(2, batch, self.groups, self.block, self.channels)
        return Cache(both, 0, self.begin_merge(batch, like))

    def step(self, x_BTW: torch.Tensor, state: Cache) -> tuple[torch.Tensor, Cache]:
        """Read the next tokens, with all earlier ones in the cache."""
        if type(state) is not Cache or state.both_2BGSD.shape[1:] != (len(x_BTW), self.groups, self.block, self.channels):
            given = tuple(state.both_2BGSD.shape[1:]) if type(state) is Cache else type(state).__name__
            wanted = (len(x_BTW), self.groups, self.block, self.channels)
            raise InputError(f"this state is of another model: softmax keeps keys {wanted}, and was given {given}")
        start, stop = state.length, state.length + x_BTW.shape[1]
        q, k, v = self.project(x_BTW, start)
        new, seen = state.both_2BGSD[..., start:stop, :], state.both_2BGSD[..., :stop, :]
        new[0], new[1] = k, v
        bias = self._bias(start, stop, q)
        if stop - start == 1 and bias is None:
            o = self._read_all(q, *seen)
        else:
            o = reference_attention(q, self._share(seen[0]), self._share(seen[1]), bias)
        y, state.merge = self.join(o, state.merge)
        state.length = stop
        return y, state

    def _read_all(self, q_BH1D: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
        """One query token reads everything before it: nothing to mask, and a group's queries share one product."""
        B, H, _, D = q_BH1D.shape
        q, k, v = q_BH1D.reshape(B * self.groups, -1, D), k_BGSD.flatten(0, 1), v_BGSD.flatten(0, 1)
        scores = torch.baddbmm(q.new_empty(1), q, k.mT, beta=0, alpha=D**-0.5)
        return torch.bmm(scores.softmax(-1), v).view(B, H, 1, D)

    def look(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None) -> Look:
        """The weights and what each head wrote."""
        q, k, v = self.project(x_BTW, start=0)
        weights = reference_weights(q, self._share(k), self._bias(0, q.shape[-2], q), mask_BT)
        return Look(weights, self.merged(weights @ self._share(v)))

    def cost(self, tokens: int, impl: Impl = "reference") -> Cost:
        """Matrix products of one row of `tokens`; the blocked form skips what the mask would hide."""
        mixing = 4 * self.heads * self.channels * tokens**2
        if impl == "blocked":
            mixing = self.heads * blocked_flops(tokens, self.channels)
        state = 2 * self.groups * self.block * self.channels * self.qkv.weight.element_size() + self.merge_state_bytes()
        return Cost(self.own_parameters(), self.projection_flops(tokens) + mixing, state)

    def _share(self, x_BGSD: torch.Tensor) -> torch.Tensor:
        return x_BGSD if self.groups == self.heads else x_BGSD.repeat_interleave(self.heads // self.groups, 1)

    def _bias(self, start: int, stop: int, like: torch.Tensor) -> torch.Tensor | None:
        if not hasattr(self.position, "bias"):
            return None
        time = torch.arange(stop, device=like.device)
        return self.position.bias(time[start:], time).to(like.dtype)
