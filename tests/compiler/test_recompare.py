"""`verify --model`: the program that the reference is made of is compared with eager there, too."""

from typing import Any

import pytest
from exports import Exports
from program_edits import scale_after
from torch.fx import Node

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
