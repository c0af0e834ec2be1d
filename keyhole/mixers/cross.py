"""Cross attention: each token of one stream reads all of another, o_t = sum over s of softmax_s(q_t . k_s / sqrt(D)) v_s.

The two streams may differ in width and length; nothing is causal, as the other stream is known in whole. Keys and values
are made once (`read`) and serve any number of queries, which is also how decoding goes on.

Legend: B rows, T query tokens, S tokens that are read, W width, V width of what is read, H heads, D head width.
"""

from __future__ import annotations

import torch
from torch import nn

from keyhole.core.errors import InputError
from keyhole.mixers.contract import Cost, Look
from keyhole.mixers.heads import HeadOutput, check_impl
from keyhole.parts.contract import Linear


class CrossAttention(HeadOutput):
    """Queries from one stream, keys and values from another: the cure of a recurrent network's bottleneck."""

    query: Linear
    key_value: Linear

    def __init__(
        self, width: int, heads: int, *, read_width: int | None = None, merge: nn.Module | None = None, bias: bool = False
    ) -> None:
        if width % heads:
            raise InputError(f"width {width} is not divisible by heads {heads}")
        query = Linear(width, width, role="in", bias=bias)
        key_value = Linear(read_width or width, 2 * width, role="in", bias=bias, stack=(width, width))
        super().__init__(width, heads, merge, projections={"query": query, "key_value": key_value}, bias=bias)

    def forward(
        self,
        x_BTW: torch.Tensor,
        other_BSV: torch.Tensor,
        mask_BS: torch.Tensor | None = None,
        impl: str | None = None,
    ) -> torch.Tensor:
        """Read `other`; `mask_BS` is True at its real tokens. A row with nothing to read gives zero."""
        k, v = self.read(other_BSV)
        return self.answer(x_BTW, k, v, mask_BS, impl)

    def read(self, other_BSV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, H, S, D) of the stream that is read: made once for all queries."""
        k, v = self.key_value(other_BSV).chunk(2, -1)
        return self.split_heads(k), self.split_heads(v)

    def answer(
        self,
        x_BTW: torch.Tensor,
        k_BHSD: torch.Tensor,
        v_BHSD: torch.Tensor,
        mask_BS: torch.Tensor | None = None,
        impl: str | None = None,
    ) -> torch.Tensor:
        """What queries find in keys and values that were read before."""
        check_impl(impl)
        q = self.split_heads(self.query(x_BTW))
        if impl == "reference":
            return self.join(cross_weights(q, k_BHSD, mask_BS) @ v_BHSD)[0]
        if mask_BS is None:
            return self.join(nn.functional.scaled_dot_product_attention(q, k_BHSD, v_BHSD))[0]
        something = mask_BS.any(1)[:, None, None, None]
        allowed = mask_BS[:, None, None, :] | ~something
        o = nn.functional.scaled_dot_product_attention(q, k_BHSD, v_BHSD, attn_mask=allowed)
        return self.join(o * something)[0]

    def look(self, x_BTW: torch.Tensor, other_BSV: torch.Tensor, mask_BS: torch.Tensor | None = None) -> Look:
        """The weights (B, H, T, S) and what each head wrote."""
        k, v = self.read(other_BSV)
        weights = cross_weights(self.split_heads(self.query(x_BTW)), k, mask_BS)
        return Look(weights, self.merged(weights @ v))

    def cost(self, tokens: int, others: int) -> Cost:
        """One row of `tokens` that reads one of `others`; the state is keys and values."""
        W = self.heads * self.channels
        flops = self.query.flops(tokens) + self.key_value.flops(others) + self.out.flops(tokens) + 4 * tokens * others * W
        return Cost(self.own_parameters(), flops, 2 * others * W * self.out.weight.element_size())


def cross_weights(q_BHTD: torch.Tensor, k_BHSD: torch.Tensor, mask_BS: torch.Tensor | None = None) -> torch.Tensor:
    """The definition: (B, H, T, S) weights. A row that may read nothing is all zero."""
    scores = q_BHTD @ k_BHSD.mT * q_BHTD.shape[-1] ** -0.5
    if mask_BS is None:
        return scores.softmax(-1)
    something = mask_BS.any(1)[:, None, None, None]
    return scores.masked_fill(~mask_BS[:, None, None, :] & something, float("-inf")).softmax(-1) * something
