"""The three structures of A as modules: their parameters, first values, and the forms that suit each.

A module holds G systems with D channels in and out: every channel is a system of its own (D = 1), or every head is one.
No parameter has two dimensions: what an optimizer does to matrices (to make them orthogonal, to let them decay) does not
suit a row of decay rates.

Legend: B rows, T tokens, G systems, D channels of a system, N states, P pairs of channels (out, in).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import nn

from keyhole.mixers import statespace_kernels as kernels
from keyhole.mixers.flops import complex_fft, fft
from keyhole.mixers.statespace_kernels import RankOneProducts

Operator = Callable[[torch.Tensor], torch.Tensor]
GOLDEN, SILVER, BRONZE = (5**0.5 - 1) / 2, 2**0.5 - 1, (13**0.5 - 3) / 2


class Structure(nn.Module, ABC):
    """What all three offer. `definition` is A, B and C written out; the rest are quicker ways to the same."""

    grows = True
    """Whether the parameters can make |A^l| grow without bound."""

    def __init__(self, systems: int, channels: int, state: int) -> None:
        super().__init__()
        self.systems, self.channels, self.state = systems, channels, state

    @abstractmethod
    def definition(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A (G, N, N), B (G, N, D), C (G, D, N); y is the real part of C x."""

    @abstractmethod
    def recurrence(self, dtype: torch.dtype) -> tuple[Operator, torch.Tensor, torch.Tensor]:
        """x -> A x at the structure's own cost, (B, G, N, 1) to the same; B and C."""

    @abstractmethod
    def kernel(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """K_l = C A^l B, (G, D, D, T), out by in."""

    @abstractmethod
    def mix_heads(self, u_BGDT: torch.Tensor) -> torch.Tensor:
        """The fast form of many channels a system."""

    @abstractmethod
    def kernel_flops(self, tokens: int) -> int:
        """Of the kernel of one system with one channel."""

    @abstractmethod
    def mix_heads_flops(self, tokens: int) -> int:
        """Of `mix_heads` for one system and row."""

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What the state is kept in when computing in `dtype`."""
        return dtype

    def mix(self, u_BGDT: torch.Tensor) -> torch.Tensor:
        """The form that trains."""
        if self.channels > 1:
            return self.mix_heads(u_BGDT)
        return kernels.convolve(u_BGDT, self.kernel(u_BGDT.shape[-1], u_BGDT.dtype)[:, 0])

    def reference(self, u_BGDT: torch.Tensor) -> torch.Tensor:
        """The definition, one token after another: x_t = A x_{t-1} + B u_t, y_t = C x_t."""
        A_GNN, B_GND, C_GDN = self.definition(u_BGDT.dtype)
        x_BGNT = kernels.reference_states(A_GNN, B_GND @ u_BGDT.to(B_GND.dtype))
        self._check(x_BGNT)
        return (C_GDN @ x_BGNT).real

    def steps(self, x_BGN: torch.Tensor, u_BGDT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Go on from a state: the outputs of the next tokens, and the state after them."""
        move, B_GND, C_GDN = self.recurrence(u_BGDT.dtype)
        states, x_BGN1 = [], x_BGN[..., None]
        for z_BGN1 in (B_GND @ u_BGDT.to(B_GND.dtype)).split(1, -1):
            x_BGN1 = move(x_BGN1) + z_BGN1
            states.append(x_BGN1)
        self._check(x_BGN1)
        return (C_GDN @ torch.cat(states, -1)).real, x_BGN1[..., 0]

    def flops(self, tokens: int) -> int:
        """Of `mix` for one row."""
        if self.channels > 1:
            return self.systems * self.mix_heads_flops(tokens)
        return self.systems * (self.kernel_flops(tokens) + 3 * fft(kernels.padded_length(tokens)))

    def _check(self, x_BGNT: torch.Tensor) -> None:
        if self.grows:
            kernels.refuse_growth(x_BGNT, lambda: kernels.spectral_radius(self.definition(x_BGNT.dtype)[0]))


class Diagonal(Structure):
    """A = diag(a), a = exp(-exp(log_decay) + i angle), so that |a| < 1 whatever is learnt; y = 2 Re C x.

    One channel a system: K_l = 2 Re sum over n of c_n g_n a_n^l. Many: x_t = a x_{t-1} + g B u_t, y = 2 Re C x.
    g = sqrt(1 - |a|^2) gives every state the same power for white input, however long it remembers.

    Parameters are the distance from a table that spreads decays and angles: in bfloat16 a learnt angle of 3 would be
    off by .01, which turns a token 300 steps back the wrong way round.
    """

    grows = False
    table_2GN: torch.Tensor

    def __init__(self, systems: int, channels: int, state: int, block: int) -> None:
        super().__init__(systems, channels, state)
        log_decay_N = log_decays(state, block)
        angle_GN = math.pi * spread(systems, state, ratio=GOLDEN)
        table = torch.stack((log_decay_N.expand(systems, state), angle_GN))
        self.register_buffer("table_2GN", table.float(), persistent=False)
        self.modes_2GN = nn.Parameter(torch.zeros(2, systems, state))
        phase_GDN = 2 * math.pi * spread(systems, channels, state, ratio=SILVER)
        read = torch.stack((phase_GDN.cos(), phase_GDN.sin())) * (2 * state) ** -0.5
        self.read_2GDN = nn.Parameter(read.float())
        self.write_2GND = None
        if channels > 1:
            phase_GND = 2 * math.pi * spread(systems, state, channels, ratio=BRONZE)
            write = torch.stack((phase_GND.cos(), phase_GND.sin())) * channels**-0.5
            self.write_2GND = nn.Parameter(write.float())

    def values(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """log a (in float64, whatever is asked), g B, and 2 C."""
        log_decay_GN, angle_GN = (self.table_2GN.double() + self.modes_2GN.double()).unbind(0)
        # A memory of one token to one of half a million; beyond, float32 no longer tells |a| from 1.
        decay_GN = log_decay_GN.clamp(-13, 5).exp()
        gain_GN1 = (-torch.expm1(-2 * decay_GN)).sqrt()[..., None].to(dtype)
        # torch.complex, not a view: a view of a flat buffer of weights need not begin at an even place.
        write = torch.complex(gain_GN1, torch.zeros_like(gain_GN1))
        if self.write_2GND is not None:
            write = write * torch.complex(*self.write_2GND.to(dtype))
        return torch.complex(-decay_GN, angle_GN), write, 2 * torch.complex(*self.read_2GDN.to(dtype))

    def definition(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A, B and C written out."""
        log_a_GN, B_GND, C_GDN = self.values(dtype)
        return torch.diag_embed(log_a_GN.exp().to(B_GND.dtype)), B_GND, C_GDN

    def recurrence(self, dtype: torch.dtype) -> tuple[Operator, torch.Tensor, torch.Tensor]:
        """A x = a x, element by element."""
        log_a_GN, B_GND, C_GDN = self.values(dtype)
        a_GN1 = log_a_GN.exp().to(B_GND.dtype)[..., None]
        return lambda x_BGN1: a_GN1 * x_BGN1, B_GND, C_GDN

    def kernel(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """By the factorised Vandermonde product."""
        log_a_GN, B_GND, C_GDN = self.values(dtype)
        weight_GPN = (C_GDN[:, :, None] * B_GND.mT[:, None]).flatten(1, 2)
        return kernels.vandermonde(log_a_GN, weight_GPN, tokens).unflatten(1, (self.channels, self.channels))

    def mix_heads(self, u_BGDT: torch.Tensor) -> torch.Tensor:
        """Each complex state is its input convolved with a^l; what is complex on one side alone is multiplied in parts."""
        T, N = u_BGDT.shape[-1], self.state
        log_a_GN, B_GND, C_GDN = self.values(u_BGDT.dtype)
        z_BGMT = torch.cat((B_GND.real, B_GND.imag), 1) @ u_BGDT
        z_BGNT = torch.complex(z_BGMT[:, :, :N], z_BGMT[:, :, N:])
        x_BGNT = kernels.convolve(z_BGNT, kernels.complex_powers(log_a_GN, T, B_GND.dtype))
        return torch.cat((C_GDN.real, -C_GDN.imag), 2) @ torch.cat((x_BGNT.real, x_BGNT.imag), 2)

    def kernel_flops(self, tokens: int) -> int:
        """The Vandermonde product."""
        return kernels.vandermonde_flops(self.state, tokens)

    def mix_heads_flops(self, tokens: int) -> int:
        """Two real products and three complex transforms a state."""
        products = 2 * 2 * tokens * self.channels * 2 * self.state
        return products + 3 * self.state * complex_fft(kernels.padded_length(tokens))

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Complex."""
        return dtype.to_complex()


class RankOne(Structure):
    """A = a I + u w^T, a = sigmoid(logit): K_l = a^l C B + ((a+s)^l - a^l)/s (C u)(w B), s = w.u."""

    def __init__(self, systems: int, channels: int, state: int, block: int) -> None:
        super().__init__(systems, channels, state)
        a_G = (-log_decays(systems, block).exp()).exp()
        self.logit_G = nn.Parameter(torch.logit(a_G).float())
        u_GN = unit(systems, state, ratio=GOLDEN)
        # The second eigenvalue a + s starts anywhere between 0 and a: it cannot grow.
        share_G1 = spread(systems, 1, ratio=SILVER)
        w_GN = -a_G[:, None] * share_G1 * u_GN / u_GN.square().sum(-1, keepdim=True)
        self.rank_2GN = nn.Parameter(torch.stack((u_GN, w_GN)).float())
        gain_G11 = (1 - a_G.square()).sqrt()[:, None, None]
        self.write_GND = nn.Parameter((unit(systems, state, channels, ratio=SILVER) * gain_G11 / channels**0.5).float())
        self.read_GDN = nn.Parameter((unit(systems, channels, state, ratio=BRONZE) / state**0.5).float())

    def values(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """a, u, w, B and C."""
        # A sigmoid may round to 0, where l a^(l-1) has no meaning.
        a_G = self.logit_G.to(dtype).sigmoid().clamp_min(torch.finfo(dtype).tiny)
        return (a_G, *self.rank_2GN.to(dtype), self.write_GND.to(dtype), self.read_GDN.to(dtype))

    def definition(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A, B and C written out."""
        a_G, u_GN, w_GN, B_GND, C_GDN = self.values(dtype)
        identity = torch.eye(self.state, dtype=dtype, device=a_G.device)
        return a_G[:, None, None] * identity + u_GN[..., None] * w_GN[:, None], B_GND, C_GDN

    def recurrence(self, dtype: torch.dtype) -> tuple[Operator, torch.Tensor, torch.Tensor]:
        """A x = a x + u (w.x)."""
        a_G, u_GN, w_GN, B_GND, C_GDN = self.values(dtype)
        a_G11, u_GN1, w_GN1 = a_G[:, None, None], u_GN[..., None], w_GN[..., None]
        return lambda x_BGN1: a_G11 * x_BGN1 + u_GN1 * (w_GN1 * x_BGN1).sum(-2, keepdim=True), B_GND, C_GDN

    def kernel(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """In closed form."""
        a_G, *others = self.values(dtype)
        return RankOneProducts(*others).kernel(a_G, tokens)

    def mix_heads(self, u_BGDT: torch.Tensor) -> torch.Tensor:
        """D convolutions with a^l, and one of w.(B u) with the divided powers."""
        T = u_BGDT.shape[-1]
        a_G, *others = self.values(u_BGDT.dtype)
        products = RankOneProducts(*others)
        divided = kernels.divided_powers(a_G, products.s_G, T)
        return kernels.convolve_rank_one(u_BGDT, products, kernels.powers(a_G, T), divided)

    def kernel_flops(self, tokens: int) -> int:  # noqa: ARG002
        """One product of two by two; the rest is element-wise."""
        return 2 * 4 * self.state

    def mix_heads_flops(self, tokens: int) -> int:
        """Products with B and C made once, D + 1 transforms there and D back, two of the kernels."""
        D = self.channels
        products = 2 * (D + 1) ** 2 * self.state + 2 * (D + 1) * D * tokens
        return products + (2 * D + 3) * fft(kernels.padded_length(tokens))


class Dense(Structure):
    """Any A: kernels and states by doubling, since A^(2^j) takes log2 T products."""

    def __init__(self, systems: int, channels: int, state: int, block: int) -> None:
        super().__init__(systems, channels, state)
        decay_P = log_decays((state + 1) // 2, block).exp()
        self.move_GNN = nn.Parameter(turning(decay_P, systems, state).float())
        gain_N1 = (-torch.expm1(-2 * decay_P)).sqrt().repeat_interleave(2)[:state, None]
        self.write_GND = nn.Parameter((unit(systems, state, channels, ratio=SILVER) * gain_N1 / channels**0.5).float())
        self.read_GDN = nn.Parameter((unit(systems, channels, state, ratio=BRONZE) / state**0.5).float())

    def definition(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A, B and C written out."""
        return self.move_GNN.to(dtype), self.write_GND.to(dtype), self.read_GDN.to(dtype)

    def recurrence(self, dtype: torch.dtype) -> tuple[Operator, torch.Tensor, torch.Tensor]:
        """One product a token."""
        A_GNN, B_GND, C_GDN = self.definition(dtype)
        return lambda x_BGN1: A_GNN @ x_BGN1, B_GND, C_GDN

    def kernel(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """By doubling."""
        return kernels.doubling_kernel(*self.definition(dtype), tokens)

    def mix_heads(self, u_BGDT: torch.Tensor) -> torch.Tensor:
        """By doubling over time: no kernel has to be made for D x D pairs of channels."""
        A_GNN, B_GND, C_GDN = self.definition(u_BGDT.dtype)
        return C_GDN @ kernels.doubling_states(A_GNN, B_GND @ u_BGDT)

    def kernel_flops(self, tokens: int) -> int:
        """The doubling and the product with C."""
        return kernels.doubling_flops(self.state, tokens, 1)[0]

    def mix_heads_flops(self, tokens: int) -> int:
        """The scan and the products with B and C."""
        return kernels.doubling_flops(self.state, tokens, self.channels)[1] + 4 * tokens * self.state * self.channels


STRUCTURES = {"diagonal": Diagonal, "rank-one": RankOne, "dense": Dense}


def spread(*shape: int, ratio: float) -> torch.Tensor:
    """Numbers evenly spread over [0, 1) without chance, in float64: the fractions of ratio k^2 (Weyl 1916)."""
    place = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64)
    return (ratio * place.square()).frac().view(shape)


def unit(*shape: int, ratio: float) -> torch.Tensor:
    """Numbers of mean 0 and mean square 1, without chance: cosines of spread angles."""
    return 2**0.5 * (2 * math.pi * spread(*shape, ratio=ratio)).cos()


def log_decays(count: int, block: int) -> torch.Tensor:
    """Logarithms of decay rates from 1/2 down to 1/block a token, evenly apart, in float64."""
    return torch.linspace(math.log(0.5), -math.log(max(2, block)), count, dtype=torch.float64)


def turning(decay_P: torch.Tensor, systems: int, state: int) -> torch.Tensor:
    """A of pairs that turn and decay, (G, N, N), the real form of a diagonal one; an odd last state only decays."""
    pairs = state // 2
    angle_GP = math.pi * spread(systems, pairs, ratio=GOLDEN)
    size_P = (-decay_P).exp()
    A_GNN = torch.zeros(systems, state, state, dtype=torch.float64)
    main = A_GNN.diagonal(dim1=-2, dim2=-1)
    main.copy_(size_P.repeat_interleave(2)[:state])
    main[:, : 2 * pairs] *= angle_GP.cos().repeat_interleave(2, -1)
    A_GNN.diagonal(1, -2, -1)[:, ::2].copy_(-size_P[:pairs] * angle_GP.sin())
    A_GNN.diagonal(-1, -2, -1)[:, ::2].copy_(size_P[:pairs] * angle_GP.sin())
    return A_GNN
