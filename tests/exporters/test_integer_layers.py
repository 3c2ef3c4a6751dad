"""Convolutions, LSTMs and GRUs in int8, from the plan to the engine, and what is found out about
wrong ones.

Weights have loud channels: one scale for all of a weight, or of what floats read, would lose the
others.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from lowering import lower, run
from mutations import edit_graph, outcome
from onnx import numpy_helper
from programs import calibrated, captured, outputs, relative_error, rewritten
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from enginecast.capture.inputs.examples import Case
from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.compiler.engines.fresh_inputs import FreshInputs
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.verify.bundle import verify_bundle
from enginecast.errors import PassError
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan, plan_of
from enginecast.passes.quantize.measure.simulate import simulate
from enginecast.passes.quantize.plan.check import check_plan
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.planning import MARGIN
from enginecast.runtime.load import load

pytestmark = pytest.mark.filterwarnings("ignore:The tensor attributes", "ignore:Using padding")
aten, own = torch.ops.aten, torch.ops.enginecast
PLAN = "plan-int8{integers=true max_error=0.3}"


def loud(make: Callable[[], nn.Module]) -> nn.Module:
    """A module, seeded, with every fourth channel four times as loud as the others."""
    torch.manual_seed(0)
    module = make()
    for part in module.modules():
        if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            part.weight.data[::4] *= 4
        if isinstance(part, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            part.weight.data[:, ::4] *= 4
        if isinstance(part, nn.LSTM | nn.GRU):
            part.get_parameter("weight_ih_l0").data[::4] *= 4
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            part.running_mean.normal_(0, 0.1)
    return module.eval().requires_grad_(False)


class Residual(nn.Module):
    """A stem, a block with a norm and a rectifier, a sum, a pool, and what floats read."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, size, 3, padding=1)
        self.first, self.norm = nn.Conv2d(size, size, 3, padding=1), nn.BatchNorm2d(size)
        self.second = nn.Conv2d(size, size, 3, padding=1, groups=2)
        self.third = nn.Conv2d(size, size, (3, 1), (2, 1), padding=(1, 0), dilation=(2, 1))
        self.deep = nn.Conv2d(size, size, 3, padding="same", groups=size)
        self.up = nn.ConvTranspose2d(size, size, 2, 2)
        self.head = nn.Linear(size, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).relu())
        kept = self.norm(x).relu()
        summed = functional.relu6(self.second(kept) + kept)
        found = functional.max_pool2d(self.third(summed).clamp(-1, 2), 2)
        found = functional.silu(self.deep(found))
        last: Tensor = self.head(self.up(found).mean((2, 3)))
        return last


def program_of(
    make: Callable[[], nn.Module], *inputs: Tensor, dynamic: Any = None
) -> ExportedProgram:
    return captured(loud(make), *inputs, dynamic=dynamic)


def planned(program: ExportedProgram, *inputs: Tensor, spec: str = PLAN) -> dict[str, LayerPlan]:
    after, _ = rewritten(
        program, f"canonicalize,fold-batch-norm,{spec}", calibrated(program, *inputs)
    )
    plan = plan_of(after)
    assert plan is not None
    return {layer.module: layer for layer in plan.layers}


PIXELS = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(3))
SIZES = {0: Dim("batch", min=1, max=8), 2: Dim("height", min=12, max=64)}


def test_a_limit_keeps_the_layers_that_lose_most() -> None:
    program = program_of(Residual, PIXELS)
    loose, _ = rewritten(program, f"canonicalize,fold-batch-norm,{PLAN}", calibrated(program))
    whole = plan_of(loose)
    assert whole is not None
    assert whole.predicted_error is not None
    # What is left of a limit is what a simulation may use of it.
    limit = 0.8 * whole.predicted_error / MARGIN
    spec = f"plan-int8{{integers=true max_error={limit:.6f}}}"
    plan = planned(program, spec=spec)
    kept = [layer for layer in plan.values() if layer.reason.startswith("not within max_error")]
    assert kept
    assert any(layer.choice == "w8a8-static" for layer in plan.values())


def test_the_rewriting_does_what_was_simulated() -> None:
    program = program_of(Residual, PIXELS, dynamic=SIZES)
    before, _ = rewritten(program, "canonicalize,fold-batch-norm")
    context = calibrated(before, PIXELS)
    after, _ = rewritten(before, f"{PLAN},int8-matmul", context)
    plan = plan_of(after)
    assert plan is not None
    ops = [node.target for node in after.graph.nodes]
    assert ops.count(own.quantized_conv.default) == 6
    assert ops.count(own.quantized_add.default) == 1
    # Steps to integers of the input, and of what SiLU gives; the pool stays among them.
    assert ops.count(own.quantize_affine.default) == 2
    (pool,) = [node for node in after.graph.nodes if node.target is aten.max_pool2d.default]
    assert pool.meta["val"].dtype == torch.uint8
    # Rectifiers and clamps are limits of what convolutions give.
    limits = (aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default)
    assert [ops.count(limit) for limit in limits] == [0, 0, 0, 0]
    exact, found = outputs(before, PIXELS)[0], outputs(after, PIXELS)[0]
    (simulated,) = simulate(before, plan, context.calibration)[0].values()
    error = relative_error(found, exact)
    assert 1e-4 < error < 0.03
    # Biases are rounded here, too, and what meets another rounding is a whole step off.
    assert relative_error(found, simulated) < error / 2
    # Other sizes than traced.
    other = torch.randn(3, 3, 20, 10, generator=torch.Generator().manual_seed(4))
    assert relative_error(outputs(after, other)[0], outputs(before, other)[0]) < 0.1


def one(function: Callable[[Any, Tensor], Any], **layers: nn.Module) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

        def forward(self, x: Tensor) -> Any:
            return function(self, x)

    return Net()


def scaled(convolution: nn.Module) -> nn.Module:
    """Between values that nothing is fused with: neither is it the first layer nor the last."""
    return one(lambda n, x: n.conv(x.sin()).tanh() * 2, conv=convolution)


FORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "3-d": (lambda: nn.Conv3d(4, 6, 3, padding=1), (1, 4, 5, 6, 5)),
    "no bias": (lambda: nn.Conv2d(8, 6, 3, bias=False), (2, 8, 9, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 6, 4, 2, 1), (2, 8, 9, 7)),
    "transposed, groups": (lambda: nn.ConvTranspose2d(8, 12, 4, 2, 1, groups=4), (2, 8, 9, 7)),
    "transposed, gaps": (lambda: nn.ConvTranspose2d(8, 6, 2, 3, output_padding=2), (2, 8, 9, 7)),
    "transposed, 3-d": (
        lambda: nn.ConvTranspose3d(4, 6, (4, 3, 2), (2, 2, 1), 1),
        (1, 4, 5, 6, 5),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    convolution, shape = FORMS[form]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    module = loud(lambda: scaled(convolution()))
    before = captured(module, x)
    after, _ = rewritten(before, f"{PLAN},int8-matmul", calibrated(before, x))
    lowered = lower(after, tmp_path)
    assert lowered.ops["QLinearConv"] == 1
    wanted, (found,) = outputs(after, x)[0], run(tmp_path, x)
    error = relative_error(wanted, module(x))
    assert 1e-4 < error < 0.03
    # Beside the rounding itself, what meets another one.
    assert relative_error(found, wanted) < error / 4


# LSTMs


class Tagger(nn.Module):
    def __init__(self, layers: int = 2, bias: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.cells = nn.LSTM(
            12, 16, layers, bias=bias, batch_first=batch_first, bidirectional=layers > 1
        )
        self.head = nn.Linear(32 if layers > 1 else 16, 7)

    def forward(self, x: Tensor) -> Tensor:
        found, (state, _) = self.cells(x)
        last: Tensor = self.head(found) + state.sum()
        return last


def check_error(found: Tensor, exact: Tensor, simulated: Tensor) -> None:
    """An int8 program differs from the exact one, by little, and as was foretold."""
    error = relative_error(found, exact)
    assert 1e-4 < error < 0.05
    assert relative_error(found, simulated) < error / 4


def run_exported(module: nn.Module, x: Tensor, folder: Path) -> Tensor:
    """What a verified int8 engine of the module gives."""
    asked = ExportRequest(module, folder, precision="int8", max_error=0.3, example={"x": x})
    done = export(asked)
    assert done.bundle is not None, done.report.verdict.reasons
    assert done.report.verdict.outcome == "verified"
    with load(folder) as engine:
        (ran,) = engine.run({"x": x.numpy()}).values()
    return torch.from_numpy(ran)


@pytest.mark.parametrize(
    ("layers", "bias", "first"),
    [pytest.param(2, True, True, marks=pytest.mark.slow), (1, False, False)],
)
def test_an_lstm_in_integers(layers: int, bias: bool, first: bool, tmp_path: Path) -> None:
    x = torch.randn(3, 9, 12, generator=torch.Generator().manual_seed(6))
    module = loud(lambda: Tagger(layers, bias, first))
    program = captured(module, x)
    context = calibrated(program, x)
    after, _ = rewritten(program, f"{PLAN},int8-matmul", context)
    plan = plan_of(after)
    assert plan is not None
    assert {p.module: p.choice for p in plan.layers} == {
        "cells": "w8a8-dynamic",
        "head": "w8a8-dynamic",
    }
    ops = [node.target for node in after.graph.nodes]
    assert ops.count(own.quantized_lstm.default) == layers
    assert aten.lstm.input not in ops
    exact, found = outputs(program, x)[0], outputs(after, x)[0]
    (simulated,) = simulate(program, plan, context.calibration)[0].values()
    check_error(found, exact, simulated)
    ran = run_exported(module, x, tmp_path / "b")
    # It rounds the states of fewer rows at once, where it shares them out.
    assert relative_error(ran, exact) < 1.5 * relative_error(found, exact)


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent") / "bundle"
    x = torch.randn(3, 9, 12, generator=torch.Generator().manual_seed(6))
    request = ExportRequest(loud(Tagger), folder, precision="int8", max_error=0.2, example={"x": x})
    done = export(request)
    assert done.bundle is not None, done.report.verdict.reasons
    graph = onnx.load(folder / "engine.onnx", load_external_data=False).graph
    assert [node.op_type for node in graph.node].count("DynamicQuantizeLSTM") == 2
    return folder


def one_gate_off(data: Any) -> Any:
    """The forget gate of one direction, upside down."""
    size = data.shape[2] // 4
    edited = data.copy()
    edited[0, :, 2 * size : 3 * size] = -edited[0, :, 2 * size : 3 * size]
    return edited


@pytest.mark.parametrize("edit", [one_gate_off])
@pytest.mark.parametrize("rows", [16], ids=["of the state"])
def test_an_lstm_with_other_weights_is_rejected(
    edit: Callable[[Any], Any], rows: int, recurrent: Path, tmp_path: Path
) -> None:
    def change(folder: Path) -> None:
        path = folder / "weights.safetensors"
        weights = load_file(path)
        data = next(
            w for _, w in sorted(weights.items()) if w.shape == (2, rows, 64) and w.dtype == np.int8
        )
        content, edited = path.read_bytes(), edit(data)
        assert content.count(data.tobytes()) == 1
        path.write_bytes(content.replace(data.tobytes(), edited.tobytes()))

    assert outcome(recurrent, tmp_path, change) == "rejected"


# GRUs


class Speaker(nn.Module):
    """A GRU that starts from a state of its own, and whose last state is read."""

    def __init__(self, units: int, layers: int, bias: bool, batch_first: bool) -> None:
        super().__init__()
        both = layers > 1
        self.cells = nn.GRU(
            24, units, layers, bias=bias, batch_first=batch_first, bidirectional=both
        )
        self.start = nn.Parameter(torch.randn(2 * layers if both else 1, 1, units))
        self.head = nn.Linear(units * (2 if both else 1), 7)
        for name in ("weight_ih_l0", "weight_hh_l0"):
            self.cells.get_parameter(name).data[1::4] *= 2

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0 if self.cells.batch_first else 1]
        found, state = self.cells(x, self.start.expand(-1, rows, -1).contiguous())
        last: Tensor = self.head(found) + state.mean()
        return last


def speaker(
    units: int = 512, layers: int = 1, bias: bool = True, first: bool = True
) -> tuple[nn.Module, Tensor]:
    """With eight rows, of four steps."""
    shape = (8, 4, 24) if first else (4, 8, 24)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6))
    return loud(lambda: Speaker(units, layers, bias, first)), x


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spoken") / "bundle"
    module, x = speaker()
    done = export(ExportRequest(module, folder, precision="int8", example={"x": x}))
    assert done.bundle is not None, done.report.verdict.reasons
    graph = onnx.load(folder / "engine.onnx", load_external_data=False).graph
    kinds = [node.op_type for node in graph.node]
    assert (kinds.count("Scan"), kinds.count("GRU")) == (1, 0)
    return folder


def new_gate_off(data: Any) -> Any:
    """The part of the new gate, upside down."""
    size = data.shape[1] // 3
    edited = data.copy()
    edited[:, 2 * size :] = -edited[:, 2 * size :]
    return edited


@pytest.mark.parametrize("rows", [512], ids=["of the state"])
def test_a_gru_with_other_weights_is_rejected(rows: int, spoken: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        path = folder / "weights.safetensors"
        (data,) = [w for w in load_file(path).values() if w.shape == (rows, 1536)]
        assert data.dtype == np.int8
        content = path.read_bytes()
        assert content.count(data.tobytes()) == 1
        path.write_bytes(content.replace(data.tobytes(), new_gate_off(data).tobytes()))

    assert outcome(spoken, tmp_path, change) == "rejected"


# Plans by hand


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"choice": "w8a8-dynamic", "activations": "row"}, "w8a8-static by row and tensor"),
        ({"weights": "tensor"}, "w8a8-static by row and tensor"),
        ({"choice": "storage"}, "which rounds weights alone"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(changes: dict[str, Any], reported: str) -> None:
    program = program_of(Residual, PIXELS)
    after, _ = rewritten(program, f"canonicalize,fold-batch-norm,{PLAN}", calibrated(program))
    plan = plan_of(after)
    assert plan is not None
    content = {name: getattr(plan, name) for name in plan.__struct_fields__}
    layers = []
    for layer in plan.layers:
        own_fields = {name: getattr(layer, name) for name in layer.__struct_fields__}
        layers.append(
            LayerPlan(**(own_fields | changes if layer.module == "third" else own_fields))
        )
    with pytest.raises(PassError, match=reported):
        check_plan(
            after, QuantizationPlan(**(content | {"layers": tuple(layers)})), PlanOptions("int8")
        )


# Engines that are wrong


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("integers") / "bundle"
    options = ModelOptions(dynamic=["x:0=1..8"])
    request = ExportRequest(
        loud(Residual), folder, precision="int8", example={"x": PIXELS}, options=options
    )
    done = export(request)
    assert done.bundle is not None, done.report.verdict.reasons
    return folder


def test_a_plan_and_what_was_measured_are_published(bundle: Path) -> None:
    plan = json.loads((bundle / "plan.json").read_text())
    assert plan["predicted_error"] <= 0.85 * plan["max_error"]
    assert any("static scales of 6 convolutions" in note for note in plan["notes"])
    graph = onnx.load(bundle / "engine.onnx", load_external_data=False).graph
    ops = [node.op_type for node in graph.node]
    assert (ops.count("QLinearConv"), ops.count("QLinearAdd")) == (6, 1)
    assert "BatchNormalization" not in ops


def _convs(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == "QLinearConv"]


def _change(graph: onnx.GraphProto, name: str, change: Callable[[Any], Any]) -> None:
    """Edit a constant, which stands in the graph or in a node."""
    found = [tensor for tensor in graph.initializer if tensor.name == name]
    if not found:
        (node,) = [node for node in graph.node if name in node.output]
        found = [node.attribute[0].t]
    array = numpy_helper.to_array(found[0])
    edited = change(array.copy()).astype(array.dtype)
    assert (edited != array).any()
    found[0].CopyFrom(numpy_helper.from_array(edited, found[0].name))


def wrong_scale(graph: onnx.GraphProto) -> None:
    _change(graph, _convs(graph)[1].input[4], lambda scales: scales * 1.3)


def wrong_zero(graph: onnx.GraphProto) -> None:
    """Of what one convolution gives; what reads it has a constant of its own."""
    node = _convs(graph)[2]
    node.input[7] = "wrong.zero"
    graph.initializer.append(numpy_helper.from_array(np.array(40, np.uint8), "wrong.zero"))


def swapped_channels(graph: onnx.GraphProto) -> None:
    """Those of the sum of each channel: weights may lie in another file."""
    _change(graph, _convs(graph)[0].input[8], lambda bias: bias[::-1])


def no_bias(graph: onnx.GraphProto) -> None:
    _change(graph, _convs(graph)[2].input[8], lambda bias: bias * 0)


@pytest.mark.parametrize("edit", [wrong_scale, wrong_zero, swapped_channels, no_bias])
def test_a_wrong_engine_is_rejected(
    edit: Callable[[onnx.GraphProto], None], bundle: Path, tmp_path: Path
) -> None:
    found = outcome(bundle, tmp_path, lambda folder: edit_graph(folder, edit))
    assert found == "rejected"


def test_an_engine_with_other_weights_is_rejected(bundle: Path, tmp_path: Path) -> None:
    """Two rows of int8 weights change places."""

    def edit(folder: Path) -> None:
        weights = load_file(folder / "weights.safetensors")
        (name,) = [
            n for n, w in weights.items() if w.shape == (16, 16, 3, 3) and w.dtype == np.int8
        ]
        data, path = weights[name], folder / "weights.safetensors"
        swapped = data.copy()
        swapped[[0, 1]] = swapped[[1, 0]]
        content = path.read_bytes()
        assert content.count(data.tobytes()) == 1
        path.write_bytes(content.replace(data.tobytes(), swapped.tobytes()))

    assert outcome(bundle, tmp_path, edit) == "rejected"


# Inputs that no scale was made from


class Small(nn.Module):
    """Few values for each channel, so that the next input is often the largest one so far."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        found = self.last(self.second(self.first(x).relu()).relu()).relu()
        last: Tensor = self.head(found.mean((2, 3)))
        return last


def small_inputs(count: int) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(11)
    return [torch.randn(1, 8, 4, 4, generator=drawn) for _ in range(count)]


def test_an_engine_is_within_its_limit_on_inputs_that_nobody_calibrated_on(tmp_path: Path) -> None:
    example, *fresh = small_inputs(41)
    module = loud(Small)
    done = export(ExportRequest(module, tmp_path / "b", precision="int8", example={"x": example}))
    assert done.bundle is not None, done.report.verdict.reasons
    with load(tmp_path / "b") as engine:
        errors = [
            relative_error(torch.from_numpy(*engine.run({"x": x.numpy()}).values()), module(x))
            for x in fresh
        ]
    assert max(errors) < 0.1
    assert sorted(errors)[20] < 0.01


class Drawn:
    """A program that takes every other input that is drawn, and what its engine makes of one."""

    def __init__(self, found: float) -> None:
        self.found = np.array([found, 1.0], np.float32)
        self.ran = 0

    def prepared(self) -> Any:
        spec = InputSpec("x", "tensor", torch.float32, (DimSpec.static(2),))
        case = Case("first", {"x": torch.ones(2)})
        return SimpleNamespace(
            inputs=(spec,),
            cases=(case,),
            captured=SimpleNamespace(guards=()),
            plain=self,
            source=SimpleNamespace(example=dict),
            mask_input=None,
        )

    def outputs(self, cases: Sequence[Any]) -> list[dict[str, Tensor]]:
        if any(float(case["x"].sum()) < 0 for case in cases):
            raise ValueError("expected a sum above 0")
        return [{"y": torch.ones(2)} for _ in cases]

    def run(self, *_: Any, **__: Any) -> dict[str, np.ndarray[Any, Any]]:
        self.ran += 1
        return {"y": self.found}


@pytest.mark.parametrize(
    ("found", "said"), [(1.0, ""), (1.05, ""), (1.5, "L2 error"), (np.nan, "are not finite")]
)
def test_fresh_inputs_are_those_that_the_model_takes_and_are_compared_whole(
    found: float, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = "enginecast.compiler.engines.fresh_inputs"
    monkeypatch.setattr(f"{fresh}.is_static_conv", bool)
    monkeypatch.setattr(f"{fresh}.as_declared", lambda _, arrays: arrays)
    drawn, criteria = Drawn(found), SimpleNamespace(reference=SimpleNamespace(masked=frozenset()))
    plan: Any = SimpleNamespace(layers=[1], max_error=0.1)
    running: Any = SimpleNamespace(engine=drawn, criteria=criteria, is_twin=False)
    why = FreshInputs(drawn.prepared(), plan).examine(running).wrong
    assert said in "".join(why)
    assert bool(why) == bool(said)
    assert 1 <= drawn.ran < 24


def test_a_bundle_is_compared_with_its_model_by_the_scales_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported with loud inputs, and compared without them: its scales are still theirs."""
    (tmp_path / "loud_small.py").write_text(
        "from test_integer_layers import Small, loud, small_inputs\n"
        "def make():\n    return loud(Small), {'x': small_inputs(1)[0]}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    save_file({"x": 4 * np.abs(small_inputs(2)[1].numpy())}, tmp_path / "loud.safetensors")
    options = ModelOptions(allow_code=True, inputs=tmp_path / "loud.safetensors")
    model = "loud_small:make"
    done = export(ExportRequest(model, tmp_path / "b", precision="int8", options=options))
    assert done.bundle is not None, done.report.verdict.reasons
    checked = verify_bundle(tmp_path / "b", model=model, allow_code=True)
    assert checked.verdict.outcome == "verified", checked.verdict.reasons


# What stays in floats beside integers
