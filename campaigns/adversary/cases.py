"""All cases, by class."""

from adversary import (
    constants,
    deployed,
    dtypes,
    edges,
    fusions,
    generated,
    inputs,
    ordinary,
    rewritten,
    rows,
    sizes,
    state,
    traced,
    values,
    writes,
)
from adversary.case import Case, Group, normal

GROUPS: tuple[Group, ...] = (
    constants.CASES,
    writes.CASES,
    edges.CASES,
    sizes.CASES,
    rewritten.CASES,
    traced.CASES,
    state.CASES,
    rows.CASES,
    dtypes.CASES,
    values.CASES,
    inputs.CASES,
    ordinary.CASES,
    deployed.CASES,
    fusions.CASES,
    generated.CASES,
)


def _warm() -> Case:
    group = Group("warm", "")
    group.right("warm", lambda self, x: x + 1, x=normal(2, 8))
    return group.cases[0]


WARM = _warm()
"""An export that is right, for what the first one of a process has to load."""
