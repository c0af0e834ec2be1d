"""Carry a study out on a local Ray cluster of two nodes, kill one midway, and compare with this machine alone.

python -m tests.studies.kill_node
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from keyhole.studies.result import StudyResult
from keyhole.studies.study import study
from tests.studies.task_helpers import trial, unlike, wait_until
from tests.studies.two_nodes import TwoNodes
from tests.training.training_helpers import write_text

STUDY = """
[study]
recipe = "base.toml"
seeds = 2
steps = 800

[set]
data = { source = "SOURCE", block = 32 }
model = { layers = 2, width = 48 }
train = { precision = "float32", save_every = 20, log_every = 5, eval_every = 50, batch = 8 }

[arms.baseline]
[arms.rope]
model.position = "rope"
"""


def main() -> None:
    """Print which trials moved, and whether everything is equal."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        (folder / "base.toml").write_text("[data]\n")
        (folder / "study.toml").write_text(STUDY.replace("SOURCE", str(folder / "text.txt")))
        began = time.monotonic()
        study(folder / "study.toml", folder / "local", on="local", workers=2, quiet=True)
        alone, began = time.monotonic() - began, time.monotonic()
        with TwoNodes() as nodes:
            os.environ["RAY_ADDRESS"] = nodes.address
            started = time.monotonic() - began
            killer = threading.Thread(target=_kill_midway, args=(nodes, folder / "ray"), daemon=True)
            killer.start()
            result = study(folder / "study.toml", folder / "ray", on="ray", quiet=True)
            took = time.monotonic() - began - started
            killer.join()
        sys.exit(_report(result, folder, alone, took))


def _kill_midway(nodes: TwoNodes, out: Path) -> None:
    """When both nodes carry a trial that has saved."""
    first = [trial(out, arm) for arm in ("baseline", "rope")]
    wait_until(lambda: all(any((out / task.name).glob("checkpoints/step-*")) for task in first), "the first saves", 60)
    nodes.lose_one()


def _report(result: StudyResult, folder: Path, alone: float, took: float) -> int:
    log = (folder / "ray/logs/cluster.log").read_text()
    wrong = 0
    print(f"{'trial':<18} {'dev loss':>9}  {'node lost':<28} equal to local")  # noqa: T201
    for arm in ("baseline", "rope"):
        for seed in (0, 1):
            task = trial(folder / "ray", arm, seed)
            differ = unlike(task, folder / "local", folder / "ray")
            wrong += bool(differ)
            loss = result.arm(arm).by_seed("dev_loss")[seed]
            resumed = f"resuming {folder / 'ray' / task.name}" in log
            how = "yes, went on from its save" if resumed else "no"
            print(f"{arm} seed {seed:<6} {loss:>9.4f}  {how:<28} {'yes' if not differ else ', '.join(differ)}")  # noqa: T201
    moved = log.count("resuming ")
    print(f"local {alone:.1f} s; two nodes {took:.1f} s, one of them killed; {moved} trial(s) moved; {wrong} differ(s)")  # noqa: T201
    return int(bool(wrong) or not moved)


if __name__ == "__main__":
    main()
