"""Legend: B rows, T tokens, H heads, D head width."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.parts.merge import Concat, Reweight, ReweightRunning, Shift, Shuffle

NORMALISE = [False, True]


def some(B=2, T=7, H=3, D=4, seed=0):
    return torch.randn(B, T, H, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def norm_of(heads_BTHD, b, t, h):
    """sqrt(sum over s <= t of ||o_h(s)||^2), the slow way."""
    return sum((heads_BTHD[b, s, h] ** 2).sum() for s in range(t + 1)) ** 0.5


def test_concat_leaves_the_heads_as_they_are():
    assert torch.equal(Concat()(some()), some())


def test_shift_puts_head_h_in_the_place_of_head_h_plus_1():
    x = some(H=4)
    y = Shift()(x)
    for h in range(4):
        assert torch.equal(y[:, :, (h + 1) % 4], x[:, :, h])


def test_shuffle_permutes_whole_heads_while_training_and_nothing_in_use():
    merge, x = Shuffle(), some(H=6)
    assert torch.equal(merge.eval()(x), x)
    merge.train()
    orders = set()
    for _ in range(30):
        y = merge(x)
        order = tuple(next(g for g in range(6) if torch.equal(y[0, 0, h], x[0, 0, g])) for h in range(6))
        assert sorted(order) == list(range(6))
        assert torch.equal(y, x[:, :, list(order)]), "one order for all rows and tokens"
        orders.add(order)
    assert len(orders) > 20


def test_every_head_goes_everywhere_equally_often():
    merge, x = Shuffle().train(), torch.arange(3.0).view(1, 1, 3, 1)
    torch.manual_seed(0)
    counts = torch.zeros(3, 3)
    for _ in range(900):
        counts[torch.arange(3), merge(x).flatten().long()] += 1
    assert ((counts - 300) ** 2 / 300).sum() < 18.5, "chi-square, 4 degrees of freedom, p = .001"


@pytest.mark.parametrize("normalise", NORMALISE)
def test_reweight_scales_each_head_by_its_norm_over_the_whole_sequence(normalise):
    x = some()
    y = Reweight(normalise)(x)
    for b in range(2):
        weights = torch.stack([norm_of(x, b, 6, h) for h in range(3)])
        weights = weights / weights.mean() if normalise else weights
        torch.testing.assert_close(y[b], x[b] * weights[:, None], rtol=1e-12, atol=0)


@pytest.mark.parametrize("normalise", NORMALISE)
def test_reweight_running_scales_each_head_by_its_norm_so_far(normalise):
    x = some()
    y = ReweightRunning(3, normalise)(x)
    for b in range(2):
        for t in range(7):
            weights = torch.stack([norm_of(x, b, t, h) for h in range(3)])
            weights = weights / weights.mean() if normalise else weights
            torch.testing.assert_close(y[b, t], x[b, t] * weights[:, None], rtol=1e-12, atol=0)


def change_of_the_first_output(merge):
    x, changed = some(), some()
    changed[:, -1] += 1
    return (merge(x)[:, 0] - merge(changed)[:, 0]).abs().max()


@pytest.mark.parametrize("normalise", NORMALISE)
def test_reweight_reads_the_future(normalise):
    assert change_of_the_first_output(Reweight(normalise)) > 1e-2
    assert Reweight.needs_whole_sequence


@pytest.mark.parametrize("merge", [Concat(), Shift(), Shuffle().eval(), ReweightRunning(3), ReweightRunning(3, True)])
def test_no_other_merge_reads_the_future(merge):
    assert change_of_the_first_output(merge) == 0


@pytest.mark.parametrize("normalise", NORMALISE)
@given(cuts=st.lists(st.integers(0, 20), max_size=6))
def test_reweight_running_step_by_step_over_any_split_is_the_forward_pass(normalise, cuts):
    merge, x = ReweightRunning(3, normalise), some(T=20)
    state, pieces, ends = merge.begin(2, like=x), [], sorted({0, *cuts, 20})
    for a, b in pairwise(ends):
        y, state = merge.step(x[:, a:b], state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), merge(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("merge", [Reweight(), Reweight(True), ReweightRunning(3), ReweightRunning(3, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_zeros_give_finite_values_and_gradients(merge, dtype):
    x = torch.zeros(2, 7, 3, 4, dtype=dtype, requires_grad=True)
    y = merge(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y))
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("merge", [Reweight(), Reweight(True), ReweightRunning(3), ReweightRunning(3, True)])
def test_gradients_pass_gradcheck(merge):
    assert torch.autograd.gradcheck(merge, some(T=4).requires_grad_())


def test_the_running_sum_is_carried_in_float32_when_the_heads_are_bfloat16():
    """600 tokens of ones, one by one: a sum carried in bfloat16 would stop growing at 256."""
    merge, one = ReweightRunning(3), torch.ones(1, 1, 3, 1, dtype=torch.bfloat16)
    state = merge.begin(1, like=one)
    for _ in range(600):
        y, state = merge.step(one, state)
    assert y.dtype == torch.bfloat16
    assert y[0, 0, 0, 0].item() == pytest.approx(600**0.5, rel=2**-8)
