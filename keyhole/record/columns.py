"""What a listing knows of each run: one row a run, one column a fact."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["text", "number", "time"]


class Column(NamedTuple):
    """What a column holds, and what it means."""

    kind: Kind
    meaning: str


COLUMNS: dict[str, Column] = {
    "run": Column("text", "the run's folder"),
    "state": Column("text", "`done`, `unfinished`, `no checkpoint`, `stopped by a finding`, or what is damaged"),
    "honest": Column("text", "`yes` or `fails` where an audit is among the run's findings, else `-`"),
    "study": Column("text", "the study that made the run"),
    "arm": Column("text", "the arm of that study"),
    "seed": Column("number", "the study's seed, or else `train.seed`"),
    "step": Column("number", "the last step in its metrics"),
    "saved": Column("number", "the step of its newest whole checkpoint"),
    "steps": Column("number", "`train.steps`, where that is its budget"),
    "tokens": Column("number", "tokens predicted so far"),
    "seconds": Column("number", "seconds of training so far"),
    "tokens_per_second": Column("number", "how fast"),
    "train_loss": Column("number", "the last training loss"),
    "dev_loss": Column("number", "the last dev loss"),
    "dev_bits_per_byte": Column("number", "the same, comparable between tokenizers"),
    "parameters": Column("number", "how many the model has"),
    "model": Column("text", "layers x heads x width, mixer and position"),
    "layers": Column("number", "`model.layers`"),
    "heads": Column("number", "`model.heads`"),
    "width": Column("number", "`model.width`"),
    "mixer": Column("text", "`model.mixer` without options; several are joined by `+`"),
    "position": Column("text", "`model.position`"),
    "merge": Column("text", "`model.merge`"),
    "norm": Column("text", "`model.norm`"),
    "feed": Column("text", "`model.feed`"),
    "optimizer": Column("text", "`train.optimizer`"),
    "rate": Column("number", "`train.rate`"),
    "source": Column("text", "`data.source`"),
    "recipe": Column("text", "the recipe's hash: equal for runs of one recipe"),
    "started": Column("time", "when the run began (UTC)"),
    "modified": Column("time", "when its metrics last grew (UTC)"),
}


def column_table() -> str:
    """The columns as docs/runs.md lists them."""
    lines = ["| column | kind | meaning |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in COLUMNS.items())])
