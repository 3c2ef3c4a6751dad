"""Cases through the real export: a few by default, all of them when slow tests run."""

from pathlib import Path

import pytest
from db_examples import db_example, db_names
from flow.cases import Case, Model, cases
from flow.examine import Row, examine
from flow.run import CAMPAIGN
from torch import Tensor, nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attribute"),  # torch's own, held back otherwise
]
CASES = {(case.group, case.name): case for case in cases()}


def examined(group: str, name: str, folder: Path) -> Row:
    return examine(CASES[group, name], folder)


@pytest.mark.parametrize(
    ("name", "compared"),
    [
        pytest.param("cond_operands", 2, marks=pytest.mark.slow),
        pytest.param("list_unpack", 1, marks=pytest.mark.slow),
        ("user_input_mutation", 2),
        ("scalar_output", 2),
    ],
)
def test_examples_that_are_verified(name: str, compared: int, tmp_path: Path) -> None:
    row = examined("db", name, tmp_path)
    assert (row.outcome, row.compared) == ("verified", compared), row.reason


@pytest.mark.slow
def test_an_example_that_is_refused_at_its_line(tmp_path: Path) -> None:
    row = examined("db", "dynamic_shape_round", tmp_path)
    code = "return x[: round(x.shape[0] / 2)]"
    assert row.outcome == "refused", row.reason
    file, _, line = row.place.partition(":")
    assert (tmp_path / file).read_text().splitlines()[int(line) - 1].strip() == code


def test_every_example_runs_in_eager_on_its_own_inputs(tmp_path: Path) -> None:
    assert len(db_names()) > 30
    for name in db_names():
        found = db_example(name, tmp_path)
        assert found.inputs, name
        found.module(**{key: tensor.clone() for key, tensor in found.inputs.items()})


class Sneaky(nn.Module):
    """Gives the export something else than it gives later: a bundle of it is wrong."""

    sign = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.sign


def test_a_wrong_bundle_is_found(tmp_path: Path) -> None:
    module, example = Sneaky(), {"x": db_example("static_for_loop", tmp_path).inputs["x"]}

    def make(_: Path) -> Model:
        return Model(module, example, dynamic=())

    module.sign = 1.0
    case = Case("fixtures", "sneaky", make)
    assert examine(case, tmp_path / "right").outcome == "verified"

    class Turned(Sneaky):
        def __deepcopy__(self, memo: object) -> nn.Module:
            copy = Sneaky()
            copy.sign = -1.0 if copies else 1.0
            copies.append(copy)
            return copy

    copies: list[nn.Module] = []
    wrong = Case("fixtures", "sneaky", lambda _: Model(Turned(), example))
    row = examine(wrong, tmp_path / "wrong")
    assert row.outcome == "silently wrong", row.reason
    assert "its own example" in row.reason


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_cases(tmp_path: Path) -> None:
    rows = list(CAMPAIGN.run(CAMPAIGN.items(), tmp_path))
    ended = {f"{row.group}: {row.name}": (row.outcome, row.reason) for row in rows}
    allowed = {"db": {"verified", "refused"}}
    for row in rows:
        good = allowed.get(row.group, {"verified", "refused", "rejected"})
        assert row.outcome in good, ended[f"{row.group}: {row.name}"]
        wanted = CASES[row.group, row.name].place()
        if row.outcome == "refused" and wanted:
            assert row.place == wanted, ended[f"{row.group}: {row.name}"]
