"""The whole state of a training, out to a checkpoint and back in, bit for bit.

Promised on the same machine, versions, threads and number of processes: data order is a pure function of the recipe, so two
integers hold its place; weights, moments and the state of chance (one for each process) are tensors; the rest is JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from keyhole.core.errors import StorageError
from keyhole.core.seeds import derive
from keyhole.record.checkpoint import Checkpoint
from keyhole.record.run import load_weights, named_tensors
from keyhole.training.engine import Engine
from keyhole.training.parallel import World

CHANCE = "chance."


def capture(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights, and optimizer with chance. Every process must call it; what is returned is whole in each."""
    weights = {name: _whole(tensor) for name, tensor in named_tensors(engine.model).items()}
    optimizer = {name: _whole(tensor) for name, tensor in engine.optimizer.tensors().items()}
    for rank, state in enumerate(engine.world.gather(torch.get_rng_state())):
        optimizer[f"{CHANCE}{rank}"] = state
    return weights, optimizer


def restore(engine: Engine, saved: Checkpoint) -> list[str]:
    """Put an engine where the checkpoint left off; returns notes on what could not be the same."""
    notes = []
    weights, optimizer = saved.weights(), saved.optimizer()
    chance = {name: optimizer.pop(name) for name in list(optimizer) if name.startswith(CHANCE)}
    fill = load_sharded if _sharded(engine) else load_weights
    fill(engine.model, weights, str(saved.path))
    engine.weights.refresh()
    try:
        like = [p for part in engine.optimizer.parts for group in part.param_groups for p in group["params"]]
        engine.optimizer.restore(_share_like(optimizer, like) if _sharded(engine) else optimizer)
    except (KeyError, IndexError, ValueError) as error:
        raise StorageError(f"{saved.path}: the optimizer's state does not fit the recipe ({error})") from None
    if len(chance) != engine.world.size:
        notes.append(
            f"this run was trained by {len(chance)} process(es) and goes on with {engine.world.size}: "
            "losses agree, but not bit for bit"
        )
        seed_chance(engine.train.seed, engine.world)
    else:
        torch.set_rng_state(chance[f"{CHANCE}{engine.world.rank}"])
    return notes


def seed_chance(seed: int, world: World) -> None:
    """Dropout and shuffling draw from a stream of their own in each process."""
    torch.manual_seed(derive(seed, "chance", world.rank))


@torch.no_grad()
def load_sharded(model: torch.nn.Module, weights: dict[str, torch.Tensor], where: str) -> None:
    """Give each process its share of whole weights."""
    wanted = named_tensors(model)
    if missing := wanted.keys() ^ weights.keys():
        raise StorageError(f"{where} does not fit the recipe: {', '.join(sorted(missing)[:3])} is on one side only")
    for name, tensor in wanted.items():
        whole = weights[name]
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        tensor.copy_(whole)


def _share_like(state: dict[str, torch.Tensor], parameters: list[Any]) -> dict[str, torch.Tensor]:
    shared = {}
    for name, whole in state.items():
        like = parameters[int(name.split(".")[1])]
        fits = isinstance(like, DTensor) and whole.shape == like.shape
        shared[name] = distribute_tensor(whole, like.device_mesh, like.placements) if fits else whole
    return shared


def _sharded(engine: Engine) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in engine.model.parameters())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
