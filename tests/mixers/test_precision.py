"""In float32 and bfloat16 each mixer stays within a stated bound of its float64 definition."""

import pytest
import torch
from mixer_examples import KINDS, WIDTH, make_mixer, normal

from keyhole.mixers.ridge import ridge_chunks, ridge_token, ridge_weights

# Largest error of results and gradients of the input, relative to their size where that is above 1.
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


def relative(found, expected):
    return float((found.double() - expected).abs().max()) / max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [7, 129, 1000])
@pytest.mark.parametrize("name", KINDS)
def test_low_precision_stays_within_its_bound(name, tokens, dtype):
    mixer, x = make_mixer(name), normal(2, tokens, WIDTH).to(dtype).requires_grad_()
    low = make_mixer(name).to(dtype)
    for weight, exact in zip(low.parameters(), mixer.parameters(), strict=True):
        exact.data = weight.detach().double()  # the definition is asked at the rounded weights
    wide = x.detach().double().requires_grad_()
    found, expected = low(x), mixer(wide, impl="reference")
    assert found.dtype == dtype
    assert relative(found.detach(), expected.detach()) < BOUNDS[dtype]
    slopes = [torch.autograd.grad(y.double().square().sum(), given)[0] for y, given in ((found, x), (expected, wide))]
    assert relative(*slopes) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_decoding_in_low_precision_stays_within_the_same_bound(name, dtype):
    mixer, x = make_mixer(name), normal(1, 300, WIDTH).to(dtype)
    low = make_mixer(name).to(dtype)
    for weight, exact in zip(low.parameters(), mixer.parameters(), strict=True):
        exact.data = weight.double()
    state, parts = low.begin(1, x), []
    for t in range(300):
        y, state = low.step(x[:, t : t + 1], state)
        parts.append(y)
    assert relative(torch.cat(parts, 1), mixer(x.double(), impl="reference")) < BOUNDS[dtype]


@pytest.mark.parametrize(("lam", "bound"), [(1.0, 2e-6), (0.01, 5e-5)])
def test_ridge_in_float32_is_as_exact_as_its_matrices_allow(lam, bound):
    """D = 32, T = 1024, unit keys: the figures that the brief gives are 3e-7 and 2e-5."""
    q, k, v = (torch.nn.functional.normalize(normal(1, 2, 1024, 32, seed=seed), dim=-1) for seed in range(3))
    expected = ridge_weights(q, k, torch.full((2,), lam, dtype=torch.float64)) @ v
    q, k, v = (x.float() for x in (q, k, v))
    H = lam * torch.eye(32).expand(1, 2, 32, 32)
    S = torch.zeros(1, 2, 32, 32)
    assert relative(ridge_chunks(q, k, v, H, S)[0], expected) < bound
    memory, parts = (H, torch.eye(32).expand(1, 2, 32, 32) / lam, S), []
    for t in range(1024):
        o, memory = ridge_token(q[:, :, t], k[:, :, t], v[:, :, t], memory)
        parts.append(o)
    # Sherman and Morrison carry rounding along; the chunks do not.
    assert relative(torch.stack(parts, 2), expected) < 10 * bound


@pytest.mark.parametrize("decay", [0.99, 0.9, 0.8, 0.7])
@torch.no_grad()
def test_a_fading_ridge_trains_and_decodes_the_same_in_float32(decay):
    """Memory may be as short as 3 tokens for 6 channels: H is then close to singular, and is kept in float64."""
    mixer, x = make_mixer("ridge", decay=decay), normal(1, 512, WIDTH)
    low = make_mixer("ridge", decay=decay).float()
    for weight, exact in zip(low.parameters(), mixer.parameters(), strict=True):
        exact.data = weight.double()
    expected = mixer(x.float().double(), impl="reference")
    assert relative(low(x.float()), expected) < 1e-3
    state, parts = low.begin(1, x.float()), []
    for t in range(512):
        y, state = low.step(x[:, t : t + 1].float(), state)
        parts.append(y)
    assert relative(torch.cat(parts, 1), expected) < 1e-3
