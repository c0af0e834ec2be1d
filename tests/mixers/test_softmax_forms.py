"""Reference, blocked, fused and step-by-step attention are one function. Legend: see keyhole.mixers.softmax."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from softmax_helpers import (
    BLOCK,
    HEADS,
    MERGES,
    POSITIONS,
    WIDTH,
    assert_all_close,
    gradients,
    make,
    normal,
    one_query_at_a_time,
)

from keyhole.mixers import kernels
from keyhole.mixers.contract import Decodes
from keyhole.mixers.kernels import blocked_attention, choose_kernel, fused_attention
from keyhole.mixers.softmax import attention, reference_attention

LENGTHS = [1, 2, 7, 63, 64, 65, 129, 200]
VARIANTS = {"plain": {}, "grouped": {"kv_heads": 2}, "one group": {"kv_heads": 1}, "qk_norm": {"qk_norm": True},
            "grouped, qk_norm, bias": {"kv_heads": 2, "qk_norm": True, "bias": True}}  # fmt: skip
STEPPING = [name for name in MERGES if name != "reweight"]


def qkv(batch, tokens, dtype=torch.float64):
    return [normal(batch, 3, tokens, 8, seed=seed).to(dtype).requires_grad_() for seed in range(3)]


@pytest.mark.parametrize("tokens", [1, 2, 7, 30])
def test_the_reference_is_the_definition(tokens):
    inputs, weight = qkv(2, tokens), normal(2, 3, tokens, 8, seed=9)
    bias = normal(3, tokens, tokens, seed=8)
    for given_bias in (None, bias):
        found = gradients(lambda b=given_bias: reference_attention(*inputs, b), inputs, weight)
        assert_all_close(found, gradients(lambda b=given_bias: one_query_at_a_time(*inputs, b), inputs, weight), 1e-12)


@pytest.mark.parametrize("form", [blocked_attention, fused_attention])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_the_fast_forms_are_the_reference_in_value_and_gradients(tokens, batch, form):
    inputs, weight = qkv(batch, tokens), normal(batch, 3, tokens, 8, seed=9)
    found, expected = (gradients(lambda f=f: f(*inputs), inputs, weight) for f in (form, reference_attention))
    assert_all_close(found, expected, 1e-10)


@pytest.mark.parametrize("form", [reference_attention, blocked_attention, fused_attention])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [7, 65, 200])
def test_lower_precision_stays_within_its_bound(tokens, dtype, bound, form):
    low, weight = qkv(2, tokens, dtype), normal(2, 3, tokens, 8, seed=9).to(dtype)
    exact = [x.detach().double().requires_grad_() for x in low]
    found = gradients(lambda: form(*low), low, weight)
    assert found[0].dtype == dtype
    assert_all_close(found, gradients(lambda: reference_attention(*exact), exact, weight.double()), bound)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_blocks_of_any_size_give_the_same(size, monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK", size)
    inputs, weight = qkv(2, 11), normal(2, 3, 11, 8, seed=9)
    found, expected = (gradients(lambda f=f: f(*inputs), inputs, weight) for f in (blocked_attention, reference_attention))
    assert_all_close(found, expected, 1e-12)


@pytest.mark.parametrize("form", [reference_attention, blocked_attention, fused_attention])
def test_large_scores_overflow_in_no_form(form):
    q, k, v = (normal(1, 2, 70, 8, seed=seed) for seed in range(3))
    found = form(q * 1e3, k * 1e3, v)
    assert found.isfinite().all()
    torch.testing.assert_close(found, reference_attention(q * 1e3, k * 1e3, v), rtol=0, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "blocked", "fused", "auto"])
@pytest.mark.parametrize("tokens", [2, 65, 130])
def test_no_form_reads_the_future(impl, tokens):
    mixer, x = make(), normal(1, tokens, WIDTH)
    changed = x.clone()
    changed[:, tokens // 2 :] += 1
    difference = (mixer(x, impl=impl) - mixer(changed, impl=impl)).abs()
    assert difference[:, : tokens // 2].max() == 0
    assert difference[:, tokens // 2 :].amax(-1).min() > 1e-3


@pytest.mark.parametrize("impl", ["blocked", "fused"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("position", POSITIONS)
def test_every_variant_of_the_mixer_has_the_same_output_and_gradients_in_each_form(position, variant, impl):
    mixer, x = make(position, **VARIANTS[variant]), normal(2, 70, WIDTH, seed=5).requires_grad_()
    inputs, weight = [x, *mixer.parameters()], normal(2, 70, WIDTH, seed=6)
    found, expected = (gradients(lambda i=i: mixer(x, impl=i), inputs, weight) for i in (impl, "reference"))
    assert_all_close(found, expected, 1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("position", ["none", "rope", "alibi"])
def test_the_whole_mixer_is_its_formula(position, variant):
    mixer, T = make(position, **VARIANTS[variant]), 20
    x = normal(2, T, WIDTH, seed=5)
    D, G = WIDTH // HEADS, mixer.groups
    both = x @ mixer.qkv.weight.T + (0 if mixer.qkv.bias is None else mixer.qkv.bias)
    q, k, v = (part.unflatten(-1, (-1, D)).transpose(1, 2) for part in both.split([WIDTH, G * D, G * D], -1))
    if mixer.qk_norm is not None:
        q, k = (
            norm.gain * y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
            for norm, y in zip(mixer.qk_norm, (q, k), strict=True)
        )
    if position == "rope":
        q, k = mixer.position.turn(q, 0), mixer.position.turn(k, 0)
    bias = mixer.position.bias(torch.arange(T), torch.arange(T)).double() if position == "alibi" else None
    # Query head h reads key-value head h // (H / G).
    k, v = (y[:, [h // (HEADS // G) for h in range(HEADS)]] for y in (k, v))
    heads = one_query_at_a_time(q, k, v, bias).transpose(1, 2).flatten(2)
    expected = heads @ mixer.out.weight.T + (0 if mixer.out.bias is None else mixer.out.bias)
    torch.testing.assert_close(mixer(x), expected, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def step_over(mixer, x, ends):
    state, pieces = mixer.begin(x.shape[0], x), []
    for start, stop in itertools.pairwise(ends):
        y, state = mixer.step(x[:, start:stop], state)
        pieces.append(y)
    return torch.cat(pieces, 1)


@pytest.mark.parametrize("merge", STEPPING)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("position", POSITIONS)
def test_decoding_token_by_token_is_the_forward_pass(position, variant, merge):
    mixer, x = make(position, merge, **VARIANTS[variant]), normal(2, 17, WIDTH)
    torch.testing.assert_close(step_over(mixer, x, range(18)), mixer(x), rtol=0, atol=1e-10)


@settings(max_examples=25)
@pytest.mark.parametrize("merge", ["concat", "reweight-running"])
@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
@given(cuts=st.lists(st.integers(0, 130), max_size=8), batch=st.sampled_from([1, 3]))
def test_decoding_over_any_split_is_the_forward_pass(position, merge, cuts, batch):
    mixer, x = make(position, merge, kv_heads=2, qk_norm=True), normal(batch, 130, WIDTH)
    ends = sorted({0, *cuts, 130})
    torch.testing.assert_close(step_over(mixer, x, ends), mixer(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_decoding_works_up_to_the_whole_block(tokens):
    mixer, x = make("rope"), normal(1, tokens, WIDTH)
    half = tokens // 2
    ends = sorted({0, half, *range(max(half, tokens - 3), tokens + 1)})
    torch.testing.assert_close(step_over(mixer, x, ends), mixer(x), rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_copied_state_goes_its_own_way():
    mixer, x = make("rope", "reweight-running"), normal(1, 12, WIDTH)
    _, state = mixer.step(x[:, :6], mixer.begin(1, x))
    kept = state.copy()
    mixer.step(normal(1, 6, WIDTH, seed=7), state)
    y, _ = mixer.step(x[:, 6:], kept)
    torch.testing.assert_close(y, mixer(x)[:, 6:], rtol=0, atol=1e-10)


def test_softmax_decodes_by_contract():
    assert isinstance(make(), Decodes)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 5000])
def test_the_choice_of_a_kernel_says_its_reason(device, dtype, tokens):
    choice = choose_kernel(device, dtype, tokens)
    assert choice.impl in ("blocked", "fused")
    assert {"blocked": "blocked attention", "fused": "fused attention"}[choice.impl] in choice.reason
    if device == "cpu":
        assert str(dtype).removeprefix("torch.") in choice.reason
        assert "faster" in choice.reason
    else:
        assert device in choice.reason


@pytest.mark.parametrize("tokens", [64, BLOCK])
def test_auto_is_the_form_that_the_table_names(tokens):
    inputs = [x.detach() for x in qkv(1, tokens)]
    named = choose_kernel("cpu", torch.float64, tokens).impl
    assert torch.equal(attention(*inputs), attention(*inputs, impl=named))


def test_a_kernel_that_does_not_exist_is_refused_and_never_replaced():
    with pytest.raises(Exception, match="blokced"):
        make(impl="blokced")(normal(1, 3, WIDTH))
