"""What `keyhole train` says at the end: figures, the curve, and what to do next."""

from __future__ import annotations

import math
import shlex
from typing import TYPE_CHECKING, Any

from keyhole.cli.curve import Series, plot
from keyhole.cli.output import console, next_steps, number, speaks_unicode
from keyhole.core.errors import InputError

if TYPE_CHECKING:
    from keyhole.record.run import Run


def summarise(run: Run) -> dict[str, Any]:
    """The figures of a finished run."""
    rows = run.metrics
    last = rows[-1] if rows else {}
    dev = next((row for row in reversed(rows) if "dev_loss" in row), {})
    loss = dev.get("dev_loss")
    return {
        "run": str(run.path),
        "recipe": run.recipe.hash,
        "steps": last.get("step", 0),
        "tokens": last.get("tokens", 0),
        "seconds": last.get("seconds", 0.0),
        "tokens_per_second": last.get("tokens_per_second"),
        "train_loss": last.get("loss"),
        "dev_loss": loss,
        "dev_perplexity": None if loss is None else math.exp(min(loss, 700)),
        "dev_sentence_perplexity": dev.get("dev_sentence_perplexity"),
        "dev_bits_per_byte": dev.get("dev_bits_per_byte"),
        "uniform_loss": math.log(run.tokenizer.vocab),
        "precision": run.environment.get("precision", {}).get("name"),
    }


def show(run: Run, warnings: list[str]) -> None:
    """The summary for people, on stdout."""
    from rich.markup import escape
    from rich.text import Text

    done, screen = summarise(run), console()
    rows = run.metrics
    curves = [
        Series("train", "cyan", [(row["step"], row["loss"]) for row in rows if "loss" in row]),
        Series("dev", "bold yellow", [(row["step"], row["dev_loss"]) for row in rows if "dev_loss" in row], dots=True),
    ]
    screen.print()
    for line in plot(curves, width=min(72, screen.width - 12), height=10, unicode=speaks_unicode()):
        screen.print(Text.assemble("  ", *line), no_wrap=True, overflow="crop")
    figures = {
        "train loss": number(done["train_loss"]),
        "dev loss": _dev(done),
        "trained": f"{done['steps']:,} steps, {done['tokens']:,} tokens in {done['seconds']:,.1f} s",
        "speed": f"{done['tokens_per_second'] or 0:,.0f} tokens/s in {done['precision']}",
        "record": str(run.path),
    }
    for name, value in figures.items():
        screen.print(f"  {name:<11} [bold]{escape(value)}[/]", soft_wrap=True)
    for warning in warnings:
        screen.print(f"  [bold red]warning[/]     {escape(warning)}", soft_wrap=True)
    path, parent = (shlex.quote(str(place)) for place in (run.path, run.path.parent))
    next_steps(
        screen,
        {
            f"keyhole sample {path}{_prompt(run)}": "let it write",
            f"keyhole eval {path}": "loss, perplexity and bits per byte on all held-out text",
            f"keyhole runs{'' if parent == 'runs' else ' ' + parent}": "all runs beside each other",
        },
    )


def _dev(done: dict[str, Any]) -> str:
    if done["dev_loss"] is None:
        return "not measured"
    parts = [f"perplexity {number(done['dev_perplexity'], 2)}"]
    if done["dev_bits_per_byte"] is not None:
        parts.append(f"{done['dev_bits_per_byte']:.3f} bits per byte")
    parts.append(f"a model that guesses evenly has loss {done['uniform_loss']:.2f}")
    return f"{number(done['dev_loss'])}  ({', '.join(parts)})"


def _prompt(run: Run) -> str:
    """A prompt that this run can read, if the usual one is in its vocabulary."""
    try:
        return ' --prompt "The "' if len(run.tokenizer.encode("The ")) else ""
    except InputError:
        return ""
