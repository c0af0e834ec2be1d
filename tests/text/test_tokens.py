import json

import numpy as np
import pytest

from keyhole.core.config import Data
from keyhole.text import cache_folder, open_dataset, token_file


def forbidden():
    raise AssertionError("the cache was there and was not used")


@pytest.mark.parametrize(("highest", "dtype"), [(65_535, np.uint16), (65_536, np.int32)])
def test_tokens_come_back_from_the_cache_by_memory_map(highest, dtype):
    ids = np.array([0, 5, highest])
    first = token_file(lambda: ids, "key")
    second = token_file(forbidden, "key")
    for stored in (first, second):
        assert isinstance(stored, np.memmap)
        assert stored.dtype == dtype
        np.testing.assert_array_equal(stored, ids)
    with pytest.raises(ValueError, match="read-only"):
        second[0] = 1


def damage_flip(path):
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def damage_truncate(path):
    path.write_bytes(path.read_bytes()[:-2])


def damage_description(path):
    path.with_suffix(".json").write_text("{")


def damage_dtype(path):
    about = path.with_suffix(".json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"dtype": "object"}))


def damage_width(path):
    about = path.with_suffix(".json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"dtype": "int32"}))


def damage_missing(path):
    path.unlink()


@pytest.mark.parametrize(
    "damage", [damage_flip, damage_truncate, damage_description, damage_dtype, damage_width, damage_missing]
)
def test_a_damaged_cache_is_made_again(damage):
    ids = np.arange(100)
    token_file(ids, "key")
    damage(cache_folder() / "tokens" / "key.bin")
    np.testing.assert_array_equal(token_file(lambda: ids, "key"), ids)
    np.testing.assert_array_equal(token_file(forbidden, "key"), ids)


def test_where_the_cache_cannot_be_written_the_tokens_stay_in_memory(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "file"))
    stored = token_file(np.arange(10), "key")
    assert not isinstance(stored, np.memmap)
    np.testing.assert_array_equal(stored, np.arange(10))
    dataset = open_dataset(Data(), tmp_path)
    assert "cannot be written" in dataset.description["cache"]
    assert dataset.batch(0, 2)[0].shape == (2, 64)


def test_a_dataset_opened_again_is_read_from_the_cache_and_other_text_is_not(tmp_path, monkeypatch):
    from keyhole.text.characters import Chars

    text = "abcdefgh" * 100
    (tmp_path / "a.txt").write_text(text)
    data = Data.model_validate({"source": "a.txt", "block": 8})
    first = open_dataset(data, tmp_path)
    monkeypatch.setattr(Chars, "encode", lambda *_: forbidden())
    again = open_dataset(data, tmp_path)
    assert again.hash == first.hash
    np.testing.assert_array_equal(again.batch(0, 9), first.batch(0, 9))
    (tmp_path / "a.txt").write_text(text[:-1] + "a")
    with pytest.raises(AssertionError, match="was not used"):
        open_dataset(data, tmp_path)


def test_nothing_temporary_is_left_beside_the_cache():
    token_file(np.arange(10), "key")
    assert sorted(path.name for path in (cache_folder() / "tokens").iterdir()) == ["key.bin", "key.json"]
