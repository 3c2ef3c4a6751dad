"""The floor of a quantized engine: wide enough for its plan, too narrow for a wrong scale."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from exports import Exports

from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.engines.rewrite import Rewritten, rewrite
from enginecast.compiler.prepare.program import Prepared, prepare
from enginecast.compiler.prepare.reference import reference_of
from enginecast.compiler.request import ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.interpret import interpret
from enginecast.passes.quantize.storage import Weights
from enginecast.passes.registry import build
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import Array, measure, pool_output
from enginecast.verification.reference import Reference

PIPELINE = "plan-int8{max_error=0.2},int8-matmul"
OUTPUT = "last_hidden_state"


@pytest.fixture(scope="module")
def prepared(exports: Exports) -> Prepared:
    return prepare(open_source(exports.model("vit")), ModelOptions(), Steps())


@pytest.fixture(scope="module")
def reference(prepared: Prepared) -> Reference:
    return reference_of(prepared, "fp32")


def carried_out(prepared: Prepared, reference: Reference) -> Rewritten:
    return rewrite(prepared, build(PIPELINE), reference, Steps())


@pytest.fixture(scope="module")
def quantized(prepared: Prepared, reference: Reference) -> Rewritten:
    return carried_out(prepared, reference)


def relative(floor: Floor) -> float:
    return pool_output(floor.cases, OUTPUT).relative


def test_the_rewriting_is_as_wrong_as_its_simulation(quantized: Rewritten) -> None:
    check = next(check for check in quantized.checks if check.name == "int8-matmul")
    assert check.failure == ""
    case = quantized.reference.cases[0]
    found = interpret(quantized.program, tensors(case.inputs), names=names(quantized))
    error = measure(found[OUTPUT].numpy(), case.reference[OUTPUT]).relative
    floor = quantized.reference.floor.only(frozenset({case.name}))
    assert error == pytest.approx(relative(floor), rel=0.2)


def tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def names(rewritten: Rewritten) -> list[str]:
    return list(rewritten.reference.cases[0].reference)


@pytest.fixture
def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products are scaled by a tenth more than the weights were rounded by."""
    right = Weights.of

    def wrong(self, layer, plan):  # type: ignore[no-untyped-def]
        values, scale = right(self, layer, plan)
        if not plan.choice.startswith("w8a8") or plan.weights == "block":
            return values, scale
        with self._program.graph.inserting_before(layer.node):
            return values, self.insert(layer, aten.mul.Scalar, scale, 1.1)

    monkeypatch.setattr(Weights, "of", wrong)
    return iter([None])


@pytest.mark.usefixtures("wrong_scale")
def test_a_wrong_scale_is_not_part_of_the_floor(
    prepared: Prepared, reference: Reference, quantized: Rewritten
) -> None:
    wrong = carried_out(prepared, reference)
    assert relative(wrong.reference.floor) == pytest.approx(relative(quantized.reference.floor))
    assert wrong.failures
    assert "'int8-matmul' promises 'precision'" in wrong.failures[0]
