"""Is a whole model honest? The probes asked of any function from token ids to logits: ours, Hugging Face's, anybody's.

A module is copied and computes in float64; what cannot be converted is asked as it is, with a wider limit, which is said.

Legend: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from keyhole.core.errors import InputError, KeyholeError
from keyhole.core.findings import Finding
from keyhole.core.seeds import derive
from keyhole.model.guard import first_line
from keyhole.testing.battery import finding, in_float64
from keyhole.testing.honesty import HONESTY
from keyhole.testing.probes import Probed, Scores, batch_mates, future_gradient, rms, suffix, truncation
from keyhole.testing.remedies import PADDING
from keyhole.testing.rules import COMMON, Measured, summing_weights
from keyhole.testing.subject import in_double

LENGTHS = (1, 2, 7, 16, 33, 64)
BLOCK = 64
"""The longest text where nobody says what a model can read."""
LIMITS = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}
"""How far results may move by rounding alone: an honest convolution by FFT moves them by 3e-5 in float32."""
MASKS = ("attention_mask", "mask", "mask_BT")
RULES = {rule.name: rule for rule in (*HONESTY, *COMMON)}


def audit_model(
    logits: Callable[[torch.Tensor], Any],
    vocab: int,
    *,
    block: int | None = None,
    name: str = "the model",
    seed: int = 0,
    full_block: bool = False,
) -> list[Finding]:
    """Ask every probe of a function from ids (B, T) to logits (B, T, V); one finding a probe.

    `block` is the longest text it reads (64 unless it says itself). Texts of up to 64 tokens are asked; with `full_block`,
    truncation is asked of one as long as the block too: what is cut into larger chunks may be honest within the first.
    A module is neither changed nor left in another mode.
    """
    if type(vocab) is not int or vocab < 2:
        raise InputError(f"vocab = {vocab!r} is not valid; it is how many tokens the model knows, for example vocab=256")
    reader = Reader(logits, vocab, block if block is not None else block_of(logits) or BLOCK, seed)
    probed = reader.probed()
    whole = replace(probed, lengths=sorted({*probed.lengths, reader.block})) if full_block else probed
    with in_float64() if reader.dtype is torch.float64 else torch.no_grad():
        asked: dict[str, Callable[[], Measured]] = {
            "suffix": lambda: suffix(probed, aligned=True),
            "unaligned cuts": lambda: suffix(probed, aligned=False),
            "truncation": lambda: truncation(whole),
            "future gradient": lambda: future_gradient(probed),
            "batch-mates": lambda: batch_mates(probed),
            "padding": lambda: _padding(reader, probed),
            "determinism": lambda: _determinism(probed),
        }
        return [_ask(rule, name, measure) for rule, measure in asked.items()]


def _ask(rule: str, name: str, measure: Callable[[], Measured]) -> Finding:
    try:
        found = measure()
    except Exception as error:  # whatever a model raises is a finding, not an end
        told = str(error) if isinstance(error, KeyholeError) else first_line(error)
        found = Measured(float("inf"), told=told, remedy="make it run at every length and batch first")
        return finding(RULES[rule], name, found, raised=True)
    return finding(RULES[rule], name, found)


def block_of(logits: object) -> int | None:
    """The longest text that a model says it can read."""
    if isinstance(size := getattr(logits, "block_size", None), int):
        return size
    config = getattr(logits, "config", None)
    for key in ("n_positions", "max_position_embeddings", "n_ctx"):
        if isinstance(size := getattr(config, key, None), int) and size > 0:
            return size
    return None


class Reader:
    """A model as a function from ids to logits in one precision, in evaluation, on its own device."""

    def __init__(self, logits: Callable[[torch.Tensor], Any], vocab: int, block: int, seed: int) -> None:
        if not callable(logits):
            raise InputError(f"a model to audit is a function from token ids to logits, not {logits!r}")
        if block < 2:
            raise InputError(f"block = {block} is too short to audit; it is at least 2 tokens")
        self.vocab, self.block, self.seed = vocab, block, seed
        self.function: Callable[..., Any] = logits
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        if isinstance(logits, nn.Module):
            self.device = next((weight.device for weight in logits.parameters()), self.device)
            self._convert(logits)
        first = self(self.draw(2, 1, 0))
        if first.shape[:2] != (1, 2) or first.ndim != 3 or first.shape[2] < 2:
            raise InputError(
                f"the model returned shape {tuple(first.shape)} for ids of shape (1, 2); it must return logits "
                "(batch, time, vocabulary)"
            )

    def _convert(self, module: nn.Module) -> None:
        """A copy in float64 where that runs, else a copy as it is."""
        try:
            exact = in_double(copy.deepcopy(module)).eval()
            self.function, self.dtype = exact, torch.float64
            with in_float64():
                self(self.draw(2, 1, 0))
        except Exception:  # a kernel without float64, a module that cannot be copied: asked as it is
            self.function = _evaluated(module)
            self.dtype = next((w.dtype for w in module.parameters() if w.is_floating_point()), torch.float32)

    def __call__(self, ids_BT: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) on the CPU; in float64, whatever they were computed in."""
        try:
            found = self.function(ids_BT.to(self.device), **{key: x.to(self.device) for key, x in options.items()})
        except KeyholeError:
            raise
        except (Exception, SystemExit) as error:
            raise InputError(f"the model could not read ids of shape {tuple(ids_BT.shape)}: {first_line(error)}") from error
        found = getattr(found, "logits", found)
        found = found[0] if isinstance(found, tuple | list) and found else found
        if not isinstance(found, torch.Tensor | np.ndarray):
            raise InputError(
                f"the model returned {type(found).__name__}; it must return logits, a tensor (batch, time, vocabulary)"
            )
        return torch.as_tensor(found).to("cpu", torch.float64)

    def draw(self, tokens: int, batch: int, seed: int) -> torch.Tensor:
        """Uniformly random ids."""
        generator = torch.Generator().manual_seed(derive(self.seed, "model", seed))
        return torch.randint(self.vocab, (batch, tokens), generator=generator)

    def change(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Other ids everywhere."""
        generator = torch.Generator().manual_seed(derive(self.seed, "change"))
        return (ids_BT + torch.randint(1, self.vocab, ids_BT.shape, generator=generator)) % self.vocab

    def probed(self) -> Probed:
        """What the probes ask."""
        limit = LIMITS.get(self.dtype, 1e-4)
        longest = min(self.block, max(LENGTHS))
        return Probed(
            call=torch.no_grad()(self.__call__),
            draw=self.draw,
            change=self.change,
            lengths=sorted({*(n for n in LENGTHS if n <= longest), longest}),
            limit=limit,
            reshaped=max(limit, 1e-10),
            slopes=self.slopes,
            whole=True,
        )

    def slopes(self, ids_BT: torch.Tensor, cut: int) -> torch.Tensor | None:
        """The gradient of earlier results wrt the embedding of every token, caught where ids become vectors."""
        with torch.enable_grad(), _Embeddings(ids_BT.to(self.device)) as caught:
            try:
                y = self(ids_BT)
            except InputError:  # such as .numpy() of what carries a gradient
                return None
            if not caught.found or not y.requires_grad:
                return None
            total = (y * summing_weights(y))[:, :cut].sum()
        slopes = torch.autograd.grad(total, caught.found, allow_unused=True)
        kept = [slope.double().cpu() for slope in slopes if slope is not None]
        return torch.cat(kept, -1) if kept else torch.zeros(*ids_BT.shape, 1)

    def mask_name(self) -> str | None:
        """What the model calls its mask of real tokens, if it takes one."""
        forward = self.function.forward if isinstance(self.function, nn.Module) else self.function
        try:
            known = inspect.signature(forward).parameters
        except (TypeError, ValueError):
            return None
        return next((mask for mask in MASKS if mask in known), None)


def _evaluated(module: nn.Module) -> Callable[..., Any]:
    """A module in evaluation during each call, and as it was after."""

    def read(*ids: torch.Tensor, **options: torch.Tensor) -> Any:
        modes = {part: part.training for part in module.modules()}
        try:
            return module.eval()(*ids, **options)
        finally:
            for part, mode in modes.items():
                part.training = mode

    return read


class _Embeddings(TorchFunctionMode):
    """Catches what the ids of a text are turned into, as leaves whose gradient can be asked."""

    def __init__(self, ids_BT: torch.Tensor) -> None:
        super().__init__()
        self.ids_BT = ids_BT
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything pass, and keep the vectors of the ids."""
        made = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.embedding:
            ids = args[0] if args else (kwargs or {}).get("input")
        elif func is torch.Tensor.__getitem__ and len(args) == 2 and isinstance(args[1], torch.Tensor):
            ids = args[1]
        else:
            return made
        if not (isinstance(made, torch.Tensor) and made.is_floating_point() and ids.shape == self.ids_BT.shape):
            return made
        if not torch.equal(ids, self.ids_BT):
            return made
        self.found.append(made.detach().requires_grad_())
        return self.found[-1]


@torch.no_grad()
def _determinism(probed: Probed) -> Measured:
    scores = Scores()
    for tokens in probed.lengths:
        x = probed.draw(tokens, 3, 0)
        before = probed.call(x)
        scores.see(probed.call(x), before, rms(before), f"{tokens} tokens, called twice")
    return Measured(scores.worst, scores.where, limit=probed.limit)


@torch.no_grad()
def _padding(reader: Reader, probed: Probed) -> Measured:
    """How much real tokens move with what stands at padded places. Their number is the same: positions may count them."""
    mask_name = reader.mask_name()
    if mask_name is None:
        return Measured(0, missing="it takes no mask (attention_mask or mask), so every token counts as real")
    scores, longest = Scores(), max(probed.lengths)
    for tokens in [n for n in probed.lengths if n + 7 <= longest]:
        for left, right in ((5, 0), (3, 4)):
            text = reader.draw(left + tokens + right, 2, 0)
            mask = torch.zeros(text.shape, dtype=torch.bool)
            mask[:, left : left + tokens] = True
            given = mask.long() if mask_name == "attention_mask" else mask
            other = torch.where(mask, text, reader.change(text))
            try:
                pair = [reader(ids, **{mask_name: given})[:, left : left + tokens] for ids in (text, other)]
            except InputError as error:
                return Measured(0, missing=f"its mask could not be used: {error}")
            where = f"{tokens} tokens, other ids at {left} padded places on the left and {right} on the right"
            scores.see(pair[1], pair[0], rms(*pair), where)
            bare = [probed.call(ids)[:, left : left + tokens] for ids in (text, other)]
            scores.reach(bare[1], bare[0], rms(*bare))
            scores.writes = True
    if not scores.asked:
        return Measured(0, missing=f"texts of at most {longest} tokens leave no room for padding")
    found = scores.measured(probed.reshaped, "without the mask nothing changes either: it does not mix tokens")
    if found.missing or found.worst <= probed.reshaped:
        return found
    remedy = "take padded tokens out of numerator, denominator and state alike; mask scores with -inf"
    return Measured(found.worst, found.where, limit=found.limit, remedy=remedy, code=PADDING, evidence=found.evidence)
