"""Kill a study at random moments, go on each time, and compare with one that nobody disturbed.

python -m tests.studies.kill_many --kills 5
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.studies.study_helpers import outcome, write_study

ARMS: dict[str, dict[str, Any]] = {
    "baseline": {},
    "rope": {"model": {"position": "rope"}},
    "shuffle": {"model": {"merge": "shuffle", "dropout": 0.1}},
    "reweight": {"model": {"merge": "reweight"}},
    "wild": {"train": {"optimizer": "sgd", "rate": 1e6, "clip": 0.0}},
}
BASE: dict[str, Any] = {"train": {"save_every": 20, "eval_every": 20}}


def start(source: Path, out: Path) -> subprocess.Popen[bytes]:
    """`keyhole study`, from nothing or going on, in a session of its own."""
    command = [sys.executable, "-m", "keyhole", "study", str(source), "--out", str(out), "--quiet", "--json"]
    command += ["--resume"] if (out / "study.json").exists() else []
    with (out.parent / "log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def whole_tree(process: subprocess.Popen[bytes]) -> list[int]:
    """The process and all that it started, workers in sessions of their own included."""
    found, parents = [process.pid], {process.pid}
    for path in sorted(Path("/proc").glob("[0-9]*/stat"), key=lambda path: int(path.parts[2])):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent in parents:
            parents.add(int(path.parts[2]))
            found.append(int(path.parts[2]))
    return found


def main() -> int:
    """Print what each kill hit, and whether the result is the same."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        source = write_study(place / "source", arms=ARMS, base=BASE, study={"seeds": 2, "steps": asked.steps})
        began = time.monotonic()
        undisturbed = place / "undisturbed"
        start(source, undisturbed).wait()
        usual = time.monotonic() - began
        say(f"undisturbed: {len(list(undisturbed.rglob('result.json')))} results in {usual:.1f} s")
        out = place / "killed"
        for number in range(asked.kills):
            process = start(source, out)
            time.sleep(draw.uniform(usual / 4, usual))
            # Every other time the workers die as well, as where the machine goes down.
            targets = whole_tree(process) if number % 2 else [process.pid]
            running = process.poll() is None
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            results = len(list(out.rglob("result.json")))
            hit = f"{len(targets)} processes" if running else "nothing: it had ended"
            say(f"kill {number + 1}: {hit}, {results} results so far")
        start(source, out).wait()
        same = outcome(out) == outcome(undisturbed)
        say(f"{len(outcome(out))} results, findings and weights: {'all bit-identical' if same else 'NOT the same'}")
    return 0 if same else 1


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
