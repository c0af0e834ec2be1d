"""Two short runs, one of them dishonest, for all tests of audits in a process."""

import pytest

import keyhole as kh


def _trained(folder, merge):
    recipe = kh.Recipe.parse(
        {
            "data": {"block": 16},
            "model": {"layers": 2, "width": 32, "heads": 4, "merge": merge},
            "train": {"steps": 200, "batch": 16, "rate": 3e-3, "precision": "float32", "eval_tokens": 256},
        }
    )
    return kh.train(recipe, out=folder / merge, quiet=True)


@pytest.fixture(scope="session")
def honest_run(tmp_path_factory):
    return _trained(tmp_path_factory.mktemp("audits"), "concat")


@pytest.fixture(scope="session")
def dishonest_run(tmp_path_factory):
    return _trained(tmp_path_factory.mktemp("audits"), "reweight")
