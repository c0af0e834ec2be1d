import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.core.config import Data
from keyhole.core.errors import InputError
from keyhole.text import NO_TARGET, Dataset, load_tokenizer, open_dataset, save_tokenizer
from keyhole.text.dataset import spread

BLOCK = 8
# Every character stands in the text once, so that a token says where it was.
DISTINCT = "".join(map(chr, range(0x4E00, 0x4E00 + 500)))
ROWS = "\n".join(DISTINCT[place : place + 1 + place % 13] for place in range(0, 480, 14))


def opened(folder: Path, text: str, **keys) -> Dataset:
    (folder / "text.txt").write_text(text)
    return open_dataset(Data.model_validate({"source": "text.txt", "block": BLOCK} | keys), folder)


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYHOLE_CACHE", str(folder))
        return opened(folder, DISTINCT)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYHOLE_CACHE", str(folder))
        return opened(folder, ROWS, rows="lines")


def in_pieces(dataset: Dataset, start: int, counts: list[int]):
    for count in counts:
        yield dataset.batch(start, count)
        start += count


def samples_of(batches) -> list[tuple[list[int], list[int]]]:
    """Samples without their padding, which depends on the neighbours in the batch."""
    return [
        (x[y != NO_TARGET].tolist(), y[y != NO_TARGET].tolist()) for xs, ys in batches for x, y in zip(xs, ys, strict=True)
    ]


def seen_in_training(dataset: Dataset, epochs: int) -> set[int]:
    x, y = dataset.batch(0, epochs * dataset.samples)
    return (set(x.ravel().tolist()) | set(y.ravel().tolist())) - {NO_TARGET, *dataset.tokenizer.specials.values()}


def seen_in_dev(dataset: Dataset) -> set[int]:
    seen = {int(token) for x, y in dataset.dev(5) for token in (*x.ravel(), *y.ravel())}
    return seen - {NO_TARGET, *dataset.tokenizer.specials.values()}


@pytest.mark.parametrize("name", ["packed", "rows"])
@given(start=st.integers(0, 5000), counts=st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_the_order_is_the_same_whatever_the_batch_size_and_wherever_it_is_taken_up(both, name, start, counts):
    dataset = both[name]
    whole = samples_of([dataset.batch(start, sum(counts))])
    assert samples_of(in_pieces(dataset, start, counts)) == whole


@pytest.fixture(scope="module")
def both(packed, rows) -> dict[str, Dataset]:
    return {"packed": packed, "rows": rows}


@pytest.mark.parametrize("name", ["packed", "rows"])
def test_training_and_dev_share_no_token_of_the_text(both, name):
    dataset = both[name]
    train, dev = seen_in_training(dataset, 20), seen_in_dev(dataset)
    assert len(train) > 100
    assert len(dev) > 20
    assert not train & dev


@pytest.mark.parametrize("length", [20, 23, 24, 100, 450, 451, 457])
def test_in_an_epoch_every_token_is_a_target_once_but_for_those_at_the_two_ends(tmp_path, length):
    dataset = opened(tmp_path, DISTINCT[: length + 20], split=(length + 0.5) / (length + 20))
    assert dataset.description["train_tokens"] == length
    targets_ever = set()
    for epoch in range(60):
        x, y = dataset.batch(epoch * dataset.samples, dataset.samples)
        np.testing.assert_array_equal(y, x + 1)
        targets = np.sort(y.ravel())
        np.testing.assert_array_equal(targets, np.arange(targets[0], targets[0] + len(targets)))
        assert length - len(targets) <= 2 * BLOCK
        targets_ever |= set(targets.tolist())
    assert targets_ever == set(range(1, length))


def test_epochs_differ_in_offset_and_order_and_seeds_in_both(packed, tmp_path):
    firsts = [packed.batch(epoch * packed.samples, packed.samples)[0][:, 0] for epoch in range(12)]
    assert len({int(first.min()) for first in firsts}) > 4
    assert len({tuple((first - first.min()).tolist()) for first in firsts}) == 12
    other = opened(tmp_path, DISTINCT, seed=1)
    assert other.hash == packed.hash
    assert not np.array_equal(other.batch(0, 20)[0], packed.batch(0, 20)[0])


def test_the_split_of_the_text_is_by_characters_to_the_last_one(tmp_path):
    dataset = opened(tmp_path, DISTINCT, split=0.75)
    assert dataset.description["train_tokens"] == 375
    assert seen_in_dev(dataset) == set(range(375, 500))


@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_every_dev_token_but_the_first_is_a_target_exactly_once(packed, batch):
    targets = [token for _, y in packed.dev(batch) for token in y.ravel().tolist()]
    assert targets == list(range(451, 500))
    assert [x.shape[1] for x, _ in packed.dev(batch)][-1] == 49 % BLOCK
    assert all(np.array_equal(y, x + 1) for x, y in packed.dev(batch))


@pytest.mark.parametrize("name", ["packed", "rows"])
@pytest.mark.parametrize("tokens", [1, 9, 17, 30, 48, 49, 10_000])
def test_a_part_of_dev_is_fixed_large_enough_and_spread(both, name, tokens):
    dataset = both[name]
    whole = samples_of(dataset.dev(4))
    part = samples_of(dataset.dev(4, tokens=tokens))
    assert part == samples_of(dataset.dev(100, tokens=tokens))
    assert all(part.count(sample) == 1 and sample in whole for sample in part)
    targets, available = sum(len(y) for _, y in part), sum(len(y) for _, y in whole)
    assert min(tokens, available) <= targets <= tokens + 2 * BLOCK
    assert (part == whole) == (targets == available)


@given(st.integers(1, 300), st.integers(1, 300))
def test_spread_places_are_different_ordered_and_never_far_apart(items, count):
    places = spread(items, count)
    assert len(places) == min(items, count)
    assert 0 <= places[0] <= places[-1] < items
    gaps = np.diff([-1, *places, items])
    assert (gaps >= 1).all()
    assert gaps.max() <= items / len(places) + 1


def test_dev_bytes_are_the_utf8_bytes_of_the_targets(packed, tmp_path):
    assert packed.dev_bytes == len(DISTINCT[451:].encode()) == 49 * 3
    assert sum(packed.target_bytes(y) for _, y in packed.dev(3)) == packed.dev_bytes
    text = "ein süßes Wort, und noch eins. " * 60
    for name, lost in (("bytes", 1), ("chars", 1), ("bpe", None)):
        dataset = opened(tmp_path, text, tokenizer=name)
        first = next(dataset.dev(1))[0][0, 0]
        lost = lost or len(dataset.tokenizer.decode([first]).encode())
        assert dataset.dev_bytes == len(text[int(len(text) * 0.9) :].encode()) - lost
    assert opened(tmp_path, text, tokenizer="words").dev_bytes is None


def test_rows_are_start_tokens_stop_and_padding(rows):
    lines = ROWS.split("\n")
    train = lines[: int(len(lines) * 0.9)]
    x, y = rows.batch(0, rows.samples)
    tokenizer = rows.tokenizer
    assert sorted(tokenizer.decode(row) for row in x) == sorted(line[: BLOCK - 1] for line in train)
    for inputs, targets in zip(x, y, strict=True):
        length = int((targets != NO_TARGET).sum())
        assert inputs[0] == tokenizer.start
        assert (inputs[1:length] == targets[: length - 1]).all()
        assert (inputs[length:] == tokenizer.pad).all()
        assert (targets[length:] == NO_TARGET).all()
        assert targets[length - 1] == tokenizer.stop or length == BLOCK


def test_each_dev_row_comes_once_sorted_by_length(rows):
    lines = ROWS.split("\n")
    dev = lines[int(len(lines) * 0.9) :]
    batches = list(rows.dev(2))
    decoded = [rows.tokenizer.decode(row) for x, _ in batches for row in x]
    assert sorted(decoded) == sorted(line[: BLOCK - 1] for line in dev)
    assert [len(text) for text in decoded] == sorted(len(text) for text in decoded)
    # STOP stands for no text, a row that was cut at the block has none.
    assert rows.dev_bytes == sum(len(line[:BLOCK].encode()) for line in dev)


def test_rows_are_padded_to_a_multiple_of_eight_but_never_beyond_the_block(tmp_path):
    text = "\n".join(["a" * length for length in (1, 6, 7, 12, 19, 30)] * 10)
    dataset = opened(tmp_path, text, rows="lines", block=20)
    widths = {dataset.batch(start, 1)[0].shape[1] for start in range(dataset.samples)}
    assert widths == {8, 16, 20}
    assert dataset.description["cut_rows"] == 10


def test_rows_that_stand_on_both_sides_are_counted(tmp_path):
    dataset = opened(tmp_path, "\n".join(["same", *"abcdefgh", "same"]), rows="lines")
    assert dataset.description["dev_rows_also_in_train"] == 1


def test_words_learn_nothing_from_the_dev_split(tmp_path):
    dataset = opened(tmp_path, "common word " * 200 + "fresh " * 60, tokenizer="words", split=0.8)
    assert set(dataset.tokenizer.symbols) >= {"common", "word"}
    assert "fresh" not in dataset.tokenizer.symbols


def test_a_given_tokenizer_is_used_as_it_is(tmp_path, packed):
    save_tokenizer(packed.tokenizer, tmp_path)
    data = Data.model_validate({"source": "text.txt", "block": BLOCK, "tokenizer": "bytes"})
    (tmp_path / "text.txt").write_text(DISTINCT)
    assert open_dataset(data, tmp_path, tokenizer=load_tokenizer(tmp_path)).hash == packed.hash
    (tmp_path / "text.txt").write_text(ROWS)
    with pytest.raises(InputError, match=r"tokenizer 'chars' has no START, STOP and PAD, which documents in rows need"):
        open_dataset(data.model_copy(update={"rows": "lines"}), tmp_path, tokenizer=packed.tokenizer)


def test_text_tokenizer_and_split_are_part_of_the_hash_and_seed_and_block_are_not(tmp_path, packed):
    same = [opened(tmp_path, DISTINCT, seed=3), opened(tmp_path, DISTINCT, block=16)]
    assert {dataset.hash for dataset in same} == {packed.hash}
    others = [
        opened(tmp_path, DISTINCT, split=0.8),
        opened(tmp_path, DISTINCT, tokenizer="bytes"),
        opened(tmp_path, DISTINCT[::-1]),
    ]
    assert len({packed.hash, *(dataset.hash for dataset in others)}) == 4


def test_batches_are_int64_of_the_same_shape(packed, rows):
    for dataset in (packed, rows):
        for x, y in (dataset.batch(3, 5), next(dataset.dev(2))):
            assert x.dtype == y.dtype == np.int64
            assert x.shape == y.shape


def test_a_batch_of_packed_text_takes_well_under_a_fifth_of_a_millisecond(tmp_path):
    dataset = open_dataset(Data(), tmp_path)
    dataset.batch(0, 12)
    start = time.perf_counter()
    for step in range(200):
        dataset.batch(12 * step, 12)
    assert (time.perf_counter() - start) / 200 < 2e-4


@pytest.mark.parametrize(
    ("text", "keys", "words"),
    [
        (
            DISTINCT[:80],
            {},
            r"too short for block 8: the train split has 72 tokens and the dev split 8, and each needs 9",
        ),
        (DISTINCT[:80], {}, r"choose data.block of at most 7, or a longer text"),
        ("ab", {}, r"the train split has 1 tokens and the dev split 1, .*; give a longer text"),
        (DISTINCT, {"rows": "lines"}, r"has too few lines: 1, of which split 0.9 leaves 0 to train and 1 for dev"),
        (DISTINCT, {"tokenizer": "chrs"}, r"there is no tokenizer 'chrs'; did you mean 'chars'"),
    ],
)
def test_text_that_does_not_fit_is_refused_in_one_sentence(tmp_path, text, keys, words):
    with pytest.raises(InputError, match=words):
        opened(tmp_path, text, **keys)


def test_the_block_that_the_error_advises_does_fit(tmp_path):
    assert opened(tmp_path, DISTINCT[:80], block=7).samples > 0


def test_a_batch_of_nothing_is_refused(packed):
    for start, count in ((-1, 2), (0, 0)):
        with pytest.raises(InputError, match=rf"batch\(start={start}, count={count}\) has no samples"):
            packed.batch(start, count)
