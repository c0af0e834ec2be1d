"""Reading one token at a time quickly gives the logits of the full pass, for every model that it takes."""

from __future__ import annotations

import itertools

import pytest
import torch

from keyhole.core.config import Recipe
from keyhole.model.decode import Decoder
from keyhole.model.lm import LM, build
from keyhole.model.quick import QuickStep

VOCAB, PREFIX, LENGTH = 23, 5, 24

POSITIONS = ["learned", "sinusoidal", "none", "rope", {"name": "rope", "pairs": "interleaved"}]
NORMS = ["layer", {"name": "layer", "bias": True}, "rms"]
FEEDS = ["gelu", {"name": "gelu", "approximate": "tanh", "bias": True}, "relu-squared"]
HEADS = [(None, False), (2, True)]


def randomised(**changes: object) -> LM:
    """A small float64 model far from its first values, so that every weight counts."""
    small = {"model.layers": 2, "model.width": 16, "model.heads": 4, "data.block": 32}
    recipe = Recipe().replace(small | {key.replace("__", "."): value for key, value in changes.items()})
    model = build(recipe, VOCAB).double().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def error(model: LM, decoder: Decoder) -> float:
    """The largest difference between a decoder's logits and those of the full pass."""
    ids = torch.randint(VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    told = [decoder.read(ids[0, :PREFIX].tolist()), *(decoder.read([token]) for token in ids[0, PREFIX:].tolist())]
    return (torch.stack(told) - model(ids)[0, PREFIX - 1 :]).abs().max().item()


@pytest.mark.parametrize(("position", "norm", "feed", "heads"), list(itertools.product(POSITIONS, NORMS, FEEDS, HEADS)))
def test_quick_logits_equal_those_of_the_full_pass(position, norm, feed, heads):
    groups, bias = heads
    mixer = {"name": "softmax", "bias": bias}
    model = randomised(
        model__position=position, model__norm=norm, model__feed=feed, model__kv_heads=groups, model__mixer=mixer
    )
    assert QuickStep.of(model) is not None
    assert error(model, Decoder(model)) < 1e-10


@pytest.mark.parametrize(
    "changes",
    [
        {"model__position": "alibi"},
        {"model__merge": "shift"},
        {"model__merge": "reweight-running"},
        {"model__feed": "swiglu"},
        {"model__mixer": {"name": "softmax", "qk_norm": True}},
    ],
    ids=str,
)
def test_what_the_quick_form_does_not_know_is_left_to_the_reference(changes):
    model = randomised(**changes)
    assert QuickStep.of(model) is None
    assert error(model, Decoder(model)) < 1e-10


def test_a_wrong_scale_in_the_quick_form_would_be_seen():
    model = randomised()
    decoder = Decoder(model)
    matrix, _ = decoder._quick.layers[0].qkv
    matrix[:, : model.config.width] *= 1.01
    assert error(model, decoder) > 1e-6


def test_text_longer_than_the_block_decodes_alike_with_and_without_the_quick_form():
    model = randomised(model__position="rope")
    ids = torch.randint(VOCAB, (50,), generator=torch.Generator().manual_seed(2)).tolist()
    quick, plain = Decoder(model), Decoder(model, quick=False)
    for token in ids:
        assert torch.allclose(quick.read([token]), plain.read([token]), atol=1e-10)
