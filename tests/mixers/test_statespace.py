"""Kernel, recurrence and definition of a state space are one function. Legend: see keyhole.mixers.statespace."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from statespace_examples import (
    HEADS,
    STATE,
    STRUCTURES,
    VARIANTS,
    WIDTH,
    assert_all_close,
    make,
    normal,
    padded,
    step_over,
    value_and_gradients,
)

from keyhole.core.errors import InputError
from keyhole.mixers import statespace_kernels as kernels
from keyhole.mixers.contract import Decodes
from keyhole.mixers.flops import measure
from keyhole.mixers.heads import held_bytes
from keyhole.mixers.statespace import StateSpace

LENGTHS = [1, 2, 7, 63, 64, 65, 129]
variants = pytest.mark.parametrize(("structure", "inputs"), VARIANTS)


def all_forms(mixer, x, weight, forms):
    inputs = [x, *mixer.parameters()]
    return [value_and_gradients(form, inputs, weight) for form in forms]


@variants
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_all_forms_have_the_same_output_and_gradients(tokens, batch, structure, inputs):
    mixer, x = make(structure, inputs), normal(batch, tokens, WIDTH, seed=5).requires_grad_()
    pieces = sorted({0, tokens // 3, tokens // 2, tokens})
    reference, *others = all_forms(
        mixer,
        x,
        normal(batch, tokens, WIDTH, seed=6),
        (
            lambda: mixer(x, impl="reference"),
            lambda: mixer(x),
            lambda: step_over(mixer, x, range(tokens + 1)),
            lambda: step_over(mixer, x, pieces),
        ),
    )
    for found in others:
        assert_all_close(found, reference, 1e-10)


@variants
def test_all_forms_agree_over_a_thousand_tokens(structure, inputs):
    mixer, x = make(structure, inputs), normal(1, 1000, WIDTH, seed=5).requires_grad_()
    forms = (lambda: mixer(x, impl="reference"), lambda: mixer(x), lambda: step_over(mixer, x, [0, 400, 401, 1000]))
    reference, *others = all_forms(mixer, x, normal(1, 1000, WIDTH, seed=6), forms)
    for found in others:
        assert_all_close(found, reference, 1e-10)


@variants
def test_the_whole_mixer_is_its_equation(structure, inputs):
    """u = in(x); x_t = A x_{t-1} + B u_t; y_t = C x_t + skip u_t, one system and one token at a time."""
    mixer, T = make(structure, inputs), 9
    x = normal(2, T, WIDTH, seed=5)
    u = x @ mixer.into.weight.T
    y = torch.empty_like(u)
    A, B, C = mixer.system.definition(torch.float64)
    D = WIDTH // len(A)
    for row, g in itertools.product(range(2), range(len(A))):
        channels = slice(g * D, (g + 1) * D)
        state = torch.zeros(STATE, dtype=A.dtype)
        for t in range(T):
            state = A[g] @ state + B[g] @ u[row, t, channels].to(A.dtype)
            y[row, t, channels] = (C[g] @ state).real + mixer.skip_W[channels] * u[row, t, channels]
    torch.testing.assert_close(mixer(x), y @ mixer.out.weight.T, rtol=0, atol=1e-12)


@settings(max_examples=10)
@variants
@pytest.mark.parametrize("merge", ["shift", "reweight-running"])
@given(cuts=st.lists(st.integers(0, 70), max_size=6), batch=st.sampled_from([1, 3]))
@torch.no_grad()
def test_decoding_over_any_split_is_the_forward_pass(merge, structure, inputs, cuts, batch):
    mixer, x = make(structure, inputs, merge), normal(batch, 70, WIDTH)
    assert_all_close([step_over(mixer, x, sorted({0, *cuts, 70}))], [mixer(x)], 1e-10)


@variants
@torch.no_grad()
def test_any_state_carried_over_a_split_decodes_as_without_the_split(structure, inputs):
    mixer, x = make(structure, inputs), normal(2, 12, WIDTH)
    state = mixer.begin(2, x)
    (x_BGN,) = state.memory
    state.memory = (torch.randn(x_BGN.shape, dtype=x_BGN.dtype, generator=torch.Generator().manual_seed(8)),)
    kept = state.copy()
    whole, end = mixer.step(x, state)
    first, middle = mixer.step(x[:, :5], kept)
    mixer.step(normal(2, 3, WIDTH, seed=7), middle.copy())
    second, split_end = mixer.step(x[:, 5:], middle)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(split_end.memory[0], end.memory[0], rtol=0, atol=1e-12)
    assert (whole - mixer(x)).abs().max() > 1e-3


@variants
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-5), (torch.bfloat16, 5e-2)], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [7, 129, 1000])
def test_lower_precision_stays_within_its_bound_in_value_and_gradients(tokens, dtype, bound, structure, inputs):
    low, exact = make(structure, inputs).to(dtype), make(structure, inputs)
    exact.load_state_dict(low.state_dict())
    if structure == "diagonal":
        exact.system.table_2GN = low.system.table_2GN.double()
    x, weight = normal(2, tokens, WIDTH, seed=5).to(dtype), normal(2, tokens, WIDTH, seed=6).to(dtype)
    found = value_and_gradients(lambda: low(x), list(low.parameters()), weight)
    expected = value_and_gradients(lambda: exact(x.double()), list(exact.parameters()), weight.double())
    assert found[0].dtype == dtype
    assert_all_close(found, expected, bound)
    assert_all_close([step_over(low, x, [0, tokens // 2, tokens])], expected[:1], bound)


def test_a_computing_copy_in_bfloat16_keeps_the_angles_of_the_table():
    """Parameters lose digits; a table in float32 keeps the phase of a token 300 steps back."""
    mixer = StateSpace(WIDTH, HEADS, 400)
    exact = mixer.system.kernel(300, torch.float32)
    for parameter in mixer.parameters():
        parameter.data = parameter.data.bfloat16()
    assert_all_close([mixer.system.kernel(300, torch.float32)], [exact], 1e-2)


@variants
def test_the_state_is_kept_in_float32_at_least(structure, inputs):
    complex_or_not = [torch.float32, torch.complex64] if structure == "diagonal" else [torch.float32] * 2
    mixer = make(structure, inputs).bfloat16()
    _, state = mixer.step(normal(1, 3, WIDTH).bfloat16(), mixer.begin(1, torch.zeros(1, dtype=torch.bfloat16)))
    assert state.memory[0].dtype == complex_or_not[1]
    assert mixer.double().begin(1, torch.zeros(1, dtype=torch.float64)).memory[0].real.dtype == torch.float64


def test_statespace_decodes_by_contract():
    assert isinstance(make(), Decodes)


def leak(mixer, x, impl="auto"):
    """How much the outputs of the first half change with the second half."""
    half, changed = x.shape[1] // 2, x.clone()
    changed[:, half:] += 1
    difference = (mixer(x, impl=impl) - mixer(changed, impl=impl)).abs()
    assert difference[:, half:].amax(-1).min() > 1e-3
    return difference[:, :half].max().item()


@variants
@pytest.mark.parametrize("impl", ["reference", "auto"])
@pytest.mark.parametrize("tokens", [2, 65, 130])
def test_no_form_reads_the_future(tokens, impl, structure, inputs):
    """A transform leaves rounding errors everywhere; the definition leaves none."""
    found = leak(make(structure, inputs), normal(1, tokens, WIDTH), impl)
    assert found <= (1e-12 if impl == "auto" else 0)


@variants
def test_a_transform_without_padding_is_seen_reading_the_future(structure, inputs, monkeypatch):
    """The control. Dense systems of whole heads use no transform."""
    monkeypatch.setattr(kernels, "padded_length", lambda tokens: tokens)
    found = leak(make(structure, inputs), normal(1, 64, WIDTH))
    assert found < 1e-12 if (structure, inputs) == ("dense", "head") else found > 1e-3


@variants
@pytest.mark.parametrize("merge", ["concat", "shift", "reweight", "reweight-running"])
@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (3, 4)])
def test_real_tokens_of_a_padded_row_give_what_the_text_alone_gives(left, right, merge, structure, inputs):
    mixer, text = make(structure, inputs, merge), normal(2, 9, WIDTH)
    x, mask = padded(text, left, right)
    for impl in ("auto", "reference"):
        found = mixer(x, mask, impl=impl)
        assert_all_close([found[:, left : left + 9]], [mixer(text)], 1e-10)
        assert torch.equal(found[~mask], torch.zeros_like(found[~mask]))


@settings(max_examples=15)
@pytest.mark.parametrize("structure", STRUCTURES)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), left=st.booleans())
@torch.no_grad()
def test_rows_of_different_lengths_do_not_disturb_each_other(structure, lengths, left):
    mixer, x = make(structure, merge="reweight-running"), normal(len(lengths), 9, WIDTH)
    place = torch.arange(9)
    mask = torch.stack([place >= 9 - n if left else place < n for n in lengths])
    together = mixer(x, mask)
    for row, n in enumerate(lengths):
        text = slice(9 - n, 9) if left else slice(0, n)
        alone = mixer(x[row : row + 1, text])[0] if n else torch.zeros(0, WIDTH, dtype=torch.float64)
        torch.testing.assert_close(together[row, text], alone, rtol=0, atol=1e-10)


@variants
def test_a_fully_padded_row_gives_zero_and_takes_no_gradient_even_from_nan(structure, inputs):
    mixer, x = make(structure, inputs), normal(2, 7, WIDTH)
    x[1] = float("nan")
    mask = torch.tensor([[True] * 7, [False] * 7])
    y = mixer(x.requires_grad_(), mask)
    y.square().sum().backward()
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    assert torch.equal(x.grad[1], torch.zeros_like(y[1]))
    assert x.grad[0].isfinite().all()


@variants
@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 65, 130])
def test_declared_flops_are_those_that_are_counted(tokens, structure, inputs):
    mixer = make(structure, inputs)
    assert mixer.cost(tokens).flops == measure(lambda: mixer(normal(1, tokens, WIDTH))) > 0


@variants
@pytest.mark.parametrize("merge", ["concat", "reweight-running"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_declared_parameters_and_state_are_the_real_ones(dtype, merge, structure, inputs):
    mixer = make(structure, inputs, merge).to(dtype)
    state = mixer.begin(1, torch.zeros(1, dtype=dtype))
    assert mixer.cost(10).state_bytes == held_bytes(state)
    assert mixer.cost(10).parameters == sum(parameter.numel() for parameter in mixer.parameters())


def test_the_state_does_not_grow_with_the_text():
    assert make().cost(10).state_bytes == make().cost(10000).state_bytes


@pytest.mark.parametrize("structure", STRUCTURES)
def test_look_at_heads_of_one_channel_shows_how_strongly_each_token_is_read(structure):
    mixer, T = make(structure, width=3, heads=3), 8
    K_HT = mixer.system.kernel(T, torch.float64)[:, 0, 0]
    pattern = mixer.look(normal(2, T, 3)).pattern_BHTT
    for head, t, s in itertools.product(range(3), range(T), range(T)):
        expected = K_HT[head, t - s].abs() if s <= t else torch.zeros((), dtype=torch.float64)
        torch.testing.assert_close(pattern[1, head, t, s], expected)


@variants
def test_look_is_the_root_mean_square_of_what_a_token_adds_to_a_later_one(structure, inputs):
    """Measured by the derivative of what a head writes by what it was given: K_{t-s}, and skip where t = s."""
    mixer, T, D = make(structure, inputs), 6, WIDTH // HEADS
    mixer.into.weight.data = torch.eye(WIDTH, dtype=torch.float64)
    mixer.skip_W.data.zero_()
    x = normal(1, T, WIDTH)
    slope = torch.autograd.functional.jacobian(lambda x: mixer.look(x).heads_BTHD[0], x)[:, :, :, 0]
    pattern = mixer.look(x).pattern_BHTT[0]
    for head in range(HEADS):
        read = slope[:, head, :, :, head * D : (head + 1) * D].square().sum((1, 3))
        entries = D if inputs == "channel" else D * D
        torch.testing.assert_close(pattern[head], (read / entries).sqrt(), rtol=0, atol=1e-12)


@variants
@pytest.mark.parametrize("merge", ["concat", "shift", "reweight-running"])
def test_look_hands_out_the_heads_that_make_the_output_and_shows_nothing_of_padding(merge, structure, inputs):
    mixer = make(structure, inputs, merge)
    x, mask = padded(normal(2, 6, WIDTH), 2, 1)
    look = mixer.look(x, mask)
    torch.testing.assert_close(mixer.out(look.heads_BTHD.flatten(2)), mixer(x, mask), rtol=0, atol=1e-12)
    both = mask[:, None, :, None] & mask[:, None, None, :] & torch.ones(9, 9, dtype=torch.bool).tril()
    assert torch.equal(look.pattern_BHTT > 0, both.expand(2, HEADS, 9, 9))


def grown(structure, inputs, radius):
    mixer = make(structure, inputs).float()
    if structure == "dense":
        mixer.system.move_GNN.data = radius * torch.eye(STATE).expand(mixer.system.systems, STATE, STATE).clone()
    else:
        mixer.system.logit_G.data.fill_(0.0)
        mixer.system.rank_2GN.data.fill_(((radius - 0.5) / STATE) ** 0.5)
    return mixer


@pytest.mark.parametrize("form", ["fast", "reference", "step"])
@pytest.mark.parametrize(("structure", "inputs"), VARIANTS[2:])
def test_powers_that_overflow_are_told_in_one_sentence_and_never_become_nan(structure, inputs, form):
    mixer, x = grown(structure, inputs, 1.5), normal(1, 700, WIDTH).float()
    run = {
        "fast": lambda: mixer(x),
        "reference": lambda: mixer(x, impl="reference"),
        "step": lambda: step_over(mixer, x, [0, 10, 700]),
    }
    # Beside a transform the limit is 1 / eps, since rounding would drown the first tokens; elsewhere overflow itself.
    length = 40 if form == "fast" and (structure, inputs) != ("dense", "head") else 110
    words = (
        rf"spectral radius 1\.5 outgrows float32: its powers pass .* after about {length} tokens; "
        r"lower train.rate .* structure = \"diagonal\""
    )
    with torch.no_grad(), pytest.raises(InputError, match=words):
        run[form]()
    assert mixer(x[:, :20]).isfinite().all()


@pytest.mark.parametrize(("structure", "inputs"), VARIANTS[2:])
def test_what_grows_a_little_is_still_right_at_the_first_tokens(structure, inputs):
    mixer, x = grown(structure, inputs, 1.01), normal(1, 700, WIDTH).float()
    found, expected = mixer(x), mixer(x, impl="reference")
    assert expected.abs().max() > 50
    assert (found - expected)[:, :10].abs().max() < 2e-3


def test_weights_that_are_nan_are_not_blamed_on_growth():
    for structure, inputs in VARIANTS:
        mixer = make(structure, inputs)
        for parameter in mixer.parameters():
            parameter.data.fill_(float("nan"))
        assert mixer(normal(1, 4, WIDTH)).isnan().all()


@pytest.mark.parametrize("size", [-100.0, 100.0])
def test_a_diagonal_state_space_cannot_grow_whatever_it_learns(size):
    mixer = make().float()
    mixer.system.modes_2GN.data.fill_(size)
    x = normal(1, 300, WIDTH).float()
    assert mixer(x).isfinite().all()
    gradients = torch.autograd.grad(mixer(x).sum(), list(mixer.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert mixer.system.definition(torch.float32)[0].abs().max() < 1


@pytest.mark.parametrize("block", [1, 2, 1000])
@pytest.mark.parametrize("state", [1, 2, 5])
@variants
def test_first_values_are_stable_the_same_each_time_and_of_useful_size(structure, inputs, state, block):
    options = {"structure": structure, "inputs": inputs, "state": state}
    mixer, again = (StateSpace(WIDTH, HEADS, block, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(mixer.parameters(), again.parameters(), strict=True))
    A, B, C = mixer.system.definition(torch.float64)
    assert torch.linalg.eigvals(A).abs().max() < 1
    assert 1e-3 < (C @ B).real.square().mean().sqrt() < 10
    assert all(parameter.ndim != 2 for parameter in mixer.system.parameters()), "a vector to optimizers"


WRONG = {
    "structure": (
        {"structure": "diagnoal"},
        "structure = 'diagnoal' is not valid; did you mean 'diagonal'? (allowed: dense, diagonal, rank-one)",
    ),
    "inputs": ({"inputs": "heads"}, "inputs = 'heads' is not valid; did you mean 'head'? (allowed: channel, head)"),
    "state": ({"state": 0}, "state = 0 is not valid; it is a whole number of at least 1, such as 16"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_option_is_told_with_what_is_allowed(options, message):
    with pytest.raises(InputError) as told:
        StateSpace(WIDTH, HEADS, 10, **options)
    assert str(told.value) == f"statespace {message}"


def test_a_form_that_does_not_exist_is_refused_and_never_replaced():
    with pytest.raises(InputError, match=r"impl = 'fused' is not valid.*allowed: auto, reference"):
        make()(normal(1, 3, WIDTH), impl="fused")
