"""Cross attention: its definition, its fast form, padding and cost. Legend: see keyhole.mixers.cross."""

import pytest
import torch
from mixer_examples import normal

from keyhole.core.errors import InputError
from keyhole.mixers import flops
from keyhole.mixers.cross import CrossAttention, cross_weights


def make_cross(**options):
    cross = CrossAttention(24, 4, read_width=10, **options).double()
    for seed, weight in enumerate(cross.parameters()):
        weight.data = normal(*weight.shape, seed=seed) * 0.4
    return cross


def test_weights_are_a_softmax_over_all_of_the_other_stream():
    q, k = normal(1, 1, 3, 4), normal(1, 1, 5, 4, seed=1)
    scores = (q[0, 0] @ k[0, 0].T / 2).exp()
    torch.testing.assert_close(cross_weights(q, k)[0, 0], scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("tokens", "others"), [(1, 1), (3, 7), (65, 129), (7, 3)])
def test_the_fast_form_is_the_definition_in_results_and_gradients(tokens, others, masked):
    cross = make_cross(bias=True)
    x, other = normal(2, tokens, 24).requires_grad_(), normal(2, others, 10, seed=1).requires_grad_()
    mask = torch.arange(others) < torch.tensor([[others], [max(1, others // 2)]]) if masked else None
    inputs = [x, other, *cross.parameters()]
    weight = normal(2, tokens, 24, seed=2)
    fast, slow = cross(x, other, mask), cross(x, other, mask, impl="reference")
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-11)
    for a, b in zip(*(torch.autograd.grad((y * weight).sum(), inputs) for y in (fast, slow)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_padding_in_the_other_stream_changes_nothing():
    cross, x, other = make_cross(), normal(2, 4, 24), normal(2, 6, 10, seed=1)
    longer = torch.cat((normal(2, 3, 10, seed=7) * 100, other, normal(2, 2, 10, seed=8) * 100), 1)
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[:, 3:9] = True
    torch.testing.assert_close(cross(x, longer, mask), cross(x, other), rtol=0, atol=1e-11)


@pytest.mark.parametrize("impl", [None, "reference"])
def test_a_row_with_nothing_to_read_gives_zero_and_lets_no_gradient_through(impl):
    cross, x, other = make_cross(), normal(2, 4, 24), normal(2, 6, 10, seed=1).requires_grad_()
    mask = torch.tensor([[True] * 6, [False] * 6])
    y = cross(x, other, mask, impl)
    y.square().sum().backward()
    assert y[1].abs().max() == 0
    assert other.grad.isfinite().all()
    assert other.grad[1].abs().max() == 0


def test_what_was_read_once_serves_any_number_of_queries():
    cross, x, other = make_cross(), normal(2, 5, 24), normal(2, 6, 10, seed=1)
    read = cross.read(other)
    one_by_one = torch.cat([cross.answer(x[:, t : t + 1], *read) for t in range(5)], 1)
    torch.testing.assert_close(one_by_one, cross(x, other), rtol=0, atol=1e-12)


def test_look_shows_weights_that_sum_to_1_and_heads_that_make_the_result():
    cross, x, other = make_cross(), normal(2, 5, 24), normal(2, 6, 10, seed=1)
    seen = cross.look(x, other)
    torch.testing.assert_close(seen.pattern_BHTT.sum(-1), torch.ones(2, 4, 5, dtype=torch.float64))
    torch.testing.assert_close(cross.out(seen.heads_BTHD.flatten(2)), cross(x, other), rtol=0, atol=1e-12)


def test_the_declared_cost_is_the_counted_one():
    cross, x, other = make_cross(), normal(1, 5, 24), normal(1, 7, 10)
    cost = cross.cost(5, 7)
    assert cost.parameters == sum(p.numel() for p in cross.parameters())
    assert cost.flops == flops.measure(lambda: cross(x, other, impl="reference"))
    assert cost.state_bytes == sum(part.untyped_storage().nbytes() for part in cross.read(other)) // 2


def test_heads_must_divide_the_width():
    with pytest.raises(InputError, match="width 10 is not divisible by heads 3"):
        CrossAttention(10, 3)
