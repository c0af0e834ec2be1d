"""`keyhole runs`: all runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.output import Json, cell, console, number, print_json, table

_STYLE = {"done": "green", "unfinished": "yellow"}


def runs(
    folder: Annotated[Path, typer.Argument(help="Where the runs lie.", metavar="DIR")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs below a folder: how far and how good each is."""
    from keyhole.record.run import list_runs

    rows = list_runs(folder)
    if json:
        print_json({"runs": rows})
        return
    if not rows:
        typer.echo(f"no runs in {folder}; keyhole train RECIPE.toml makes the first")
        return
    numbers = ("step", "train\nloss", "dev\nloss")
    shown = table("run", "state", *numbers, "model", "optimizer", "source", right=numbers)
    for row in rows:
        shown.add_row(
            cell(row["run"]),
            cell(row["state"], _STYLE.get(row["state"], "red")),
            f"{row['step']:,}" if "step" in row else "-",
            number(row.get("train_loss")),
            number(row.get("dev_loss")),
            *(cell(str(row.get(key, "-"))) for key in ("model", "optimizer")),
            cell(Path(row["source"]).name if "source" in row else "-"),
        )
    console().print(shown)
