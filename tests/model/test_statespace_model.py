"""Language models whose mixer is a state space."""

import pytest
import torch
from model_helpers import VOCAB, shaken, small, some_ids

from keyhole.core.errors import InputError
from keyhole.mixers.flops import measure
from keyhole.model.count import count, flops
from keyhole.model.decode import Decoder
from keyhole.model.lm import build
from keyhole.training.weights import own_rate, treated_alike

VARIANTS = [
    {"name": "statespace", "structure": structure, "inputs": inputs, "state": 3}
    for structure in ("diagonal", "rank-one", "dense")
    for inputs in ("channel", "head")
]


def stable(changes):
    """Large random weights, but A of a size that its powers do not explode."""
    model = shaken(small(changes))
    for name, parameter in model.named_parameters():
        if ".system." in name:
            parameter.data *= 0.5
    return model


@pytest.mark.parametrize("merge", ["concat", "shift", "reweight", "reweight-running"])
@pytest.mark.parametrize("mixer", VARIANTS, ids=str)
def test_decoding_from_the_state_gives_the_logits_of_recomputing(mixer, merge):
    model = stable({"model.mixer": mixer, "model.merge": merge})
    ids = some_ids(1)[0].tolist()
    going_on, afresh = Decoder(model), Decoder(model, cached=False)
    assert going_on.cached == (merge != "reweight")
    for piece in (ids[:5], *([token] for token in ids[5:])):
        torch.testing.assert_close(going_on.read(piece), afresh.read(piece), rtol=0, atol=1e-9)


@pytest.mark.parametrize("mixer", VARIANTS, ids=str)
def test_flops_and_parameters_of_the_model_are_counted_exactly(mixer):
    recipe = small({"model.mixer": mixer})
    model = build(recipe, VOCAB)
    assert count(model, 16).flops == measure(lambda: model(some_ids(1)))
    assert count(model, 16).total == sum(parameter.numel() for parameter in model.parameters())
    assert flops(recipe.model, VOCAB, 16) * 16 == count(model, 16).flops, "without building it"


@pytest.mark.parametrize("mixer", VARIANTS, ids=str)
def test_optimizers_take_only_the_projections_for_matrices(mixer):
    model = build(small({"model.mixer": mixer}), VOCAB)
    matrices = treated_alike(model, own_rate)["matrix", 1.0]
    assert [name for name in matrices if name.startswith("blocks.0.mixer")] == [
        "blocks.0.mixer.into.weight",
        "blocks.0.mixer.out.weight",
    ]


@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_positions_that_act_on_queries_are_refused(position):
    with pytest.raises(InputError, match=f"position {position} acts on queries and keys, and mixer statespace"):
        build(small({"model.mixer": "statespace", "model.position": position}), VOCAB)


def test_exchanging_the_mixer_leaves_the_first_values_of_all_other_parts():
    ours, theirs = (
        dict(build(small({"model.mixer": name}), VOCAB).named_parameters()) for name in ("statespace", "softmax")
    )
    shared = [name for name in theirs if ".mixer." not in name]
    assert len(shared) > 5
    for name in shared:
        assert torch.equal(ours[name], theirs[name]), name
