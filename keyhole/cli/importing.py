"""`keyhole import`: a Hugging Face GPT-2 folder as a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.output import Json, print_json


def import_folder(
    folder: Annotated[Path, typer.Argument(help="A Hugging Face GPT-2 folder.", metavar="FOLDER")],
    out: Annotated[Path, typer.Argument(help="The run to make, a new or empty folder.", metavar="DIR")],
    json: Json = False,
) -> None:
    """Read a Hugging Face GPT-2 folder into a new run."""
    from keyhole.use.gpt2 import import_gpt2

    made = import_gpt2(folder, out)
    model = made.recipe.model
    about = {"layers": model.layers, "width": model.width, "heads": model.heads, "vocab": made.tokenizer.vocab}
    if json:
        print_json({"run": str(made.path), "from": str(folder), **about})
        return
    sizes = ", ".join(f"{key} {value:,}" for key, value in about.items())
    typer.echo(f"{made.path}: a GPT-2 of {sizes}")
    typer.echo(f'next: keyhole sample {made.path} --prompt "The "')
