"""Legend: N targets, W width, V vocabulary."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.model import loss
from keyhole.model.loss import IGNORED, reference_loss, summed_loss


def case(N, V, W=8, ignored=(), dtype=torch.float64, size=1.0):
    chance = torch.Generator().manual_seed(N * 1000 + V)
    hidden = (torch.randn(N, W, generator=chance, dtype=torch.float64) * size).to(dtype).requires_grad_()
    head = (torch.randn(V, W, generator=chance, dtype=torch.float64) * size).to(dtype).requires_grad_()
    target = torch.randint(V, (N,), generator=chance)
    target[list(ignored)] = IGNORED
    return hidden, head, target


def value_and_gradients(function, hidden, head, target):
    value = function(hidden, head, target) * 0.7  # a gradient other than 1 from above
    return [value.detach(), *torch.autograd.grad(value, (hidden, head))]


def assert_same(inputs, tolerance):
    found, expected = (value_and_gradients(f, *inputs) for f in (summed_loss, reference_loss))
    for ours, theirs in zip(found, expected, strict=True):
        size = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * size)


@settings(max_examples=40)
@given(N=st.integers(1, 300), V=st.integers(2, 50), ignored=st.sets(st.integers(0, 299), max_size=40))
def test_in_one_piece_and_in_many_it_is_the_definition_in_value_and_gradients(N, V, ignored):
    inputs = case(N, V, ignored=[place for place in ignored if place < N])
    for piece in (1, 64 * V + 1, 100 * V, 10_000_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loss, "PIECE", piece)
            assert_same(inputs, 1e-11)


def test_small_pieces_are_really_pieces(monkeypatch):
    """A guard for the test above: if PIECE went by another name, it would compare one piece with itself."""
    sizes, real = [], loss._piece
    monkeypatch.setattr(loss, "_piece", lambda logits, *rest: (sizes.append(len(logits)), real(logits, *rest))[1])
    monkeypatch.setattr(loss, "PIECE", 1)
    summed_loss(*case(150, 5))
    assert sizes == [64, 64, 22]


@pytest.mark.parametrize("all_ignored", [False, True])
def test_ignored_targets_count_for_nothing(all_ignored):
    hidden, head, target = case(90, 7)
    target[:80] = IGNORED
    if all_ignored:
        target[:] = IGNORED
    value, d_hidden, d_head = value_and_gradients(summed_loss, hidden, head, target)
    assert d_hidden[:80].abs().max() == 0
    if all_ignored:
        assert value == 0
        assert d_head.abs().max() == 0
    else:
        alone = value_and_gradients(reference_loss, hidden[80:].detach().requires_grad_(), head, target[80:])
        torch.testing.assert_close(value, alone[0])
        torch.testing.assert_close(d_hidden[80:], alone[1])
        torch.testing.assert_close(d_head, alone[2])


def test_float32_is_within_its_bound():
    assert_same(case(500, 65, dtype=torch.float32), 1e-5)


@pytest.mark.parametrize("V", [65, 5000])
def test_bfloat16_is_as_good_as_its_rounding(V):
    low = case(600, V, W=64, dtype=torch.bfloat16, size=0.5)
    exact = (low[0].detach().double().requires_grad_(), low[1].detach().double().requires_grad_(), low[2])
    found, expected = value_and_gradients(summed_loss, *low), value_and_gradients(summed_loss, *exact)
    assert found[0].dtype == torch.float32
    assert abs(found[0].item() / expected[0].item() - 1) < 2e-3, "roundings of single targets must cancel in the sum"
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).norm() < 2**-6 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nan_stays_nan(dtype):
    hidden, head, target = case(70, 5, dtype=dtype)
    hidden.data[3, 0] = math.nan
    value, d_hidden, d_head = value_and_gradients(summed_loss, hidden, head, target)
    assert value.isnan()
    assert d_hidden[3].isnan().all()
    assert d_head.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_hopeless_target_costs_much_but_not_infinity(dtype):
    head, target = torch.eye(4, dtype=dtype), torch.tensor([0])
    value = summed_loss(torch.tensor([[-500.0, 500.0, 0.0, 0.0]], dtype=dtype), head, target)
    assert 80 < value < 1001


def test_no_targets_cost_nothing():
    hidden, head, target = case(1, 5)
    value, d_hidden, d_head = value_and_gradients(summed_loss, hidden[:0].detach().requires_grad_(), head, target[:0])
    assert value == 0
    assert d_hidden.shape == (0, 8)
    assert d_head.abs().max() == 0
