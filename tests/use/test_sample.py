from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_helpers import TEXT, make_run

from keyhole.core.config import Recipe, Spec
from keyhole.core.errors import InputError
from keyhole.model.decode import generate
from keyhole.text import build_tokenizer
from keyhole.use.sample import sample, stream_sample


class Scripted(torch.nn.Module):
    """Says given tokens one after the other, whatever the prompt, and notes what it read first."""

    def __init__(self, vocab, script):
        super().__init__()
        self.vocab, self.script, self.prompt = vocab, script, None
        self.block_size, self.embedding = 10_000, torch.zeros(1)

    def can_step(self):
        return False

    def forward(self, ids):
        self.prompt = ids[0].tolist() if self.prompt is None else self.prompt
        said = self.script[ids.shape[1] - len(self.prompt)]
        return torch.nn.functional.one_hot(torch.full(ids.shape, said), self.vocab).float()


def scripted(name, script, rows="text", specials=False, **options):
    """A run that says the script."""
    tokenizer = build_tokenizer(Spec(name=name, options=options), [TEXT], specials or rows != "text")
    tokens = script if isinstance(script, list) else tokenizer.encode(script).tolist()
    recipe = Recipe.parse({"data": {"tokenizer": name, "rows": rows}})
    return SimpleNamespace(tokenizer=tokenizer, recipe=recipe, model=Scripted(tokenizer.vocab, tokens))


def said(run, prompt=""):
    return list(stream_sample(run, prompt, len(run.model.script), temperature=0))


@pytest.fixture(scope="module", params=["chars", "bytes", "words", {"name": "bpe", "size": 300}], ids=str)
def run(request, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", {"data.tokenizer": request.param})


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 3}, {"top_k": 3}, {"top_p": 0.5, "temperature": 2.0}])
@pytest.mark.parametrize("prompt", ["", "the cat sat", "naïve 😀"])
def test_the_stream_joined_is_the_sample_behind_its_prompt(run, prompt, options):
    whole = sample(run, prompt, 40, **options)
    assert whole == prompt + "".join(stream_sample(run, prompt, 40, **options))
    assert whole == sample(run, prompt, 40, **options)
    assert len(whole) > len(prompt)


def test_the_sample_is_what_the_model_generates(run):
    prompt = "the cat sat"
    ids = run.tokenizer.encode(prompt).tolist()
    new = list(generate(run.model, ids, 30, temperature=0.8, top_k=5, seed=4, stop=run.tokenizer.stop))
    assert sample(run, prompt, 30, top_k=5, seed=4) == run.tokenizer.decode([*ids, *new])


def test_seeds_differ(run):
    assert sample(run, "the", 30, temperature=3.0, seed=1) != sample(run, "the", 30, temperature=3.0, seed=2)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
def test_characters_of_many_bytes_come_whole_and_in_order(text):
    pieces = said(scripted("bytes", text), "€")
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("script", ["é", "€uro", "😀", "a😀b", "naïve 😀"])
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_each_piece_is_told_as_soon_as_its_characters_are_whole(script, name):
    run = scripted(name, script, **({"size": 260} if name == "bpe" else {}))
    ids = run.model.script
    so_far = [run.tokenizer.decode(ids[: count + 1]) for count in range(len(ids))]
    whole = [text for text in so_far if not text.endswith("\ufffd")]
    assert list(accumulate(said(run, "the "))) == whole
    assert whole[-1] == script


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_end_cuts_off_is_shown_as_a_replacement_sign_and_not_lost(cut):
    run = scripted("bytes", list("ab😀".encode())[: 2 + cut])
    assert "".join(said(run)) == "ab\ufffd"


def test_bytes_that_are_no_text_are_shown_and_what_follows_is_kept():
    assert "".join(said(scripted("bytes", [0xFF, 0xE2, ord("a"), 0x80, ord("b"), 0xF0]))) == "\ufffd\ufffda\ufffdb\ufffd"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 255), min_size=1, max_size=12), st.sampled_from(["", "x", "€", "\ufffd"]))
def test_any_bytes_are_told_as_they_decode(script, prompt):
    run = scripted("bytes", script)
    assert "".join(said(run, prompt)) == bytes(script).decode(errors="replace")


def test_words_are_told_with_the_spaces_between_them():
    run = scripted("words", "sat on the mat;")
    assert "the cat" + "".join(said(run, "the cat")) == "the cat sat on the mat;"


@pytest.mark.parametrize("name", ["bytes", "chars", "words"])
def test_a_model_of_rows_begins_with_start_and_ends_with_stop(name):
    run = scripted(name, "the cat", rows="lines")
    run.model.script += [run.tokenizer.stop, *run.tokenizer.encode("the dog").tolist()]
    assert "".join(said(run)) == "the cat"
    assert run.model.prompt == [run.tokenizer.start]
    run.model.prompt = None
    assert "".join(said(run, "the ")).strip() == "the cat"
    assert run.model.prompt == [run.tokenizer.start, *run.tokenizer.encode("the ")]


@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_without_a_prompt_a_model_of_text_begins_a_line(name):
    run = scripted(name, "the cat")
    assert "".join(said(run)) == "the cat"
    assert run.model.prompt == run.tokenizer.encode("\n").tolist()


def test_without_a_prompt_and_a_line_break_a_model_begins_with_its_first_token():
    run = scripted("chars", "the cat")
    run.tokenizer = build_tokenizer(Spec(name="chars"), ["the cat"])
    run.model.script, run.model.vocab = run.tokenizer.encode("the cat").tolist(), run.tokenizer.vocab
    assert "".join(said(run)) == "the cat"
    assert run.model.prompt == [0]


def test_start_in_the_vocabulary_of_a_model_of_text_is_not_used():
    run = scripted("bytes", "a", specials=True)
    said(run, "x")
    assert run.model.prompt == [ord("x")]


def test_pieces_come_while_the_rest_is_still_to_be_drawn():
    run = scripted("bytes", "the cat")
    stream = stream_sample(run, "x", 7, temperature=0)
    assert [next(stream) for _ in range(3)] == ["t", "h", "e"]


def test_a_prompt_that_the_model_cannot_read_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    with pytest.raises(InputError, match="character '%' at position 1 is outside the vocabulary"):
        sample(run, "a%", 3)
    with pytest.raises(InputError, match="temperature -1 is not valid"):
        sample(run, "a", 3, temperature=-1)
