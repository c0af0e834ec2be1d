from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_helpers import Ask

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.widht=16", ["model.widht", "did you mean 'width'"]),
        ("modle.width=16", ["modle.width", "section.key"]),
        ("train.steps", ["section.key=value", "--set train.steps=100"]),
        ("train.steps=many", ["train.steps = 'many'", "integer"]),
        ("train.steps=-1", ["train.steps = -1", "greater than or equal to 1"]),
        ("train.rate=nan", ["train.rate", "finite"]),
        ("model.heads=3", ["width 16 is not divisible by heads 3", "1, 2, 4, 8"]),
        ("model.kv_heads=3", ["heads 2 is not divisible by kv_heads 3"]),
        ("model.mixer=sofmax", ["no mixer 'sofmax'", "did you mean 'softmax'", "my.py:Mine"]),
        ("model.position=rop", ["no position 'rop'", "did you mean 'rope'"]),
        ("model.merge={ name = 'reweight', normalize = true }", ["'normalize'", "did you mean 'normalise'"]),
        ("model.norm={ eps = 1e-5 }", ["needs a `name`"]),
        ("train.optimizer=adamv", ["no optimizer 'adamv'", "did you mean 'adam'"]),
        ("train.schedule=cosin", ["no schedule 'cosin'", "did you mean 'cosine'"]),
        ("data.tokenizer=char", ["no tokenizer 'char'", "did you mean 'chars'"]),
        ("data.source=task:copi", ["no task 'copi'", "did you mean 'copy'"]),
        ("data.source=nothere.txt", ["there is no file or folder nothere.txt", "builtin:python"]),
        ("data.source=imported:gpt", ["imported from gpt", "brings no text", "data.source"]),
        ("data.block=5000", ["too short for block 5000", "choose data.block of at most"]),
        ("train.batch=0", ["train.batch = 0", "greater than or equal to 1"]),
        ("model.mixer=nofile.py:Mine", ["there is no file nofile.py"]),
        ("model.mixer=no_such_module:Mine", ["no_such_module", "installed"]),
    ],
)
def test_a_wrong_setting_leaves_no_run(ask: Ask, home: Path, setting: str, words: list[str]) -> None:
    answer = ask("train", "tiny.toml", "--quiet", "--set", setting)
    assert answer.code == 2
    assert answer.out == ""
    for word in words:
        assert word in answer.complaint
    assert not (home / "runs" / "tiny" / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[model]\nwidth = 'wide'\n", ["bad.toml", "model.width = 'wide'", "integer"]),
        (b"[model]\nwidht = 16\n", ["unknown key 'model.widht'", "did you mean 'width'"]),
        (b"[modle]\nwidth = 16\n", ["unknown key 'modle'", "did you mean 'model'"]),
        (b"[model\n", ["bad.toml is not a TOML file"]),
        (b"\xff\xfe", ["bad.toml is not a TOML file"]),
        (b"[train]\nsteps = 5\nseconds = 3.0\n", ["give one of steps, tokens, seconds"]),
        (b"[train]\nbatch = true\n", ["train.batch = True"]),
    ],
)
def test_a_wrong_recipe_file_is_one_sentence(ask: Ask, home: Path, content: bytes, words: list[str]) -> None:
    (home / "bad.toml").write_bytes(content)
    answer = ask("train", "bad.toml", "--quiet")
    assert answer.code == 2
    for word in words:
        assert word in answer.complaint


def test_a_missing_recipe_and_a_folder_say_what_to_give(ask: Ask, home: Path) -> None:
    (home / "folder").mkdir()
    missing, folder = ask("train", "none.toml"), ask("train", "folder")
    assert (missing.code, folder.code) == (2, 2)
    assert "there is no recipe none.toml" in missing.complaint
    assert "folder is a folder; give a recipe file" in folder.complaint


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["text.txt holds no text"]),
        (b" \n\n\t ", ["text.txt holds no text"]),
        (b"short", ["too short for block 16"]),
        (b"caf\xe9 " * 200, ["text.txt is not utf-8 text: byte 3 is 0xe9", "latin-1"]),
        (b"\x00\x01\x02" * 200, ["not a text file", "binary"]),
    ],
)
def test_unusable_text_is_one_sentence(ask: Ask, home: Path, content: bytes, words: list[str]) -> None:
    (home / "text.txt").write_bytes(content)
    answer = ask("train", "tiny.toml", "--quiet")
    assert answer.code == 2
    for word in words:
        assert word in answer.complaint


@pytest.mark.parametrize("command", ["eval", "sample"])
def test_a_character_outside_the_vocabulary_is_named(ask: Ask, trained: Path, command: str) -> None:
    answer = ask(command, trained, "--text" if command == "eval" else "--prompt", "the Ω")
    assert answer.code == 2
    assert answer.out == ""
    assert "character 'Ω' at position 4 is outside the vocabulary" in answer.complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "-1"], ["temperature -1.0 is not valid", "0.8"]),
        (["--temperature", "nan"], ["temperature nan is not valid"]),
        (["--temperature", "warm"], ["--temperature 'warm' is not valid", "a number"]),
        (["--top-k", "0"], ["top-k 0 is not valid"]),
        (["--top-p", "2"], ["top-p 2.0 is not valid"]),
        (["--tokens", "-5"], ["tokens = -5 is not valid"]),
        (["--seed", "99999999999999999999999"], ["seed"]),
    ],
)
def test_wrong_sampling_options_are_one_sentence(ask: Ask, trained: Path, arguments: list[str], words: list[str]) -> None:
    answer = ask("sample", trained, "--prompt", "the", *arguments)
    assert answer.code == 2
    assert answer.out == ""
    for word in words:
        assert word in answer.complaint


@pytest.mark.parametrize("text", ["", "t"])
def test_a_text_with_nothing_to_predict_is_refused(ask: Ask, trained: Path, text: str) -> None:
    answer = ask("eval", trained, "--text", text)
    assert answer.code == 2
    assert "at least two" in answer.complaint


def test_eval_of_a_missing_or_unreadable_file_is_one_sentence(ask: Ask, home: Path, trained: Path) -> None:
    (home / "latin.txt").write_bytes(b"caf\xe9")
    assert "there is no file or folder none.txt" in ask("eval", trained, "--file", "none.txt").complaint
    assert "latin.txt is not utf-8 text" in ask("eval", trained, "--file", "latin.txt").complaint


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["there is no command 'trian'; did you mean 'train'"]),
        (["train"], ["missing argument", "keyhole train --help"]),
        (["train", "a.toml", "--stesp", "5"], ["no such option: --stesp", "keyhole train --help"]),
        (["sample", "run", "--tokens", "many"], ["--tokens 'many' is not valid", "a whole number"]),
        (["runs", "a", "b"], ["unexpected extra argument", "keyhole runs --help"]),
        (["parts", "mixr"], ["no kind of part 'mixr'", "did you mean 'mixer'"]),
        (["runs", "nowhere"], ["there is no folder nowhere"]),
    ],
)
def test_a_wrong_command_line_is_one_sentence(ask: Ask, arguments: list[str], words: list[str]) -> None:
    answer = ask(*arguments)
    assert answer.code == 2
    for word in words:
        assert word in answer.complaint


def test_with_json_an_error_is_an_object_too(ask: Ask) -> None:
    answer = ask("train", "none.toml", "--json")
    assert answer.json == {"error": answer.complaint, "exit_code": 2}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "none.toml"], 2, "there is no recipe none.toml"),
        (["train", "tiny.toml", "--set", "model.widht=3"], 2, "did you mean 'width'"),
        (["sample", "none"], 2, "there is no run none"),
        (["--nonsense"], 2, "no such option"),
    ],
)
def test_the_process_itself_exits_with_the_code(home: Path, arguments: list[str], code: int, words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "keyhole", *arguments], cwd=home, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code
    assert done.stdout == ""
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
