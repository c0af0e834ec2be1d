"""mup and unit do what their derivation says: first values, relative rates, and steps that are as large at every width."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from model_helpers import small, some_ids
from torch import nn

from keyhole.core.config import Recipe, Spec
from keyhole.model.decode import Decoder
from keyhole.model.lm import LM, build
from keyhole.model.parameterization import logit_multiplier, rate_multiplier
from keyhole.model.quick import QuickStep
from keyhole.model.registry import CATALOGUE
from keyhole.parts.contract import Linear, parameter
from keyhole.training.engine import Engine
from keyhole.training.precision import Precision

VOCAB, TOKENS, HEAD, STEPS = 17, 16, 16, 3
WIDTHS = (64, 128, 256, 512)
RATES = {
    "mup": {"sgd": 0.3, "adam": 0.01, "sign": 0.01, "muon": 0.05},
    "unit": {"sgd": 30.0, "adam": 0.05, "sign": 0.05, "muon": 0.2},
    "standard": {"adam": 0.01},
}


def recipe_of(init, width=64, **changes) -> Recipe:
    shape = {"model.width": width, "model.heads": width // HEAD, "model.init": init, "data.block": TOKENS}
    return small(shape | {f"model.{key}": value for key, value in changes.items()})


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


@torch.no_grad()
def activations(model: LM) -> dict[str, torch.Tensor]:
    """What every block writes, what the head reads, and the logits."""
    seen: dict[str, torch.Tensor] = {}
    hooks = [
        block.register_forward_hook(lambda _, __, y, name=f"block {i}": seen.update({name: y}))
        for i, block in enumerate(model.blocks)
    ]
    hooks.append(model.norm.register_forward_hook(lambda _, __, y: seen.update({"norm": y})))
    seen["logits"] = model(some_ids(4, TOKENS, VOCAB))
    for hook in hooks:
        hook.remove()
    return seen


@cache
def moved(init: str, optimizer: str, width: int, tie: bool) -> dict[str, float]:
    """By how much a few steps change each activation, as a root mean square."""
    recipe = recipe_of(init, width, tie=tie)
    train = recipe.train.model_copy(
        update={"optimizer": Spec(name=optimizer), "rate": RATES[init][optimizer], "clip": 0.0, "batch": 4}
    )
    engine = Engine(build(recipe, VOCAB), train, precision=Precision("float32", "asked for"))
    before = activations(engine.model)
    for seed in range(STEPS):
        ids = some_ids(4, TOKENS + 1, VOCAB, seed)
        engine.advance(ids[:, :-1], ids[:, 1:])
    after = activations(engine.model)
    return {name: rms(after[name] - before[name]) for name in before}


def spread(init: str, optimizer: str, tie: bool) -> dict[str, float]:
    """The largest change over the smallest, over all widths."""
    widths = WIDTHS[:-1] if optimizer == "muon" else WIDTHS  # its steps at the widest would take most of these tests' time
    found = [moved(init, optimizer, width, tie) for width in widths]
    return {name: max(one[name] for one in found) / min(one[name] for one in found) for name in found[0]}


@pytest.mark.parametrize("tie", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "sign", "muon"])
@pytest.mark.parametrize("init", ["mup", "unit"])
def test_a_few_steps_change_activations_and_logits_by_as_much_at_every_width(init, optimizer, tie):
    assert min(moved(init, optimizer, WIDTHS[0], tie).values()) > 1e-3, "nothing moved, so nothing is shown"
    assert max(spread(init, optimizer, tie).values()) < 1.7, spread(init, optimizer, tie)


def test_under_standard_the_same_steps_change_more_the_wider_the_model():
    """The control: what is measured above does tell a parameterization that does not transfer."""
    changes = [moved("standard", "adam", width, tie=False)["block 0"] for width in WIDTHS]
    assert changes == sorted(changes)
    assert changes[-1] > 8 * changes[0]
    assert spread("standard", "adam", tie=False)["logits"] > 2.5


@pytest.mark.parametrize(("init", "optimizer"), [("mup", "adam"), ("mup", "sign"), ("unit", "sgd"), ("unit", "adam")])
def test_without_relative_rates_first_values_alone_do_not_transfer(init, optimizer, monkeypatch):
    """The control for the rates: all of them the recipe's own."""
    monkeypatch.setattr(Engine, "_relative_rate", lambda _, __: 1.0)
    narrow, wide = (moved.__wrapped__(init, optimizer, width, tie=False) for width in (WIDTHS[0], WIDTHS[-1]))
    assert max(max(wide[name] / narrow[name], narrow[name] / wide[name]) for name in narrow) > 2


def multipliers(init: str, optimizer: str, width: int, **changes) -> dict[str, float]:
    """Every parameter's relative rate, as a training sets it."""
    recipe = recipe_of(init, width, **changes)
    train = recipe.train.model_copy(update={"optimizer": Spec(name=optimizer)})
    engine = Engine(build(recipe, VOCAB), train, precision=Precision("float32", "asked for"))
    found = {}
    for group in engine.weights.groups:
        start = group.tensors[0].data_ptr()
        stop = start + 4 * group.tensors[0].numel()
        found |= {n: group.multiplier for n, p in engine.model.named_parameters() if start <= p.data_ptr() < stop}
    return found


BIASES = {"mixer": {"name": "softmax", "bias": True, "qk_norm": True}, "feed": {"name": "swiglu", "bias": True}}


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam", "adamw", "sign", "muon"])
@pytest.mark.parametrize("init", ["mup", "unit"])
def test_at_the_base_width_every_parameter_has_the_recipe_s_rate(init, optimizer):
    for width in (32, 64):
        found = multipliers(init, optimizer, width, base_width=width, tie=False, **BIASES)
        assert set(found.values()) == {1.0}


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "sign", "muon"])
@pytest.mark.parametrize("init", ["standard", "quiet"])
def test_without_a_parameterization_every_parameter_has_the_recipe_s_rate(init, optimizer):
    assert set(multipliers(init, optimizer, 256).values()) == {1.0}


TABLE = {  # optimizer: embedding and the like, matrices under mup, matrices under unit; at 16 times the base width
    "sgd": (16, 1, 16), "adagrad": (1, 1 / 16, 1 / 4), "adam": (1, 1 / 16, 1 / 4), "adamw": (1, 1 / 16, 1 / 4),
    "sign": (1, 1 / 16, 1 / 4), "muon": (1, 1, 4),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", TABLE)
@pytest.mark.parametrize("init", ["mup", "unit"])
def test_rates_are_those_of_the_table(init, optimizer):
    other, *matrix = TABLE[optimizer]
    found = multipliers(init, optimizer, 256, base_width=16, tie=False, **BIASES)
    assert len(found) == 3 + 2 * 14 + 1  # tables, blocks, last norm
    for name, multiplier in found.items():
        fixed = ".qk_norm." in name  # a gain over a head's channels, of which there are as many at every width
        expected = matrix[init == "unit"] if name.endswith(".weight") and "blocks" in name else 1 if fixed else other
        assert multiplier == expected, name


def test_a_dimension_that_does_not_grow_with_the_width_does_not_count_as_growing():
    """A low rank, say: 256 channels read into 8, and 8 written to 256."""
    model = recipe_of("mup", 256, base_width=64).model
    into, back = parameter(8, 256, role="in"), parameter(256, 8, role="out")
    assert [rate_multiplier(into, model, rule) for rule in ("sgd", "adam", "muon")] == [1 / 4, 1 / 4, 1 / 2]
    assert [rate_multiplier(back, model, rule) for rule in ("sgd", "adam", "muon")] == [4, 1, 1]


def test_a_parameter_without_a_role_keeps_its_value_and_the_recipe_s_rate():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((256, 256), 3.0))

    from keyhole.model.init import initialise

    own = Own()
    for init in ("mup", "unit"):
        model = recipe_of(init, 256).model
        initialise(own, model, seed=0)
        assert torch.equal(own.weight, torch.full((256, 256), 3.0))
        assert rate_multiplier(own.weight, model, "sgd") == 1.0


@torch.no_grad()
def test_a_weight_outside_of_a_linear_starts_under_unit_as_large_as_a_linear_s_product():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = parameter(256, 256, role="in")

    from keyhole.model.init import initialise

    bare, model = Bare(), recipe_of("unit", 256).model
    initialise(bare, model, seed=0)
    assert bare.weight.std().item() == pytest.approx(1 / 16, rel=0.02)
    assert rate_multiplier(bare.weight, model, "adam") == 1 / 4


@pytest.mark.parametrize("feed", ["gelu", "relu-squared", "swiglu"])
@pytest.mark.parametrize("width", [64, 512])
def test_under_unit_every_product_starts_with_numbers_of_size_one(width, feed):
    model, seen = build(recipe_of("unit", width, feed=feed, tie=False), VOCAB), {}
    for name, part in model.named_modules():
        if isinstance(part, Linear):
            assert part.weight.std().item() == pytest.approx(1, rel=0.02)
            part.register_forward_hook(lambda _, __, y, name=name: seen.update({name: rms(y)}))
    if feed == "relu-squared":  # its product is made together with the square
        for i, block in enumerate(model.blocks):
            block.feed.register_forward_hook(lambda _, __, y, i=i: seen.update({f"blocks.{i}.feed.down": rms(y)}))
    with torch.no_grad():
        model(some_ids(4, TOKENS, VOCAB))
    assert len(seen) == sum(isinstance(part, Linear) for part in model.modules())
    assert {name: size for name, size in seen.items() if not 0.5 < size < 2} == {}


FEEDS = [{"feed": {"name": feed, "bias": True}} for feed in CATALOGUE["feed"]]
MIXERS = [{"mixer": {"name": "softmax", "bias": True}}, *({"mixer": mixer} for mixer in CATALOGUE["mixer"])]


@pytest.mark.parametrize("init", ["mup", "unit"])
def test_every_product_is_multiplied_once_in_whatever_part_it_is_made(init):
    """Plain matrices with the multipliers in them give the same logits and losses."""
    for changes in FEEDS + MIXERS:
        model = shaken_alike(recipe_of(init, 128, **changes))
        plain = LM(recipe_of("standard", 128, **changes).model, VOCAB, TOKENS, recipe_of(init).folder).double()
        plain.load_state_dict(model.state_dict())
        for ours, theirs in zip(model.modules(), plain.modules(), strict=True):
            if isinstance(ours, Linear):
                theirs.weight.data = ours.effective.detach()
                assert ours.multiplier == (ours.weight.shape[1] ** -0.5 if init == "unit" else 1)
        ids = some_ids(2, TOKENS, VOCAB)
        scaled = plain(ids) * logit_multiplier(model.config)
        torch.testing.assert_close(model(ids), scaled, rtol=1e-10, atol=1e-12)
        losses = nn.functional.cross_entropy(scaled.flatten(0, 1), ids.flatten(), reduction="sum")
        torch.testing.assert_close(model(ids, ids), losses, rtol=1e-10, atol=1e-12)


def shaken_alike(recipe: Recipe) -> LM:
    """The recipe's model in float64, each weight about as large as before but none zero."""
    model, chance = build(recipe, VOCAB).double().eval(), torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data += 0.1 * torch.randn(weight.shape, generator=chance, dtype=torch.float64)
    return model


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("init", ["mup", "unit"])
def test_decoding_quickly_by_steps_and_at_once_gives_the_same_logits(init, tie):
    for changes in ({}, {"feed": "relu-squared", "norm": {"name": "layer", "bias": True}, "kv_heads": 2}):
        model = shaken_alike(recipe_of(init, 128, tie=tie, **changes))
        assert QuickStep.of(model) is not None
        ids = some_ids(1, TOKENS, VOCAB)
        whole = model(ids)[0, 4:]
        for quick in (True, False):
            decoder = Decoder(model, quick=quick)
            told = [decoder.read(ids[0, :5].tolist()), *(decoder.read([token]) for token in ids[0, 5:].tolist())]
            torch.testing.assert_close(torch.stack(told), whole, rtol=1e-9, atol=1e-10)
