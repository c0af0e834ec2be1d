"""What options mean, which are refused, and what odd ones give. Legend: see the mixers."""

from contextlib import suppress

import pytest
import torch
from mixer_examples import KINDS, WIDTH, make_mixer, normal

from keyhole.core.errors import InputError
from keyhole.mixers.heads import held_bytes
from keyhole.mixers.linear import Linear
from keyhole.mixers.ridge import Ridge, inverse
from keyhole.parts.position import Rope

REFUSED = {
    "no ridge": ("ridge", {"lam": 0.0}, "ridge lam = 0.0 is not valid; it is above 0"),
    "a negative ridge": ("ridge", {"lam": -1.0}, "ridge lam = -1.0 is not valid"),
    "an infinite ridge": ("ridge", {"lam": float("inf")}, "ridge lam = inf is not valid"),
    "a ridge that grows": ("ridge", {"decay": 1.1}, "ridge decay = 1.1 is not valid; it is above 0 and at most 1"),
    "no decay": ("ridge", {"decay": 0.0}, "ridge decay = 0.0 is not valid"),
    "an empty chunk": ("linear", {"chunk": 0}, "linear chunk = 0 is not valid; it is 1 or more"),
    "an empty window": ("window", {"window": 0}, "window window = 0 is not valid; it is 1"),
    "a third power": ("polynomial", {"offset": 2}, "polynomial offset = 2 is not valid; it is 1 for"),
    "a ridge beyond float32": ("ridge", {"lam": 1e-50}, "ridge lam = 1e-50 is not valid; it is above 0 .1e-12 to 1e.12"),
    "half a name": ("linear", {"feature": ":phi"}, "linear feature = ':phi' is not valid.* is written \"my.py:phi\""),
    "exp of anything": ("linear", {"feature": "exp"}, "linear feature exp overflows .* set qk_norm = true, or use elu.1"),
    "an unknown feature": ("linear", {"feature": "elu"}, "linear feature = 'elu' is not valid; did you mean 'relu'"),
}


@pytest.mark.parametrize(("name", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        make_mixer(name, **options)


FEATURES = """
import torch
calls = 0
def squares(x): return x.square() + .1
def wide(x): return torch.cat((x.relu(), (-x).relu()), -1)
def negative(x): return x
def nan(x): return x.sqrt()
def short(x): return x[:, :, :-1].exp()
def none(x): return x.relu()[..., :0]
number = 3
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my.py").write_text(FEATURES)
    return tmp_path


@pytest.mark.parametrize(("name", "phi"), [("squares", lambda x: x.square() + 0.1),
                                           ("wide", lambda x: torch.cat((x.relu(), (-x).relu()), -1))])  # fmt: skip
def test_a_feature_map_of_the_user_s_is_what_weights_are_made_of(folder, name, phi):
    mixer = Linear(WIDTH, 4, 64, folder=folder, feature=f"my.py:{name}").double()
    q, k = normal(1, 4, 9, 6), normal(1, 4, 9, 6, seed=1)
    scores = (phi(q) @ phi(k).mT).tril()
    torch.testing.assert_close(mixer.weights(q, k, None), scores / (scores.sum(-1, keepdim=True) + 1e-6))
    assert mixer.features == phi(q).shape[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("negative", "linear feature my.py:negative returned negative values, down to -"),
        ("nan", "linear feature my.py:nan returned NaN; weights need a map that is never negative"),
        ("short", "linear feature my.py:short returned .* it must keep all but the last"),
        ("number", "linear feature my.py:number is not a function"),
        ("none", "linear feature my.py:none returned no features; it must return one at least"),
        ("gone", "my.py has no 'gone'"),
    ],
)
def test_a_feature_map_that_cannot_be_one_is_told_so(folder, name, message):
    with pytest.raises(InputError, match=message):
        used(folder, name)


def used(folder, name):
    mixer = Linear(WIDTH, 4, 64, folder=folder, feature=f"my.py:{name}").double()
    mixer.qkv.weight.data = normal(3 * WIDTH, WIDTH)
    return mixer(normal(2, 9, WIDTH))


@pytest.mark.parametrize("name", ["linear", "polynomial", "ridge"])
def test_a_chunk_longer_than_the_text_is_the_text(name):
    x = normal(2, 9, WIDTH)
    torch.testing.assert_close(make_mixer(name, chunk=9)(x), make_mixer(name, chunk=500)(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_fully_padded_rows_give_zero_heads_and_no_nan_in_any_gradient(name):
    mixer, x = make_mixer(name), normal(3, 7, WIDTH).requires_grad_()
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1] = False
    y = mixer(x, mask)
    y.square().sum().backward()
    assert y[1].abs().max() == 0
    assert x.grad.isfinite().all()
    assert x.grad[1].abs().max() == 0


def test_keys_that_leave_no_inverse_are_an_error_and_no_nan():
    H = torch.eye(4)
    H[0, 0] = -1.0
    with pytest.raises(InputError, match=r"no longer positive definite .* raise lam"):
        inverse(H)


def test_the_inverse_has_the_gradient_of_an_inverse():
    x = normal(2, 5, 5)
    H = (x @ x.mT + torch.eye(5)).requires_grad_()
    symmetric = lambda h: (h + h.mT) / 2  # noqa: E731 - it is defined on symmetric matrices
    assert torch.autograd.gradcheck(lambda h: inverse(symmetric(h)), H)


def test_lam_is_learned_only_if_asked():
    assert "log_lam" in dict(Ridge(WIDTH, 4, 64).named_parameters())
    fixed = Ridge(WIDTH, 4, 64, lam=0.5, learn_lam=False)
    assert "log_lam" not in dict(fixed.named_parameters())
    assert fixed.begin(1, torch.zeros(1)).memory[0].diagonal(0, -1, -2).unique().item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["softmax", "window", "polynomial", "ridge"])
def test_under_rope_results_depend_on_distances_alone(name):
    """Padding on the left moves every token to a later place; rope's tables are float32."""
    mixer = make_mixer(name, position=Rope(WIDTH, 4, 64))
    text = normal(2, 9, WIDTH)
    x, mask = torch.cat((normal(2, 7, WIDTH, seed=3), text), 1), torch.ones(2, 16, dtype=torch.bool)
    mask[:, :7] = False
    torch.testing.assert_close(mixer(x, mask)[:, 7:], mixer(text), rtol=0, atol=1e-4)
    assert (mixer(text) - make_mixer(name)(text)).abs().max() > 1e-3


@pytest.mark.parametrize("name", KINDS)
def test_a_form_that_there_is_not_is_an_error_and_never_the_default(name):
    with pytest.raises(InputError, match="impl = 'refrence' is not valid; did you mean 'reference'"):
        make_mixer(name)(normal(1, 3, WIDTH), impl="refrence")


@pytest.mark.parametrize("other", [*KINDS, "narrower", "another batch", "nothing"])
@pytest.mark.parametrize("name", KINDS)
def test_a_state_of_another_model_is_refused(name, other):
    mixer, x = make_mixer(name), normal(2, 3, WIDTH)
    if other == "narrower":
        state = KINDS[name](12, 2, 2048).double().begin(2, x)
    else:
        state = (
            None if other == "nothing" else make_mixer(name if "batch" in other else other).begin(3 - (other in KINDS), x)
        )
    if other == name:
        assert mixer.step(x, state)[0].isfinite().all()
        return
    with pytest.raises(InputError, match=f"this state is of another model: {name} keeps "):
        mixer.step(x, state)


@pytest.mark.parametrize("name", KINDS)
def test_a_state_holds_no_more_memory_after_a_long_prompt(name):
    mixer, x = make_mixer(name), normal(1, 500, WIDTH)
    with torch.no_grad():
        _, state = mixer.step(x, mixer.begin(1, x))
    assert held_bytes(state) == held_bytes(mixer.begin(1, x))


@pytest.mark.parametrize(("lam", "decay"), [(1e-12, 1.0), (1e-12, 0.9), (1.0, 0.2)])
def test_keys_that_repeat_until_nothing_else_is_left_are_an_error_or_finite(lam, decay):
    """One token, 2,000 times: with a decay lam is 0 in the end, and what the key does not point at has no inverse."""
    mixer = make_mixer("ridge", lam=lam, decay=decay).float()
    with suppress(InputError):
        assert mixer(torch.ones(1, 2000, WIDTH)).isfinite().all()


def test_a_window_asks_a_position_only_for_places_that_there_are():
    class Table(torch.nn.Module):
        def bias(self, queries, keys):
            table = torch.arange(16.0)
            return (table[queries][:, None] - table[keys]).expand(4, -1, -1)

    mixer, x = make_mixer("window", window=5, position=Table()), normal(1, 16, WIDTH)
    torch.testing.assert_close(mixer(x), mixer(x, impl="reference"), rtol=0, atol=1e-12)


def test_a_window_wider_than_the_block_is_the_block():
    assert make_mixer("window", window=10**9).window == 2048


def test_decoding_ridge_attention_does_not_drift():
    """P is made anew from H now and then: after 3,000 tokens it is still the inverse, in float32."""
    mixer = make_mixer("ridge", lam=0.1).float()
    with torch.no_grad():
        state = mixer.begin(1, torch.zeros(1))
        for x in normal(3000, 1, 1, WIDTH).float():
            _, state = mixer.step(x, state)
    H, P, _ = state.memory
    torch.testing.assert_close(H @ P, torch.eye(6).expand(1, 4, 6, 6), rtol=0, atol=1e-4)
