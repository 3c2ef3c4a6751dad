"""`verify --model`: the program behind the reference is compared with eager there, too, and other
inputs must be in fp16's range.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from exports import Exports
from program_edits import scale_after
from safetensors.torch import save_file
from torch.fx import Node

from enginecast.capture.sources.factory import open_factory
from enginecast.capture.tracing.captured import capture
from enginecast.compiler.prepare import program
from enginecast.compiler.verify.bundle import verify_bundle


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "verified"), (1.1, "rejected")])
def test_a_program_that_is_not_the_model_is_no_reference(
    exports: Exports, monkeypatch: pytest.MonkeyPatch, factor: float, outcome: str
) -> None:
    def otherwise(*args: Any, **options: Any) -> Any:
        captured = capture(*args, **options)
        program = captured.program
        [output] = [node for node in program.graph.nodes if node.op == "output"]
        last = next(arg for arg in output.args[0] if isinstance(arg, Node))
        if factor != 1:
            scale_after(last, factor)
            spec = program.graph_signature.output_specs[0]
            spec.arg.name = output.args[0][0].name
        return captured

    bundle = exports("plain").folder
    monkeypatch.chdir(exports.root)
    monkeypatch.setattr(program, "capture", otherwise)
    check = verify_bundle(bundle, model=str(exports.model("plain")))
    assert check.verdict.outcome == outcome
    assert (outcome == "verified") or "is not the model" in check.verdict.reasons[0]


def test_louder_inputs_name_what_fp16_does_not_hold(
    exports: Exports, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bundle, loud = exports("plain", "fp16"), tmp_path / "loud.safetensors"
    model = exports.model("plain")
    monkeypatch.chdir(exports.root)
    made, example = open_factory(model).eager(), open_factory(model).example()
    signs = made.get_parameter("wide.weight")[0].sign()
    save_file({**example, "features": 5e4 * signs.repeat(3, 7, 1)}, loud)
    (headroom,) = [note for note in bundle.report.notes if "headroom" in note]
    assert headroom.startswith("headroom on these inputs: ")
    check = verify_bundle(bundle.folder, model=model, inputs=loud)
    assert check.verdict.outcome == "rejected"
    found = r"leave fp16's range at wide plain_model.py:\d+ \(.*left \d+.\d bits: export again"
    assert re.search(found, check.verdict.reasons[0])
