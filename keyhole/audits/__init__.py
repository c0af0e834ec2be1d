"""Audits: is a part or a model honest, does its fast form do what it says, and what was a leak worth?

part.py      the battery of `keyhole.testing`, and the canary
model.py     the same probes, asked of any function from ids to logits
canary.py    300 steps on random tokens, which no honest model can predict
prefix.py    each token scored from its prefix alone
recipe.py    what a study asks of an arm before it trains
target.py    one door to all of it: `keyhole.audit`
"""

from keyhole.audits.model import audit_model
from keyhole.audits.part import audit_part
from keyhole.audits.prefix import PrefixLoss, dev_windows, prefix_loss
from keyhole.audits.recipe import audit_recipe, dishonest
from keyhole.audits.target import audit

__all__ = ["PrefixLoss", "audit", "audit_model", "audit_part", "audit_recipe", "dev_windows", "dishonest", "prefix_loss"]
