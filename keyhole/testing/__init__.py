"""One set of tests that every part passes, built in or yours.

    from keyhole.testing import assert_passes, check
    for finding in check("my.py:Mine"):
        print(finding.line())
    assert_passes("my.py:Mine")          # in a test of yours

Each rule measures one number in float64 and says where it was worst. What a part does not offer (a mask, a state, a
definition) cannot be tested: the finding is then undecided and says what to add.
"""

from keyhole.testing.battery import assert_passes, check, rules_of

__all__ = ["assert_passes", "check", "rules_of"]
