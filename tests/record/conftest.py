import pytest

from keyhole.core.config import Recipe

TEXT = "\n".join(f"The {n} keys open {n + 1} doors, and no key opens all of them." for n in range(60))


@pytest.fixture
def folder(tmp_path):
    """A folder with a small text in it."""
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def recipe(folder):
    """A tiny recipe on that text, with keys changed."""

    def make(**changes):
        values = {
            "data": {"source": "text.txt", "block": 8},
            "model": {"layers": 1, "heads": 2, "width": 16},
            "train": {"steps": 4, "batch": 4, "precision": "float32", "save_every": 2, "log_every": 1},
        }
        for key, value in changes.items():
            section, _, name = key.partition("_")
            values[section][name] = value
        return Recipe.parse(values, folder=folder)

    return make
