"""A callable that returns no logits is refused in a sentence."""

import pytest

import keyhole as kh
from keyhole.core.errors import InputError


@pytest.mark.parametrize("given", [None, "text", {"logits": 1}, ()])
def test_a_function_that_returns_no_tensor_is_refused(given):
    with pytest.raises(InputError, match=f"returned {type(given).__name__}; it must return logits"):
        kh.audit(lambda _: given, vocab=50)


def test_a_function_that_ends_the_program_is_refused():
    def ends(ids):
        raise SystemExit(0)

    with pytest.raises(InputError, match="SystemExit: 0"):
        kh.audit(ends, vocab=50)
