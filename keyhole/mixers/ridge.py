"""Ridge attention: each token is answered by the ridge regression of values on keys so far.

    o_t = S_t^T P_t q_t,   P_t = (lam I + sum over s <= t of k_s k_s^T)^-1,   S_t = sum over s <= t of k_s v_s^T

In weights: w_ts = q_t^T P_t k_s. Two exact forms beside the definition:

  - Sherman-Morrison, one token at a time (decoding): u = P k, P -= u u^T / (1 + k.u).
  - by chunks (training), with H = lam I + sum k k^T and P = H^-1 at the start of a chunk of C tokens, rows Q K V:

        L L^T = I + K P K^T,   W = L^-1 K P,   X = Q P - tril(Q W^T) W,   O = X S + tril(X K^T) V

    The rows of W are the downdates of Sherman and Morrison (k_t makes P_t = P - sum over s <= t of w_s w_s^T), so what is
    left is causal linear attention twice. H and S at all starts are running sums: every chunk of every head is computed
    at once, and no error is carried along, as P is always made anew from H.

Derivation of W: by Woodbury P_t = P - P K_t^T (I + K_t P K_t^T)^-1 K_t P for the first t rows K_t, and the Cholesky factor
of a leading block is the leading block of the factor, hence L^-1 K P has the same first t rows however many follow.

With `decay` = g < 1 all that is remembered fades: P_t = (g^t lam I + sum of g^(t-s) k_s k_s^T)^-1. lam has to fade along:
were it fixed, the chunks would not nest. g cancels from o_t but for a weight g^(-s/2) on k_s and v_s, counted from the
chunk's start.

Everything is computed in float32 at least, with a decay in float64: P and H must stay positive definite. What fades to less
than a fifth within a chunk loses digits: chunks are shortened until it does not. lam is exp of a parameter for each head.

Legend: B rows, T tokens, H heads, D head width (of keys and values), N chunks, C tokens of a chunk.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from keyhole.core.errors import InputError
from keyhole.mixers import flops
from keyhole.mixers.heads import State, check_chunk, in_chunks, sums_before, wide
from keyhole.mixers.weighted import WeightedMixer

REFRESH = 64
"""Decoded tokens after which P is made anew from H at the latest, so that rounding does not add up."""
LEAST_FADE = 0.2
"""How far memory may fade within a chunk, or between two renewals of P: what is divided by it loses digits."""
LEAST_LAM, LARGEST_LAM = 1e-12, 1e12

Memory = tuple[torch.Tensor, ...]
"""H with lam in it (B, H, D, D), P = H^-1, and S (B, H, D, D)."""


def ridge_weights(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    lam_H: torch.Tensor,
    decay: float = 1.0,
    mask_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition: for each token the weights q_t^T P_t k_s of all values so far, by solving its own system."""
    D = k_BHTD.shape[-1]
    if mask_BT is not None:
        k_BHTD = k_BHTD * mask_BT[:, None, :, None]
    age_BT = _ages(k_BHTD, mask_BT)
    fade_B1TT = (decay ** (age_BT[:, None, :, None] - age_BT[:, None, None, :]).clamp_min(0)).tril()
    start_BHT = lam_H[:, None] * decay ** age_BT[:, None]
    H_BHTDD = torch.einsum("bxts,bhsd,bhse->bhtde", fade_B1TT, k_BHTD, k_BHTD)
    H_BHTDD = H_BHTDD + start_BHT[..., None, None] * torch.eye(D, dtype=k_BHTD.dtype, device=k_BHTD.device)
    x_BHTD = torch.linalg.solve(H_BHTDD, q_BHTD.unsqueeze(-1)).squeeze(-1)
    return (x_BHTD @ k_BHTD.mT) * fade_B1TT


def _ages(like_BHTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
    """How many real tokens there are up to each: the time in which memories fade. Padding takes no time."""
    real_BT = like_BHTD.new_ones(len(like_BHTD), like_BHTD.shape[2]) if mask_BT is None else mask_BT.to(like_BHTD)
    return real_BT.cumsum(1)


def _factor(H: torch.Tensor) -> torch.Tensor:
    factor, wrong = torch.linalg.cholesky_ex(H)
    if bool(wrong.any()):
        raise InputError(
            "ridge: the keys' matrix is no longer positive definite in this precision; raise lam, bring decay "
            "nearer to 1, or norm the keys (qk_norm = true)"
        )
    return factor


class _Inverse(torch.autograd.Function):
    """P = H^-1 of symmetric positive definite matrices; dH = -P dP P, which keeps P alone."""

    @staticmethod
    def forward(ctx, H):
        P = torch.cholesky_inverse(_factor(H))
        ctx.save_for_backward(P)
        return P

    @staticmethod
    def backward(ctx, dP):
        (P,) = ctx.saved_tensors
        return -(P @ dP @ P)


def inverse(H: torch.Tensor) -> torch.Tensor:
    """P = H^-1 of symmetric positive definite matrices."""
    return _Inverse.apply(H)


def ridge_chunks(
    q_BHTD: torch.Tensor,
    k_BHTD: torch.Tensor,
    v_BHTD: torch.Tensor,
    H_BHDD: torch.Tensor,
    S_BHDD: torch.Tensor,
    decay: float = 1.0,
    chunk: int = 32,
    mask_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The exact chunk form: the outputs, and H and S after them."""
    T = q_BHTD.shape[2]
    size = min(chunk, T)
    if mask_BT is not None:
        k_BHTD = k_BHTD * mask_BT[:, None, :, None]
    q, k, v = (in_chunks(x, size) for x in (q_BHTD, k_BHTD, v_BHTD))
    if decay == 1:
        (H, H_after), (S, S_after) = sums_before(H_BHDD, k.mT @ k), sums_before(S_BHDD, k.mT @ v)
    else:
        # Ages within each chunk, in real tokens: (B, 1, N, C, 1). What fills the last chunk up takes no time.
        real = k.new_ones(len(q), T) if mask_BT is None else mask_BT.to(k)
        age = in_chunks(real[:, None, :, None], size).cumsum(3)
        swell, fade = decay ** (-0.5 * age), decay ** age[:, :, :, -1:]
        k, v = k * swell, v * swell
        (H, H_after), (S, S_after) = (_fading_sums(*pair, fade) for pair in ((H_BHDD, k.mT @ k), (S_BHDD, k.mT @ v)))
    P = inverse(H)
    KP = k @ P
    L = _factor(KP @ k.mT + torch.eye(size, dtype=k.dtype, device=k.device))
    W = torch.linalg.solve_triangular(L, KP, upper=False)
    X = q @ P - (q @ W.mT).tril() @ W
    o = X @ S + (X @ k.mT).tril() @ v
    return o.flatten(2, 3)[:, :, :T], H_after, S_after


def _fading_sums(first: torch.Tensor, grown_BHN: torch.Tensor, fade_B1N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums at the start of every chunk and after the last, each chunk's end fading all before it."""
    starts, state = [], first
    for grown, fade in zip(grown_BHN.unbind(2), fade_B1N.unbind(2), strict=True):
        starts.append(state)
        state = fade * (state + grown)
    return torch.stack(starts, 2), state


def ridge_token(
    q_BHD: torch.Tensor, k_BHD: torch.Tensor, v_BHD: torch.Tensor, memory: Memory, decay: float = 1.0
) -> tuple[torch.Tensor, Memory]:
    """Sherman and Morrison: the output of one token, and H, P, S after it."""
    H, P, S = memory
    if decay != 1:
        H, P, S = H * decay, P / decay, S * decay
    k_1 = k_BHD.unsqueeze(-1)
    u = P @ k_1
    P = P - u @ u.mT / (1 + k_BHD.unsqueeze(-2) @ u)
    H, S = H + k_1 * k_BHD.unsqueeze(-2), S + k_1 * v_BHD.unsqueeze(-2)
    return ((q_BHD.unsqueeze(-2) @ P) @ S).squeeze(-2), (H, P, S)


class Ridge(WeightedMixer):
    """Ridge regression of values on keys so far, answered at each query; exact by chunks, decoded from D x D states.

    `lam` > 0 is the ridge at the start, learned for each head unless `learn_lam = false`. `decay` <= 1 forgets. Rope turns
    it as it does softmax: outputs depend on distances alone. `qk_norm` norms queries and keys first.
    """

    positions = ("turn",)

    def __init__(
        self,
        width: int,
        heads: int,
        block: int,  # noqa: ARG002
        position: nn.Module | None = None,
        merge: nn.Module | None = None,
        lam: float = 1.0,
        learn_lam: bool = True,
        decay: float = 1.0,
        qk_norm: bool = False,
        chunk: int = 32,
    ) -> None:
        super().__init__(width, heads, position=position, merge=merge, qk_norm=qk_norm)
        if not LEAST_LAM <= lam <= LARGEST_LAM:
            raise InputError(
                f"ridge lam = {lam} is not valid; it is above 0 ({LEAST_LAM:g} to {LARGEST_LAM:g}), for example 1.0: "
                "without it P does not exist"
            )
        if not 0 < decay <= 1:
            raise InputError(f"ridge decay = {decay} is not valid; it is above 0 and at most 1 (1 forgets nothing)")
        lasts = chunk if decay == 1 else max(1, int(math.log(LEAST_FADE) / math.log(decay)))
        self.decay, self.chunk, self.refresh = decay, min(check_chunk("ridge", chunk), lasts), min(REFRESH, lasts)
        start = torch.full((heads,), math.log(lam))
        if learn_lam:
            self.log_lam: torch.Tensor = nn.Parameter(start)
        else:
            self.register_buffer("log_lam", start)

    def weights(self, q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, mask_BT: torch.Tensor | None) -> torch.Tensor:
        """The definition."""
        exact = self._exact(q_BHTD.dtype)
        return ridge_weights(q_BHTD.to(exact), k_BHTD.to(exact), self._lam(exact), self.decay, mask_BT).to(q_BHTD.dtype)

    def first(self, batch: int, like: torch.Tensor) -> Memory:
        """H = lam I, P = I / lam, S = 0."""
        exact = self._exact(like.dtype)
        lam_H11 = self._lam(exact)[:, None, None]
        eye = torch.eye(self.channels, dtype=exact, device=like.device)
        shape = (batch, self.heads, self.channels, self.channels)
        S = like.new_zeros(shape, dtype=exact)
        return (lam_H11 * eye).expand(shape).contiguous(), (eye / lam_H11).expand(shape).contiguous(), S

    def mix(
        self,
        q_BHTD: torch.Tensor,
        k_BHTD: torch.Tensor,
        v_BHTD: torch.Tensor,
        memory: Memory,
        mask_BT: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, Memory]:
        """By chunks from H and S on."""
        exact = memory[0].dtype
        q, k, v = (x.to(exact) for x in (q_BHTD, k_BHTD, v_BHTD))
        o, H, S = ridge_chunks(q, k, v, memory[0], memory[2], self.decay, self.chunk, mask_BT)
        return o.to(q_BHTD.dtype), (H, memory[1], S)

    def step(self, x_BTW: torch.Tensor, state: State) -> tuple[torch.Tensor, State]:
        """One token by Sherman and Morrison, several by chunks; P is made anew from H now and then."""
        self.check_state(state, x_BTW)
        q, k, v = self.project(x_BTW, state.length)
        after = state.length + x_BTW.shape[1]
        if x_BTW.shape[1] == 1:
            exact = state.memory[0].dtype
            o, memory = ridge_token(*(x[:, :, 0].to(exact) for x in (q, k, v)), state.memory, self.decay)
            o = o.unsqueeze(2).to(q.dtype)
        else:
            o, memory = self.mix(q, k, v, state.memory)
        if x_BTW.shape[1] > 1 or after % self.refresh == 0:
            memory = (memory[0], inverse(memory[0]), memory[2])
        y, merge = self.join(o, state.merge)
        return y, State(memory, after, merge)

    def mixing_flops(self, tokens: int) -> int:
        """About 10 D^2 + 11 C D + C^2 / 3 + 7 D^3 / 3 C a token and head, the factors of P and L included."""
        D, C = self.channels, min(self.chunk, tokens)
        chunks = -(-tokens // C)
        products = 2 * C * D * D * 5 + 2 * C * C * D * 5  # k'k, k'v, KP, QP, XS; KPK', QW', (..)W, XK', (..)V
        factors = flops.cholesky(D) + 2 * D**3 + flops.cholesky(C) + flops.triangular(C, D)
        return self.heads * chunks * (products + factors)

    def _exact(self, dtype: torch.dtype) -> torch.dtype:
        """float32 at least; with a decay float64, since lam fades with all else and leaves H close to singular."""
        return wide(dtype) if self.decay == 1 else torch.float64

    def _lam(self, dtype: torch.dtype) -> torch.Tensor:
        return self.log_lam.to(dtype).exp()
