"""The whole state of a training, out to a checkpoint and back in, bit for bit.

Promised on the same machine, versions, threads and number of processes: data order is a pure function of the recipe, so two
integers hold its place; weights, moments and the state of chance (one for each process) are tensors; the rest is JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from keyhole.core.errors import InputError, StorageError
from keyhole.core.seeds import derive
from keyhole.record.checkpoint import Checkpoint
from keyhole.record.run import load_weights, named_tensors
from keyhole.training.engine import Engine
from keyhole.training.parallel import World

CHANCE, CHANCE_GPU = "chance.", "chance-gpu."


def capture(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights, and optimizer with chance. Every process must call it; what is returned is whole in each."""
    weights = {name: _whole(tensor) for name, tensor in named_tensors(engine.model).items()}
    optimizer = {name: _whole(tensor) for name, tensor in engine.optimizer.tensors().items()}
    for rank, state in enumerate(engine.world.gather(torch.get_rng_state())):
        optimizer[f"{CHANCE}{rank}"] = state
    if _on_gpu(engine):
        for rank, state in enumerate(engine.world.gather(torch.cuda.get_rng_state(engine.device))):
            optimizer[f"{CHANCE_GPU}{rank}"] = state
    return weights, optimizer


def restore(engine: Engine, saved: Checkpoint) -> list[str]:
    """Put an engine where the checkpoint left off; returns notes on what could not be the same."""
    notes = []
    weights, optimizer = saved.weights(), saved.optimizer()
    chance = {name: optimizer.pop(name) for name in list(optimizer) if name.startswith(CHANCE)}
    chance_gpu = {name: optimizer.pop(name) for name in list(optimizer) if name.startswith(CHANCE_GPU)}
    fill = load_sharded if is_sharded(engine) else load_weights
    fill(engine.model, weights, str(saved.path))
    engine.weights.refresh()
    engine.optimizer.restore(_placed(optimizer, engine, str(saved.path)))
    if len(chance) != engine.world.size:
        notes.append(
            f"this run was trained by {len(chance)} process(es) and goes on with {engine.world.size}: "
            "losses agree, but not bit for bit"
        )
        seed_chance(engine.train.seed, engine.world)
    else:
        torch.set_rng_state(chance[f"{CHANCE}{engine.world.rank}"])
        if _on_gpu(engine) and chance_gpu:
            torch.cuda.set_rng_state(chance_gpu[f"{CHANCE_GPU}{engine.world.rank}"], engine.device)
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
            whole = distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements)
        tensor.copy_(whole)


def _placed(state: dict[str, torch.Tensor], engine: Engine, where: str) -> dict[str, torch.Tensor]:
    """The optimizer's tensors where its parameters are: on their device, shared out as they are."""
    parts = [[p for group in part.param_groups for p in group["params"]] for part in engine.optimizer.parts]
    placed = {}
    for name, whole in state.items():
        i, j, key = name.split(".", 2)
        like: Any = parts[int(i)][int(j)] if int(i) < len(parts) and int(j) < len(parts[int(i)]) else None
        if like is None or (whole.ndim and whole.shape != like.shape):
            raise InputError(
                f"the optimizer's state in {where} does not fit: it was cut for another train.parallel or number of "
                "processes; go on with as many processes as the run began with"
            )
        if not whole.ndim:
            # A count of steps lies where torch left it: on the device for fused optimizers, else on the CPU.
            known = engine.optimizer.parts[int(i)].state.get(like, {}).get(key)
            fused = engine.optimizer.parts[int(i)].defaults.get("fused")
            placed[name] = whole.to(known.device if known is not None else like.device if fused else "cpu")
        elif isinstance(like, DTensor):
            placed[name] = distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)
        else:
            placed[name] = whole.to(like.device)
    return placed


def _on_gpu(engine: Engine) -> bool:
    return engine.device.startswith("cuda")


def is_sharded(engine: Engine) -> bool:
    """Whether each process holds only a share of the model."""
    return any(isinstance(parameter, DTensor) for parameter in engine.model.parameters())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
