"""Engines that choose otherwise than eager where values tie, and engines that choose wrongly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.capture.inputs.examples import Case
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest
from enginecast.verification.eager.choices import TieReference, choice_nodes, tie_reference
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.eager.outputs import as_arrays
from enginecast.verification.engine import where_it_ran
from enginecast.verification.reference import Reference
from enginecast.verification.verdict import judge

KEPT = 4
Choose = Callable[[Tensor], Tensor]


class Proposals(nn.Module):
    """A detector's: what comes of the best of many places."""

    def __init__(self, score: Choose) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.score = score
        self.box = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x, self.score(x).topk(KEPT, dim=1).indices)

    def of(self, x: Tensor, chosen: Tensor) -> Tensor:
        """What the model gives for a choice, [batch, KEPT]."""
        found: Tensor = self.box(x.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 16)))
        return found


def equal(x: Tensor) -> Tensor:
    """Scores of which many are equal."""
    return (x[..., 0] > 1).float()


def near(x: Tensor) -> Tensor:
    """Scores of which many are a unit roundoff apart."""
    return 1 + (x[..., 0] * 3).sigmoid() * 2e-7


def apart(x: Tensor) -> Tensor:
    """Scores that rounding does not change."""
    return x[..., 0]


def masked(x: Tensor) -> Tensor:
    """Scores of which a mask hides all but a few, as attention does."""
    return x[..., 0].masked_fill(x[..., 1] < 0, torch.finfo(x.dtype).min)


def lowered(x: Tensor) -> Tensor:
    """Scores of which a mask lowers all but a few, which rounding changes."""
    return x[..., 0] * 1.1 + (x[..., 1] < 0).float() * -1e9


def beside_huge(x: Tensor) -> Tensor:
    """Scores beside a huge one."""
    return torch.cat([x[..., :1, 0] * 1e-3 + 1e8, x[..., 1:, 0] * 1.1], dim=1)


def first(scores: Tensor) -> Tensor:
    """Of equal scores the first ones."""
    return scores.double().sort(dim=1, descending=True, stable=True).indices[:, :KEPT]


def last(scores: Tensor) -> Tensor:
    """Of equal scores the last ones."""
    return scores.shape[1] - 1 - first(scores.flip(1))


def next_best(scores: Tensor) -> Tensor:
    """All but the best."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, 1 : KEPT + 1]


def swapped(scores: Tensor) -> Tensor:
    """The best ones, the second and the third in the wrong order."""
    return first(scores)[:, [0, 2, 1, 3]]


def twice(scores: Tensor) -> Tensor:
    """The best as the second one, too."""
    found = first(scores).clone()
    found[:, 1] = found[:, 0]
    return found


def referenced(model: nn.Module, case: Case, output: str) -> tuple[ExportedProgram, Reference]:
    """The program of a model, and the reference that an engine is judged by first."""
    program = torch.export.export(model, (case.inputs["x"],))
    before = make_reference(
        program,
        lambda dtype: model,
        [case],
        dtype="fp32",
        names=[output],
        forward=lambda module, inputs: {output: module(inputs["x"])},
    )
    return program, before


def outcome(score: Choose, choose: Choose, *, wrong: float = 0.0) -> tuple[str, TieReference]:
    """The verdict on an engine that chooses in its way, and is off by a part of what it gives."""
    model = Proposals(score).eval()
    x = torch.randn(3, 40, 16, generator=torch.Generator().manual_seed(1))
    case = Case("drawn", {"x": x})
    with torch.no_grad():
        chosen = choose(score(x))
        given = {"boxes": model.of(x, chosen) * (1 + wrong)}
    program, before = referenced(model, case, "boxes")
    choices = {"drawn": {"topk": chosen.numpy()}}
    found = tie_reference(program, [case], [], ["boxes"], choices, before)
    reference = found.reference or before
    [stored] = reference.cases
    assert (list(stored.inputs), list(stored.outputs)) == (["x"], ["boxes"])
    measured = {"drawn": reference.compare(stored, as_arrays(given))}
    verdict = judge(measured, reference.floor, where=where_it_ran(), engine_ran=True)
    return verdict.outcome, found


@pytest.mark.parametrize("score", [equal, near])
@pytest.mark.parametrize("choose", [first, last])
def test_an_engine_may_choose_any_of_values_that_tie(score: Choose, choose: Choose) -> None:
    verdict, found = outcome(score, choose)

    assert verdict == "verified"
    if found.reference is not None:
        assert "ties at" in found.notes[0]
        assert "compared with the model run with its choices" in found.notes[0]


def test_of_values_that_tie_an_engine_may_choose_others_than_eager() -> None:
    changed = [outcome(equal, choose)[1].reference is not None for choose in (first, last)]

    assert any(changed)


@pytest.mark.parametrize("choose", [first, last])
def test_what_follows_from_a_choice_has_to_be_right(choose: Choose) -> None:
    assert outcome(equal, choose, wrong=1e-5)[0] == "rejected"


@pytest.mark.parametrize(
    ("score", "choose", "why"),
    [
        *((apart, next_best, "worse by"), (apart, twice, "worse by inf"), (equal, twice, "inf")),
        *((masked, swapped, "worse by"), (lowered, swapped, "worse by")),
        (beside_huge, swapped, "worse by"),
    ],
)
def test_a_wrong_choice_is_not_excused(score: Choose, choose: Choose, why: str) -> None:
    verdict, found = outcome(score, choose)

    assert verdict == "rejected"
    assert found.reference is None
    assert why in found.notes[0]


def test_an_engine_that_resolves_ties_in_its_own_way_is_verified(tmp_path: Path) -> None:
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(1))

    done = export(ExportRequest(Proposals(equal).eval(), tmp_path / "out", example={"x": x}))

    verdict = done.report.verdict
    assert verdict.outcome == "verified", verdict.reasons
    assert any("ties at" in reason for reason in verdict.reasons)
    assert all(output.ratio is not None and output.ratio <= 3 for output in verdict.outputs)


class Ends(nn.Module):
    """What stands at the first mark, as pooling at the end of a text takes it."""

    def __init__(self, mark: Choose, choose: Choose) -> None:
        super().__init__()
        self.mark = mark
        self.choose = choose

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0]), self.choose(self.mark(x))]


def largest(marks: Tensor) -> Tensor:
    return marks.argmax(1)


def largest_pair(marks: Tensor) -> Tensor:
    return marks.max(1).indices


def in_order(marks: Tensor) -> Tensor:
    return marks.sort(dim=1, descending=True, stable=True).indices[:, 0]


def rejudged_ends(mark: Choose, choose: Choose, chosen: Choose) -> TieReference:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    model, case = Ends(mark, choose).eval(), Case("drawn", {"x": x})
    program, before = referenced(model, case, "y")
    [name] = choice_nodes(program)
    choices = {"drawn": {name: chosen(mark(x)).numpy()}}
    return tie_reference(program, [case], [], ["y"], choices, before)


@pytest.mark.parametrize("mark", [lambda x: (x > 1).long(), lambda x: (x > 1).float()])
@pytest.mark.parametrize("choose", [largest, largest_pair, in_order])
def test_where_the_first_of_equal_values_is_promised_no_other_one_ties(
    mark: Choose, choose: Choose
) -> None:
    def of_last(marks: Tensor) -> Tensor:
        if choose is in_order:
            flipped = marks.flip(1).sort(dim=1, descending=True, stable=True)
            return marks.shape[1] - 1 - flipped.indices
        return marks.shape[1] - 1 - marks.flip(1).argmax(1)

    found = rejudged_ends(mark, choose, of_last)

    assert found.reference is None
    assert "is not the first of equal ones" in found.notes[0]


@pytest.mark.parametrize("off", [-40, 40])
def test_a_place_that_does_not_exist_is_no_choice(off: int) -> None:
    found = rejudged_ends(lambda x: x, largest, lambda scores: scores.argmax(1) + off)

    assert found.reference is None
    assert found.notes
