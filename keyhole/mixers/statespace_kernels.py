"""The mathematics of state spaces: kernels, convolutions and scans, each definition with its fast forms.

    x_t = A x_{t-1} + B u_t,   y_t = C x_t   (y reads the state after its update),
    so y_t = sum over l <= t of K_l u_{t-l} with K_l = C A^l B and K_0 = C B

| structure of A | kernel | FLOPs for T tokens |
| --- | --- | --- |
| any | `reference_kernel`: one product with A after another | 2 N^2 T, one after another |
| dense | `doubling_kernel`: [X, A^(2^j) X] | 2 N^2 T + 2 N^3 log2 T, in log2 T products |
| diagonal, complex pairs | `vandermonde`: a^(rows of sqrt T) times a^(columns) | 4 N T |
| aI + u w^T | `divided_powers` in closed form | element-wise only |

Legend: B rows, T tokens, G systems, D channels in (E: out) of a system, N states, L padded length, P pairs of channels,
I and J places in a kernel laid out as a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from keyhole.core.errors import InputError


def reference_kernel(A_GNN: torch.Tensor, B_GND: torch.Tensor, C_GEN: torch.Tensor, tokens: int) -> torch.Tensor:
    """The definition, (G, E, D, T): K_l = C A^l B, one power after another."""
    found, x_GND = [], B_GND
    for _ in range(tokens):
        found.append((C_GEN @ x_GND).real)
        x_GND = A_GNN @ x_GND
    return torch.stack(found, -1)


def reference_states(A_GNN: torch.Tensor, z_BGNT: torch.Tensor) -> torch.Tensor:
    """The definition, (B, G, N, T): x_t = A x_{t-1} + z_t, one token after another."""
    states, x_BGN1 = [], torch.zeros_like(z_BGNT[..., :1])
    for token in range(z_BGNT.shape[-1]):
        x_BGN1 = A_GNN @ x_BGN1 + z_BGNT[..., token : token + 1]
        states.append(x_BGN1)
    return torch.cat(states, -1)


def reference_convolution(u_BGDT: torch.Tensor, K_GDT: torch.Tensor) -> torch.Tensor:
    """The definition: y_t = sum over l <= t of K_l u_{t-l}."""
    return torch.stack([(K_GDT[..., : t + 1].flip(-1) * u_BGDT[..., : t + 1]).sum(-1) for t in range(u_BGDT.shape[-1])], -1)


# Dense A: doubling.


def doubling_kernel(A_GNN: torch.Tensor, B_GND: torch.Tensor, C_GEN: torch.Tensor, tokens: int) -> torch.Tensor:
    """K_l = C A^l B, (G, E, D, T), from X = [B, AB, A^2 B, ...]: each product with A^(2^j) makes X twice as long."""
    D, length = B_GND.shape[-1], 1
    X_GNM, power_GNN = B_GND, A_GNN
    while length < tokens:
        new = min(length, tokens - length)
        X_GNM = torch.cat((X_GNM, power_GNN @ X_GNM[..., : new * D]), -1)
        length += new
        if length < tokens:
            power_GNN = power_GNN @ power_GNN
    K_GDET = (C_GEN @ X_GNM).unflatten(-1, (tokens, D)).transpose(-1, -2)
    refuse_growth(K_GDET, lambda: spectral_radius(A_GNN), transformed=True)
    return K_GDET


def doubling_states(A_GNN: torch.Tensor, z_BGNT: torch.Tensor) -> torch.Tensor:
    """x_t = A x_{t-1} + z_t, (B, G, N, T): after round j every x_t holds its last 2^j inputs."""
    T, reach = z_BGNT.shape[-1], 1
    x_BGNT, power_GNN = z_BGNT, A_GNN
    while reach < T:
        later = x_BGNT[..., reach:] + power_GNN @ x_BGNT[..., :-reach]
        x_BGNT = torch.cat((x_BGNT[..., :reach], later), -1)
        reach *= 2
        if reach < T:
            power_GNN = power_GNN @ power_GNN
    refuse_growth(power_GNN, lambda: spectral_radius(A_GNN))
    return x_BGNT


def doubling_flops(state: int, tokens: int, channels: int) -> tuple[int, int]:
    """Of one system: the kernel with its product with C, and the scan."""
    rounds = (tokens - 1).bit_length()
    squares = 2 * state**3 * max(0, rounds - 1)
    kernel = 2 * state**2 * channels * (tokens - 1) + 2 * channels**2 * state * tokens
    return squares + kernel, squares + sum(2 * state**2 * (tokens - 2**j) for j in range(rounds))


# Diagonal A: powers from two small tables.


def vandermonde(log_a_GN: torch.Tensor, weight_GPN: torch.Tensor, tokens: int) -> torch.Tensor:
    """Re sum over n of weight_n a_n^l, (G, P, T): with l = iJ + j it is one product, (weight a^(iJ)) times a^j.

    Only the real part is wanted: with real and imaginary parts side by side it is a real product, at half the cost.
    """
    P = weight_GPN.shape[1]
    coarse_GIN, fine_GJN = _tables(log_a_GN, tokens, weight_GPN.dtype)
    left_GMN = (weight_GPN[:, :, None] * coarse_GIN[:, None]).flatten(1, 2)
    left, right = torch.cat((left_GMN.real, -left_GMN.imag), -1), torch.cat((fine_GJN.real, fine_GJN.imag), -1)
    return (left @ right.mT).unflatten(1, (P, -1)).flatten(2)[..., :tokens]


def vandermonde_flops(state: int, tokens: int) -> int:
    """Of one system with one channel."""
    rows, columns = _table_shape(tokens)
    return 4 * state * rows * columns


def complex_powers(log_a_GN: torch.Tensor, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """a^l, (G, N, T)."""
    coarse_GIN, fine_GJN = _tables(log_a_GN, tokens, dtype)
    return (coarse_GIN.mT[..., None] * fine_GJN.mT[:, :, None]).flatten(2)[..., :tokens]


def _table_shape(tokens: int) -> tuple[int, int]:
    columns = math.isqrt(tokens - 1) + 1
    return -(-tokens // columns), columns


def _tables(log_a_GN: torch.Tensor, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """a^(iJ) and a^j. In float64 until the end: in float32 an angle times l has lost its digits by l = 1000."""
    rows, columns = _table_shape(tokens)
    coarse, fine = (torch.arange(size, dtype=torch.float64, device=log_a_GN.device) for size in (rows, columns))
    log_a_G1N = log_a_GN[:, None]
    return (log_a_G1N * (coarse * columns)[:, None]).exp().to(dtype), (log_a_G1N * fine[:, None]).exp().to(dtype)


# A = aI + u w^T: closed form. With s = w.u, A^l = a^l I + ((a+s)^l - a^l)/s u w^T.


def powers(a_G: torch.Tensor, tokens: int) -> torch.Tensor:
    """a^l, (G, T)."""
    return a_G[:, None] ** torch.arange(tokens, dtype=a_G.dtype, device=a_G.device)


def divided_powers(a_G: torch.Tensor, s_G: torch.Tensor, tokens: int) -> torch.Tensor:
    """((a+s)^l - a^l) / s, (G, T), which is l a^(l-1) at s = 0; a > 0. Exact around s = 0, in value and gradient.

    Where a and r = a + s are within a factor of two, the difference loses its digits. With h the larger of them and
    e^-tau their ratio the same number is l h^(l-1) E(l tau) / E(tau), E(x) = (1 - e^-x) / x, without any difference.
    """
    r_G = a_G + s_G
    high_G, low_G = torch.maximum(a_G, r_G), torch.minimum(a_G, r_G)
    near_G = low_G > high_G / 2
    # Each side computes on numbers that suit it, so that the side not taken sends no NaN into the gradient.
    one = torch.ones_like(a_G)
    tau_G = -torch.log1p(-torch.where(near_G, high_G - low_G, 0) / torch.where(near_G, high_G, one))
    lag_T = torch.arange(tokens, dtype=a_G.dtype, device=a_G.device)
    lead = torch.where(near_G, high_G, one)[:, None] ** (lag_T - 1).clamp_min(0)
    near = lag_T * lead * _one_minus_exp(lag_T * tau_G[:, None]) / _one_minus_exp(tau_G)[:, None]
    far = (powers(r_G, tokens) - powers(a_G, tokens)) / torch.where(near_G, one, s_G)[:, None]
    found = torch.where(near_G[:, None], near, far)
    refuse_growth(found, lambda: float(r_G.detach().abs().max()), transformed=True)
    return found


_SERIES = [(-1) ** k / math.factorial(k + 1) for k in range(14)]


def _one_minus_exp(x: torch.Tensor) -> torch.Tensor:
    """E(x) = (1 - e^-x) / x for x >= 0, by its series below 1/2: there the quotient's gradient has no digits left."""
    small = x < 0.5
    near, near_x = torch.full_like(x, _SERIES[-1]), torch.where(small, x, 0)
    for coefficient in reversed(_SERIES[:-1]):
        near = near * near_x + coefficient
    far_x = torch.where(small, 1, x)
    return torch.where(small, near, -torch.expm1(-far_x) / far_x)


# Convolution.


def fast_length(least: int) -> int:
    """The smallest 2^a 3^b 5^c that is at least `least`: FFTs of such lengths are quick."""
    best = 1 << (least - 1).bit_length()
    five = 1
    while five < best:
        three = five
        while three < best:
            best = min(best, three << max(0, (-(-least // three) - 1).bit_length()))
            three *= 3
        five *= 5
    return best


def padded_length(tokens: int) -> int:
    """How long an FFT must be: without this padding it is circular, and the first tokens read the last ones."""
    return fast_length(2 * tokens)


def convolve(u_BGDT: torch.Tensor, K_GDT: torch.Tensor) -> torch.Tensor:
    """y_t = sum over l <= t of K_l u_{t-l} by FFT, real or complex."""
    T = u_BGDT.shape[-1]
    L = padded_length(T)
    there, back = (torch.fft.fft, torch.fft.ifft) if u_BGDT.is_complex() else (torch.fft.rfft, torch.fft.irfft)
    return back(there(u_BGDT, L) * there(K_GDT, L), L)[..., :T]


def convolve_rank_one(u_BGDT: torch.Tensor, inner: RankOneProducts, a_GT: torch.Tensor, d_GT: torch.Tensor) -> torch.Tensor:
    """C B u convolved with a^l, plus C u_vector times w.(B u) convolved with the divided powers; one transform back."""
    T, D = u_BGDT.shape[-1], u_BGDT.shape[-2]
    L = padded_length(T)
    plain_BGDF, scalar_BG1F = torch.fft.rfft(inner.into_GMD @ u_BGDT, L).split((D, 1), -2)
    a_G1F, d_G1F = torch.fft.rfft(torch.stack((a_GT, d_GT), 1), L).split(1, 1)
    return torch.fft.irfft(plain_BGDF * a_G1F + inner.out_GD[..., None] * (scalar_BG1F * d_G1F), L)[..., :T]


class RankOneProducts:
    """C B, C u, w.B and w.u from one product: [C; w^T] [B, u]."""

    def __init__(self, u_GN: torch.Tensor, w_GN: torch.Tensor, B_GND: torch.Tensor, C_GDN: torch.Tensor) -> None:
        both = torch.cat((C_GDN, w_GN[:, None]), 1) @ torch.cat((B_GND, u_GN[..., None]), 2)
        self.into_GMD, last_GM = both[..., :-1], both[..., -1]
        self.out_GD, self.s_G = last_GM[:, :-1], last_GM[:, -1]

    def kernel(self, a_G: torch.Tensor, tokens: int) -> torch.Tensor:
        """K_l = a^l C B + ((a+s)^l - a^l)/s (C u)(w.B), (G, D, D, T)."""
        plain_GDD, scalar_G1D = self.into_GMD[:, :-1], self.into_GMD[:, -1:]
        rank_one_GDD = self.out_GD[..., None] * scalar_G1D
        a_GT, d_GT = powers(a_G, tokens), divided_powers(a_G, self.s_G, tokens)
        return plain_GDD[..., None] * a_GT[:, None, None] + rank_one_GDD[..., None] * d_GT[:, None, None]


# What grows.


def refuse_growth(values: torch.Tensor, radius: Callable[[], float], *, transformed: bool = False) -> None:
    """Stop where powers of A have outgrown the arithmetic, before they become NaN or noise in silence.

    A transform rounds every token by the largest: past 1 / eps the late ones drown the early ones. Elsewhere the limit is
    the root of the largest number, so that a product of two stays finite.
    """
    numbers = torch.finfo(values.dtype)
    limit = 1 / numbers.eps if transformed else numbers.max**0.5
    if bool((values.detach().abs() <= limit).all()):
        return
    found = radius()
    if not 1 < found < math.inf:
        return  # the weights or the input are at fault, and whoever watches the loss will say so
    length, name = math.ceil(math.log(limit) / math.log(found)), str(values.dtype).removeprefix("torch.")
    raise InputError(
        f"a state space whose A has the spectral radius {found:.4g} outgrows {name}: its powers pass {limit:.0e} after "
        f"about {length} tokens; lower train.rate so that A stays within 1, read shorter texts, "
        'or use structure = "diagonal", which cannot grow'
    )


def spectral_radius(A_GNN: torch.Tensor) -> float:
    """The largest eigenvalue of any system, by its size; NaN where A is not finite."""
    if not bool(A_GNN.isfinite().all()):
        return math.nan
    return float(torch.linalg.eigvals(A_GNN.detach().double()).abs().max())
