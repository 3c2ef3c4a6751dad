"""An engine file that no provider here can run is run in fp32, and what is wrong in it is found."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx
import pytest
import torch
from mutations import change_epsilon, edit_graph, perturb_weight
from torch import nn

from enginecast.api import compile as export
from enginecast.compiler.engines import lower_and_run
from enginecast.compiler.export import session
from enginecast.runtime.bundle.manifest import Verdict
from enginecast.runtime.bundle.reader import Bundle

Judge = Callable[[Path], Verdict]


class Block(nn.Module):
    """A norm, weights of both kinds (in the graph and beside it), a branch and an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.where(x > 0.5, self.narrow(self.wide(self.norm(x)).tanh()), x)
        other = torch.cond(x.sum() > 0, lambda t: t.exp(), lambda t: t - 0.3, (x,))
        return kept.softmax(1), other.topk(3).values


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Judge]:
    """The folder of a bf16 engine, and what judges a copy of it as the export did."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("twin") / "engine"
    seen: list[Callable[[Bundle], lower_and_run.EngineRun]] = []
    bundles: list[Bundle] = []

    def spy(bundle: Bundle, *args: object, **options: object) -> lower_and_run.EngineRun:
        bundles.append(bundle)
        seen.append(lambda other: lower_and_run.run_engine(other, *args, **options))  # type: ignore[arg-type]
        return lower_and_run.run_engine(bundle, *args, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "run_engine", spy)
        export(Block().eval(), folder, example={"x": torch.randn(2, 6, 16)}, precision="bf16")

    def judge(copy: Path) -> Verdict:
        return seen[0](replace(bundles[0], root=copy)).verdict

    return folder, judge


def test_the_verdict_says_that_the_file_ran(made: tuple[Path, Judge]) -> None:
    folder, judge = made
    found = judge(folder)
    assert (found.outcome, found.engine) == ("verified-by-emulation", "not run on target")
    said = "the engine file ran on CPUExecutionProvider with its 16-bit values in fp32"
    assert said in found.reasons
    assert not found.where.provider
    assert [path for path in folder.iterdir() if "twin" in path.name] == []


def attribute(op: str, name: str, value: int) -> Callable[[Path], None]:
    """Another integer attribute in the first node of this op."""

    def edit(graph: onnx.GraphProto) -> None:
        node = next(node for node in graph.node if node.op_type == op)
        [found] = [a for a in node.attribute if a.name == name]
        assert found.i != value
        found.i = value

    return partial(edit_graph, edit=edit)


def inline_bias(bundle: Path) -> None:
    """One element of a weight that lies in the graph is off by the last of its bits."""

    def edit(graph: onnx.GraphProto) -> None:
        [bias] = [one for one in graph.initializer if one.name == "wide.bias"]
        bias.raw_data = bytes([bias.raw_data[0] ^ 1]) + bias.raw_data[1:]

    edit_graph(bundle, edit)


def in_branch(bundle: Path) -> None:
    """A constant of a branch is another."""

    def edit(graph: onnx.GraphProto) -> None:
        [node] = [node for node in graph.node if node.op_type == "If"]
        branches = [a.g for a in node.attribute]
        changed = [n for g in branches for n in g.node if n.op_type == "Exp"]
        changed[0].op_type = "Sigmoid"

    edit_graph(bundle, edit)


@pytest.mark.parametrize(
    "fault",
    [
        perturb_weight("narrow.weight", 0.01),
        inline_bias,
        change_epsilon(0, 1e-3),
        attribute("Softmax", "axis", 2),
        in_branch,
    ],
)
def test_a_fault_in_the_file_is_found(
    made: tuple[Path, Judge], tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    folder, judge = made
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    fault(copy)
    found = judge(copy)
    assert found.outcome == "rejected"
    assert found.reasons[0].startswith("the engine file, run in fp32: output ")


def test_a_cast_to_another_dtype_breaks_the_rules_of_onnx(
    made: tuple[Path, Judge], tmp_path: Path
) -> None:
    folder, judge = made
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    attribute("Cast", "to", onnx.TensorProto.FLOAT16)(copy)
    found = judge(copy)
    assert found.outcome == "rejected"
    assert (
        "the engine file does not run in fp32: engine.onnx is not valid ONNX:" in found.reasons[0]
    )


def test_what_onnx_lacks_in_bf16_is_computed_in_fp32(made: tuple[Path, Judge]) -> None:
    """ONNX's TopK takes no bf16: ONNX Runtime would refuse the file on any device."""
    model = onnx.load(made[0] / "engine.onnx", load_external_data=False)
    assert "TopK" in [node.op_type for node in model.graph.node]
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
