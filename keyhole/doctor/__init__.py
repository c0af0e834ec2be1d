"""Is this machine fit to train? Findings on packages and machine, each with the command that mends it."""

from __future__ import annotations

from keyhole.core.findings import Finding


def examine() -> list[Finding]:
    """Look at everything. Works also where torch is missing or broken: that is a finding."""
    from keyhole.doctor.machine import examine_machine
    from keyhole.doctor.packages import examine_packages

    return [*examine_packages(), *examine_machine()]


__all__ = ["examine"]
