import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_helpers import tiny, write_text

from keyhole.core.config import Spec
from keyhole.core.errors import InputError
from keyhole.model.lm import build
from keyhole.training.optim import QUINTIC, Group, build_optimizer, newton_schulz
from keyhole.training.weights import FlatWeights, kind_of, own_rate

RATE, STEPS = 0.05, 5
B1, B2, EPS = 0.9, 0.95, 1e-8


# The definitions, one number after the other: w weights, g their gradient, s what is remembered, t the step from 1.


def sgd(w, g, s, t, momentum=0.9, decay=0.0, nesterov=False):
    g = g + decay * w
    s["m"] = momentum * s.get("m", 0) + g
    return w - RATE * (g + momentum * s["m"] if nesterov else s["m"])


def adagrad(w, g, s, t, decay=0.0, eps=1e-10):
    g = g + decay * w
    s["v"] = s.get("v", 0) + g**2
    return w - RATE * g / (s["v"] ** 0.5 + eps)


def adam(w, g, s, t, decay=0.0):
    g = g + decay * w
    s["m"] = B1 * s.get("m", 0) + (1 - B1) * g
    s["v"] = B2 * s.get("v", 0) + (1 - B2) * g**2
    return w - RATE * (s["m"] / (1 - B1**t)) / ((s["v"] / (1 - B2**t)) ** 0.5 + EPS)


def adamw(w, g, s, t, decay=0.1):
    return adam(w, g, s, t) - RATE * decay * w


def sign(w, g, s, t, momentum=0.9, decay=0.0):
    s["m"] = momentum * s.get("m", 0) + (1 - momentum) * g
    return w - RATE * (torch.sign(s["m"]) + decay * w)


def muon(w, g, s, t, momentum=0.95, decay=0.0, newton_steps=5):
    s["m"] = momentum * s.get("m", 0) + g
    ahead = g + momentum * s["m"]
    rows, columns = w.shape
    return w - RATE * (decay * w + max(1, rows / columns) ** 0.5 * orthogonal(ahead, newton_steps))


def orthogonal(x, steps):
    """The scalar quintic on the singular values, with the singular vectors left alone."""
    u, values, v = torch.linalg.svd(x, full_matrices=False)
    values = values / (values.norm() + 1e-7)
    for _ in range(steps):
        values = quintic(values)
    return u @ torch.diag(values) @ v


def quintic(s):
    a, b, c = QUINTIC
    return a * s + b * s**3 + c * s**5


def run(spec, weights, gradients, groups=None, dtype=torch.float64):
    """Weights after steps with the given gradients."""
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    groups = groups or [Group("matrix", [p], lambda flat: [flat], decays=True) for p in parameters]
    groups = [Group(g.kind, [p], g.matrices, g.decays) for g, p in zip(groups, parameters, strict=True)]
    optimizer = build_optimizer(spec, RATE, groups, dtype)
    for gradient in gradients:
        for parameter, g in zip(parameters, gradient, strict=True):
            parameter.grad = g.clone()
        optimizer.step(1.0)
    return [parameter.detach() for parameter in parameters]


def numbers(*shapes, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


SHAPES = [(4, 6), (6, 4), (5, 5), (1, 7), (7, 1)]
DEFINITIONS = {
    "sgd": (sgd, {}),
    "sgd with decay": (sgd, {"decay": 0.3, "momentum": 0.5}),
    "sgd without momentum": (sgd, {"momentum": 0.0}),
    "sgd, nesterov": (sgd, {"nesterov": True}),
    "adagrad": (adagrad, {}),
    "adagrad with decay": (adagrad, {"decay": 0.3, "eps": 1e-3}),
    "adam": (adam, {}),
    "adam with decay": (adam, {"decay": 0.3}),
    "adamw": (adamw, {}),
    "adamw with decay": (adamw, {"decay": 0.7}),
    "sign": (sign, {}),
    "sign with decay": (sign, {"decay": 0.3, "momentum": 0.0}),
    "muon": (muon, {}),
    "muon with decay": (muon, {"decay": 0.3, "momentum": 0.5, "newton_steps": 3}),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_an_optimizer_follows_its_formula_in_float64(name):
    definition, options = DEFINITIONS[name]
    weights = numbers(*SHAPES)
    gradients = [numbers(*SHAPES, seed=1 + t) for t in range(STEPS)]
    found = run(Spec(name=definition.__name__, options=options), weights, gradients)
    for i, shape in enumerate(SHAPES):
        w, s = weights[i], {}
        for t in range(STEPS):
            w = definition(w, gradients[t][i], s, t + 1, **options)
        torch.testing.assert_close(found[i], w, rtol=1e-10, atol=1e-10, msg=lambda text, shape=shape: f"{shape}: {text}")


@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 1000), steps=st.integers(1, 6))
def test_newton_schulz_is_the_scalar_quintic_on_singular_values(rows, columns, seed, steps):
    (x,) = numbers((min(rows, columns), max(rows, columns)), seed=seed)
    torch.testing.assert_close(newton_schulz(x[None], steps)[0], orthogonal(x, steps), rtol=1e-8, atol=1e-8)


def test_newton_schulz_brings_singular_values_near_one():
    (x,) = numbers((3, 32, 64))
    values = torch.linalg.svdvals(newton_schulz(x, 5))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize("stack", [(6,), (2, 4), (2, 2, 2), (1, 2, 3)])
def test_muon_takes_stacked_matrices_one_by_one(stack):
    (w,), gradients = numbers((6, 4)), [numbers((6, 4), seed=1 + t) for t in range(STEPS)]
    group = Group("matrix", [], lambda flat: list(flat.split(stack)), decays=True)
    (together,) = run(Spec(name="muon"), [w], gradients, [group])
    apart = run(Spec(name="muon"), list(w.split(stack)), [list(g[0].split(stack)) for g in gradients])
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-12, atol=1e-12)


def test_muon_moves_a_matrix_and_its_transpose_alike_but_for_the_scale_of_tall_ones():
    (w,), gradients = numbers((8, 2)), [numbers((8, 2), seed=1 + t) for t in range(STEPS)]
    (tall,) = run(Spec(name="muon"), [w], gradients)
    (wide,) = run(Spec(name="muon"), [w.T.contiguous()], [[g[0].T.contiguous()] for g in gradients])
    torch.testing.assert_close(tall - w, (wide.T - w) * (8 / 2) ** 0.5, rtol=1e-10, atol=1e-12)


def test_muon_agrees_with_torchs_own_where_torch_has_one():
    muon_of_torch = getattr(torch.optim, "Muon", None)
    if muon_of_torch is None:
        pytest.skip("this torch has no Muon")
    (w,), gradients = numbers((16, 24)), [numbers((16, 24), seed=1 + t) for t in range(STEPS)]
    w, gradients = w.float(), [[g[0].float()] for g in gradients]
    (ours,) = run(Spec(name="muon"), [w], gradients, dtype=torch.bfloat16)
    theirs = torch.nn.Parameter(w.clone())
    # Its momentum is a mean where ours is a sum: the same direction, and the iteration begins by dividing by the norm.
    optimizer = muon_of_torch([theirs], lr=RATE, weight_decay=0.0, momentum=0.95)
    for (gradient,) in gradients:
        theirs.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(ours - w, theirs.detach() - w, rtol=0.03, atol=0.01 * RATE * STEPS)


def model_of(tmp_path, **changes):
    write_text(tmp_path)
    return build(tiny(tmp_path, model_layers=2, model_norm={"name": "layer", "bias": True}, **changes), vocab=11)


def by_role(parameter):
    """Relative rates that differ within each kind."""
    return {"out": 0.25, "position": 3.0, "bias": 0.5}.get(parameter.role, 1.0)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw", "sign", "muon"])
@pytest.mark.parametrize(("kv_heads", "relative"), [(None, own_rate), (1, own_rate), (1, by_role)])
def test_flat_weights_move_as_each_parameter_by_itself_would(tmp_path, name, kv_heads, relative):
    changes = {"model_tie": False, "model_width": 16, "model_heads": 4} | ({"model_kv_heads": kv_heads} if kv_heads else {})
    flat, apart = model_of(tmp_path, **changes), model_of(tmp_path, **changes)
    weights = FlatWeights(flat, torch.float32, relative)
    one = build_optimizer(Spec(name=name), RATE, weights.groups)
    groups = [
        Group(
            kind_of(p),
            [p],
            lambda x, p=p: list(x.split(getattr(p, "stack", x.shape[0]))),
            kind_of(p) != "vector",
            relative(p),
        )
        for p in apart.parameters()
    ]
    other = build_optimizer(Spec(name=name), RATE, groups)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        weights.zero_grad()
        for a, b in zip(flat.parameters(), apart.parameters(), strict=True):
            b.grad = torch.randn(b.shape, generator=draw)
            a.grad = b.grad.clone()
        weights.collect_grad()
        one.step(0.5)
        other.step(0.5)
    for (key, a), b in zip(flat.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw", "sign", "muon"])
def test_decay_shrinks_matrices_and_tables_and_leaves_vectors_alone(tmp_path, name):
    model = model_of(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = {key: tensor.detach().clone() for key, tensor in model.named_parameters()}
    weights = FlatWeights(model, torch.float32)
    optimizer = build_optimizer(Spec(name=name, options={"decay": 0.5}), 0.1, weights.groups)
    weights.zero_grad()
    weights.collect_grad()
    optimizer.step(1.0)
    kinds = set()
    for key, parameter in model.named_parameters():
        kind = kind_of(parameter)
        kinds.add(kind)
        moved = not torch.equal(parameter, before[key])
        assert moved == (kind != "vector"), key
        assert not moved or parameter.mean() < before[key].mean(), key
    assert kinds == {"matrix", "table", "vector"}


def test_matrices_tables_and_vectors_are_told_apart_by_their_role(tmp_path):
    kinds = {key: kind_of(p) for key, p in model_of(tmp_path, model_tie=False).named_parameters()}
    assert kinds["embedding"] == kinds["head"] == kinds["position.weight"] == "table"
    assert kinds["blocks.0.mixer.qkv.weight"] == kinds["blocks.1.mixer.out.weight"] == "matrix"
    assert all(kind == "vector" for key, kind in kinds.items() if "norm" in key)
    assert {key for key, kind in kinds.items() if kind == "matrix"} == {
        key for key in kinds if (key.endswith(".weight") and ".mixer." in key) or ".feed." in key
    }


def test_what_is_treated_alike_lies_side_by_side(tmp_path):
    """Matrices, tables, vectors; in a kind those of one relative rate; in the order of the model; no gap, no overlap."""
    changes = {"model_tie": False, "model_mixer": {"name": "softmax", "bias": True}}
    for relative, expected in (
        (own_rate, [("matrix", 1.0), ("table", 1.0), ("vector", 1.0)]),
        (by_role, [("matrix", 1.0), ("matrix", 0.25), ("table", 1.0), ("table", 3.0), ("vector", 1.0), ("vector", 0.5)]),
    ):
        model = model_of(tmp_path, **changes)
        weights = FlatWeights(model, torch.float32, relative)
        assert [(group.kind, group.multiplier) for group in weights.groups] == expected
        assert torch.equal(torch.cat([group.tensors[0] for group in weights.groups]), weights.master)
        for group in weights.groups:
            alike = [p for p in model.parameters() if (kind_of(p), relative(p)) == (group.kind, group.multiplier)]
            assert torch.equal(torch.cat([p.flatten() for p in alike]), group.tensors[0])
            assert alike[0].data_ptr() == group.tensors[0].data_ptr()


def test_decoupled_decay_is_multiplied_by_the_rate_of_its_group():
    """As in torch: a matrix whose rate is a quarter decays a quarter as fast."""
    for name in ("adamw", "sign", "muon"):
        parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
        group = Group("matrix", [parameter], lambda flat: [flat], decays=True, multiplier=0.25)
        optimizer = build_optimizer(Spec(name=name, options={"decay": 0.5}), RATE, [group], torch.float64)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step(1.0)
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 1 - 0.25 * RATE * 0.5))


def test_muon_trains_the_rest_with_adamw_at_its_own_rate():
    weights, gradients = numbers((3, 4), (3, 4)), [numbers((3, 4), (3, 4), seed=1)]
    groups = [Group(kind, [], lambda flat: [flat], decays=True) for kind in ("matrix", "table")]
    found = run(Spec(name="muon", options={"adam_rate": RATE}), weights, gradients, groups)
    torch.testing.assert_close(found[1], adam(weights[1], gradients[0][1], {}, 1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found[0], muon(weights[0], gradients[0][0], {}, 1), rtol=1e-10, atol=1e-12)
    found = run(Spec(name="muon"), weights, gradients, groups)
    moved = adam(weights[1], gradients[0][1], {}, 1) - weights[1]
    torch.testing.assert_close(found[1] - weights[1], moved / 5, rtol=1e-10, atol=1e-12)


def test_the_factor_scales_the_rate_of_every_group_and_does_not_pile_up():
    weights, gradient = numbers((3, 4)), numbers((3, 4), seed=1)
    parameter = torch.nn.Parameter(weights[0].clone())
    optimizer = build_optimizer(
        Spec(name="sign", options={"momentum": 0.0}), RATE, [Group("matrix", [parameter], lambda flat: [flat], decays=True)]
    )
    parameter.grad = gradient[0]
    for factor in (0.5, 0.5, 0.25, 0.0):
        optimizer.step(factor)
    torch.testing.assert_close(parameter.detach(), weights[0] - 1.25 * RATE * gradient[0].sign(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "adamw", "sign", "muon"])
def test_an_optimizers_state_goes_out_and_back_in_bit_for_bit(tmp_path, name):
    def stepped(steps, state=None):
        model = model_of(tmp_path)
        weights = FlatWeights(model, torch.float32)
        optimizer = build_optimizer(Spec(name=name), RATE, weights.groups)
        if state is not None:
            weights.master.copy_(state[0])
            optimizer.restore(state[1])
        for step in steps:
            draw = torch.Generator().manual_seed(step)
            weights.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            weights.collect_grad()
            optimizer.step(1.0)
        return weights.master.clone(), {key: value.clone() for key, value in optimizer.tensors().items()}

    whole = stepped([1, 2, 3, 4])
    halves = stepped([3, 4], stepped([1, 2]))
    assert torch.equal(whole[0], halves[0])
    assert whole[1].keys() == halves[1].keys()
    assert all(torch.equal(whole[1][key], halves[1][key]) for key in whole[1])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (
            "adamm",
            {},
            r"there is no optimizer 'adamm'; did you mean 'adam'\? \(allowed: adagrad, adam, adamw, muon, sgd, sign\)",
        ),
        (
            "sgd",
            {"momentun": 1},
            r"unknown option 'momentun' of optimizer 'sgd'; did you mean 'momentum'\? \(allowed: decay",
        ),
        ("sgd", {"momentum": 1.0}, r"optimizer 'sgd': momentum = 1.0 is not valid; it takes a number from 0 to below 1"),
        ("sgd", {"momentum": True}, r"momentum = True is not valid"),
        ("sgd", {"nesterov": 1}, r"nesterov = 1 is not valid; it takes true or false"),
        (
            "adam",
            {"betas": [0.9]},
            r"betas = \[0.9\] is not valid; it takes two numbers from 0 to below 1, such as \[0.9, 0.95\]",
        ),
        ("adamw", {"betas": [0.9, 1.0]}, r"betas = \[0.9, 1.0\] is not valid"),
        ("adamw", {"decay": -1}, r"decay = -1 is not valid; it takes a number of at least 0"),
        ("adamw", {"eps": "small"}, r"eps = 'small' is not valid"),
        ("muon", {"newton_steps": 0}, r"newton_steps = 0 is not valid; it takes a whole number of at least 1"),
        ("muon", {"newton_steps": 2.5}, r"newton_steps = 2.5 is not valid"),
        ("sgd", {"nesterov": True, "momentum": 0.0}, r"nesterov = true needs a momentum above 0, such as 0.9"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(name, options, says):
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(InputError, match=says):
        build_optimizer(
            Spec(name=name, options=options), RATE, [Group("matrix", [parameter], lambda flat: [flat], decays=True)]
        )
