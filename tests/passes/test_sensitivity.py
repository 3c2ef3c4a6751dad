"""What layers lose when they are quantized, measured on calibration inputs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from programs import prompts
from tiny_programs import tiny_program
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.passes.quantize.measure.calibration import (
    largest_row_error,
    masks_of,
)
from enginecast.passes.quantize.measure.quantizable import find_layers
from enginecast.passes.quantize.measure.simulate import simulate
from enginecast.passes.quantize.plan.forms import planned
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.planning import make_plan
from enginecast.passes.quantize.plan.sensitivity import Sensitivity, measure, measure_alone

ROWS: Any = ("w8a8-dynamic", "row", "row")
TENSOR: Any = ("w8a8-dynamic", "row", "tensor")


@pytest.fixture(scope="module")
def t5() -> ExportedProgram:
    return tiny_program("t5")


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        yield


def context(*sizes: tuple[int, int]) -> PassContext:
    cases = (dict(zip(("ids", "mask"), prompts(*size), strict=True)) for size in sizes)
    return PassContext(calibration=tuple(cases), mask_input="mask")


def plan_of(layers: tuple[LayerPlan, ...] = ()) -> QuantizationPlan:
    return QuantizationPlan(format="int8", arch="cpu", max_error=1.0, layers=layers)


def choices(program: ExportedProgram, *forms: Any) -> dict[Node, list[LayerPlan]]:
    linears = [layer for layer in find_layers(program) if layer.kind == "linear"]
    return {layer.node: [planned(layer, *form) for form in forms] for layer in linears}


def measured(program: ExportedProgram, given: PassContext, *forms: Any) -> Sensitivity:
    subject = (program, given, plan_of(), choices(program, *forms))
    found = measure(*subject)
    measure_alone(*subject, found)
    return found


def test_the_effect_of_one_layer_is_what_a_plan_of_it_alone_gives(t5: ExportedProgram) -> None:
    given = context((2, 9))
    found = measured(t5, given, ROWS, TENSOR)
    masks = masks_of(given)
    assert len(found.end_to_end) == 14
    for node, (layer, _) in choices(t5, ROWS, TENSOR).items():
        alone = simulate(t5, plan_of((layer,)), given.calibration)
        error = largest_row_error(alone, found.outputs, masks)
        assert found.end_to_end[node] == pytest.approx(error, rel=1e-4), layer.module
        assert error > 0


OPTIONS = PlanOptions(format="int8", heads=True)


def refused(program: ExportedProgram, given: PassContext) -> PassError:
    with pytest.raises(PassError) as error:
        make_plan(program, given, OPTIONS)
    return error.value


def test_bad_calibration_inputs_are_refused_by_name(t5: ExportedProgram) -> None:
    assert "there are no calibration inputs" in refused(t5, PassContext()).message
    ids, mask = prompts(2, 5)
    case = {"ids": ids, "mask": mask}

    def given(**changed: Tensor) -> PassContext:
        return PassContext(calibration=(case, case | changed), mask_input="mask")

    padding = PassContext(calibration=(case | {"mask": mask * 0},) * 2, mask_input="mask")
    assert "are padding alone: 'mask' is 0 everywhere" in refused(t5, padding).message
    one_empty = make_plan(t5, given(mask=mask * 0), OPTIONS)
    assert one_empty.predicted_error is not None
    foreign = refused(t5, given(ids=ids + 96))
    assert "calibration inputs 1: 'ids' holds the id" in foreign.message
    assert "has 96 rows" in foreign.message
    assert "another vocabulary" in foreign.hint
    assert "id -1" in refused(t5, given(ids=ids * 0 - 1)).message
    lacking = PassContext(calibration=({"ids": ids},), mask_input="mask")
    assert "'mask' is missing" in refused(t5, lacking).message
    wrong = PassContext(calibration=(case,), mask_input="padding")
    assert "have no mask 'padding'" in refused(t5, wrong).message
