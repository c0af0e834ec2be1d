import itertools

import pytest
import torch
from model_helpers import VOCAB, small, some_ids
from torch.utils.flop_counter import FlopCounterMode

from keyhole.model.count import count, flops
from keyhole.model.lm import build
from keyhole.model.registry import CATALOGUE

REFERENCE = {"name": "softmax", "impl": "reference"}
VARIANTS = [
    {"model.feed": feed, "model.tie": tie, "model.kv_heads": kv_heads, "model.mixer": REFERENCE}
    for feed, tie, kv_heads in itertools.product(CATALOGUE["feed"], [True, False], [None, 2, 1])
]
WITH_BIAS = {
    "model.mixer": {**REFERENCE, "bias": True, "qk_norm": True},
    "model.feed": {"name": "gelu", "bias": True},
    "model.norm": {"name": "layer", "bias": True},
}


@pytest.mark.parametrize("changes", [*VARIANTS, WITH_BIAS], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_flops_are_exactly_those_that_torch_counts(tokens, changes):
    recipe = small(changes)
    model = build(recipe, VOCAB)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(some_ids(1, tokens))
    assert count(model, tokens).flops == counter.get_total_flops() > 0
    whole = count(model, 16).flops
    assert flops(recipe.model, VOCAB, 16) == whole / 16


@pytest.mark.parametrize("changes", [*VARIANTS, WITH_BIAS, {"model.position": "rope"}, {"model.norm": "rms"}], ids=str)
def test_the_parts_sum_to_the_parameters_of_the_module(changes):
    model = build(small(changes), VOCAB)
    assert count(model, 16).total == sum(parameter.numel() for parameter in model.parameters())


def test_each_group_counts_what_belongs_to_it():
    """Two layers of width 16, vocabulary 11, block 16, feed ratio 4, no biases."""
    expected = {
        "embedding": 11 * 16,
        "position": 16 * 16,
        "mixer": 2 * 4 * 16**2,
        "feed": 2 * 8 * 16**2,
        "norm": 5 * 16,
    }
    assert count(build(small(), VOCAB), 16).parameters == expected | {"head": 0}
    assert count(build(small({"model.tie": False}), VOCAB), 16).parameters == expected | {"head": 11 * 16}
    assert count(build(small({"model.position": "rope"}), VOCAB), 16).parameters["position"] == 0


def test_counting_flops_needs_no_memory_for_the_model():
    """A model of 200 thousand million parameters: building it would need 800 GB."""
    recipe = small({"model.width": 65536, "model.layers": 4})
    assert flops(recipe.model, 1000, 16) > 2 * 4 * 12 * 65536**2


MINE = """
from torch import nn
class Silent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w = nn.Parameter(__import__("torch").ones(width))
    def forward(self, x):
        return x * self.w
class Telling(Silent):
    def flops(self, tokens):
        return 5 * tokens
"""


def test_a_users_feed_is_counted_by_its_own_word_or_not_at_all(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    silent, telling = (build(small({"model.feed": f"mine.py:{name}"}, tmp_path), VOCAB) for name in ("Silent", "Telling"))
    assert count(silent, 16).flops is None
    assert flops(small({"model.feed": "mine.py:Silent"}, tmp_path).model, VOCAB, 16, tmp_path) != 0
    without = count(build(small({"model.feed": {"name": "gelu", "ratio": 1.0}}), VOCAB), 16).flops
    assert count(telling, 16).flops == without - 2 * 16 * 2 * 2 * 16**2 + 2 * 5 * 16
    assert count(telling, 16).parameters["feed"] == 2 * 16
