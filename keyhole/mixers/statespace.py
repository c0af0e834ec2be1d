"""State-space mixing: a linear recurrence over time, trained as a convolution and decoded as a recurrence.

    u = in(x);   x_t = A x_{t-1} + B u_t,   y_t = C x_t + skip u_t;   y -> heads -> merge -> out

y reads the state after its update, so that y_t = sum over l <= t of K_l u_{t-l} with K_l = C A^l B, K_0 = C B. Three
structures of A (`statespace_structures`), one recurrence a channel or one a head; the mathematics is in
`statespace_kernels`. How we differ from S4D (Gu et al. 2022): discrete from the start, no step size; inputs are scaled
by sqrt(1 - |a|^2) as in the LRU (Orvieto et al. 2023).

Legend: B rows, T tokens, W width, H heads, G systems (channels or heads), D channels of a head or system, N states.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import nn

from keyhole.core.errors import InputError, nearest
from keyhole.mixers.contract import Cost, Impl, Look
from keyhole.mixers.heads import HeadOutput, State, check_impl, wide
from keyhole.mixers.statespace_structures import STRUCTURES, Structure
from keyhole.parts.contract import Linear, parameter

Inputs = Literal["channel", "head"]


class StateSpace(HeadOutput):
    """A linear recurrence over time for each channel or head: a memory of fixed size, no attention scores.

    `structure` of A: "diagonal" (complex pairs, cannot grow), "rank-one" (a I + u w^T), "dense". `state` is N. `inputs`:
    "channel" (each channel its own system) or "head" (a system reads and writes all channels of a head).
    """

    into: Linear
    system: Structure

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,
        merge: nn.Module | None = None,
        structure: str = "diagonal",
        state: int = 16,
        inputs: str = "channel",
    ) -> None:
        if structure not in STRUCTURES:
            raise InputError(f"statespace structure = {structure!r} is not valid{nearest(str(structure), STRUCTURES)}")
        if inputs not in get_args(Inputs):
            raise InputError(f"statespace inputs = {inputs!r} is not valid{nearest(str(inputs), get_args(Inputs))}")
        if state < 1:
            raise InputError(f"statespace state = {state!r} is not valid; it is a whole number of at least 1, such as 16")
        systems = width if inputs == "channel" else heads
        into = Linear(width, width, role="in")
        system = STRUCTURES[structure](systems, width // systems, state, block)
        super().__init__(width, heads, merge, projections={"into": into, "system": system})
        self.skip_W = parameter(width, role="gain")

    def forward(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None, impl: Impl = "auto") -> torch.Tensor:
        """Read all tokens at once; `mask_BT` is True at real tokens."""
        check_impl(impl)
        return self.join(self._read(x_BTW, mask_BT, impl))[0]

    def begin(self, batch: int, like: torch.Tensor) -> State:
        """Nothing remembered yet."""
        dtype = self.system.state_dtype(wide(like.dtype))
        x_BGN = like.new_zeros(batch, self.system.systems, self.system.state, dtype=dtype)
        return State((x_BGN,), 0, self.begin_merge(batch, like))

    def step(self, x_BTW: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """Read the next tokens by the recurrence."""
        self.check_state(state, x_BTW)
        u_BTW = self.into(x_BTW)
        y_BGDT, x_BGN = self.system.steps(state.memory[0], self._systems(u_BTW))
        y, merge = self.join(self._heads(y_BGDT, u_BTW), state.merge)
        return y, State((x_BGN,), state.length + x_BTW.shape[1], merge)

    def look(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None = None) -> Look:
        """The implicit pattern and what each head wrote.

        The weight of token s in token t is the matrix K_{t-s} over the head's channels (diagonal for inputs = "channel");
        shown is the root mean square of its entries, of those on the diagonal alone where the others are none.
        The skip is left out: it passes a token to itself.
        """
        B, T, _ = x_BTW.shape
        K_GDDT = self.system.kernel(T, wide(x_BTW.dtype))
        size_HT = K_GDDT.reshape(self.heads, -1, T).square().mean(1).sqrt()
        time = torch.arange(T, device=x_BTW.device)
        lag_TT = time[:, None] - time
        pattern = torch.where(lag_TT >= 0, size_HT[:, lag_TT.clamp_min(0)], 0).to(x_BTW.dtype).repeat(B, 1, 1, 1)
        if mask_BT is not None:
            pattern = pattern * (mask_BT[:, None, :, None] & mask_BT[:, None, None, :])
        return Look(pattern, self.merged(self._read(x_BTW, mask_BT, "auto")))

    def cost(self, tokens: int) -> Cost:
        """The training form: the kernel, transforms of twice the length, and the projections."""
        flops = self.into.flops(tokens) + self.out.flops(tokens) + self.system.flops(tokens)
        return Cost(self.own_parameters(), flops, self.begin(1, self.out.weight).bytes)

    def _read(self, x_BTW: torch.Tensor, mask_BT: torch.Tensor | None, impl: Impl) -> torch.Tensor:
        """What each head writes, (B, H, T, D), before the merge."""
        u_BTW = self.into(x_BTW)
        if mask_BT is not None:
            u_BTW = u_BTW.masked_fill(~mask_BT[..., None], 0)
        u_BGDT = self._systems(u_BTW)
        o_BHTD = self._heads(self.system.reference(u_BGDT) if impl == "reference" else self.system.mix(u_BGDT), u_BTW)
        # After a text its echo goes on; a merge that sums over tokens must not hear it.
        return o_BHTD if mask_BT is None else o_BHTD.masked_fill(~mask_BT[:, None, :, None], 0)

    def _systems(self, u_BTW: torch.Tensor) -> torch.Tensor:
        """(B, G, D, T) in float32 at least: time last, as transforms want it."""
        return u_BTW.to(wide(u_BTW.dtype)).mT.unflatten(1, (self.system.systems, -1))

    def _heads(self, y_BGDT: torch.Tensor, u_BTW: torch.Tensor) -> torch.Tensor:
        y_BTW = y_BGDT.flatten(1, 2).mT.to(u_BTW.dtype) + self.skip_W * u_BTW
        return y_BTW.unflatten(-1, (self.heads, -1)).transpose(1, 2)
