"""`keyhole export`: a run as a folder that others can read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.output import Json, print_json


def export(
    run: Annotated[Path, typer.Argument(help="A run's directory.", metavar="RUN")],
    folder: Annotated[Path, typer.Argument(help="Where to write, a new or empty folder.", metavar="DIR")],
    json: Json = False,
) -> None:
    """Write a run as a folder that others can read.

    It becomes a Hugging Face GPT-2 where every part of the model has a form in GPT-2, and safetensors otherwise.
    """
    from keyhole.record.run import open_run

    opened = open_run(run)

    from keyhole.use.export import export_run

    done = export_run(opened, folder)
    if json:
        print_json({"run": str(run), **done.to_dict()})
        return
    typer.echo(f"{done.path}: {done.form}, as {done.reason}")
    typer.echo(f"files: {', '.join(done.files)}")
    if done.form == "gpt2":
        typer.echo(f'load it with: transformers.AutoModelForCausalLM.from_pretrained("{done.path}")')
    else:
        typer.echo(f"load it as {done.path / 'KEYHOLE.md'} says")
