"""The battery: every rule of a part's kind, asked of one part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.core.errors import InputError, KeyholeError, nearest
from keyhole.core.findings import Finding
from keyhole.model.guard import first_line
from keyhole.model.registry import CATALOGUE
from keyhole.testing.honesty import HONESTY
from keyhole.testing.mixing import MIXING
from keyhole.testing.others import OTHERS, PlacedSubject
from keyhole.testing.rules import COMMON, SHAPES, Aspect, Measured, Rule
from keyhole.testing.subject import LENGTHS, Subject, subject

FLOAT32 = 1e-5
"""Below this a difference may be float32's, above it is none."""


def rules_of(kind: str) -> tuple[Rule, ...]:
    """What is asked of a kind of part: "mixer", "position", "merge", "norm" or "feed"."""
    if kind not in CATALOGUE:
        raise InputError(f"there is no kind of part {kind!r}{nearest(kind, CATALOGUE)}")
    return (SHAPES, *HONESTY, *COMMON[1:], *(MIXING if kind == "mixer" else OTHERS[kind]))


def check(
    part: str | type[nn.Module],
    kind: str = "mixer",
    *,
    aspect: Aspect | None = None,
    options: dict[str, Any] | None = None,
    width: int = 24,
    heads: int = 4,
    block: int = 256,
    lengths: tuple[int, ...] = LENGTHS,
    seed: int = 0,
    folder: Path | None = None,
) -> list[Finding]:
    """Ask every rule of a part, given by name ("linear", "my.py:Mine") or by its class; one finding a rule.

    With `aspect`, "honesty" or "faithfulness", only the rules of that.
    """
    settings = {"width": width, "heads": heads, "block": block, "lengths": lengths, "seed": seed}
    tested = subject(part, kind, options or {}, folder=folder or Path.cwd(), **settings)
    if kind == "position":
        tested = PlacedSubject(**{field.name: getattr(tested, field.name) for field in fields(Subject)})
    _rehearse(tested)
    return [_ask(rule, tested) for rule in rules_of(kind) if aspect in (None, rule.aspect)]


def _rehearse(tested: Subject) -> None:
    """A part that cannot be built or called at all is an error of its own, and no question of rules."""
    with in_float64():
        try:
            tested.make()(tested.input(2))
        except KeyholeError:
            raise
        except Exception as error:
            raise InputError(f"{tested.kind} {tested.spec} could not be used: {first_line(error)}") from error


@contextmanager
def in_float64() -> Iterator[None]:
    """Constants that a part makes on the way are then of the type it computes in."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(usual)


def assert_passes(part: str | type[nn.Module], kind: str = "mixer", **settings: Any) -> None:
    """Raise AssertionError with every finding that fails. What cannot be tested does not fail."""
    failed = [finding.paragraph() for finding in check(part, kind, **settings) if finding.verdict == "fails"]
    if failed:
        raise AssertionError("\n".join(failed))


def _ask(rule: Rule, tested: Subject) -> Finding:
    try:
        with in_float64():
            found = rule.measure(tested)
    except Exception as error:  # whatever a part raises is a finding, not an end
        measured = str(error) if isinstance(error, KeyholeError) else first_line(error)
        return finding(rule, tested.spec, Measured(float("inf"), told=measured, remedy="make it run first"), raised=True)
    return finding(rule, tested.spec, found)


def finding(rule: Rule, who: object, found: Measured, *, raised: bool = False) -> Finding:
    """What a rule measured, as a finding."""
    said: dict[str, Any] = {
        "name": rule.name,
        "statement": f"{who}: {rule.statement}",
        "why": rule.why,
        "aspect": rule.aspect,
        "evidence": found.evidence,
    }
    if raised:
        return Finding(**said, expected="a result", measured=found.told, verdict="fails", remedy=found.remedy)
    if found.missing:
        measured = found.told or "nothing"
        return Finding(**said, expected="an answer", measured=measured, verdict="undecided", remedy=found.missing)
    if found.limit == float("inf"):
        return Finding(**said, expected="a report", measured=found.told, verdict="holds")
    holds = found.worst <= found.limit
    remedy = found.remedy or rule.remedy
    if 0 < found.limit < found.worst < FLOAT32:
        remedy += "; so small a difference is usually arithmetic in float32: keep to the input's type"
    measured = f"{found.worst:.2g}" + (f" ({found.where})" if found.where and not holds else "")
    said["evidence"] = {"worst": found.worst, "limit": found.limit, "where": found.where, **found.evidence}
    return Finding(
        **said,
        expected=f"at most {found.limit:g}",
        measured="; ".join(filter(None, (measured, found.told))),
        tolerance=f"{found.limit:g}",
        score=found.worst,
        limit=found.limit,
        verdict="holds" if holds else "fails",
        remedy="" if holds else remedy,
        code="" if holds else found.code,
    )
