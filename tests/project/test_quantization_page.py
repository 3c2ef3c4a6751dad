"""A plan on a terminal."""

import io

from rich.console import Console

from enginecast.cli.inspect.pages import print_plan
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan


def layer(module: str, **changed: object) -> LayerPlan:
    fields: dict[str, object] = {
        "module": module,
        "source": "m.py:1",
        "kind": "linear",
        "weight": f"{module}.weight",
        "shape": (4096, 10240),
        "choice": "w8a8-dynamic",
        "activations": "row",
        "error": 0.035,
        "end_to_end": 0.01,
        "gain": 1.5,
        "gain_from": "measured",
    }
    return LayerPlan(**(fields | changed))  # type: ignore[arg-type]


PLAN = QuantizationPlan(
    format="fp8",
    arch="sm90",
    max_error=0.15,
    predicted_error=0.0823,
    notes=("every layer in its fastest form: error 0.0823, measured on 3 calibration inputs",),
    layers=(
        *(layer(f"block.{i}.layer.1.wo", error=0.03 + i / 1000, gain=1.5 + i) for i in range(24)),
        layer("block.24.layer.1.wo", choice="keep", activations=None, reason="I want it so"),
        layer("head", shape=(8, 4096), choice="storage", activations=None, weights="row"),
    ),
)


def printed(plan: QuantizationPlan) -> list[str]:
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=160, markup=False, highlight=False))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_repeated_layers_are_one_row_with_the_worst_of_them() -> None:
    head, columns, wo, kept, storage, note = printed(PLAN)
    assert head == "fp8 plan for sm90: predicted error 0.0823, allowed 0.15"
    assert columns.split() == [
        "layers",
        "n",
        "weight",
        "choice",
        "error",
        "outputs",
        "gain",
        "reason",
    ]
    assert " ".join(wo.split()) == (
        "block.*.layer.*.wo 24 4096 x 10240 w8a8-dynamic row/row 0.053 0.01 1.5"
    )
    assert kept.split()[:2] == ["block.24.layer.1.wo", "1"]
    assert kept.endswith("I want it so")
    assert storage.split()[:7] == ["head", "1", "8", "x", "4096", "storage", "row"]
    assert note == PLAN.notes[0]
