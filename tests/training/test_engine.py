import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from training_helpers import tiny, write_text

from keyhole.model.lm import build
from keyhole.training import loop
from keyhole.training.engine import Engine
from keyhole.training.loop import train
from keyhole.training.precision import Precision
from keyhole.training.weights import FlatWeights

VOCAB = 11
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def engine(tmp_path):
    write_text(tmp_path)

    def make(precision="float32", **changes):
        plain = {
            "train_optimizer": {"name": "sgd", "momentum": 0.0},
            "train_rate": 0.1,
            "train_clip": 0.0,
            "model_layers": 2,
        }
        recipe = tiny(tmp_path, **(plain | changes))
        return Engine(build(recipe, VOCAB), recipe.train, precision=Precision(precision, "asked for"))

    return make


def batch(rows=8, time=8, seed=0, padded=False):
    draw = np.random.default_rng(seed)
    x, y = (draw.integers(0, VOCAB, (rows, time)) for _ in range(2))
    if padded:
        for row, length in enumerate(draw.integers(1, time + 1, rows)):
            y[row, length:] = -100
        y[0] = -100  # a row without any target
    return x, y


def flat(model):
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def exact(model, x, y):
    """Loss and gradient by torch's own cross entropy, all in float64."""
    model = copy.deepcopy(model).double().eval()
    logits = model(torch.as_tensor(x))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(y).flatten(), ignore_index=-100)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2, 4, 8])
def test_a_step_takes_the_gradient_of_the_mean_over_all_targets(engine, accumulate, padded):
    made = engine(train_batch=8, train_accumulate=accumulate)
    x, y = batch(padded=padded)
    loss, gradient = exact(made.model, x, y)
    before = flat(made.model)
    step = made.advance(x, y)
    assert step.loss == pytest.approx(loss, abs=1e-6)
    assert step.targets == (y != -100).sum()
    assert step.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-5)
    torch.testing.assert_close((before - flat(made.model)) / 0.1, gradient, rtol=1e-4, atol=2e-6)


def test_in_bfloat16_a_step_takes_about_the_same_gradient(engine):
    made = engine("bfloat16", train_batch=8, train_accumulate=2)
    x, y = batch(padded=True)
    loss, gradient = exact(made.model, x, y)
    before = flat(made.model)
    assert made.advance(x, y).loss == pytest.approx(loss, rel=0.01)
    moved = (before - flat(made.model)) / 0.1
    assert torch.nn.functional.cosine_similarity(moved, gradient, dim=0) > 0.999


def test_targets_that_do_not_count_change_nothing(engine):
    one, other = engine(train_batch=4), engine(train_batch=4)
    x, y = batch(4, padded=True)
    changed = x.copy()
    changed[0] = (x[0] + 1) % VOCAB  # the row without any target
    one.advance(x, y)
    other.advance(changed, y)
    assert torch.equal(flat(one.model), flat(other.model))


def test_a_batch_without_any_target_moves_nothing_and_is_no_error(engine):
    made = engine(train_batch=4)
    before = flat(made.model)
    step = made.advance(batch(4)[0], np.full((4, 8), -100))
    assert step.finite
    assert step.loss == 0
    assert torch.equal(flat(made.model), before)


@pytest.mark.parametrize("limit", [0.01, 0.1, 1e9, 0.0])
def test_clipping_scales_the_gradient_to_the_limit_and_never_up(engine, limit):
    free, made = engine(train_batch=8), engine(train_batch=8, train_clip=limit)
    x, y = batch()
    before = flat(made.model)
    norm = free.advance(x, y).grad_norm
    assert made.advance(x, y).grad_norm == pytest.approx(norm)  # what it was before
    moved = float((flat(made.model) - before).norm()) / 0.1
    assert moved == pytest.approx(min(norm, limit) if limit else norm, rel=1e-4)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("tie", [True, False])
def test_every_parameter_is_a_view_into_one_buffer(engine, precision, tie):
    made = engine(precision, model_tie=tie, train_batch=8)
    weights = made.weights
    assert isinstance(weights, FlatWeights)

    def inside(tensor, buffer):
        start = buffer.data_ptr()
        return start <= tensor.data_ptr() < start + buffer.numel() * buffer.element_size()

    def check():
        parameters = list(made.model.parameters())
        assert sum(p.numel() for p in parameters) == weights.master.numel()
        assert all(inside(p, weights.master) for p in parameters)
        starts = sorted((p.data_ptr(), p.numel() * 4) for p in parameters)
        assert all(a + size == b for (a, size), (b, _) in pairwise(starts))  # no gap, no overlap
        for model in (made.model, weights.compute):
            assert (model.head is model.embedding) == tie
        for a, b in zip(made.model.parameters(), weights.compute.parameters(), strict=True):
            assert b.dtype == DTYPES[precision]
            assert torch.equal(a.to(b.dtype), b)

    check()
    for seed in range(3):
        made.advance(*batch(seed=seed))
        check()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd", "sign", "adagrad"])
def test_a_step_that_is_not_finite_moves_no_weight_and_no_moment(engine, optimizer):
    made = engine("bfloat16", train_optimizer=optimizer, train_batch=8, train_clip=1.0)
    made.advance(*batch())
    before = made.weights.master.clone(), {key: value.clone() for key, value in made.optimizer.tensors().items()}
    with torch.no_grad():
        good = float(made.model.norm.gain[0])
        made.model.norm.gain[0] = math.nan
        made.weights.refresh()
    step = made.advance(*batch(seed=1))
    assert not step.finite
    with torch.no_grad():
        made.model.norm.gain[0] = good
    assert torch.equal(made.weights.master, before[0])
    assert all(torch.equal(value, before[1][key]) for key, value in made.optimizer.tensors().items())


def test_a_step_after_one_that_was_not_finite_is_as_if_that_had_not_been(engine):
    one, other = engine(train_batch=8), engine(train_batch=8)
    with torch.no_grad():
        one.model.norm.gain[0] = math.nan
    one.advance(*batch(seed=1))
    with torch.no_grad():
        one.model.norm.gain[0] = 1.0
    one.advance(*batch())
    other.advance(*batch())
    assert torch.equal(flat(one.model), flat(other.model))


ARMS = [
    {},
    {"model_width": 32, "model_layers": 2},
    {"model_position": "rope", "model_dropout": 0.2, "model_merge": "shuffle"},
    {"train_optimizer": "muon", "train_precision": "bfloat16", "train_seed": 7},
    {"train_eval_every": 1, "train_save_every": 1},
]


@pytest.mark.parametrize("rows", ["text", "lines"])
def test_batches_come_in_the_same_order_whatever_is_trained(folder, monkeypatch, rows):
    seen = []
    advance = loop.Engine.advance

    def watched(self, x, y, factor=1.0):
        seen[-1].append((x.tobytes(), y.tobytes()))
        return advance(self, x, y, factor)

    monkeypatch.setattr(loop.Engine, "advance", watched)
    for i, arm in enumerate([*ARMS, {"data_seed": 1}]):
        seen.append([])
        train(tiny(folder, data_rows=rows, data_block=48 if rows == "lines" else 8, **arm), folder / f"run{i}", quiet=True)
    assert len(seen[0]) == 12
    assert all(order == seen[0] for order in seen[1:-1])
    assert seen[-1] != seen[0]
    assert len(set(seen[0])) == 12


def test_first_weights_depend_on_the_seed_alone(folder):
    def first(seed, **changes):
        return build(tiny(folder, train_seed=seed, **changes), VOCAB)

    a, b, c = first(0), first(0, model_position="rope"), first(1)
    assert torch.equal(a.embedding, b.embedding)
    assert torch.equal(a.blocks[0].mixer.qkv.weight, b.blocks[0].mixer.qkv.weight)
    assert not torch.equal(a.embedding, c.embedding)
