"""Several processes, one run: torch's own engines, started by torchrun.

    torchrun --nproc-per-node 2 -m keyhole train RECIPE

`ddp` (every process holds the whole model) is torch's DistributedDataParallel; `fsdp` (each holds a share) is FSDP2. Every
process sees the same global batch and takes its rows, so the losses are those of one process up to rounding.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import nn

from keyhole.core.errors import InputError


@dataclass(frozen=True)
class World:
    """How many processes train together, and which one this is. Process 0 alone writes."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def writes(self) -> bool:
        """Whether this process keeps the record."""
        return self.rank == 0

    def share(self, rows: int) -> slice:
        """This process's rows of a batch."""
        if rows % self.size:
            raise InputError(f"a batch of {rows} rows cannot be shared by {self.size} processes; make train.batch a multiple")
        each = rows // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def wrap(self, network: nn.Module, *, sharded: bool) -> nn.Module:
        """The network with its gradients averaged over processes."""
        if self.size == 1 or sharded:
            return network
        return nn.parallel.DistributedDataParallel(network)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a number over processes."""
        if self.size > 1:
            torch.distributed.all_reduce(value)
        return value

    def gather(self, value: torch.Tensor) -> list[torch.Tensor]:
        """Every process's tensor, in order."""
        if self.size == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.size)]
        torch.distributed.all_gather(found, value)
        return found

    def any(self, flag: bool) -> bool:
        """Whether any process says yes; all get the same answer."""
        return float(self.sum(torch.tensor(float(flag)))) > 0

    def first(self, value: float) -> float:
        """Process 0's number, so that clocks cannot disagree."""
        return float(self.gather(torch.tensor(value, dtype=torch.float64))[0])

    def wait(self) -> None:
        """Wait for all processes."""
        if self.size > 1:
            torch.distributed.barrier()


ALONE = World()


def join_world() -> World:
    """Join the processes that torchrun started, or train alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    if not torch.distributed.is_initialized():
        # Numbers on the CPU travel by gloo also where tensors on GPUs travel by nccl.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(minutes=10))
    return World(torch.distributed.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))


def leave_world() -> None:
    """Part from the other processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
