import itertools

import pytest
import torch
from model_helpers import VOCAB, shaken, small, some_ids

from keyhole.core.errors import InputError
from keyhole.model.lm import build
from keyhole.model.loss import reference_loss
from keyhole.model.registry import CATALOGUE

VARIANTS = {
    "plain": {},
    "untied": {"model.tie": False},
    "rope, rms, swiglu": {"model.position": "rope", "model.norm": "rms", "model.feed": "swiglu"},
    "alibi, relu-squared": {"model.position": "alibi", "model.feed": "relu-squared"},
    "grouped": {"model.kv_heads": 2, "model.mixer": {"name": "softmax", "qk_norm": True}},
    "reweight-running": {"model.merge": "reweight-running"},
}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("tokens", [1, 2, 15, 16])
def test_logits_have_a_row_a_time_and_a_word_for_any_time_up_to_the_block(tokens, changes):
    model = build(small(changes), VOCAB)
    assert model(some_ids(3, tokens)).shape == (3, tokens, VOCAB)


def test_a_text_longer_than_the_block_is_refused():
    with pytest.raises(InputError, match="a text of 17 tokens is longer than this model's block of 16"):
        build(small(), VOCAB)(some_ids(1, 17))


def test_a_vocabulary_of_one_word_is_refused():
    with pytest.raises(InputError, match="a vocabulary of 1 is too small; it needs at least 2 tokens"):
        build(small(), 1)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_model_is_its_formula(changes):
    """x = embed(ids) + position; x += mixer(norm(x)); x += feed(norm(x)); logits = norm(x) head^T."""
    model, ids = shaken(small(changes)), some_ids()
    x = model.embedding[ids]
    if hasattr(model.position, "add"):
        x = model.position.add(x, 0)
    for block in model.blocks:
        x = x + block.mixer(block.mixer_norm(x))
        x = x + block.feed(block.feed_norm(x))
    torch.testing.assert_close(model(ids), model.norm(x) @ model.head.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_the_first_logits_know_nothing_of_later_tokens(changes):
    model, ids = shaken(small(changes)), some_ids()
    for cut in (1, 8, 15):
        changed = ids.clone()
        changed[:, cut:] = (changed[:, cut:] + 1) % VOCAB
        difference = (model(ids) - model(changed)).abs()
        assert difference[:, :cut].max() == 0
        assert difference[:, cut:].amax(-1).min() > 1e-3


def test_the_dishonest_merge_knows_later_tokens():
    model, ids = shaken(small({"model.merge": "reweight"})), some_ids()
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCAB
    assert (model(ids) - model(changed))[:, 0].abs().min() > 1e-6


@pytest.mark.parametrize("changes", [{}, {"model.tie": False}], ids=["tied", "untied"])
def test_with_targets_the_model_gives_their_summed_loss_and_its_gradients(changes):
    model, ids = shaken(small(changes)), some_ids()
    targets = some_ids(seed=3)
    targets[0, 3:6] = -100
    expected = reference_loss(model.hidden(ids).flatten(0, 1), model.head, targets.flatten())
    found = model(ids, targets)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    for mine, exact in zip(*(torch.autograd.grad(y, list(model.parameters())) for y in (found, expected)), strict=True):
        torch.testing.assert_close(mine, exact, rtol=0, atol=1e-10 * max(1, exact.abs().max().item()))


def test_a_padding_mask_reaches_the_mixer():
    model, ids = shaken(small({"model.position": "alibi"})), some_ids()
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[:, :4] = False
    torch.testing.assert_close(model(ids, mask_BT=mask)[:, 4:], model(ids[:, 4:]), rtol=0, atol=1e-10)


def test_dropout_acts_in_training_only():
    model, ids = shaken(small({"model.dropout": 0.5})), some_ids()
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert not torch.allclose(model(ids), model(ids))


def test_a_tied_head_is_the_embedding_and_learns_from_both_ends():
    model, ids = shaken(small()), some_ids()
    assert model.head is model.embedding
    model(ids, some_ids(seed=3)).backward()
    # Words that were never read learn from the head alone.
    unread = [word for word in range(VOCAB) if word not in ids[:, :1]]
    assert model.embedding.grad[unread].abs().amax(1).min() > 0
    untied = shaken(small({"model.tie": False}))
    assert untied.head is not untied.embedding
    assert untied.head.shape == untied.embedding.shape


STEPPING_MERGES = [name for name in CATALOGUE["merge"] if name != "reweight"]
CACHED = list(itertools.product(CATALOGUE["position"], STEPPING_MERGES, [None, 2, 1], [False, True]))


@pytest.mark.parametrize(("position", "merge", "kv_heads", "qk_norm"), CACHED)
@torch.no_grad()
def test_cached_logits_are_the_full_ones(position, merge, kv_heads, qk_norm):
    model = shaken(
        small(
            {
                "model.position": position,
                "model.merge": merge,
                "model.kv_heads": kv_heads,
                "model.mixer": {"name": "softmax", "qk_norm": qk_norm},
                "model.layers": 1,
            }
        )
    )
    ids = some_ids()
    assert model.can_step()
    full = model(ids)
    for first in (1, 5, 16):
        state, start = model.begin(2), 0
        for stop in (first, *range(first + 1, 17)):
            logits, state = model.step(ids[:, start:stop], state, start)
            torch.testing.assert_close(logits, full[:, stop - 1], rtol=0, atol=1e-10)
            start = stop


def test_a_model_that_reads_the_whole_sequence_cannot_step():
    assert not build(small({"model.merge": "reweight"}), VOCAB).can_step()
