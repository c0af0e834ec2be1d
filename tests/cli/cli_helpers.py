from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

TEXT = "the cat sat on the mat and the dog sat on the log.\n" * 40

RECIPE = """\
[data]
source = "text.txt"
block = 16

[model]
layers = 1
width = 16
heads = 2

[train]
steps = 6
batch = 4
precision = "float32"
eval_every = 3
save_every = 3
log_every = 1
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def complaint(self) -> str:
        """The one sentence that a failing command says."""
        said = [line for line in self.err.splitlines() if line.startswith("keyhole: ")]
        assert len(said) == 1, self.err
        assert "Traceback" not in self.err
        return said[0].removeprefix("keyhole: ")


Ask = Callable[..., Answer]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, to see that nothing was changed."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
