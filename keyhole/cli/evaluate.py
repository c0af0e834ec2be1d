"""`keyhole eval`: how well a run predicts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.output import Json, cell, console, number, print_json, table

if TYPE_CHECKING:
    from keyhole.use.evaluate import Evaluation

SHOWN = 48
"""Characters of a text that its row shows."""


def evaluate(
    run: Annotated[Path, typer.Argument(help="A run's directory.", metavar="RUN")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            metavar="TEXT",
            help="A text to score; may be given many times.",
            show_default="the run's dev split",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="A file to score, cut into rows as the training data was."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure how well a run predicts: loss, perplexity, bits per byte.

    Scores the texts and the file that are given, each by itself and all together; or else the run's whole dev split.
    """
    from keyhole.record.run import open_run

    opened = open_run(run)

    from keyhole.use.evaluate import evaluate as measure

    found = measure(opened, texts=text or None, file=file)
    if json:
        print_json({"run": str(run), **found.to_dict()})
    else:
        _show(found, "all" if found.texts else "dev split")


def _show(found: Evaluation, name: str) -> None:
    columns = ("tokens", "loss", "perplexity", "sentence\nperplexity", "bits per\nbyte")
    shown = table("text", *columns, right=columns)
    for text, score in [*found.texts, (name, found.total)]:
        if score is found.total and found.texts:
            shown.add_section()
        whole = score is found.total
        label = cell(text if whole else _short(repr(text)), "bold" if whole else "")
        numbers = (score.loss, score.perplexity, score.sentence_perplexity, score.bits_per_byte)
        shown.add_row(label, f"{score.tokens:,}", *map(number, numbers))
    console().print(shown)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 4]}...{text[-1]}"
