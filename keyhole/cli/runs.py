"""`keyhole runs`: all runs below a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.output import Json, console, number, print_json, table

_STYLE = {"done": "green", "unfinished": "yellow"}


def runs(
    folder: Annotated[Path, typer.Argument(help="Where the runs lie.", metavar="DIR")] = Path("runs"),
    json: Json = False,
) -> None:
    """List the runs below a folder: where each stands, and how well it predicts."""
    from keyhole.record.run import list_runs

    rows = list_runs(folder)
    if json:
        print_json({"runs": rows})
        return
    if not rows:
        typer.echo(f"no runs in {folder}; keyhole train RECIPE.toml makes the first")
        return
    from rich.text import Text

    shown = table("run", "state", "step", "train loss", "dev loss", "model", "optimizer", "source", right=("step", "train loss", "dev loss"))
    for row in rows:
        shown.add_row(
            Text(row["run"]),
            Text(row["state"], style=_STYLE.get(row["state"], "red")),
            f"{row['step']:,}" if "step" in row else "-",
            number(row.get("train_loss")),
            number(row.get("dev_loss")),
            *(Text(str(row.get(key, "-"))) for key in ("model", "optimizer", "source")),
        )
    console().print(shown)
