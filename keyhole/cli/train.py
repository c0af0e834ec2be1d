"""`keyhole train`: carry a recipe out, and say how it went."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from keyhole.cli.options import Quiet
from keyhole.cli.output import Json, print_json

if TYPE_CHECKING:
    from keyhole.core.config import Recipe


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe file in TOML.", metavar="RECIPE.toml")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The run's directory, which must be new or empty.",
            show_default="runs/NAME for NAME.toml",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", metavar="", help="Go on where the run was stopped.")] = False,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a key of the recipe; may be given many times.", metavar="SECTION.KEY=VALUE"),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train the model of a recipe, and keep the record of it."""
    from keyhole.core.config import Recipe, parse_setting

    loaded = Recipe.load(recipe)
    if change:
        loaded = loaded.replace(dict(map(parse_setting, change)))
    place = out or _default_out(recipe, resume)
    first = os.environ.get("RANK", "0") == "0"
    warnings = _warnings(loaded)
    for warning in warnings if first else []:
        typer.echo(f"warning: {warning}", err=True)

    from keyhole.cli.summary import show, summarise
    from keyhole.training.loop import train as carry_out

    done = carry_out(loaded, place, resume=resume, quiet=quiet)
    if not first:
        return
    if json:
        print_json({**summarise(done), "warnings": warnings})
    else:
        show(done, warnings)


def _default_out(recipe: Path, resume: bool) -> Path:
    """runs/NAME for recipes/NAME.toml; a run's own recipe.toml goes on in its run, when that is asked for."""
    from keyhole.core.errors import InputError

    own = recipe.name == "recipe.toml" and (recipe.parent / "environment.json").is_file()
    if own and resume:
        return recipe.parent
    if own:
        raise InputError(
            f"{recipe} is the recipe of a run; add --resume to go on with that run, or give --out a new folder to repeat it"
        )
    return Path("runs") / recipe.stem


def _warnings(recipe: Recipe) -> list[str]:
    from keyhole.model.registry import CATALOGUE, warning

    found = [warning(kind, spec.name) for kind in CATALOGUE for spec in recipe.model.specs(kind)]
    return [text for text in found if text]
