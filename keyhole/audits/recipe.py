"""What a study asks of an arm before it trains: its own model, of its own size, under all probes; and the user's parts."""

from __future__ import annotations

from keyhole.audits.model import audit_model
from keyhole.core.config import Recipe
from keyhole.core.findings import Finding
from keyhole.model.lm import build
from keyhole.model.registry import CATALOGUE, is_builtin
from keyhole.testing.battery import check
from keyhole.testing.subject import moved

PART_LENGTHS = (1, 2, 7, 33, 64)


def audit_recipe(recipe: Recipe, vocab: int, *, name: str = "the model", seed: int = 0) -> list[Finding]:
    """Ask the model of a recipe, its weights moved at random away from their start, and each part of the user's own.

    Nothing is trained. Parts are asked at the recipe's width, heads and block, or as much of it as the probes read.
    """
    model = moved(build(recipe, vocab), seed)
    findings = audit_model(model, vocab, block=recipe.data.block, name=name, seed=seed, full_block=True)
    return [*findings, *audit_parts(recipe, built_in=bool(dishonest(findings)), seed=seed)]


def audit_parts(recipe: Recipe, *, built_in: bool, seed: int = 0) -> list[Finding]:
    """The rules of honesty for each part of a recipe: the user's own, and the built-in ones where those are in question.

    Of built-in parts only the findings that fail are given.
    """
    findings = []
    for kind in CATALOGUE:
        for spec in recipe.model.specs(kind):
            if is_builtin(kind, spec.name) and not built_in:
                continue
            found = check(
                spec.name,
                kind,
                aspect="honesty",
                options=spec.options,
                width=recipe.model.width,
                heads=recipe.model.heads,
                block=min(recipe.data.block, max(PART_LENGTHS)),
                lengths=PART_LENGTHS,
                seed=seed,
                folder=recipe.folder,
            )
            findings += dishonest(found) if is_builtin(kind, spec.name) else found
    return findings


def dishonest(findings: list[Finding]) -> list[Finding]:
    """The findings for which a result may not be compared: an honesty rule fails."""
    return [finding for finding in findings if finding.aspect == "honesty" and finding.verdict == "fails"]
