"""One case through the export, and its bundle against eager."""

import json
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from harness import one_line

from adversary.case import Case
from adversary.judge import Array, Taken, TurnedAwayError, flat, judge
from adversary.plain import plain
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import EnginecastError, InputError, MissingError
from enginecast.runtime.load import load

Outcome = Literal["right", "refused", "rejected", "wrong", "crashed", "timed out"]


@dataclass
class Row:
    """What became of one case."""

    group: str
    name: str
    expected: str
    outcome: Outcome = "crashed"
    reason: str = ""
    plain: str = ""
    """What `torch.onnx.export` makes of it; asked where what was published is not right."""
    compared: int = 0
    turned_away: int = 0
    seconds: float = 0.0
    """CPU seconds of the export."""
    commit: str = ""

    @property
    def is_wrongly_refused(self) -> bool:
        turned_away = self.outcome in ("refused", "rejected") and self.expected != "refused"
        return turned_away and self.plain == "right"

    @property
    def is_as_expected(self) -> bool:
        if self.outcome in ("wrong", "crashed", "timed out"):
            return False
        published = self.outcome == "right"
        return {"right": published, "refused": not published}.get(self.expected, True)


def examine(case: Case, folder: Path, *, asks_plain: bool = True) -> Row:
    """Export a case in `folder`, and judge what was published."""
    row = Row(case.group, case.name, case.expected)
    started = time.process_time()
    module = case.make()
    before = unchanging(module, case)
    try:
        done = export(
            ExportRequest(
                module,
                folder / "bundle",
                target=case.target,
                precision=case.precision,
                options=ModelOptions(dynamic=case.dynamic, fallback=case.fallback),
                example=case.inputs(),
                threads=1,
                allow_fallback=True,
            )
        )
    except EnginecastError as error:
        row.outcome = "rejected" if error.exit_code == 1 else "refused"
        row.reason = one_line(f"{type(error).__name__}: {error.message}", 400)
    except Exception as error:
        row.reason = one_line(f"{type(error).__name__}: {error}", 400)
    else:
        if done.bundle is None:
            row.outcome = "rejected"
            row.reason = one_line("; ".join(done.report.verdict.reasons[:3]), 400)
        else:
            try:
                _judge(case, folder / "bundle", row)
            except MissingError as error:  # bf16, on a machine without a provider for it
                row.outcome, row.reason = "right", one_line(f"not run: {error.message}", 400)
    row.seconds = round(time.process_time() - started, 1)
    if row.outcome in ("right", "refused", "rejected") and not _same(
        before, unchanging(module, case)
    ):
        row.outcome, row.reason = "wrong", "the export changed the caller's own module"
    if asks_plain and row.outcome in ("refused", "rejected", "wrong"):
        row.plain = one_line(plain(case, folder), 400)
    return row


def unchanging(module: torch.nn.Module, case: Case) -> list[Array] | None:
    """What the module itself gives; None of a module with state or randomness."""
    if case.group == "state":
        return None
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn = torch.get_rng_state()
            first, second = (flat(module(**case.inputs())) for _ in range(2))
    except Exception:
        return None
    is_random = not torch.equal(drawn, torch.get_rng_state())
    return first if not is_random and _same(first, second) else None


def _same(one: list[Array] | None, two: list[Array] | None) -> bool:
    if one is None or two is None:
        return one is two
    return all(
        np.array_equal(a, b, equal_nan=a.dtype.kind in "fc") for a, b in zip(one, two, strict=True)
    )


def _judge(case: Case, bundle: Path, row: Row) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    taken = {
        found["name"]: Taken(
            found["dtype"], tuple(found["shape"]), found["minimum"], found["maximum"]
        )
        for found in manifest["inputs"]
    }
    symbols = {name: (low, high) for name, (low, high) in manifest["symbols"].items()}
    names = [output["name"] for output in manifest["outputs"]]
    with load(bundle, threads=1, allow_code=True) as engine:

        def run(feeds: Mapping[str, Array]) -> list[Any]:
            try:
                fed = {name: feeds[name].astype(kind.dtype) for name, kind in taken.items()}
                found = engine.run(fed, check_finite=False)
            except InputError as error:
                raise TurnedAwayError(error.message) from error
            return [np.asarray(found[name]) for name in names]

        judged = judge(case, run, taken, symbols)
    row.compared, row.turned_away = judged.compared, judged.turned_away
    row.outcome = "wrong" if judged.wrong else "right"
    row.reason = one_line(judged.wrong, 400)
