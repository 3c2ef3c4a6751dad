"""One finding a line, whoever saw it: the recorder or torch.export."""

import contextlib
from pathlib import Path

import pytest
import torch
from control_flow import ROWS, Row
from exports import cast

from enginecast.capture.control_flow.detect.recorder import Read, record
from enginecast.capture.control_flow.detect.reporters import detect
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.refusals.explain import Refusal, explain

BY_NAME = {row.name: row for row in ROWS}


def refusal_of(row: Row) -> Refusal:
    batch = torch.export.Dim("batch", min=2, max=64)
    shapes = {name: {0: batch} if name == "x" else None for name in row.a()}
    with pytest.raises(Exception, match=r"\S") as caught, quiet_torch(), torch.no_grad():
        torch.export.export(row.module(), (), row.a(), dynamic_shapes=shapes)
    return explain(caught.value)


def runs_of(row: Row) -> list[list[Read]]:
    with quiet_torch():
        return record(row.module(), [row.a(), row.b()])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("IfElse", "data-dependent-branch"),
        ("Ternary", "data-dependent-branch"),
        ("WhileNorm", "data-dependent-branch"),
        ("ForRangeTensor", "data-dependent-size"),
        ("MoeLoop", "data-dependent-branch"),
        ("TryValue", "data-dependent-branch"),
        ("NumpyHop", "data-leaves-torch"),
        ("ForShape", "specialized-dimension"),
        ("IfShape", "specialized-dimension"),
    ],
)
def test_a_refusal_and_a_run_agree_on_kind_and_line(name: str, kind: str) -> None:
    row = BY_NAME[name]
    refusal = refusal_of(row)
    assert refusal.kind == kind
    assert refusal.line == row.line
    found = detect(refusals=[refusal], runs=runs_of(row))
    blocking = [f for f in found if f.is_blocking]
    # That a size depends on inputs, as rows of an expert do, nothing reads.
    decides = "unknown" if name == "MoeLoop" else row.decides
    assert [(f.line, f.kind, f.decides) for f in blocking] == [(row.line, row.kind, decides)]
    run = () if decides in ("shapes", "unknown") else ("recorder",)
    assert blocking[0].witnesses == (*run, "export")
    assert blocking[0].action == "refused"


@pytest.mark.parametrize("name", ["IfElse", "WhileNorm", "EarlyExit", "SliceByItem", "NumpyHop"])
def test_what_a_run_reads_is_a_finding(name: str) -> None:
    row = BY_NAME[name]
    here = [f for f in detect(runs=runs_of(row)) if f.line == row.line]
    assert [f.kind for f in here] == [row.kind]
    assert here[0].witnesses == ("recorder",)
    assert bool(here[0].tensor) == (row.kind in ("if", "while"))
    assert len(here[0].values) >= 2


FACTORIES = """
from control_flow import THREE, ForShape, TryValue

def shape():
    return ForShape().eval(), THREE()

def tried():
    return TryValue().eval(), THREE()
"""


def test_inspect_gives_the_findings_of_refused_models_and_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refused_models.py").write_text(FACTORIES, encoding="utf-8")
    row = BY_NAME["TryValue"]
    with contextlib.chdir(tmp_path):
        shown = cast(capsys, "inspect", "refused_models:tried")
        asked = cast(capsys, "inspect", "refused_models:tried", "--json")
        shape = cast(capsys, "inspect", "refused_models:shape", "--json")
        exported = cast(capsys, "export", "refused_models:tried", "-o", "b", "--fallback", "none")
    assert (shown.code, asked.code, shape.code, exported.code) == (2, 2, 0, 2)
    assert f"control_flow.py:{row.line}" in shown.out
    assert "refused" in shown.out
    assert asked.json["message"].splitlines()[-1] == f"1 place: control_flow.py:{row.line} try"
    (found,) = asked.json["control_flow"]
    assert (found["kind"], found["line"], found["decides"]) == ("try", row.line, "inputs")
    assert {"recorder", "export"} == set(found["witnesses"])
    assert [f["line"] for f in shape.json["control_flow"]] == [BY_NAME["ForShape"].line]
    assert f"1 place: control_flow.py:{row.line} try" in exported.err
