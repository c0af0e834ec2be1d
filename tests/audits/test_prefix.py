"""The prefix loss is the loss of use: equal to the whole-window loss for honest models, and larger where that one lies."""

import math

import numpy as np
import pytest
import torch

from keyhole.audits import dev_windows, prefix_loss
from keyhole.audits.interval import mean_interval
from keyhole.core.config import Data
from keyhole.core.errors import InputError
from keyhole.text import NO_TARGET, open_dataset

IDS = np.random.default_rng(0).integers(0, 7, (70, 9))
X, Y = IDS[:, :-1], IDS[:, 1:]


def knows_the_last(ids):
    """Certain of nothing but that the text's last token comes next."""
    return torch.nn.functional.one_hot(ids[:, -1:], 7).double().expand(-1, ids.shape[1], -1) * 3


def says_the_same_again(ids):
    return torch.nn.functional.one_hot(ids, 7).double() * 3


def test_both_losses_are_what_scoring_by_hand_gives():
    found = prefix_loss(knows_the_last, X, Y)
    worth = math.log(math.exp(3) + 6)
    by_hand_full = worth - 3 * np.mean(X[:, -1:] == Y)
    by_hand_prefix = worth - 3 * np.mean(X == Y)
    assert found.full == pytest.approx(by_hand_full, abs=1e-12)
    assert found.prefix == pytest.approx(by_hand_prefix, abs=1e-12)
    assert found.gap == pytest.approx(by_hand_prefix - by_hand_full, abs=1e-12)
    assert found.windows == 70
    assert found.finding("it").verdict == "fails"


def test_a_function_of_prefixes_has_no_gap():
    found = prefix_loss(says_the_same_again, X, Y)
    assert found.worst == 0
    assert found.finding("it").verdict == "holds"


def test_targets_that_are_not_asked_do_not_count():
    y = Y.copy()
    y[:, 3:] = NO_TARGET
    kept = prefix_loss(says_the_same_again, X[:, :3], Y[:, :3])
    assert prefix_loss(says_the_same_again, X, y).prefix == pytest.approx(kept.prefix, abs=1e-12)
    y[0] = NO_TARGET
    with pytest.raises(InputError, match="each window of prefix_loss must have a target"):
        prefix_loss(says_the_same_again, X, y)
    with pytest.raises(InputError, match="of one shape"):
        prefix_loss(says_the_same_again, X, Y[:, 1:])


def test_a_model_in_training_is_scored_in_evaluation_and_left_in_training(dishonest_run):
    model = dishonest_run.model.train()
    text = torch.arange(9)[None]
    found = prefix_loss(model, text[:, :-1], text[:, 1:])
    assert model.training
    assert found.windows == 1
    assert found.interval == (-math.inf, math.inf)
    assert found.to_dict()["prefix"] == found.prefix


def test_windows_are_spread_over_the_dev_split_and_padded_where_rows_are_short(tmp_path):
    sentences = [" ".join(["word"] * (1 + number % 7)) for number in range(400)]
    (tmp_path / "text.txt").write_text("\n".join(sentences))
    for rows in ("text", "lines"):
        data = Data(source=str(tmp_path / "text.txt"), tokenizer="words", rows=rows, block=8, split=0.5)
        x, y = dev_windows(open_dataset(data, tmp_path), 12, 6)
        assert x.shape == y.shape == (12, 6)
        assert (y != NO_TARGET).any(1).all()
        lengths = (y != NO_TARGET).sum(1)
        assert (rows == "text") == (lengths == 6).all()
        assert rows == "text" or len(set(lengths.tolist())) > 3


def test_the_interval_is_student_s():
    mean, low, high = mean_interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert mean == 2.5
    assert high - mean == pytest.approx(3.182446 * math.sqrt(5 / 3) / 2, rel=1e-6)
    assert mean - low == pytest.approx(high - mean)


def test_studies_and_audits_of_runs_hold_a_model_to_the_same_limit():
    from keyhole.audits.prefix import ROUNDED
    from keyhole.studies.result import PREFIX_LIMIT

    assert PREFIX_LIMIT == ROUNDED  # written twice, as reading a study must not wait for torch
