"""One optimizer step, fast: the part of training that knows nothing of files, budgets or displays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from keyhole.core.config import Train
from keyhole.core.errors import InputError
from keyhole.mixers.kernels import choose_kernel
from keyhole.mixers.softmax import Softmax
from keyhole.model.lm import LM
from keyhole.model.loss import IGNORED
from keyhole.model.parameterization import rate_multiplier
from keyhole.training.optim import build_optimizer, rule_of
from keyhole.training.parallel import ALONE, World
from keyhole.training.precision import Precision, choose_precision, keep_freed_memory
from keyhole.training.weights import FlatWeights, kind_of

if TYPE_CHECKING:
    from keyhole.training.sharded import ShardedWeights

Array = np.ndarray | torch.Tensor


@dataclass(frozen=True)
class Step:
    """What a step saw: the mean loss over its targets, the gradient's norm before clipping, how many targets."""

    loss: float
    grad_norm: float
    targets: int

    @property
    def finite(self) -> bool:
        """Whether both are numbers; if not, no weight was changed."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.grad_norm))


class Engine:
    """A model in training. `step` takes a batch of ids and targets; the model's own parameters are always up to date.

    With several processes each is given the whole batch and computes its share; the losses are those of one process.
    """

    def __init__(
        self, model: LM, train: Train, *, world: World = ALONE, precision: Precision | None = None, device: str = "cpu"
    ) -> None:
        keep_freed_memory()
        self.model, self.train, self.world, self.device = model.to(device), train, world, device
        self.precision = precision or choose_precision(train.precision, device)
        self.weights: FlatWeights | ShardedWeights
        if world.size > 1 and train.parallel == "fsdp":
            _refuse_sharded(train)
            from keyhole.training.sharded import ShardedWeights

            self.weights = ShardedWeights(self.model, self.precision.dtype, self._relative_rate)
        else:
            self.weights = FlatWeights(self.model, self.precision.dtype, self._relative_rate)
        self.optimizer = build_optimizer(train.optimizer, train.rate, self.weights.groups, self.precision.dtype)
        self.weights.compute.train()
        self.network: nn.Module = world.wrap(self.weights.compute, sharded=train.parallel == "fsdp")
        if train.compile:
            self.network = torch.compile(self.network)

    def step(self, x_BT: Array, y_BT: Array, factor: float = 1.0) -> torch.Tensor:
        """One step at `factor` times the rate; returns the mean loss. See `advance` for the loop's richer form."""
        return torch.tensor(self.advance(x_BT, y_BT, factor).loss)

    def advance(self, x_BT: Array, y_BT: Array, factor: float = 1.0) -> Step:
        """Compute the gradient of the mean loss over all targets, clip, and move the weights if everything is finite."""
        x, y = (torch.as_tensor(ids).to(self.device) for ids in (x_BT, y_BT))
        targets = max(1, int((y != IGNORED).sum()))
        mine = self.world.share(len(x))
        pieces = self.train.accumulate
        self.weights.zero_grad()
        total = torch.zeros((), device=self.device)
        for px, py in zip(x[mine].chunk(pieces), y[mine].chunk(pieces), strict=True):
            loss = self.network(px, py)
            # The wrapper averages gradients over processes; the loss wants their sum over all targets.
            (loss * (self.world.size / targets)).backward()
            self.weights.collect_grad()
            total += loss.detach()
        done = Step(float(self.world.sum(total)) / targets, self.weights.clip(self.train.clip), targets)
        if done.finite:
            self.optimizer.step(factor)
            self.weights.refresh()
        return done

    def _relative_rate(self, parameter: nn.Parameter) -> float:
        rule = rule_of(self.train.optimizer.name, kind_of(parameter))
        return rate_multiplier(parameter, self.model.config, rule)

    def kernel(self, tokens: int) -> str | None:
        """Which attention kernel trains this model, and why; None where there is no softmax attention."""
        mixers = [block.mixer for block in self.model.blocks if isinstance(block.mixer, Softmax)]
        if not mixers:
            return None
        if hasattr(mixers[0].position, "bias"):
            return "the readable definition: a bias on the scores has no faster form yet"
        asked = mixers[0].impl
        return choose_kernel(self.device, self.precision.dtype, tokens).reason if asked == "auto" else f"{asked}: asked for"


def _refuse_sharded(train: Train) -> None:
    if train.optimizer.name == "muon":
        raise InputError('muon works on whole matrices and fsdp holds shares of them; set train.parallel = "ddp"')
