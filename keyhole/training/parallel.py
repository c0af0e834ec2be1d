"""Several processes, one run: torch's own engines, started by torchrun.

    torchrun --nproc-per-node 2 -m keyhole train RECIPE

`ddp` (every process holds the whole model) is torch's DistributedDataParallel; `fsdp` (each holds a share) is FSDP2. Every
process sees the same global batch and takes its rows, so the losses are those of one process up to rounding.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
from torch import nn

from keyhole.core.config import Train
from keyhole.core.errors import InputError, KeyholeError


class Parted(KeyholeError):
    """Another process of the run ended, so this one cannot go on."""

    exit_code = 1


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
            raise InputError(f"{rows} rows cannot be shared by {self.size} processes; make them a multiple of {self.size}")
        each = rows // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def refuse(self, train: Train) -> None:
        """Refuse a recipe that so many processes cannot carry out."""
        if train.batch % (train.accumulate * self.size):
            cut = f" cut into {train.accumulate} pieces" if train.accumulate > 1 else ""
            raise InputError(
                f"a batch of {train.batch} rows{cut} cannot be shared by {self.size} processes; "
                f"make train.batch a multiple of {train.accumulate * self.size}"
            )
        if self.size > 1 and train.parallel == "fsdp" and train.optimizer.name == "muon":
            raise InputError('muon works on whole matrices and fsdp holds shares of them; set train.parallel = "ddp"')

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

    @contextmanager
    def together(self) -> Iterator[None]:
        """What one process cannot do, all leave undone: the first to fail says why, the others end in silence.

        Processes must not talk to each other inside; all of them leave at the same time.
        """
        try:
            yield
        except Exception:
            if self._first_to_fail(True) in (None, self.rank):
                raise
            raise SystemExit(2) from None
        if self._first_to_fail(False) is not None:
            raise SystemExit(2)

    def _first_to_fail(self, failed: bool) -> int | None:
        flags = self.gather(torch.tensor(float(failed)))
        return next((rank for rank, flag in enumerate(flags) if flag), None)


ALONE = World()


def join_world() -> World:
    """Join the processes that torchrun started, or train alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return ALONE
    if not torch.distributed.is_initialized():
        if torch.cuda.is_available():
            local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
            if local >= gpus:
                raise InputError(f"there is no GPU for process {local}: this machine has {gpus}; start no more than that")
            torch.cuda.set_device(local)
        # Numbers on the CPU travel by gloo also where tensors on GPUs travel by nccl.
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(minutes=10))
    return World(torch.distributed.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))


def leave_world() -> None:
    """Part from the other processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def end_process(code: int) -> NoReturn:
    """End this process. Among others it ends at once: torch's teardown of gloo's threads aborts one exit in twenty under
    load (torch 2.13), which torchrun would take for a failed run.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        sys.exit(code)
    leave_world()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
