"""What each process of a torchrun does in the tests: carry out orders from a file, one after the other.

An order is a recipe, a folder and perhaps a plant that ends this very process. What an order ended with is written beside
its run, by each process: OUT.0.json, OUT.1.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from keyhole.core.config import Recipe
from keyhole.core.errors import KeyholeError
from keyhole.record import checkpoint, create, metrics
from keyhole.training import engine, loop
from keyhole.training.parallel import end_process


def main(orders: Path) -> None:
    """Carry out all orders."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if rank:
        _forbid_writing()
    for order in json.loads(orders.read_text()):
        if order.get("plant") and order["plant"]["rank"] == rank:
            _plant(**order["plant"])
        said, out = {"error": None, "kind": None}, Path(order["out"])
        try:
            recipe = Recipe.parse(order["recipe"], folder=orders.parent)
            if order.get("missing_on") == rank:
                (orders.parent / "gone.txt").rename(orders.parent / "gone")
            loop.train(recipe, out, resume=order.get("resume", False), quiet=True)
        except (KeyholeError, SystemExit) as error:
            said = {"error": str(error), "kind": type(error).__name__}
        out.with_name(f"{out.name}.{rank}.json").write_text(json.dumps(said))
        if said["kind"] == "Parted":
            os._exit(1)
    end_process(0)


def _forbid_writing() -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("only process 0 writes")

    checkpoint.save = checkpoint.set_aside = refuse
    create.start_record = loop.start_record = loop.write_json = loop.only_writer = refuse
    metrics.MetricsWriter.__init__ = refuse


def _plant(rank: int, step: int = 0, where: str = "", save: int = 0) -> None:
    if where:
        import training_driver

        training_driver.plant(where, save)
        return
    advance, calls = engine.Engine.advance, []

    def die(self: engine.Engine, *arguments: object) -> engine.Step:
        calls.append(1)
        if len(calls) == step:
            os._exit(77)
        return advance(self, *arguments)

    engine.Engine.advance = die


if __name__ == "__main__":
    main(Path(sys.argv[1]))
