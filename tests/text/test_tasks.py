import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.core.config import Data
from keyhole.core.errors import InputError
from keyhole.text import NO_TARGET, TASKS, open_dataset

BLOCK = 24


def task(name: str, block: int = BLOCK, seed: int = 0, **options):
    return open_dataset(
        Data.model_validate({"source": {"name": f"task:{name}", **options}, "block": block, "seed": seed}), None
    )


def sequence(x: np.ndarray, y: np.ndarray) -> list[int]:
    """The whole sample: the inputs, and the last answer."""
    return [*x.tolist(), int(y[-1])]


def spelled(dataset, x, y) -> list[str]:
    return [dataset.tokenizer.piece(token) for token in sequence(x, y)]


def number(symbol: str) -> int:
    return int(symbol[1:])


# Each definition is written from the words of the task alone: which places are answers, and what stands there.


def answers_after_bar(words: list[str], change) -> dict[int, str]:
    bar = words.index("|")
    return {bar + 1 + place: word for place, word in enumerate(change(words[:bar]))}


def answers_of_induction(words: list[str]) -> dict[int, str]:
    answers = {}
    for place in range(1, len(words)):
        earlier = words[: place - 1]
        if words[place - 1] in earlier:
            assert earlier.count(words[place - 1]) == 1
            answers[place] = words[earlier.index(words[place - 1]) + 1]
    return answers


def answers_of_recall(words: list[str]) -> dict[int, str]:
    bar = words.index("|")
    told = dict(zip(words[0:bar:2], words[1:bar:2], strict=True))
    assert len(told) == bar // 2
    assert sorted(words[bar + 1 :: 2]) == sorted(told)
    return {place + 1: told[words[place]] for place in range(bar + 1, len(words), 2)}


DEFINITIONS = {
    "copy": lambda words: answers_after_bar(words, list),
    "reverse": lambda words: answers_after_bar(words, lambda part: part[::-1]),
    "sort": lambda words: answers_after_bar(words, lambda part: sorted(part, key=number)),
    "induction": answers_of_induction,
    "recall": answers_of_recall,
    "noise": lambda words: dict(enumerate(words[1:], 1)),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("block", [7, 24, 65])
def test_every_target_is_the_answer_that_the_definition_gives_and_nothing_else_is_asked(name, block):
    dataset = task(name, block)
    x, y = dataset.batch(0, 100)
    assert x.shape == y.shape
    assert x.shape[1] <= block
    for inputs, targets in zip(x, y, strict=True):
        expected = DEFINITIONS[name](spelled(dataset, inputs, targets))
        asked = {place + 1: dataset.tokenizer.piece(t) for place, t in enumerate(targets) if t != NO_TARGET}
        assert asked == expected


@pytest.mark.parametrize("name", TASKS)
def test_answers_stand_in_the_text_as_the_next_input(name):
    x, y = task(name).batch(0, 50)
    asked = y[:, :-1] != NO_TARGET
    np.testing.assert_array_equal(x[:, 1:][asked], y[:, :-1][asked])


@given(start=st.integers(0, 10**12), cuts=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@pytest.mark.parametrize("name", TASKS)
def test_a_sample_does_not_depend_on_its_batch(name, start, cuts):
    dataset = task(name)
    whole = dataset.batch(start, sum(cuts))
    places = np.cumsum([0, *cuts[:-1]])
    parts = [dataset.batch(start + int(place), count) for place, count in zip(places, cuts, strict=True)]
    for side in (0, 1):
        np.testing.assert_array_equal(whole[side], np.concatenate([part[side] for part in parts]))


@pytest.mark.parametrize("name", TASKS)
def test_seeds_and_splits_give_other_samples_and_no_sample_comes_twice(name):
    x, _ = task(name, 65).batch(0, 2000)
    assert len(np.unique(x, axis=0)) == 2000
    other, _ = task(name, 65, seed=1).batch(0, 2000)
    dev = np.concatenate([inputs for inputs, _ in task(name, 65).dev(100)])
    assert len(dev) == 512
    assert len(np.unique(np.concatenate([x, other, dev]), axis=0)) == 4512


def test_symbols_are_uniform_and_independent_of_their_neighbours():
    x, _ = task("noise", 128, symbols=4).batch(0, 1000)
    pairs = np.bincount((4 * x[:, :-1] + x[:, 1:]).ravel(), minlength=16) / x[:, 1:].size
    # 127,000 pairs: the standard error of each share is 0.0007.
    np.testing.assert_allclose(pairs, 1 / 16, atol=0.004)
    samples = np.bincount((4 * x[:-1] + x[1:]).ravel(), minlength=16) / x[1:].size
    np.testing.assert_allclose(samples, 1 / 16, atol=0.004)


@pytest.mark.parametrize("name", ["induction", "recall"])
def test_every_order_of_distinct_symbols_comes_up_about_equally_often(name):
    options = {"length": 4, "symbols": 4} if name == "induction" else {"pairs": 4, "symbols": 4}
    x, _ = task(name, **options).batch(0, 24_000)
    first = x[:, :4] if name == "induction" else x[:, 0:8:2]
    _, counts = np.unique(first, axis=0, return_counts=True)
    assert len(counts) == 24
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.parametrize("name", TASKS)
def test_samples_decode_and_encode(name):
    dataset = task(name)
    x, _ = dataset.batch(5, 1)
    assert dataset.tokenizer.encode(dataset.tokenizer.decode(x[0])).tolist() == x[0].tolist()


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_of_64_by_256_takes_a_few_milliseconds(name):
    dataset = task(name, 256)
    times = []
    for step in range(10):
        start = time.perf_counter()
        dataset.batch(64 * step, 64)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


def test_dev_is_fixed_and_tokens_takes_its_first_samples():
    dataset = task("recall")
    whole = np.concatenate([y for _, y in dataset.dev(100)])
    some = np.concatenate([y for _, y in dataset.dev(7, tokens=100)])
    assert 100 <= (some != NO_TARGET).sum() < 106
    np.testing.assert_array_equal(some, whole[: len(some)])
    assert dataset.dev_bytes is None
    assert dataset.samples is None


def test_options_and_seed_are_part_of_the_hash():
    assert task("copy").hash == task("copy", length=12, symbols=16).hash
    hashes = {task("copy").hash, task("reverse").hash, task("copy", length=5).hash, task("copy", seed=1).hash}
    assert len(hashes) == 4


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("cpy", {}, r"there is no task 'cpy'; did you mean 'copy'.*write, for example, task:copy"),
        ("copy", {"lenght": 3}, r"task 'copy' has no option 'lenght'; did you mean 'length'"),
        ("copy", {"length": 13}, r"option length of task 'copy' is 13; at most 12 fits into a block of 24"),
        ("copy", {"length": 0}, r"option length of task 'copy' is 0; give 1 or more"),
        ("copy", {"length": 2.5}, r"option length of task 'copy' is 2.5; give a whole number, for example length = 8"),
        ("noise", {"symbols": 10**9}, r"option symbols of task 'noise' is 1000000000; give at most 65536"),
        ("induction", {"length": 10, "symbols": 9}, r"option symbols of task 'induction' is 9; give 10 or more"),
        ("recall", {"pairs": 6, "symbols": 5}, r"give 6 or more, as its 6 keys are all different"),
    ],
)
def test_a_bad_task_is_refused_in_one_sentence(name, options, words):
    with pytest.raises(InputError, match=words):
        task(name, **options)


def test_a_block_too_short_for_the_task_and_a_foreign_tokenizer_are_refused():
    with pytest.raises(InputError, match=r"block 3 is too short for task 'recall'"):
        task("recall", block=3)
    data = Data.model_validate({"source": "task:copy", "block": 8})
    with pytest.raises(InputError, match=r"task:copy brings its own tokenizer of 17 symbols"):
        open_dataset(data, None, tokenizer=task("noise").tokenizer)
    assert open_dataset(data, None, tokenizer=task("copy").tokenizer).vocab == 17
