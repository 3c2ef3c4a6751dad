"""Cases of a test of which some are slow, while another of their kind runs by default."""

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def joined(case: Any) -> str:
    """The name that pytest gives a case: that of each value."""
    return "-".join(map(str, case)) if isinstance(case, tuple) else str(case)


def some_slow(
    cases: Iterable[Any], slow: Collection[str], named: Callable[[Any], str] = joined
) -> list[Any]:
    """The cases, for `pytest.mark.parametrize`; `make test` leaves out those with these names.

    Args:
        cases: a value each, or a tuple of values.
    """
    known = {named(case): case if isinstance(case, tuple) else (case,) for case in cases}
    assert known.keys() >= set(slow), set(slow) - known.keys()
    return [
        pytest.param(*values, id=name, marks=[pytest.mark.slow] * (name in slow))
        for name, values in known.items()
    ]
