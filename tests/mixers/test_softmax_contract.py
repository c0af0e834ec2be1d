"""Padding, look and cost of softmax attention. Legend: see keyhole.mixers.softmax."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_helpers import HEADS, POSITIONS, WIDTH, make, normal
from torch.utils.flop_counter import FlopCounterMode

from keyhole.mixers.softmax import reference_attention, reference_weights

VARIANTS = {"plain": {}, "grouped": {"kv_heads": 2}, "qk_norm, bias": {"qk_norm": True, "bias": True}}


def padded(x_BTW, left, right):
    """Rows with noise before and after the text, and the mask that is True at the text."""
    noise = normal(x_BTW.shape[0], left + right, WIDTH, seed=99) * 100
    x = torch.cat((noise[:, :left], x_BTW, noise[:, left:]), 1)
    mask = torch.zeros(x.shape[:2], dtype=torch.bool)
    mask[:, left : left + x_BTW.shape[1]] = True
    return x, mask


@pytest.mark.parametrize("merge", ["concat", "shift", "reweight-running"])
@pytest.mark.parametrize("position", ["none", "learned", "rope", "rope, interleaved", "alibi"])
@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (3, 4)])
def test_real_tokens_of_a_padded_row_give_what_the_text_alone_gives(left, right, position, merge):
    """Rope and alibi know distances only, so that even padding on the left changes nothing."""
    mixer, text = make(position, merge), normal(2, 9, WIDTH)
    x, mask = padded(text, left, right)
    found = mixer(x, mask)[:, left : left + 9]
    tolerance = 1e-5 if "rope" in position and left else 1e-10  # the tables of rope are float32
    torch.testing.assert_close(found, mixer(text), rtol=0, atol=tolerance * mixer(text).abs().max().item())


@settings(max_examples=30)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), left=st.booleans())
def test_rows_of_different_lengths_do_not_disturb_each_other(lengths, left):
    mixer, x = make("alibi"), normal(len(lengths), 9, WIDTH)
    place = torch.arange(9)
    mask = torch.stack([place >= 9 - n if left else place < n for n in lengths])
    together = mixer(x, mask)
    for row, n in enumerate(lengths):
        text = slice(9 - n, 9) if left else slice(0, n)
        alone = mixer(x[row : row + 1, text])[0] if n else torch.zeros(0, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(together[row, text], alone, rtol=0, atol=1e-10)


def test_a_position_with_nothing_to_read_gives_zero_and_no_nan_and_lets_no_gradient_through():
    q, k, v = (normal(2, HEADS, 6, 5, seed=seed).requires_grad_() for seed in range(3))
    mask = torch.tensor([[False, False, True, True, True, True], [False] * 6])
    o = reference_attention(q, k, v, None, mask)
    o.square().sum().backward()
    assert torch.equal(o[0, :, :2], torch.zeros_like(o[0, :, :2]))
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert o[0, :, 2:].abs().amax((0, 2)).min() > 1e-3
    for x in (q, k, v):
        assert x.grad.isfinite().all()
        assert x.grad[1].abs().max() == 0
        assert x.grad[0, :, :2].abs().max() == 0


@pytest.mark.parametrize("position", POSITIONS)
def test_fully_padded_rows_give_zero_from_the_mixer(position):
    mixer, x = make(position), normal(3, 7, WIDTH)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1] = False
    y = mixer(x, mask)
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    torch.testing.assert_close(y[[0, 2]], mixer(x[[0, 2]]), rtol=0, atol=1e-10)


def test_a_mask_of_all_real_tokens_changes_nothing():
    mixer, x = make("rope"), normal(2, 9, WIDTH)
    torch.testing.assert_close(mixer(x, torch.ones(2, 9, dtype=torch.bool)), mixer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("merge", ["concat", "shift", "reweight", "reweight-running"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("position", ["none", "rope", "alibi"])
def test_look_shows_weights_that_sum_to_1_and_heads_that_make_the_output(position, variant, merge):
    mixer, x = make(position, merge, **VARIANTS[variant]), normal(2, 9, WIDTH)
    look = mixer.look(x)
    assert look.pattern_BHTT.shape == (2, HEADS, 9, 9)
    assert look.heads_BTHD.shape == (2, 9, HEADS, WIDTH // HEADS)
    torch.testing.assert_close(look.pattern_BHTT.sum(-1), torch.ones(2, HEADS, 9, dtype=torch.float64))
    assert look.pattern_BHTT.triu(1).abs().max() == 0
    assert look.pattern_BHTT.min() >= 0
    torch.testing.assert_close(mixer.out(look.heads_BTHD.flatten(2)), mixer(x), rtol=0, atol=1e-10)


def test_look_with_padding_shows_no_weight_on_padding():
    mixer = make("rope")
    x, mask = padded(normal(2, 6, WIDTH), 2, 1)
    look = mixer.look(x, mask)
    assert look.pattern_BHTT[..., ~mask[0]].abs().max() == 0
    expected = torch.cat((torch.zeros(2), torch.ones(7))).double().expand(2, HEADS, 9)
    torch.testing.assert_close(look.pattern_BHTT.sum(-1), expected)
    torch.testing.assert_close(mixer.out(look.heads_BTHD.flatten(2)), mixer(x, mask), rtol=0, atol=1e-10)


def test_fewer_queries_than_keys_are_the_last_ones():
    q, k = normal(1, 2, 3, 4), normal(1, 2, 8, 4, seed=1)
    assert (reference_weights(q, k) > 0).int().tolist()[0][0] == [[1] * 6 + [0] * 2, [1] * 7 + [0], [1] * 8]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 130, 200])
@pytest.mark.parametrize("impl", ["reference", "blocked"])
def test_declared_flops_are_those_that_torch_counts(impl, tokens, variant):
    mixer = make("rope", **VARIANTS[variant])
    with FlopCounterMode(display=False) as counter:
        mixer(normal(1, tokens, WIDTH), impl=impl)
    assert mixer.cost(tokens, impl).flops == counter.get_total_flops()


def test_blocked_attention_saves_work_on_long_texts():
    mixer = make()
    assert mixer.cost(64, "blocked").flops == mixer.cost(64).flops
    assert mixer.cost(200, "blocked").flops < mixer.cost(200).flops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_declared_parameters_and_state_are_the_real_ones(variant, dtype):
    mixer = make("rope", **VARIANTS[variant]).to(dtype)
    cost = mixer.cost(10)
    assert cost.parameters == sum(parameter.numel() for parameter in mixer.parameters())
    assert cost.state_bytes == held_bytes(mixer.begin(1, torch.zeros(1, dtype=dtype)))


def test_the_state_of_a_running_merge_is_counted():
    mixer = make(merge="reweight-running")
    assert mixer.cost(10).state_bytes == held_bytes(mixer.begin(1, torch.zeros(1, dtype=torch.float64)))


def held_bytes(state):
    """The memory behind all tensors of a state, each once."""
    storages = [x.untyped_storage() for x in vars(state).values() if isinstance(x, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
