import math

import pytest
import torch
from model_helpers import VOCAB, small, some_ids

from keyhole.model.init import scale
from keyhole.model.lm import build

WIDE = {
    "model.width": 256, "model.layers": 3, "data.block": 64,
    "model.mixer": {"name": "softmax", "bias": True, "qk_norm": True},
    "model.feed": {"name": "swiglu", "bias": True}, "model.norm": {"name": "layer", "bias": True},
}  # fmt: skip
OUT = 0.02 / math.sqrt(6)
STANDARD = {"embedding": 0.02, "position": 0.02, "in": 0.02, "out": OUT, "head": 0.02, "gain": 1, "bias": 0}
QUIET = {"embedding": 1, "position": 0.02, "in": None, "out": 0, "head": 0, "gain": 1, "bias": 0}
TABLES = {
    "standard, tied": ("standard", True, STANDARD),
    "standard, untied": ("standard", False, STANDARD),
    "quiet, tied": ("quiet", True, QUIET | {"embedding": 0.02}),
    "quiet, untied": ("quiet", False, QUIET),
}


@pytest.mark.parametrize(("init", "tie", "table"), TABLES.values(), ids=TABLES)
def test_every_parameter_starts_as_large_as_the_table_says(init, tie, table):
    model = build(small({**WIDE, "model.init": init, "model.tie": tie}), 300)
    seen = set()
    for name, parameter in model.named_parameters():
        role, size = parameter.role, table[parameter.role]
        seen.add(role)
        if role == "in" and size is None:
            size = parameter.shape[1] ** -0.5
        if role in ("gain", "bias") or size == 0:
            assert torch.equal(parameter, torch.full_like(parameter, size)), name
            continue
        # Five standard errors of the standard deviation and of the mean of n normal numbers.
        n = parameter.numel()
        assert abs(parameter.std().item() / size - 1) < 5 / math.sqrt(2 * n), name
        assert abs(parameter.mean().item()) < 5 * size / math.sqrt(n), name
    assert seen == set(table) - ({"head"} if tie else set())


def test_first_values_are_normal():
    values = build(small(WIDE), 300).blocks[0].feed.up.weight.flatten() / 0.02
    assert abs((values**4).mean().item() - 3) < 0.1
    assert values.abs().max() > 3.5


def test_quiet_starts_at_the_loss_of_a_uniform_guess_exactly():
    for position in ("learned", "rope"):
        model = build(small({"model.init": "quiet", "model.tie": False, "model.position": position}), VOCAB)
        ids = some_ids()
        assert torch.equal(model(ids), torch.zeros(2, 16, VOCAB))
        assert model(ids, ids).item() / 32 == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_quiet_blocks_start_as_the_identity():
    model = build(small({"model.init": "quiet"}), VOCAB)
    x = torch.randn(2, 16, 16)
    for block in model.blocks:
        assert torch.equal(block(x), x)


def test_standard_starts_near_the_loss_of_a_uniform_guess():
    ids = some_ids()
    targets = (ids + 1) % VOCAB  # not the word itself, which a tied head knows best from the start
    assert build(small(), VOCAB)(ids, targets).item() / 32 == pytest.approx(math.log(VOCAB), abs=0.05)


EXCHANGES = {
    "position": {"model.position": "rope"},
    "merge": {"model.merge": "reweight-running"},
    "norm": {"model.norm": "rms"},
    "feed": {"model.feed": "swiglu"},
    "qk_norm": {"model.mixer": {"name": "softmax", "qk_norm": True}},
    "tie": {"model.tie": False},
    "dropout": {"model.dropout": 0.5},
    "kv_heads": {"model.kv_heads": 2},
}


@pytest.mark.parametrize("changes", EXCHANGES.values(), ids=EXCHANGES)
def test_exchanging_a_part_leaves_the_first_values_of_all_others_as_they_were(changes):
    before = dict(build(small(), VOCAB).named_parameters())
    after = dict(build(small(changes), VOCAB).named_parameters())
    kept = [name for name in before.keys() & after.keys() if before[name].shape == after[name].shape]
    assert len(kept) >= len(before) - 4
    for name in kept:
        assert torch.equal(before[name], after[name]), name


def test_the_seed_decides_the_first_values_and_nothing_else_does():
    torch.manual_seed(0)
    first = build(small(), VOCAB).embedding
    torch.manual_seed(1)
    assert torch.equal(build(small({"data.seed": 3, "train.rate": 0.5}), VOCAB).embedding, first)
    assert not torch.equal(build(small({"train.seed": 1}), VOCAB).embedding, first)


def test_no_two_parameters_start_alike():
    weights = [p.flatten()[:16] for p in build(small(), VOCAB).parameters() if p.role in ("in", "out", "embedding")]
    assert len({tuple((w / w.std()).tolist()) for w in weights}) == len(weights)


def test_building_leaves_the_global_chance_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    build(small(), VOCAB)
    assert torch.rand(1) == expected


def test_quiet_scales_by_the_fan_in_of_the_parameter_itself():
    """In our own parts that is always the model's width; a user's may read something wider."""
    model = small({"model.init": "quiet"}).model
    assert scale("in", 64, model) == 1 / 8
    assert scale("in", 100, model) == 1 / 10
