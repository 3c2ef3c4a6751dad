"""`--accept`: an error beyond its limit is published where it is named, and nowhere unsaid."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exports import cast

from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import Verdict, Where
from enginecast.runtime.engine import Engine
from enginecast.verification.accepted_excess import parse_accept
from enginecast.verification.edges import edge_failures
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import BEYOND, measure
from enginecast.verification.reference import ReferenceCase
from enginecast.verification.verdict import judge, verdict_line

VALUES = np.linspace(0.5, 2.0, 12).reshape(3, 4)


def verdict(*accept: str, off: float = 1e-5, edges: Mapping[str, float] | None = None) -> Verdict:
    """Of an engine whose output `y` is off in two cases, and at edges."""

    def made(by: float) -> Any:
        return {case: {"y": measure(VALUES * (1 + by), VALUES)} for case in ("a", "b")}

    problems = [
        failure
        for name, by in (edges or {}).items()
        for failure in edge_failures(
            ReferenceCase(name, {}, {"y": VALUES.astype(np.float32)}, {"y": VALUES}),
            {"y": (VALUES * (1 + by)).astype(np.float32)},
        )
    ]
    floor = Floor("fp32", made(6e-8), accept=tuple(map(parse_accept, accept)))
    where = Where(provider="CPUExecutionProvider", device="x86_64", versions={})
    return judge(made(off), floor, where=where, engine_ran=True, problems=problems)


def test_only_what_is_named_is_accepted() -> None:
    assert verdict().outcome == verdict("z").outcome == verdict("y/a").outcome == "rejected"
    found = verdict("y")
    assert found.outcome == "verified"
    start = "verified except 'y', accepted at up to 1e-05 (limit 1.8e-07): 167x the error of eager"
    assert verdict_line(found, "fp32").startswith(start)
    assert {(e.output, e.case, e.accepted) for e in found.excesses} == {
        ("y", case, "y") for case in ("", "a", "b")
    }
    assert all(reason.startswith("accepted: output 'y'") for reason in found.reasons)


@pytest.mark.parametrize(
    ("accept", "off", "outcome"),
    [
        ("y", 9e-4, "verified"),
        ("y", 2e-3, "rejected"),
        ("y=2e-5", 1e-5, "verified"),
        ("y=5e-6", 1e-5, "rejected"),
        ("y=0.1", 0.01, "verified"),
        ("y=0.9", math.nan, "rejected"),
        ("y=0.9", math.inf, "rejected"),
    ],
)
def test_no_more_than_the_bound(accept: str, off: float, outcome: str) -> None:
    assert verdict(accept, off=off).outcome == outcome


def test_what_is_zero_but_for_rounding_may_be_accepted() -> None:
    """The mean of what its mean was subtracted from: eager is the measure, and no measure."""
    made = {"a": {"y": measure(VALUES * -1.1, VALUES)}}

    def found(lost: float, *accept: str) -> Verdict:
        accepts = tuple(map(parse_accept, accept))
        floor = Floor("fp32", {"a": {"y": measure(VALUES, VALUES)}}, None, accept=accepts)
        floor = replace(floor, by_eager={"y": lost})
        where = Where(provider="CPUExecutionProvider", device="x86_64", versions={})
        return judge(made, floor, where=where, engine_ran=True)

    for lost in (1e8, BEYOND):
        reasons = found(lost).reasons
        assert "output 'y' is zero but for rounding" in " ".join(reasons)
        assert reasons[-1] == "if this is good enough: --accept 'y'"
        assert found(lost, "y").outcome == "verified"
        assert found(lost, "y=0.5").outcome == "rejected"
    for lost in (0.5, math.inf):
        assert found(lost, "y").outcome == "rejected"
        assert "--accept" not in " ".join(found(lost).reasons)


@pytest.mark.parametrize("text", ["", "/zeros", "/zeros=0.1", "=0.1", "y=0", "y=2", "y=nan"])
def test_what_is_no_name_or_bound(text: str) -> None:
    with pytest.raises(UsageError, match="expected OUTPUT"):
        parse_accept(text)


MODULE = """
import torch
from torch import nn


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 8)

    def forward(self, x):
        y = self.linear(x)
        return {"features": y, "score": y.mean(1)}


def scored():
    return Scored().eval(), {"x": torch.randn(2, 16)}
"""


def test_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an engine whose score is off by 1e-5."""
    run = Engine.run

    def off(self: Engine, *given: Any, **options: Any) -> Any:
        found = run(self, *given, **options)
        return {**found, "score": np.asarray(found["score"] * (1 + 1e-5), np.float32)}

    monkeypatch.setattr(Engine, "run", off)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "scored_module.py").write_text(MODULE)
    words = ("export", "scored_module:scored", "-o", "bundle", "--no-speed", "--json")
    done = cast(capsys, *words)
    assert done.code == 1
    reasons = done.json["verdict"]["reasons"]
    assert "if this is good enough: --accept 'score'" in reasons
    assert any("kernels lose most digits in" in r and "scored_module.py:" in r for r in reasons)
    wrong = cast(capsys, *words, "--accept", "scroe")
    assert wrong.code == 2
    assert "there is no output 'scroe'" in wrong.err
    done = cast(capsys, *words, "--accept", "score")
    assert (done.code, done.json["outcome"]) == (0, "verified")
    assert {e["accepted"] for e in done.json["verdict"]["excesses"]} == {"score"}
    verified = cast(capsys, "verify", "bundle")
    assert verified.code == 0
    assert "verified except 'score', accepted at" in verified.out
    assert cast(capsys, "verify", "bundle", "--model", "scored_module:scored").code == 0
