from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_helpers import Ask, contents

from keyhole.model.registry import CATALOGUE
from keyhole.text import TASKS, TOKENIZER_OPTIONS
from keyhole.training.optim import OPTIONS
from keyhole.training.schedule import SHAPES


def test_train_shows_the_curve_the_figures_and_what_to_do_next(ask: Ask, home: Path) -> None:
    answer = ask("train", "tiny.toml")
    assert answer.code == 0
    assert (home / "runs" / "tiny" / "recipe.toml").is_file()
    for words in ("train loss", "dev loss", "perplexity", "tokens/s", "runs/tiny", "┤", "●", "step 6"):
        assert words in answer.out
    assert "keyhole sample runs/tiny" in answer.out
    assert "keyhole eval runs/tiny" in answer.out
    assert "step 6" in answer.err  # progress goes to stderr


def test_the_prompt_that_train_suggests_is_one_the_run_can_read(ask: Ask, home: Path) -> None:
    assert "--prompt" not in ask("train", "tiny.toml", "--quiet").out  # the text has no capital T
    (home / "text.txt").write_text("The cat sat.\n" * 60)
    answer = ask("train", "tiny.toml", "--quiet", "--out", "runs/capital")
    assert 'keyhole sample runs/capital --prompt "The "' in answer.out
    assert ask("sample", "runs/capital", "--prompt", "The ").code == 0


def test_train_with_json_prints_one_object_that_agrees_with_the_record(ask: Ask, home: Path) -> None:
    answer = ask("train", "tiny.toml", "--json", "--quiet", "--set", "train.steps=4", "--set", "model.position=rope")
    rows = [json.loads(line) for line in (home / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert answer.code == 0
    assert answer.err == ""
    assert answer.json["steps"] == 4
    assert answer.json["train_loss"] == rows[-1]["loss"]
    assert answer.json["dev_loss"] == rows[-1]["dev_loss"]
    assert answer.json["warnings"] == []
    assert 'position = "rope"' in (home / "runs/tiny/recipe.toml").read_text()


def test_a_dishonest_part_is_warned_about_wherever_it_shows(ask: Ask) -> None:
    quiet = ask("train", "tiny.toml", "--quiet", "--json", "--set", "model.merge=reweight")
    assert "reads the future" in quiet.json["warnings"][0]
    assert "warning: merge reweight reads the future" in quiet.err
    shown = ask("train", "tiny.toml", "--quiet", "--set", "model.merge=reweight", "--out", "runs/again")
    assert "reads the future" in shown.out
    honest = ask("train", "tiny.toml", "--quiet", "--json", "--set", "model.merge=reweight-running", "--out", "runs/honest")
    assert honest.json["warnings"] == []
    parts = {part["name"]: part["warning"] for part in ask("parts", "merge", "--json").json["parts"]}
    assert "reads the future" in parts.pop("reweight")
    assert set(parts.values()) == {None}


def test_resume_goes_on_in_the_run_of_its_own_recipe(ask: Ask, trained: Path) -> None:
    before = contents(trained)["metrics.jsonl"]
    answer = ask("train", trained / "recipe.toml", "--resume", "--json")
    assert answer.code == 0
    assert answer.json["run"] == str(trained)
    assert "already trained" in answer.err
    assert contents(trained)["metrics.jsonl"] == before


def test_eval_measures_each_text_and_all_of_them(ask: Ask, trained: Path) -> None:
    answer = ask("eval", trained, "--text", "the cat sat", "--text", "on the log", "--json").json
    first, second = answer["texts"]
    assert (first["text"], second["text"]) == ("the cat sat", "on the log")
    total = answer["total"]
    assert total["tokens"] == first["tokens"] + second["tokens"]
    mean = (first["loss"] * first["tokens"] + second["loss"] * second["tokens"]) / total["tokens"]
    assert total["loss"] == pytest.approx(mean)
    assert total["sentence_perplexity"] == pytest.approx((first["perplexity"] + second["perplexity"]) / 2)
    table = ask("eval", trained, "--text", "the cat sat", "--text", "on the log").out
    for words in ("'the cat sat'", "all", f"{total['loss']:.4f}", f"{total['bits_per_byte']:.4f}"):
        assert words in table


def test_eval_without_texts_measures_the_whole_dev_split(ask: Ask, trained: Path) -> None:
    answer = ask("eval", trained, "--json").json
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert answer["texts"] == []
    assert answer["total"]["loss"] == pytest.approx(last["dev_loss"], abs=1e-5)
    assert answer["total"]["bits_per_byte"] == pytest.approx(last["dev_bits_per_byte"], abs=1e-5)
    assert "dev split" in ask("eval", trained).out


def test_eval_of_a_file_is_eval_of_its_text(ask: Ask, home: Path, trained: Path) -> None:
    (home / "more.txt").write_text("the dog and the cat")
    assert ask("eval", trained, "--file", "more.txt", "--json").json["total"] == pytest.approx(
        ask("eval", trained, "--text", "the dog and the cat", "--json").json["total"]
    )


def test_sample_prints_the_prompt_and_the_same_text_for_the_same_seed(ask: Ask, trained: Path) -> None:
    arguments = ("sample", trained, "--prompt", "the ", "--tokens", "30", "--seed", "3")
    first, again = ask(*arguments), ask(*arguments)
    assert first.code == 0
    assert first.out == again.out
    assert first.out.startswith("the ")
    assert len(first.out) == len("the ") + 30 + len("\n")
    assert ask(*arguments, "--json").json["text"] == first.out.removesuffix("\n")
    assert ask(*arguments[:-1], "4").out != first.out


def test_greedy_top_k_1_and_a_tiny_top_p_agree(ask: Ask, trained: Path) -> None:
    def text(*options: str) -> str:
        return ask("sample", trained, "--prompt", "the ", "--tokens", "20", *options).out

    assert text("--temperature", "0") == text("--top-k", "1") == text("--top-p", "1e-9")


def test_runs_lists_what_there_is_and_marks_what_is_damaged(ask: Ask, home: Path, trained: Path) -> None:
    (home / "runs" / "bad").mkdir()
    (home / "runs" / "bad" / "recipe.toml").write_text("[model")
    bad, tiny = ask("runs", "--json").json["runs"]
    assert bad["state"].startswith("damaged")
    assert (tiny["run"], tiny["state"], tiny["step"]) == ("runs/tiny", "done", 6)
    table = ask("runs").out
    assert "runs/tiny" in table
    assert f"{tiny['dev_loss']:.4f}" in table
    assert "damaged" in table
    assert ask("runs", "cache", "--json").code == 2
    (home / "none").mkdir()
    assert ask("runs", "none", "--json").json == {"runs": []}
    assert "no runs in none" in ask("runs", "none").out


def test_parts_lists_everything_that_a_recipe_may_name(ask: Ask) -> None:
    found = ask("parts", "--json").json["parts"]
    names: dict[str, set[str]] = {}
    for part in found:
        assert part["summary"], part
        names.setdefault(part["kind"], set()).add(part["name"])
    assert names == {
        **{kind: set(parts) for kind, parts in CATALOGUE.items()},
        "optimizer": set(OPTIONS),
        "schedule": set(SHAPES),
        "tokenizer": set(TOKENIZER_OPTIONS),
        "task": set(TASKS),
    }
    shown = ask("parts").out
    for part in found:
        assert part["name"] in shown
    assert "my.py:Mine" in shown
    assert {part["kind"] for part in ask("parts", "optimizers", "--json").json["parts"]} == {"optimizer"}


def test_export_says_what_it_wrote_and_import_reads_it_back(ask: Ask, home: Path, trained: Path) -> None:
    plain = ask("export", trained, "exported", "--json").json
    assert plain["form"] in ("gpt2", "safetensors")
    assert sorted(plain["files"]) == sorted(contents(home / "exported"))
    settings = [
        "model.mixer={ name = 'softmax', bias = true }",
        "model.norm={ name = 'layer', bias = true }",
        "model.feed={ name = 'gelu', bias = true }",
    ]
    assert ask("train", "tiny.toml", "--quiet", "--out", "runs/gpt", *(w for s in settings for w in ("--set", s))).code == 0
    shown = ask("export", "runs/gpt", "gpt2")
    assert "gpt2: gpt2" in shown.out
    assert "from_pretrained" in shown.out
    back = ask("import", "gpt2", "runs/back", "--json").json
    assert (back["layers"], back["width"], back["heads"]) == (1, 16, 2)
    one, two = (ask("eval", run, "--text", "the cat", "--json").json["total"] for run in ("runs/gpt", "runs/back"))
    assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
    assert "brings no text; set data.source" in ask("eval", "runs/back").complaint
