import json
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.core.config import Spec
from keyhole.core.errors import InputError, StorageError
from keyhole.text import Tokenizer, build_tokenizer, load_tokenizer, save_tokenizer, wordpieces
from keyhole.text.wordpieces import BytePairs, Symbols

TEXT = "the cat sat on the mat; the dog sat on the cat. Größe: 5 €, naïve 😀 " * 40
NAMES = ("bytes", "chars", "words", "bpe")
any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def build(name: str, specials: bool = False, **options) -> Tokenizer:
    return build_tokenizer(Spec(name=name, options=options), [TEXT], specials)


@pytest.fixture(scope="module", params=[(name, specials) for name in NAMES for specials in (False, True)], ids=str)
def tokenizer(request) -> Tokenizer:
    return build(request.param[0], request.param[1], **({"size": 400} if request.param[0] == "bpe" else {}))


BYTES, BPE, CHARS = build("bytes"), build("bpe", size=400), build("chars")
WORDS = build("words")


@given(any_text)
def test_bytes_and_bpe_give_every_text_back(text):
    for each in (BYTES, BPE):
        assert each.decode(each.encode(text)) == text


@given(st.text(alphabet=sorted(set(TEXT))))
def test_chars_give_every_text_of_their_alphabet_back(text):
    assert CHARS.decode(CHARS.encode(text)) == text


@given(any_text)
def test_words_give_known_words_back_and_unk_for_the_others(text):
    known = set(TEXT.split())
    expected = " ".join(word if word in known else "<UNK>" for word in f"{text} the".split())
    assert WORDS.decode(WORDS.encode(f"{text} the")) == expected


def test_ids_are_int32_within_the_vocabulary(tokenizer):
    ids = tokenizer.encode(TEXT)
    assert ids.dtype == np.int32
    assert 0 <= ids.min() <= ids.max() < tokenizer.vocab - len(tokenizer.specials)
    assert tokenizer.encode("").shape == (0,)
    assert tokenizer.decode([]) == ""


def test_many_texts_at_once_are_encoded_as_one_by_one(tokenizer):
    texts = ["the cat", "", "sat on the mat; "]
    for together, alone in zip(tokenizer.encode_all(texts), map(tokenizer.encode, texts), strict=True):
        np.testing.assert_array_equal(together, alone)


def test_special_tokens_stand_behind_the_ordinary_ones_and_are_silent_when_decoded(tokenizer):
    expected = list(range(tokenizer.vocab - len(tokenizer.specials), tokenizer.vocab))
    assert list(tokenizer.specials.values()) == expected
    if tokenizer.specials:
        framed = [tokenizer.start, *tokenizer.encode("the cat"), tokenizer.stop, tokenizer.pad]
        assert tokenizer.decode(framed) == "the cat"
        assert tokenizer.piece(tokenizer.pad) == "<PAD>"


def test_a_saved_tokenizer_loads_equal(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path / "run")
    loaded = load_tokenizer(tmp_path / "run")
    assert type(loaded) is type(tokenizer)
    assert (loaded.hash, loaded.vocab, loaded.specials) == (tokenizer.hash, tokenizer.vocab, tokenizer.specials)
    np.testing.assert_array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))


@given(text=any_text)
@pytest.mark.parametrize("name", NAMES)
def test_the_exported_tokenizer_gives_the_same_ids_and_text(name, text):
    from tokenizers import Tokenizer as Fast

    for each, fast in EXPORTED[name]:
        # White space of every kind between known words, then whatever the alphabet allows.
        allowed = text if name != "chars" or each.unknown is not None else "".join(c for c in text if c in set(TEXT))
        sample = f"the\x1c\x1fcat\x85sat\u3000on {allowed}" if name == "words" else f"the cat {allowed}"
        ids = each.encode(sample)
        assert isinstance(fast, Fast)
        assert fast.encode(sample).ids == ids.tolist()
        assert fast.decode(ids.tolist(), skip_special_tokens=False) == each.decode(ids)
        assert fast.get_vocab_size() == each.vocab
        assert all(fast.token_to_id(token) == number for token, number in each.specials.items())


def exported(each: Tokenizer):
    from tokenizers import Tokenizer as Fast

    return each, Fast.from_str(each.to_hugging_face())


EXPORTED = {
    name: [exported(build(name, specials, **({"size": 400} if name == "bpe" else {}))) for specials in (False, True)]
    for name in NAMES
}


@given(any_text)
def test_token_bytes_add_up_to_the_bytes_of_the_text(text):
    inside = "".join(character for character in text if character in set(TEXT))
    for each, sample in ((BYTES, text), (BPE, text), (CHARS, inside)):
        assert each.token_bytes is not None
        assert each.token_bytes[each.encode(sample)].sum() == len(sample.encode())
    assert WORDS.token_bytes is None


def test_words_below_the_count_are_unknown_and_frequent_ones_come_first():
    words = build_tokenizer(Spec(name="words", options={"count": 2}), ["b b b a a c <PAD> <PAD>"])
    assert words.symbols == ["b", "a"]
    assert words.decode(words.encode("a c")) == "a <UNK>"


def test_chars_know_the_dev_text_and_words_and_bpe_learn_from_the_training_text_alone():
    rest = ["zzz zzz zzz zzz"]
    assert build_tokenizer(Spec(name="chars"), ["abc"], rest=rest).decode([3, 4]) == "cz"
    assert "zzz" not in build_tokenizer(Spec(name="words"), [TEXT], rest=rest).symbols
    assert build_tokenizer(Spec(name="bpe", options={"size": 300}), [TEXT], rest=rest).encode("zzz").size == 3


def test_a_character_outside_the_vocabulary_is_unknown_where_there_is_an_unknown_token():
    chars = build("chars", specials=True)
    assert chars.encode("cat漢")[-1] == chars.unknown
    assert chars.decode(chars.encode("cat漢")) == "cat<UNK>"


@given(text=st.lists(st.sampled_from(["the cat", "Größe", " ", "\n", "\t", "\u3000", "5", "'s", "."])).map("".join))
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_a_text_cut_into_parts_is_encoded_as_if_it_were_one_piece(size, text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wordpieces, "_PART", size)
        assert BPE.encode(text).tolist() == BPE._fast.encode(text).ids


def test_bpe_learned_again_is_the_same_and_no_larger_than_asked():
    again = BytePairs.learn([TEXT], 400)
    assert again.hash == BPE.hash
    assert again.vocab <= 400
    assert BytePairs.learn([TEXT], 270, specials=True).vocab == 270


def test_a_million_characters_are_encoded_in_well_under_a_fifth_of_a_second():
    text = TEXT * (1_000_000 // len(TEXT))
    CHARS.encode(text)
    start = time.perf_counter()
    CHARS.encode(text)
    assert time.perf_counter() - start < 0.1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            {"name": "char"},
            r"there is no tokenizer 'char'; did you mean 'chars'\? \(allowed: bpe, bytes, chars, words\)",
        ),
        ({"name": "bpe", "options": {"sise": 5}}, r"tokenizer 'bpe' has no option 'sise'; did you mean 'size'"),
        ({"name": "bpe", "options": {"size": 200}}, r"option size of tokenizer 'bpe' is 200; give 256 or more"),
        ({"name": "bpe", "options": {"size": "big"}}, r"option size of tokenizer 'bpe' is 'big'; give a whole number"),
        ({"name": "bpe", "options": {"size": True}}, r"is True; give a whole number, for example size = 1000"),
        ({"name": "chars", "options": {"specials": 1}}, r"is 1; give true or false, for example specials = false"),
        ({"name": "words", "options": {"count": 0}}, r"option count of tokenizer 'words' is 0; give 1 or more"),
        ({"name": "words", "options": {"count": 999}}, r"no word occurs 999 times .*lower the option count"),
    ],
)
def test_a_bad_tokenizer_is_refused_in_one_sentence(spec, words):
    with pytest.raises(InputError, match=words):
        build_tokenizer(Spec(**spec), [TEXT])


def test_what_cannot_be_encoded_or_decoded_is_named_with_its_place():
    with pytest.raises(InputError, match=r"character '漢' at position 3 is outside the vocabulary of \d+ characters"):
        CHARS.encode("cat漢")
    with pytest.raises(InputError, match=r"symbol 'd' at position 1 is outside the vocabulary of 2 symbols"):
        Symbols(["a", "b"]).encode("a d")
    for each in (BYTES, BPE):
        with pytest.raises(InputError, match=r"at position 1 is half a surrogate pair"):
            each.encode("a\udcff")
    for token in (-1, 256):
        with pytest.raises(InputError, match=rf"token {token} at position 1 is outside the vocabulary; give 0 to 255"):
            BYTES.decode([65, token])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is damaged"),
        ("{}", "is not a tokenizer that Keyhole saved"),
        ({"name": "gone"}, "is not a tokenizer that Keyhole saved"),
        ({"name": "chars"}, "is damaged"),
        ({"name": "words", "words": [1]}, "is damaged"),
        ({"name": "bpe", "specials": False, "tokenizer": {}}, "is damaged"),
    ],
)
def test_a_damaged_tokenizer_file_is_refused(content, words, tmp_path):
    state = content if isinstance(content, str) else json.dumps({"format": "keyhole-tokenizer-1", **content})
    (tmp_path / "tokenizer.json").write_text(state)
    with pytest.raises(StorageError, match=words):
        load_tokenizer(tmp_path)
