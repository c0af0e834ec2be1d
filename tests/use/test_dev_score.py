from __future__ import annotations

import math
from pathlib import Path

import pytest

from keyhole.core.config import Recipe
from keyhole.model.lm import build
from keyhole.text import open_dataset
from keyhole.use.evaluate import score, score_dev

TEXT = "caffè e tè, più di tutto. ecco perché il tè è più buono.\n" * 60


@pytest.mark.parametrize("tokenizer", ["chars", "bytes", "bpe"])
@pytest.mark.parametrize("tokens", [0, 64])
def test_bits_per_byte_count_the_bytes_of_the_part_that_is_scored(tmp_path: Path, tokenizer: str, tokens: int) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    data = {"source": str(tmp_path / "text.txt"), "tokenizer": tokenizer, "block": 16}
    recipe = Recipe.parse({"data": data, "model": {"layers": 1, "width": 16, "heads": 2}})
    dataset = open_dataset(recipe.data, tmp_path)
    found = score_dev(build(recipe, dataset.vocab).eval(), dataset, tokens)
    targets = [y for _, y in dataset.dev(rows=32, tokens=tokens)]
    text = "".join(dataset.tokenizer.decode(y) for rows in targets for y in rows)
    if "\ufffd" not in text:
        size = len(text.encode())
        assert found.bits_per_byte == pytest.approx(found.loss * found.tokens / math.log(2) / size)
    assert found.tokens == sum(y.size for y in targets)
    if not tokens:
        assert found == score(build(recipe, dataset.vocab).eval(), dataset.dev(rows=32), dataset.dev_bytes)


def test_where_the_spelling_is_lost_there_are_no_bits_per_byte(tmp_path: Path) -> None:
    recipe = Recipe.parse({"data": {"source": "task:copy", "block": 16}, "model": {"layers": 1, "width": 16, "heads": 2}})
    dataset = open_dataset(recipe.data, tmp_path)
    assert score_dev(build(recipe, dataset.vocab).eval(), dataset).bits_per_byte is None
