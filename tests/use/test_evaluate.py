import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_helpers import TEXT, make_run

from keyhole.core.errors import InputError
from keyhole.text import open_dataset
from keyhole.use import evaluate as module
from keyhole.use.evaluate import evaluate

TEXTS = ["the cat sat on the mat", "naïve 😀", "Größe: 5 €, it's 42. the dog sat on the cat; the cat sat on the dog."]


@torch.no_grad()
def losses_by_hand(run, ids):
    """-ln p of every token but the first, each read in a window of a block that starts at a multiple of the block."""
    block, found = run.recipe.data.block, []
    for start in range(0, len(ids) - 1, block):
        text = torch.tensor([list(map(int, ids[start : start + block]))])
        chances = run.model(text)[0].double().softmax(-1)
        found += [-math.log(chances[i, ids[start + 1 + i]]) for i in range(min(block, len(ids) - 1 - start))]
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "chars")


@pytest.mark.parametrize("text", [*TEXTS, "th", TEXT[:17], TEXT[:18], TEXT[:200]])
def test_the_score_of_a_text_is_what_a_hand_computes_window_by_window(text, run):
    ids = run.tokenizer.encode(text)
    losses = losses_by_hand(run, ids)
    found = evaluate(run, [text])
    mean = sum(losses) / len(losses)
    assert len(losses) == len(ids) - 1
    assert (found.total.tokens, found.total.rows) == (len(losses), 1)
    assert found.total.loss == pytest.approx(mean, rel=1e-5)
    assert found.total.perplexity == found.total.sentence_perplexity == pytest.approx(math.exp(mean), rel=1e-4)
    assert found.total.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / len(text[1:].encode()), rel=1e-5)
    assert found.texts == [(text, found.total)]


def test_each_text_has_its_score_and_all_of_them_together_theirs(run):
    losses = [losses_by_hand(run, run.tokenizer.encode(text)) for text in TEXTS]
    found = evaluate(run, TEXTS)
    assert [text for text, _ in found.texts] == TEXTS
    for (text, score), each in zip(found.texts, losses, strict=True):
        assert score == evaluate(run, [text]).total
        assert score.loss == pytest.approx(sum(each) / len(each), rel=1e-5)
    flat = [loss for each in losses for loss in each]
    assert found.total.loss == pytest.approx(sum(flat) / len(flat), rel=1e-5)
    assert found.total.perplexity == pytest.approx(math.exp(sum(flat) / len(flat)), rel=1e-4)
    mean_of_texts = sum(math.exp(sum(each) / len(each)) for each in losses) / 3
    assert found.total.sentence_perplexity == pytest.approx(mean_of_texts, rel=1e-4)
    assert abs(mean_of_texts / found.total.perplexity - 1) > 1e-3, "texts on which both agree would show nothing"
    size = sum(len(text[1:].encode()) for text in TEXTS)
    assert found.total.bits_per_byte == pytest.approx(sum(flat) / math.log(2) / size, rel=1e-5)
    assert (found.total.tokens, found.total.rows) == (len(flat), 3)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(2, 60), min_size=1, max_size=5))
def test_the_order_of_texts_does_not_matter(cuts, run):
    texts = [TEXT[place : place + place] for place in cuts]
    there, back = evaluate(run, texts), evaluate(run, texts[::-1])
    assert there.texts == back.texts[::-1]
    assert there.total.loss == pytest.approx(back.total.loss, rel=1e-12)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars", {"name": "bpe", "size": 300}], ids=str)
def test_bits_per_byte_divide_by_the_bytes_that_were_predicted(tokenizer, tmp_path):
    run = make_run(tmp_path / "run", {"data.tokenizer": tokenizer})
    for text in (f"the {text}" for text in TEXTS):
        score = evaluate(run, [text]).total
        # The first token is given: "t", or what the pairs made of "the", always plain ASCII.
        size = len(text.encode()) - len(run.tokenizer.decode(run.tokenizer.encode(text)[:1]))
        assert score.bits_per_byte == pytest.approx(score.loss * score.tokens / math.log(2) / size, rel=1e-9)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_a_model_of_rows_is_asked_for_the_first_token_and_for_the_end_too(tokenizer, tmp_path):
    run = make_run(tmp_path / "run", {"data.tokenizer": tokenizer, "data.rows": "lines"})
    text = "Größe: 5 €, naïve 😀"
    ids = [run.tokenizer.start, *run.tokenizer.encode(text), run.tokenizer.stop]
    losses, score = losses_by_hand(run, ids), evaluate(run, [text]).total
    assert score.tokens == len(losses) == len(ids) - 1
    assert score.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert score.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / len(text.encode()), rel=1e-5)
    assert evaluate(run, ["t"]).total.tokens == 2


def test_bits_per_byte_are_unknown_where_the_spelling_is_lost(tmp_path):
    words = make_run(tmp_path / "words", {"data.tokenizer": "words"})
    assert evaluate(words, ["the cat sat"]).total.bits_per_byte is None
    chars = make_run(tmp_path / "chars", specials=True)
    found = evaluate(chars, ["the cat", "the %"])
    assert found.texts[0][1].bits_per_byte is not None
    assert found.texts[1][1].bits_per_byte is None
    assert found.total.bits_per_byte is None


def test_logits_in_pieces_give_the_same_score(run, monkeypatch):
    whole = evaluate(run, TEXTS)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", run.tokenizer.vocab * 3)
    assert evaluate(run, TEXTS).total.loss == pytest.approx(whole.total.loss, rel=1e-6)


def test_without_a_text_the_whole_dev_split_is_scored(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    run = make_run(tmp_path / "run", {"data.source": str(tmp_path / "text.txt")})
    dataset = open_dataset(run.recipe.data, tmp_path, tokenizer=run.tokenizer)
    losses, rows = [], []
    with torch.no_grad():
        for x, y in dataset.dev(rows=3):
            chances = run.model(torch.from_numpy(x)).double().softmax(-1)
            for chance, targets in zip(chances, y, strict=True):
                own = [-math.log(chance[i, target]) for i, target in enumerate(targets) if target != -100]
                losses += own
                rows.append(sum(own) / len(own))
    found = evaluate(run)
    assert found.texts == []
    assert found.total.tokens == len(losses) > 0.08 * len(TEXT)
    assert found.total.rows == len(rows)
    assert found.total.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found.total.sentence_perplexity == pytest.approx(sum(map(math.exp, rows)) / len(rows), rel=1e-4)
    bits = sum(losses) / math.log(2) / dataset.dev_bytes
    assert found.total.bits_per_byte == pytest.approx(bits, rel=1e-5)


def test_a_file_is_cut_as_the_training_data_was(tmp_path, run):
    (tmp_path / "some.txt").write_text("the cat\nsat on\nthe mat\n")
    whole = evaluate(run, file=tmp_path / "some.txt")
    assert [text for text, _ in whole.texts] == ["the cat\nsat on\nthe mat\n"]
    lines = make_run(tmp_path / "lines", {"data.rows": "lines"})
    found = evaluate(lines, file=tmp_path / "some.txt")
    assert [text for text, _ in found.texts] == ["the cat", "sat on", "the mat"]
    assert found == evaluate(lines, ["the cat", "sat on", "the mat"])


def test_evaluating_leaves_the_model_as_it_was(run):
    run.model.train()
    evaluate(run, TEXTS)
    assert run.model.training
    run.model.eval()
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_a_hopeless_model_has_an_infinite_perplexity_and_no_error(tmp_path):
    run = make_run(tmp_path / "run")
    for parameter in run.model.parameters():
        parameter.data *= 100
    score = evaluate(run, TEXTS).total
    assert score.perplexity == math.inf
    assert math.isfinite(score.loss)


REFUSED = {
    "one token": (["t"], "the text 't' has 1 tokens; a text to evaluate needs at least two"),
    "an empty text": (["the cat", ""], "the text '' has 0 tokens; a text to evaluate needs at least two"),
    "no texts": ([], 'there is no text to evaluate; give at least one, for example texts=["To be, or not"]'),
    "a character that the model does not know": (["the %"], "character '%' at position 4 is outside the vocabulary"),
}


@pytest.mark.parametrize(("texts", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_scored_is_refused_in_one_sentence(texts, sentence, run):
    with pytest.raises(InputError) as caught:
        evaluate(run, texts)
    assert str(caught.value).startswith(sentence)


def test_one_text_that_is_not_in_a_list_is_one_text(run):
    assert evaluate(run, "the cat") == evaluate(run, ["the cat"])


def test_an_evaluation_is_plain_json(run):
    found = evaluate(run, TEXTS[:2]).to_dict()
    assert found["total"]["tokens"] == len(TEXTS[0]) + len(TEXTS[1]) - 2
    assert [entry["text"] for entry in found["texts"]] == TEXTS[:2]
    assert set(found["texts"][0]) == {"text", *found["total"]}
