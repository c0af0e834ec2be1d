"""`keyhole sample`: let a run write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.output import Json, print_json


def sample(
    run: Annotated[Path, typer.Argument(help="A run's directory.", metavar="RUN")],
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What the text begins with.", show_default="nothing")] = "",
    tokens: Annotated[int, typer.Option(metavar="N", help="How many tokens to write at most.")] = 200,
    temperature: Annotated[
        float, typer.Option(metavar="X", help="0 takes the likeliest token; 1 draws as the model says.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(metavar="K", help="Draw among the K likeliest tokens only.", show_default="all")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="P", help="Draw among the likeliest that hold this share.", show_default="1.0"),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same text.")] = 0,
    json: Json = False,
) -> None:
    """Let a run write, and print the text as it comes."""
    from keyhole.record.run import open_run

    opened = open_run(run)

    from keyhole.use.sample import stream_sample

    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    pieces = stream_sample(opened, prompt, tokens, **options)
    if json:
        print_json({"run": str(run), "prompt": prompt, "text": prompt + "".join(pieces), "tokens": tokens, **options})
        return
    # The first piece is drawn before the prompt is shown: wrong input prints a sentence and no half text.
    first = next(pieces, "")
    sys.stdout.write(prompt + first)
    try:
        for piece in pieces:
            sys.stdout.flush()
            sys.stdout.write(piece)
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()
