from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_helpers import Ask

from keyhole import __version__
from keyhole.cli.main import COMMANDS, EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {
    "train": ("--out", "--resume", "--set", "--json", "--quiet"),
    "eval": ("--text", "--file", "--json"),
    "sample": ("--prompt", "--tokens", "--temperature", "--top-k", "--top-p", "--seed", "--json"),
    "runs": ("--where", "--sort", "--descending", "--limit", "--columns", "--reindex", "--compare", "--json"),
    "parts": ("--json",),
    "audit": ("--kind", "--set", "--no-canary", "--json"),
    "study": ("--out", "--seeds", "--workers", "--on", "--resume", "--json", "--quiet"),
    "search": ("--out", "--trials", "--workers", "--on", "--resume", "--json", "--quiet"),
    "report": ("--html", "--md", "--json"),
    "export": ("--json",),
    "import": ("--json",),
    "doctor": ("--json",),
}


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_every_command_has_its_options_and_an_example(ask: Ask) -> None:
    assert OPTIONS.keys() == COMMANDS.keys() == EXAMPLES.keys()
    for command, options in OPTIONS.items():
        answer = ask(command, "--help")
        assert answer.code == 0
        for option in (*options, f"Example: keyhole {command}"):
            assert option in answer.out, (command, option)


def test_options_say_their_defaults(ask: Ask) -> None:
    text = " ".join(ask("sample", "--help").out.replace("│", " ").split())
    for default in ("nothing", "200", "0.8", "all", "1.0", "0"):
        assert f"[default: {default}]" in text or f"[default: ({default})]" in text


def test_help_lists_every_command_on_one_line_each(ask: Ask) -> None:
    lines = ask("--help").out.splitlines()
    for command in COMMANDS:
        assert any(line.startswith(f"│ {command} ") for line in lines)
    assert ask().out == ask("--help").out


def test_the_version_is_the_packages(ask: Ask) -> None:
    assert ask("--version").out == f"keyhole {__version__}\n"


@pytest.mark.alone
def test_help_is_quick() -> None:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        done = python("-m", "keyhole", "--help")
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0
        assert "sample" in done.stdout
    assert statistics.median(seconds) < 0.5, seconds


@pytest.mark.parametrize("code", ["import keyhole", "import keyhole.cli.main"])
def test_importing_keyhole_or_its_commands_imports_nothing_heavy(code: str) -> None:
    heavy = ("torch", "numpy", "pydantic", "transformers", "tokenizers")
    done = python("-c", f"{code}; import sys; print([name for name in {heavy} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_reader_who_has_enough_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m keyhole parts --json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", f"{command} | head -c 10; echo ${{PIPESTATUS[0]}}"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    assert done.stdout.endswith("0\n")
