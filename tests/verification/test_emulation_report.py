"""What users see of emulated arithmetic: verdicts, reports, and the forecast of `inspect`."""

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from exports import Exports
from reports import report

from enginecast.verification.emulate.data import (
    Emulation,
    Overflow,
    StoredValues,
    WeightLoss,
)
from enginecast.verification.report.data import Report
from enginecast.verification.report.files import write_report


def test_an_export_is_judged_in_the_arithmetic_of_its_target(exports: Exports) -> None:
    done = exports("t5", "fp16")
    assert done.bundle is not None
    assert done.bundle.manifest.engines[0].verdict.arithmetic == "ort-cuda"
    found = json.loads((done.folder / "report.json").read_text(encoding="utf-8"))
    emulation = found["emulation"]
    assert (emulation["profile"], emulation["overflow"]) == ("ort-cuda", None)
    rows = {row["module"]: row for row in emulation["modules"]}
    assert {"", "encoder", "encoder.block.1.layer.0.SelfAttention.q"} <= set(rows)
    assert "encoder.block" not in rows  # a list of modules computes nothing
    assert all(row["dtype"] == "float16" and row["overflow"] == 0 for row in rows.values())
    assert 40 < rows["encoder"]["sqnr_db"] < 90
    page = (done.folder / "report.html").read_text(encoding="utf-8")
    assert "as ort-cuda computes" in page
    assert "encoder.block.1.layer.0.SelfAttention.q" in page
    assert exports("t5").report.emulation is None


def place(module: str, bits: float, **others: int) -> StoredValues:
    fields = {"overflow": 0, "clamped": 0, **others}
    return StoredValues(
        module=module,
        source="model.py:7",
        op="aten.linear",
        dtype="float16",
        max_abs=65504 / 2**bits,
        headroom_bits=bits,
        subnormal=0.125,
        energy_lost=1e-9,
        sqnr_db=None,
        **fields,
    )


def emulation(overflow: Overflow | None = None, clamped: int = 0) -> Emulation:
    loss = WeightLoss("a.weight", "float16", 1e5, 3, 0.25, 0.5)
    places = (place("a", 9.0), place("a.<b>", 0.5, clamped=clamped), place("c", 4.0))
    return Emulation("ort-cuda", "ONNX Runtime", ("long",), places, places[1:2], (loss,), overflow)


def reported(found: Emulation) -> Report:
    return replace(report(), emulation=found)


def test_the_page_holds_every_module(tmp_path: Path) -> None:
    _, page = write_report(tmp_path, reported(emulation(clamped=2)))
    text = page.read_text(encoding="utf-8")
    HTMLParser().feed(text)
    for shown in (
        "<code>a.&lt;b&gt; model.py:7</code>",
        "12.50%",
        "25.00%",
        "as ort-cuda computes",
    ):
        assert shown in text
