"""Options that several commands share, each said once."""

from __future__ import annotations

from typing import Annotated

import typer

Quiet = Annotated[bool, typer.Option("--quiet", metavar="", help="Show no progress.")]
Workers = Annotated[
    int | None, typer.Option(metavar="N", help="How many trainings at once, one thread each.", show_default="one a core")
]
Where = Annotated[str, typer.Option(metavar="WHERE", help="Where it runs: local, ray, or ray://host:port.")]
