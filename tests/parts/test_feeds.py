import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from keyhole.core.errors import InputError
from keyhole.parts.feed import Gelu, ReluSquared, Swiglu

FEEDS = {
    "gelu": lambda width, **o: Gelu(width, **o),
    "gelu tanh": lambda width, **o: Gelu(width, approximate="tanh", **o),
    "relu-squared": lambda width, **o: ReluSquared(width, **o),
    "swiglu": lambda width, **o: Swiglu(width, **o),
}


def filled(kind, width=12, **options):
    feed = FEEDS[kind](width, **options).double()
    for seed, parameter in enumerate(feed.parameters()):
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return feed


def formula(kind, feed, x):
    def map_(linear, x):
        y = torch.einsum("oi,...i->...o", linear.weight, x)
        return y if linear.bias is None else y + linear.bias

    h = map_(feed.up, x)
    if kind == "gelu":
        a = h * 0.5 * (1 + torch.erf(h / math.sqrt(2)))
    elif kind == "gelu tanh":
        a = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    elif kind == "relu-squared":
        a = h.clamp_min(0) ** 2
    else:
        a = h / (1 + torch.exp(-h)) * map_(feed.gate, x)
    return map_(feed.down, a)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", FEEDS)
def test_a_feed_is_its_formula_in_value_and_gradients(kind, bias):
    feed = filled(kind, bias=bias)
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    wanted = [x, *feed.parameters()]
    ours, theirs = feed(x), formula(kind, feed, x)
    grad = torch.randn_like(ours)
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    for mine, exact in zip(torch.autograd.grad(ours, wanted, grad), torch.autograd.grad(theirs, wanted, grad), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("kind", FEEDS)
def test_gradients_pass_gradcheck(kind):
    feed = filled(kind, width=4)
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert torch.autograd.gradcheck(feed, x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", FEEDS)
def test_declared_flops_are_those_that_torch_counts(kind, bias):
    feed = filled(kind, bias=bias)
    with FlopCounterMode(display=False) as counter:
        feed(torch.randn(1, 7, 12, dtype=torch.float64))
    assert feed.flops(7) == counter.get_total_flops() > 0


@pytest.mark.parametrize(("width", "hidden"), [(1, 8), (3, 8), (12, 32), (48, 128), (100, 272), (128, 344), (384, 1024)])
def test_swiglu_rounds_its_hidden_width_up_to_a_multiple_of_8(width, hidden):
    assert Swiglu(width).up.weight.shape == Swiglu(width).gate.weight.shape == (hidden, width)
    assert 0 <= hidden - round(8 / 3 * width) < 8


def test_the_ratio_sets_the_hidden_width():
    assert Gelu(12, ratio=2.5).up.weight.shape == (30, 12)
    assert ReluSquared(12).down.weight.shape == (12, 48)
    assert Swiglu(12, ratio=2).up.weight.shape == (24, 12)


def test_gelu_refuses_an_approximation_it_does_not_know():
    with pytest.raises(InputError, match='gelu approximate = \'erf\' is not valid; it may be "none" or "tanh"'):
        Gelu(4, approximate="erf")


@pytest.mark.parametrize("kind", FEEDS)
def test_every_parameter_says_what_it_is_for(kind):
    roles = {name: parameter.role for name, parameter in filled(kind, bias=True).named_parameters()}
    assert {name: role for name, role in roles.items() if name.endswith("weight")} == {
        f"{name}.weight": {"up": "in", "gate": "in", "down": "out"}[name] for name in roles_of(kind)
    }
    assert all(role == "bias" for name, role in roles.items() if name.endswith("bias"))


def roles_of(kind):
    return ("up", "down", "gate") if kind == "swiglu" else ("up", "down")
