import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import VOCAB, shaken, small, some_ids

from keyhole.core.errors import InputError
from keyhole.model.decode import Decoder, generate
from keyhole.model.registry import CATALOGUE


class Fixed(torch.nn.Module):
    """Says the same of every text: the sampler alone decides."""

    def __init__(self, logits, block=4):
        super().__init__()
        self.logits = torch.tensor(logits)
        self.vocab, self.block_size, self.embedding = len(logits), block, torch.zeros(1)

    def can_step(self):
        return False

    def forward(self, ids):
        return self.logits.expand(*ids.shape, -1)


def drawn(logits, tokens=400, **options):
    return list(generate(Fixed(logits), [0], tokens, **options))


def greedy_by_hand(model, ids, tokens):
    """The likeliest word, always from a fresh forward pass; what outgrew the block is cut to its last half."""
    text, new = list(ids), []
    for _ in range(tokens):
        if len(text) > model.block_size:
            text = text[-(model.block_size // 2) :]
        new.append(int(model(torch.tensor([text]))[0, -1].argmax()))
        text.append(new[-1])
    return new


MODELS = {merge: {"model.merge": merge} for merge in CATALOGUE["merge"]} | {
    position: {"model.position": position} for position in CATALOGUE["position"]
}


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_greedy_generation_takes_the_likeliest_with_and_without_a_cache_also_beyond_the_block(changes):
    model, prompt = shaken(small(changes)), some_ids(1, 5)[0].tolist()
    expected = greedy_by_hand(model, prompt, 45)
    assert len(set(expected)) > 1
    for cached in (True, False):
        assert list(generate(model, prompt, 45, temperature=0, cached=cached)) == expected


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_a_decoder_reads_in_pieces_what_a_forward_pass_reads_at_once(lengths):
    model, text = MODEL, []
    cached, recomputed = Decoder(model), Decoder(model, cached=False)
    for length in lengths:
        new = some_ids(1, length, seed=length)[0].tolist()
        text = [*text, *new]
        if len(text) > model.block_size:
            text = text[-(model.block_size // 2) :]
        with torch.no_grad():
            full = model(torch.tensor([text]))[0, -1]
        torch.testing.assert_close(cached.read(new), full, rtol=0, atol=1e-10)
        torch.testing.assert_close(recomputed.read(new), full, rtol=0, atol=1e-10)


BODIES = {
    "layer, gelu": {},
    "rms, swiglu, untied": {"model.norm": "rms", "model.feed": "swiglu", "model.tie": False},
    "biases": {
        "model.norm": {"name": "layer", "bias": True},
        "model.feed": {"name": "gelu", "bias": True, "approximate": "tanh"},
        "model.mixer": {"name": "softmax", "bias": True},
    },
    "relu-squared, grouped, qk_norm": {
        "model.feed": "relu-squared", "model.kv_heads": 2, "model.mixer": {"name": "softmax", "qk_norm": True},
    },
}  # fmt: skip


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("position", CATALOGUE["position"])
def test_token_by_token_a_decoder_gives_the_full_logits_for_every_kind_of_part(position, body):
    model, ids = shaken(small({"model.position": position, **body})), some_ids(1, 16)[0].tolist()
    with torch.no_grad():
        full = model(torch.tensor([ids]))[0]
    for first in (1, 6):
        decoder = Decoder(model)
        torch.testing.assert_close(decoder.read(ids[:first]), full[first - 1], rtol=0, atol=1e-10)
        for t in range(first, 16):
            torch.testing.assert_close(decoder.read([ids[t]]), full[t], rtol=0, atol=1e-10)


MODEL = shaken(small({"model.position": "rope"}))


def test_a_prompt_longer_than_the_block_is_cut_to_its_last_half_block():
    prompt = some_ids(1, 40)[0].tolist()
    long, short = (list(generate(MODEL, text, 8, temperature=0)) for text in (prompt, prompt[-8:]))
    assert long == short


def test_a_block_of_one_token_can_be_generated_from():
    model = shaken(small({"data.block": 1}))
    assert len(list(generate(model, [1, 2, 3], 5, temperature=0))) == 5


def test_the_same_seed_draws_the_same_and_another_seed_another():
    texts = [list(generate(MODEL, [1], 30, temperature=2.0, seed=seed)) for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_drawing_leaves_the_global_chance_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    list(generate(MODEL, [1], 5))
    assert torch.rand(1) == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_words_are_drawn_as_often_as_the_softmax_says(temperature):
    logits, draws = [0.0, 1.0, -1.0, 2.0, 0.5], 4000
    expected = (torch.tensor(logits) / temperature).softmax(-1) * draws
    counts = torch.bincount(torch.tensor(drawn(logits, draws, temperature=temperature)), minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5, "chi-square, 4 degrees of freedom, p = .001"


def test_temperature_0_is_the_likeliest_word():
    assert set(drawn([0.0, 1.0, 0.9], temperature=0)) == {1}


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
def test_top_k_keeps_exactly_k_words_and_draws_them_all(k):
    logits = [0.3, 0.1, 0.5, 0.2, 0.4]
    best = sorted(range(5), key=lambda word: -logits[word])[:k]
    assert set(drawn(logits, top_k=k)) == set(best)


def test_top_k_keeps_exactly_k_of_equally_likely_words():
    assert len(set(drawn([1.0] * 6, top_k=2))) == 2


def test_top_k_keeps_the_proportions_of_what_it_keeps():
    logits, draws = [0.0, 1.0, 0.5, -9.0], 4000
    counts = torch.bincount(torch.tensor(drawn(logits, draws, top_k=3)), minlength=4)
    expected = torch.tensor(logits[:3]).softmax(-1) * draws
    assert ((counts[:3] - expected) ** 2 / expected).sum() < 13.8, "chi-square, 2 degrees of freedom, p = .001"


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.1, 1), (0.49, 1), (0.51, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (1.0, 4)]
)
def test_top_p_keeps_the_fewest_likeliest_words_that_reach_p(top_p, kept):
    chances = torch.tensor([0.2, 0.5, 0.1, 0.2001])
    order = [1, 3, 0, 2]
    assert set(drawn(chances.log().tolist(), 600, top_p=top_p)) == set(order[:kept])


def test_top_p_looks_at_what_top_k_left():
    """Of two words left with .6 and .4, .5 needs only the first; among all words it would need both."""
    chances = torch.tensor([0.3, 0.2, 0.25, 0.25])
    assert set(drawn(chances.log().tolist(), top_k=1, top_p=0.99)) == {0}
    assert len(set(drawn(chances.log().tolist(), top_k=2, top_p=0.5))) == 1


def test_generation_ends_with_the_stop_word():
    found = drawn([0.0, 0.0, 0.0], 200, stop=2)
    assert found[-1] == 2
    assert 2 not in found[:-1]
    assert drawn([0.0, 9.0], 5, stop=0, temperature=0) == [1] * 5


def test_words_come_as_they_are_drawn():
    assert len(list(itertools.islice(generate(MODEL, [1], 10**9), 3))) == 3
    assert list(generate(MODEL, [1], 0)) == []


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_found_also_when_generation_is_abandoned(training):
    model = shaken(small({"model.dropout": 0.5})).train(training)
    list(generate(model, [1], 3))
    assert model.training is training
    stream = generate(model, [1], 3)
    next(stream)
    assert not model.training
    stream.close()
    assert model.training is training


REFUSED = {
    "temperature -1 is not valid; it is 0 (greedy) or more, for example 0.8": {"temperature": -1},
    "temperature nan is not valid; it is 0 (greedy) or more, for example 0.8": {"temperature": float("nan")},
    "temperature inf is not valid; it is 0 (greedy) or more, for example 0.8": {"temperature": float("inf")},
    "top-k 0 is not valid; it is 1 or more": {"top_k": 0},
    "top-p 0 is not valid; it is above 0 and at most 1": {"top_p": 0},
    "top-p 1.5 is not valid; it is above 0 and at most 1": {"top_p": 1.5},
    "tokens = -1 is not valid; it is 0 or more": {"tokens": -1},
    "there is no token to read; give a prompt of at least one token": {"ids": []},
    "token 11 at place 1 is outside this model's vocabulary of 11 (0 to 10)": {"ids": [1, VOCAB]},
    "token -1 at place 0 is outside this model's vocabulary of 11 (0 to 10)": {"ids": [-1]},
}


@pytest.mark.parametrize(("sentence", "options"), REFUSED.items(), ids=REFUSED)
def test_what_cannot_be_drawn_is_refused_in_one_sentence(sentence, options):
    with pytest.raises(InputError) as caught:
        list(generate(MODEL, **({"ids": [1], "tokens": 3} | options)))
    assert str(caught.value) == sentence
