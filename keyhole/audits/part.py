"""The audit of a part: the battery, and the canary."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from torch import nn

from keyhole.audits.canary import canary as ask_canary
from keyhole.core.errors import InputError, nearest
from keyhole.core.findings import Finding
from keyhole.model.registry import CATALOGUE, find
from keyhole.testing.battery import check


def audit_part(
    part: str | type[nn.Module],
    kind: str | None = None,
    *,
    options: dict[str, Any] | None = None,
    canary: bool = True,
    folder: Path | None = None,
) -> list[Finding]:
    """Every rule of the battery and, unless it is left out, the canary."""
    folder = folder or Path.cwd()
    kind = kind or kind_of(part, folder)
    findings = check(part, kind, options=options, folder=folder)
    return [*findings, ask_canary(part, kind, options=options, folder=folder)] if canary else findings


def kind_of(part: str | type[nn.Module], folder: Path) -> str:
    """What kind of part this is: by its name, or by what its class takes and offers."""
    if isinstance(part, str) and ":" not in part:
        kinds = [kind for kind, names in CATALOGUE.items() if part in names]
        if not kinds:
            known = sorted({name for names in CATALOGUE.values() for name in names})
            raise InputError(f"there is no part {part!r}{nearest(part, known)}; see keyhole parts")
        if len(kinds) > 1:
            raise InputError(f"{part} is a {' and a '.join(kinds)}; say which: --kind {kinds[0]} (kind={kinds[0]!r})")
        return kinds[0]
    cls = find("mixer", part, folder) if isinstance(part, str) else part
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise InputError(f"give a part by name or by its class, not {part!r}")
    if (guess := _by_contract(cls)) is None:
        raise InputError(
            f"{part if isinstance(part, str) else cls.__name__} could be a mixer, a merge, a norm or a feed; "
            'say which: --kind norm (kind="norm")'
        )
    return guess


def _by_contract(cls: type[nn.Module]) -> str | None:
    """The only kind that a class can be by what it takes and offers; None where it could be several."""
    if any(callable(getattr(cls, method, None)) for method in ("add", "turn", "bias")):
        return "position"
    takes = set() if cls.__init__ is nn.Module.__init__ else set(inspect.signature(cls).parameters)
    forward = [name for name in inspect.signature(cls.forward).parameters if name != "self"]
    if forward and "head" in forward[0]:
        return "merge"
    offers = any(callable(getattr(cls, method, None)) for method in ("look", "cost"))
    if offers or {"position", "kv_heads"} & takes or {"heads", "block"} <= takes or len(forward) > 1:
        return "mixer"
    return "feed" if callable(getattr(cls, "flops", None)) else None
