"""Keyhole, the attention laboratory.

    import keyhole as kh
    run = kh.train(kh.Recipe.load("recipes/first.toml"), out="runs/first")
    print(kh.sample(run, prompt="The ", tokens=100))

Names are imported when first used, so that `import keyhole` costs nothing and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyhole.audits.target import audit
    from keyhole.core.config import Recipe
    from keyhole.core.errors import InputError, KeyholeError, RunStopped, StorageError
    from keyhole.core.findings import Finding
    from keyhole.model.lm import build
    from keyhole.record.compare import compare_runs
    from keyhole.record.index import list_runs
    from keyhole.record.run import Run, open_run
    from keyhole.studies.result import StudyResult, open_study
    from keyhole.studies.search.conduct import search
    from keyhole.studies.study import study
    from keyhole.training.loop import train
    from keyhole.use.evaluate import evaluate
    from keyhole.use.export import export_run
    from keyhole.use.gpt2 import import_gpt2
    from keyhole.use.sample import sample

__version__ = "0.1.0"

_WHERE = {
    "Finding": "keyhole.core.findings",
    "InputError": "keyhole.core.errors",
    "KeyholeError": "keyhole.core.errors",
    "Recipe": "keyhole.core.config",
    "Run": "keyhole.record.run",
    "RunStopped": "keyhole.core.errors",
    "StorageError": "keyhole.core.errors",
    "StudyResult": "keyhole.studies.result",
    "audit": "keyhole.audits.target",
    "build": "keyhole.model.lm",
    "compare_runs": "keyhole.record.compare",
    "evaluate": "keyhole.use.evaluate",
    "export_run": "keyhole.use.export",
    "import_gpt2": "keyhole.use.gpt2",
    "list_runs": "keyhole.record.index",
    "open_run": "keyhole.record.run",
    "open_study": "keyhole.studies.result",
    "sample": "keyhole.use.sample",
    "search": "keyhole.studies.search.conduct",
    "study": "keyhole.studies.study",
    "train": "keyhole.training.loop",
}

__all__ = [
    "Finding",
    "InputError",
    "KeyholeError",
    "Recipe",
    "Run",
    "RunStopped",
    "StorageError",
    "StudyResult",
    "audit",
    "build",
    "compare_runs",
    "evaluate",
    "export_run",
    "import_gpt2",
    "list_runs",
    "open_run",
    "open_study",
    "sample",
    "search",
    "study",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
    # Bound once, so that the next use costs nothing.
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
