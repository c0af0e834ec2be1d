"""Kill runs at many random moments, go on each time, and compare with runs that nobody disturbed.

python -m tests.training.kill_many --kills 30
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.training.training_helpers import Trainer, differences, end, kill_often, log_of, values, write_text

RECIPES: dict[str, dict[str, Any]] = {
    "adamw, dropout, packed text, a save each step": {
        "model_dropout": 0.1,
        "train_optimizer": "adamw",
        "train_save_every": 1,
    },
    "muon, bfloat16, shuffle, a line a row": {
        "data_rows": "lines",
        "data_tokenizer": "words",
        "model_dropout": 0.1,
        "model_merge": "shuffle",
        "train_optimizer": "muon",
        "train_precision": "bfloat16",
        "train_save_every": 2,
    },
    "sgd, accumulated, sentences, a save each third step": {
        "data_rows": "sentences",
        "model_merge": "shuffle",
        "train_accumulate": 2,
        "train_optimizer": "sgd",
        "train_save_every": 3,
    },
}


def main() -> None:
    """Print what the kills hit, and whether the weights were the same."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    hit: Counter[str] = Counter()
    runs, other, began = 0, [], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_text(place)
        trainer = Trainer(place)
        recipes = {name: values(train_steps=asked.steps, **changes) for name, changes in RECIPES.items()}
        whole = {}
        for name, recipe in recipes.items():
            out = place / f"whole {len(whole)}"
            trainer.run(recipe, out)  # the first one pays for what is only done once
            out, start = place / f"undisturbed {len(whole)}", time.monotonic()
            assert trainer.run(recipe, out) == 0, log_of(out).read_text()
            whole[name] = end(out), time.monotonic() - start
        while hit.total() < asked.kills:
            name = list(recipes)[runs % len(recipes)]
            undisturbed, seconds = whole[name]
            out = place / f"killed {runs}"
            some = kill_often(trainer, recipes[name], out, min(asked.kills - hit.total(), 6), seconds, draw)
            found = differences(undisturbed, end(out))
            hit, runs = hit + some, runs + 1
            other += found
            kills = ", ".join(f"{count} {where}" for where, count in sorted(some.items())) or "none"
            say(f"run {runs:2d}  {name}: kills: {kills}; {'identical' if not found else f'NOT the same: {found}'}")
        trainer.close()
    where = ", ".join(f"{count} {where}" for where, count in hit.most_common())
    say(f"{hit.total()} kills in {runs} runs ({time.monotonic() - began:.0f} s): {where}")
    if other:
        raise SystemExit(f"{len(other)} differences")
    say("weights, optimizer, state and metrics of every killed run are bit-identical with those of an undisturbed one")


def say(text: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
