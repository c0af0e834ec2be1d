"""`keyhole parts`: everything that a recipe may name."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from keyhole.cli.output import Json, console, print_json

OWN = 'A part of your own is a class in a file: write "my.py:Mine" (or "package.module:Mine") where a name stands.'


def parts(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help="This kind alone, for example mixer.", show_default="all kinds"),
    ] = None,
    json: Json = False,
) -> None:
    """List what a recipe may name: parts, optimizers, tokenizers, tasks."""
    found = _everything()
    if kind is not None:
        found = _only(kind, found)
    if json:
        print_json({"parts": found, "own": OWN})
    else:
        _show(found)


def _everything() -> list[dict[str, Any]]:
    from keyhole.model.registry import catalogue
    from keyhole.text import TASKS, TOKENIZER_OPTIONS
    from keyhole.training.optim import OPTIONS
    from keyhole.training.schedule import SHAPES

    found = [asdict(part) for part in catalogue()]
    found += [_entry("optimizer", name, options) for name, options in OPTIONS.items()]
    found += [_entry("schedule", name, options) for name, options in SHAPES.items()]
    found += [_entry("tokenizer", name, options) for name, options in TOKENIZER_OPTIONS.items()]
    found += [
        _entry("task", name, task.defaults, (task.__doc__ or "").strip().split("\n")[0]) for name, task in TASKS.items()
    ]
    return found


SUMMARIES = {
    "sgd": "Gradient descent with momentum.",
    "adagrad": "Rates that fall with the sum of squared gradients.",
    "adam": "Rates scaled by running moments of the gradient.",
    "adamw": "Adam with decay of the weights apart from the gradient.",
    "sign": "Every weight moves by the rate, in the direction of its averaged gradient.",
    "muon": "Momentum made orthogonal for matrices; AdamW for the rest.",
    "constant": "The full rate to the end.",
    "cosine": "Half a cosine down to `floor` times the rate.",
    "linear": "A straight line down to `floor` times the rate.",
    "trapezoid": "The full rate, then over the last share `decay` a line down to `floor`.",
    "bytes": "Every UTF-8 byte: any text in any language.",
    "chars": "Every character that occurs in the text.",
    "words": "Words that occur at least `count` times; the others are <UNK>.",
    "bpe": "Pieces of words learnt from the text, `size` of them.",
}
"""What tables of plain options cannot say of themselves; a test holds the names complete."""


def _entry(kind: str, name: str, options: dict[str, Any], summary: str = "") -> dict[str, Any]:
    summary = summary or SUMMARIES.get(name, "")
    return {"kind": kind, "name": name, "summary": summary, "options": dict(options), "warning": None}


def _only(kind: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from keyhole.core.errors import InputError, nearest

    kinds = list(dict.fromkeys(part["kind"] for part in found))
    if kind.rstrip("s") not in kinds:
        raise InputError(f"there is no kind of part {kind!r}{nearest(kind, kinds)}")
    return [part for part in found if part["kind"] == kind.rstrip("s")]


def _show(found: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    shown, before = Table.grid(padding=(0, 2)), ""
    shown.add_column(no_wrap=True)
    for part in found:
        if part["kind"] != before:
            shown.add_row(Text(f"{chr(10) * bool(before)}{part['kind']}", style="bold"), "")
        about = Text(part["summary"].rstrip("."))
        if part["options"]:
            options = ", ".join(_option(key, value) for key, value in part["options"].items())
            about.append(f"\n{options}", style="dim")
        if part["warning"]:
            about.append(f"\nwarning: {part['warning']}", style="red")
        shown.add_row(Text(f"  {part['name']}", style="cyan"), about)
        before = part["kind"]
    screen = console()
    screen.print(shown)
    screen.print(f"\n{OWN}", markup=False, soft_wrap=True)
    screen.print('Options go into a table: mixer = { name = "softmax", qk_norm = true }', markup=False, soft_wrap=True)


def _option(key: str, default: Any) -> str:
    """An option and its default as a recipe would write them."""
    if default is None:
        return f"{key} (from the block)"
    if isinstance(default, bool):
        return f"{key} = {str(default).lower()}"
    if isinstance(default, str):
        return f'{key} = "{default}"'
    return f"{key} = {round(default, 4) if isinstance(default, float) and default > 0.01 else default}"
