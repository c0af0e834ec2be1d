"""What mixers with heads share: queries, keys and values from one projection, and the way back to the stream.

Legend: B rows, T tokens, W width, H heads, G key-value heads, D head width.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keyhole.core.errors import InputError, nearest
from keyhole.parts.contract import Linear
from keyhole.parts.norm import RMSNorm


def check_impl(impl: str | None, allowed: tuple[str, ...] = ("auto", "reference")) -> None:
    """A form that there is. Nothing else than what was asked for is ever run in silence."""
    if impl is not None and impl not in allowed:
        raise InputError(f"impl = {impl!r} is not valid{nearest(impl, allowed)}")


def check_chunk(mixer: str, chunk: int) -> int:
    """A chunk's size that makes sense. Longer than the text it is the text."""
    if chunk < 1:
        raise InputError(f"{mixer} chunk = {chunk} is not valid; it is 1 or more, for example 64")
    return chunk


class HeadOutput(nn.Module):
    """The way from (B, H, T, D) heads back to the stream: merge them, then project."""

    def __init__(
        self,
        width: int,
        heads: int,
        merge: nn.Module | None = None,
        *,
        projections: dict[str, nn.Module] | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.channels = heads, width // heads
        for name, module in (projections or {}).items():  # parameters stand in the order in which they are used
            self.add_module(name, module)
        self.merge = merge
        self._kept: list[torch.Size] | None = None
        self.out = Linear(width, width, role="out", bias=bias)

    def join(self, o_BHTD: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
        """Merge the heads, going on from the merge's state where it has one, and write to the stream."""
        heads_BTHD = o_BHTD.transpose(1, 2)
        if state is not None:
            heads_BTHD, state = self.merge.step(heads_BTHD, state)
        elif self.merge is not None:
            heads_BTHD = self.merge(heads_BTHD)
        return self.out(heads_BTHD.flatten(2)), state

    def merged(self, o_BHTD: torch.Tensor) -> torch.Tensor:
        """What each head wrote, (B, T, H, D), after the merge and before the output projection."""
        heads_BTHD = o_BHTD.transpose(1, 2)
        return self.merge(heads_BTHD) if self.merge is not None else heads_BTHD

    def begin_merge(self, batch: int, like: torch.Tensor) -> Any:
        """The merge's state before the first token; None where it needs none."""
        return self.merge.begin(batch, like) if hasattr(self.merge, "begin") else None

    def own_parameters(self) -> int:
        """All parameters but those of position and merge, which are counted where they belong."""
        parts = (getattr(self, "position", None), self.merge)
        shared = {id(p) for part in parts if part is not None for p in part.parameters()}
        return sum(weight.numel() for weight in self.parameters() if id(weight) not in shared)

    def check_state(self, state: Any, x_BTW: torch.Tensor) -> None:
        """Refuse a state of another mixer, another size or another batch, which would decode nonsense or fail unclearly."""
        if self._kept is None:
            self._kept = [x.shape for x in self.begin(1, self.out.weight).memory]
        memory = state.memory if type(state) is State else ()
        if len(memory) == len(self._kept):
            same = (x.shape[-2:] == kept[-2:] or x.ndim == 2 for x, kept in zip(memory, self._kept, strict=True))
            held = (x.numel() == len(x_BTW) * kept.numel() for x, kept in zip(memory, self._kept, strict=True))
            if all(same) and all(held):
                return
        name, given = type(self).__name__.lower(), _shapes([x.shape for x in memory]) or type(state).__name__
        raise InputError(
            f"this state is of another model: {name} keeps {_shapes(self._kept)} for a row and has {len(x_BTW)}, "
            f"and was given {given}; begin(batch, like) makes one"
        )

    def merge_state_bytes(self) -> int:
        """What the merge keeps for one row."""
        return held_bytes(self.begin_merge(1, self.out.weight))

    def split_heads(self, x_BTW: torch.Tensor) -> torch.Tensor:
        """(B, T, W) as (B, H, T, D)."""
        return x_BTW.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class HeadMixer(HeadOutput):
    """Projects tokens to (B, H, T, D) queries, keys and values; merges (B, H, T, D) outputs and projects them back."""

    qkv: Linear

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        position: nn.Module | None = None,
        merge: nn.Module | None = None,
        qk_norm: bool = False,
        bias: bool = False,
    ) -> None:
        groups = kv_heads or heads
        key_width = groups * (width // heads)
        split = (width, key_width, key_width)
        qkv = Linear(width, sum(split), role="in", bias=bias, stack=split)
        super().__init__(width, heads, merge, projections={"qkv": qkv}, bias=bias)
        self.groups, self.split = groups, split
        self.position = position
        self.qk_norm = nn.ModuleList(RMSNorm(self.channels) for _ in range(2)) if qk_norm else None

    def project(self, x_BTW: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D), normed and turned, of tokens at positions from `start`."""
        B, T, _ = x_BTW.shape
        both = self.qkv(x_BTW)
        if self.groups == self.heads:
            # One copy brings all three to (B, H, T, D): the layout every kernel wants.
            q, k, v = both.view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        else:
            q, k, v = (part.unflatten(-1, (-1, self.channels)).transpose(1, 2) for part in both.split(self.split, -1))
        if self.qk_norm is not None:
            q, k = self.qk_norm[0](q), self.qk_norm[1](k)
        turn = getattr(self.position, "turn", None)
        return (turn(q, start), turn(k, start), v) if turn else (q, k, v)

    def projection_flops(self, tokens: int) -> int:
        """The projections in and out."""
        return self.qkv.flops(tokens) + self.out.flops(tokens)


def _shapes(shapes: list[torch.Size]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)


@dataclass
class State:
    """What a mixer keeps of the tokens so far: its own tensors, how many tokens, and its merge's state."""

    memory: tuple[torch.Tensor, ...]
    length: int = 0
    merge: Any = None

    def copy(self) -> State:
        """The same state in memory of its own."""
        return State(tuple(x.clone() for x in self.memory), self.length, copy.deepcopy(self.merge))

    @property
    def bytes(self) -> int:
        """How much memory its tensors take."""
        return held_bytes((self.memory, self.merge))


def held_bytes(state: Any) -> int:
    """The memory behind all tensors that a state holds, however it is made, each once."""
    found: dict[int, int] = {}
    rest, seen = [state], set()
    while rest:
        item = rest.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            rest += item.values()
        elif isinstance(item, list | tuple):
            rest += item
        else:
            rest += getattr(item, "__dict__", {}).values()
            rest += [getattr(item, name) for name in getattr(item, "__slots__", ()) if hasattr(item, name)]
    return sum(found.values())


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision that sums over many tokens are kept in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def in_chunks(x_BHTD: torch.Tensor, size: int) -> torch.Tensor:
    """(B, H, T, D) as (B, H, N, C, D): chunks of `size` tokens, the last one filled up with zeros."""
    missing = -x_BHTD.shape[2] % size
    if missing:
        x_BHTD = nn.functional.pad(x_BHTD, (0, 0, 0, missing))
    return x_BHTD.unflatten(2, (-1, size))


def sums_before(first: torch.Tensor, grown_BHN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The running sum of chunks' contributions at the start of each chunk, and after the last, beginning with `first`."""
    total = torch.cat((first[:, :, None].to(grown_BHN.dtype), grown_BHN), 2).cumsum(2)
    return total[:, :, :-1], total[:, :, -1].clone()  # a view would keep all sums alive
