"""Nothing that misleads is published and wrong; the default run has a choice of the cases."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adversary.case import Case, Group, normal
from adversary.cases import GROUPS
from adversary.examine import Row, examine, unchanging
from adversary.judge import Array, Taken, judge
from adversary.page import table
from slow_cases import some_slow
from torch import Tensor, nn

ALL = [case for group in GROUPS for case in group]
QUICK = [case for case in ALL if case.is_quick]
SLOW = [f"generated: graph {number}" for number in range(3)]
SLOW += ["values: item", "traced: pointer", "traced: exact type", "sizes: type is int"]
SLOW += ["ordinary: cells", "traced: a part that is scripted and branches", "dtypes: wide"]
TOGETHER = {
    "constants": "add 1e-8|times nearly one|power nearly|log of|over norm|over deviation|normalize|leaky|clamp|lerp|softplus",
    "edges": "log1p|expm1|elu|softsign|mish|sinh|atanh|round|divide|logsumexp|cumulative s|ties",
    "writes": "swap|two views|a transpose|alias read|recurrence|relu in|silu in|add to a|overlapping|split|a chunk",
    "fusions": "gelu, [^c0]|norm, (over|sum|eps|weight|unbiased|skip)",
}
"""Names of cases, each right and of one input: they share an export."""
TAKEN = {"x": Taken("float32", ("batch", 8))}


def named(case: Case) -> str:
    return f"{case.group}: {case.name}"


@pytest.mark.all_sizes
@pytest.mark.parametrize("case", some_slow(QUICK, SLOW, named))
def test_a_module_that_misleads(case: Case, tmp_path: Path) -> None:
    row = examine(case, tmp_path, asks_plain=False)
    assert row.is_as_expected, f"{row.outcome}: {row.reason}"


class Together(nn.Module):
    """The outputs of all, by name."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.names = [case.name for case in cases]
        self.members = nn.ModuleList(case.make() for case in cases)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: member(x) for name, member in zip(self.names, self.members, strict=True)}


def together(group: Group) -> list[Case]:
    """The cases that share the export of their class."""
    found = [case for case in group if re.search(TOGETHER[group.name], case.name)]
    found = [case for case in found if case.expected == "right" and set(case.example) == {"x"}]
    first = found[0].example["x"]
    return [case for case in found if case.example["x"] is first and not case.dynamic]


@pytest.mark.parametrize(
    "group",
    some_slow(
        [group for group in GROUPS if group.name in TOGETHER],
        ["constants", "fusions", "writes"],
        lambda group: str(group.name),
    ),
)
def test_modules_that_mislead_side_by_side(group: Group, tmp_path: Path) -> None:
    cases = together(group)
    assert len(cases) >= 10
    shared = Group(group.name, "")
    shared.right("together", partial(Together, cases), x=cases[0].example["x"])
    row = examine(next(iter(shared)), tmp_path, asks_plain=False)
    assert row.is_as_expected, f"{row.outcome}: {row.reason}"


def test_the_cases_are_many_and_have_names_of_their_own() -> None:
    assert len(ALL) >= 400
    assert sum(len(together(g)) for g in GROUPS if g.name in TOGETHER) + len(QUICK) >= 60
    assert len({(case.group, case.name) for case in ALL}) == len(ALL)


def logged() -> Case:
    group = Group("edges", "")
    group.right("log1p", lambda self, x: x.log1p(), x=normal(2, 8))
    return next(iter(group))


def test_the_judge_sees_lost_digits() -> None:
    def lossy(feeds: Mapping[str, Array]) -> list[Array]:
        with np.errstate(all="ignore"):
            return [np.log(np.float32(1) + feeds["x"])]

    assert judge(logged(), lossy, TAKEN, {"batch": (1, 4)}).wrong.startswith("tiny: ")


def test_the_judge_accepts_what_is_right() -> None:
    def right(feeds: Mapping[str, Array]) -> list[Array]:
        with np.errstate(all="ignore"):
            return [np.log1p(feeds["x"])]

    judged = judge(logged(), right, TAKEN, {"batch": (1, 4)})
    assert not judged.wrong
    assert judged.compared > 15


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_judge_takes_complex_numbers_as_pairs(sign: int) -> None:
    group = Group("dtypes", "")
    group.right("pairs", lambda self, x: torch.complex(x, -x), x=normal(2, 8))

    def pairs(feeds: Mapping[str, Array]) -> list[Array]:
        return [np.stack([feeds["x"], sign * feeds["x"]], -1)]

    wrong = judge(next(iter(group)), pairs, TAKEN, {"batch": (1, 4)}).wrong
    assert wrong.startswith("example: output 0: ") if sign > 0 else not wrong


def test_a_module_that_draws_is_not_compared_with_itself() -> None:
    group = Group("traced", "")
    group.refused("drawn", lambda self, x: (torch.rand(1), x)[1], x=normal(2, 8))
    case = next(iter(group))
    assert unchanging(case.make(), case) is None


def test_the_table_counts_what_plain_torch_exports() -> None:
    rows = [
        Row("writes", "a", "right", "right"),
        Row("writes", "b", "right", "refused", plain="right"),
        Row("edges", "c", "either", "wrong"),
    ]
    lines = table(rows).splitlines()
    assert lines[0].split("  ")[-1] == "unexpected"
    assert lines[-1].split() == ["all", "1", "1", "0", "1", "0", "0", "1", "2"]
