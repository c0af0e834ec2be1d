import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.parts.norm import LayerNorm, RMSNorm

KINDS = {"layer": LayerNorm, "layer with bias": lambda width, **o: LayerNorm(width, bias=True, **o), "rms": RMSNorm}
shapes = st.lists(st.integers(1, 4), max_size=3)


def filled(kind, width, **options):
    norm = KINDS[kind](width, **options).double()
    for seed, parameter in enumerate(norm.parameters()):
        parameter.data = torch.randn(width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return norm


def formula(norm, x):
    if isinstance(norm, RMSNorm):
        return norm.gain * x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    centred = x - x.mean(-1, keepdim=True)
    y = norm.gain * centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return y if norm.bias is None else y + norm.bias


@pytest.mark.parametrize("kind", KINDS)
@given(rows=shapes, width=st.integers(3, 33), size=st.sampled_from([1e-4, 1.0, 1e4]), eps=st.sampled_from([1e-6, 1e-2]))
def test_a_norm_is_its_formula_in_value_and_gradients(kind, rows, width, size, eps):
    norm = filled(kind, width, eps=eps)
    x = (torch.randn(*rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(9)) * size).requires_grad_()
    wanted = [x, *norm.parameters()]
    ours, theirs = norm(x), formula(norm, x)
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for mine, exact in zip(torch.autograd.grad(ours, wanted, grad), torch.autograd.grad(theirs, wanted, grad), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9 * max(1.0, 1 / size))


def test_rms_agrees_with_torch():
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    norm = filled("rms", 16)
    expected = torch.nn.functional.rms_norm(x, (16,), norm.gain, norm.eps)
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_gradcheck(kind):
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(filled(kind, 6), x)


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_give_finite_values_and_gradients(kind):
    x = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    y = filled(kind, 6)(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_in_bfloat16_values_and_gradients_are_as_good_as_rounding(kind):
    norm = filled(kind, 256)
    x = torch.randn(64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).bfloat16()
    grad = torch.randn(64, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).bfloat16()
    for parameter in norm.parameters():
        parameter.data = parameter.data.bfloat16().double()  # what is compared is the arithmetic, not the rounded gain
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        copy = x.to(dtype).requires_grad_()
        y = norm.to(dtype)(copy)
        y.backward(grad.to(dtype))
        found[dtype] = (y.double(), copy.grad.double())
    for exact, low in zip(found[torch.float64], found[torch.bfloat16], strict=True):
        assert (low - exact).norm() < 2**-7 * exact.norm()
        assert (low - exact).abs().max() < 4 * 2**-8 * exact.abs().max()


def test_rms_in_bfloat16_takes_the_mean_in_float32():
    """100 equal numbers give ones, off by two roundings (2^-8); a norm rounded to bfloat16 on the way makes it 2^-7."""
    norm = RMSNorm(100).bfloat16()
    norm.gain.data.fill_(1)
    numbers = torch.linspace(1, 2, 129)[:-1].bfloat16()
    assert (norm(numbers[:, None].repeat(1, 100)).float() - 1).abs().max() <= 2**-8
