from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import Ask, contents


def test_a_run_is_never_written_over(ask: Ask, trained: Path) -> None:
    before = contents(trained)
    again = ask("train", "tiny.toml", "--quiet")
    assert again.code == 2
    assert "not empty; add --resume to go on with it, or give --out another folder" in again.complaint
    own = ask("train", trained / "recipe.toml", "--quiet")
    assert own.code == 2
    assert "is the recipe of a run" in own.complaint
    assert "--out" in own.complaint
    assert contents(trained) == before


def test_other_peoples_files_are_never_written_over(ask: Ask, home: Path, trained: Path) -> None:
    full = home / "full"
    full.mkdir()
    (full / "letter.txt").write_text("dear")
    for arguments in (["train", "tiny.toml", "--quiet", "--out", full], ["export", trained, full]):
        answer = ask(*arguments)
        assert answer.code == 2
        assert "not empty" in answer.complaint
    taken = ask("train", "tiny.toml", "--quiet", "--out", full / "letter.txt")
    assert "is a file; give --out a new folder" in taken.complaint
    assert contents(full) == {"letter.txt": b"dear"}


@pytest.mark.parametrize("setting", ["train.rate=0.5", "model.width=32", "data.split=0.8"])
def test_a_changed_recipe_is_not_resumed(ask: Ask, trained: Path, setting: str) -> None:
    before = contents(trained)
    answer = ask("train", trained / "recipe.toml", "--resume", "--quiet", "--set", setting)
    assert answer.code == 2
    assert "changed" in answer.complaint
    assert contents(trained) == before


def test_changed_text_is_not_resumed(ask: Ask, home: Path, trained: Path) -> None:
    recipe = (trained / "recipe.toml").read_text()
    (home / "other.txt").write_text("on the mat the cat and the dog sat. log.\n" * 50)
    source = next(line for line in recipe.splitlines() if line.startswith("source"))
    (trained / "recipe.toml").write_text(recipe.replace(source, f'source = "{home / "other.txt"}"'))
    answer = ask("train", trained / "recipe.toml", "--resume", "--quiet")
    assert answer.code == 2
    assert "data changed" in answer.complaint


def test_resuming_nothing_says_so(ask: Ask) -> None:
    answer = ask("train", "tiny.toml", "--resume", "--quiet")
    assert answer.code == 2
    assert "there is no run to resume in runs/tiny" in answer.complaint


@pytest.mark.parametrize("damage", ["cut", "flipped", "state", "gone"])
def test_a_damaged_checkpoint_is_refused_by_name(ask: Ask, trained: Path, damage: str) -> None:
    newest = max((trained / "checkpoints").iterdir())
    weights, state = newest / "weights.safetensors", newest / "state.json"
    content = bytearray(weights.read_bytes())
    if damage == "cut":
        weights.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[-1] ^= 1
        weights.write_bytes(content)
    elif damage == "state":
        state.write_text("{")
    else:
        weights.unlink()
    before = contents(trained)
    for arguments in (["eval", trained], ["sample", trained], ["export", trained, "exported"]):
        answer = ask(*arguments)
        assert answer.code == 2
        assert newest.name in answer.complaint
        assert not Path("exported").exists()
    assert contents(trained) == before


def test_a_resume_falls_back_loudly_and_refuses_when_nothing_is_whole(ask: Ask, trained: Path) -> None:
    older, newest = sorted((trained / "checkpoints").iterdir())
    (newest / "weights.safetensors").write_bytes(b"torn")
    back = ask("train", trained / "recipe.toml", "--resume")
    assert back.code == 0
    assert f"going on from the older {older.name}" in back.err
    for folder in (trained / "checkpoints").iterdir():
        (folder / "weights.safetensors").write_bytes(b"torn")
    before = contents(trained)
    refused = ask("train", trained / "recipe.toml", "--resume", "--quiet")
    assert refused.code == 2
    assert "no checkpoint" in refused.complaint
    assert contents(trained) == before


def test_a_damaged_tokenizer_recipe_or_record_is_refused_by_name(ask: Ask, trained: Path) -> None:
    for name in ("tokenizer.json", "recipe.toml", "environment.json"):
        kept = (trained / name).read_text()
        (trained / name).write_text(kept[: len(kept) // 2])
        answer = ask("eval", trained)
        assert answer.code == 2, name
        assert str(trained) in answer.complaint
        (trained / name).write_text(kept)


def test_the_beginning_of_a_recipe_is_never_taken_for_all_of_it(ask: Ask, trained: Path) -> None:
    """Cut at the end of a line, a TOML file is still a TOML file: what is missing would be filled in with defaults."""
    kept = (trained / "recipe.toml").read_text()
    for lines in range(1, len(kept.splitlines())):
        (trained / "recipe.toml").write_text("".join(kept.splitlines(keepends=True)[:lines]))
        answer = ask("eval", trained)
        assert answer.code == 2, lines
        assert "recipe.toml is damaged or was changed" in answer.complaint


@pytest.mark.parametrize("command", [["eval"], ["sample"], ["export"]])
def test_what_is_no_run_is_refused(ask: Ask, home: Path, command: list[str]) -> None:
    (home / "empty").mkdir()
    rest = ["exported"] if command == ["export"] else []
    for place, words in (("none", "there is no run none"), ("empty", "empty is not a run: it has no recipe.toml")):
        answer = ask(*command, place, *rest)
        assert answer.code == 2
        assert words in answer.complaint


def test_what_is_no_model_folder_is_not_imported(ask: Ask, home: Path) -> None:
    (home / "folder").mkdir()
    answer = ask("import", "folder", "runs/imported")
    assert answer.code == 2
    assert "not a Hugging Face model folder" in answer.complaint
    assert not (home / "runs").exists()
