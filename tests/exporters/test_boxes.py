"""Suppression of boxes and pooling of regions in ONNX, against the operators."""

from typing import Any

import box_ops
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import enginecast
from enginecast.errors import LoweringError
from enginecast.exporters.onnx.convert import convert
from enginecast.exporters.onnx.workarounds import say_older_opset
from enginecast.runtime.load import load

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
assert box_ops  # registers the operators
DYNAMIC = Dim.DYNAMIC


class Suppress(nn.Module):
    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, boxes: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = torch.ops.torchvision.nms(boxes, scores, self.threshold)
        return found


class Pool(nn.Module):
    def __init__(self, name: str, *options: Any) -> None:
        super().__init__()
        self.op, self.options = getattr(torch.ops.torchvision, name), options

    def forward(self, x: Tensor, rois: Tensor) -> Tensor:
        found = self.op(x, rois, self.options[0], 3, 2, *self.options[1:])
        pooled: Tensor = found[0] if isinstance(found, tuple) else found
        return pooled


def engine(module: nn.Module, *inputs: Tensor, varying: Any) -> Any:
    program = torch.export.export(module, inputs, dynamic_shapes=varying)
    program.graph.eliminate_dead_code()
    for node in program.graph.nodes:
        if "assert" in str(node.target) or "constrain" in str(node.target):
            program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    model = convert(program, opset=23, reader="onnxruntime-cpu")
    say_older_opset(model)
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def run(*given: Tensor) -> Tensor:
        feeds = dict(zip(names, (each.numpy() for each in given), strict=True))
        return torch.from_numpy(session.run(None, feeds)[0])

    return run


def drawn(count: int, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    boxes = torch.rand(count, 4, generator=generator) * 8
    scores = torch.rand(count, generator=generator)
    if kind != "any corners":
        boxes[:, 2:] += boxes[:, :2]
    if kind == "whole numbers":
        boxes = boxes.round()
    if kind == "ties":
        boxes, scores = (boxes / 2).round(), (scores * 3).round()
    if kind == "odd" and count > 4:
        boxes[0, 0], boxes[1, 2], scores[2] = torch.nan, torch.inf, torch.nan
        boxes[3] = torch.tensor([-1e30, -1e30, 1e30, 1e30])
    return boxes, scores


@pytest.mark.parametrize("threshold", [0.0, 1 / 3, 0.7, 1.0])
def test_the_same_boxes_are_kept_in_the_same_order(threshold: float) -> None:
    module = Suppress(threshold)
    run = engine(module, *drawn(7, "any", torch.Generator()), varying=({0: DYNAMIC}, {0: DYNAMIC}))
    generator = torch.Generator().manual_seed(1)
    lost = 0
    for kind in ("any corners", "two corners", "whole numbers", "ties", "odd"):
        for count in (0, 1, 2, 14):
            boxes, scores = drawn(count, kind, generator)
            wanted = module(boxes, scores)
            assert run(boxes, scores).tolist() == wanted.tolist(), (kind, count)
            lost += count - len(wanted)
    assert lost > 0 or threshold == 1.0  # else nothing was suppressed, and nothing is proved


def test_what_onnx_does_not_have_is_refused() -> None:
    boxes, scores = drawn(4, "any", torch.Generator())
    varying = ({0: DYNAMIC}, {0: DYNAMIC})
    with pytest.raises(LoweringError, match=r"overlap of -0\.1"):
        engine(Suppress(-0.1), boxes, scores, varying=varying)
    with pytest.raises(LoweringError, match="takes fp32"):
        engine(Suppress(0.5), boxes.double(), scores.double(), varying=varying)


def regions(count: int, kind: int, generator: torch.Generator) -> Tensor:
    found = torch.rand(count, 5, generator=generator) * 18
    found[:, 3:] = found[:, 1:3] + found[:, 3:] * (0.1, 1.0, 0.0)[kind % 3]
    if kind == 3:
        found = found.round()
    if kind == 4:
        found[:, 1:] -= 8  # half outside
    if kind == 5:
        found[:, 3:] = found[:, 1:3] - 1  # without an area
    found[:, 0] = torch.randint(0, 2, (count,), generator=generator).float()
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(("roi_align", (scale, ratio, aligned))
          for scale, ratio in ((1.0, 2), (0.5, -1)) for aligned in (True, False)),
        ("roi_pool", (1.0,)),
        ("roi_pool", (0.5,)),
    ],
)  # fmt: skip
def test_regions_are_pooled_alike(name: str, options: tuple[Any, ...]) -> None:
    module = Pool(name, *options)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 9, 7, generator=generator)
    run = engine(module, x, regions(5, 0, generator), varying=({}, {0: DYNAMIC}))
    for kind in range(6):
        for count in (0, 1, 4):
            rois = regions(count, kind, generator)
            wanted = module(x, rois)
            torch.testing.assert_close(run(x, rois), wanted, rtol=1e-5, atol=1e-5)


class Detect(nn.Module):
    """Scores regions of a feature map, and keeps those that do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.score = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(24, 1)

    def forward(self, x: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        rois = torch.cat([torch.zeros_like(boxes[:, :1]), boxes], 1)
        pooled = torch.ops.torchvision.roi_align(self.features(x), rois, 0.5, 3, 2, 2, True)
        scores = self.score(pooled.flatten(1))[:, 0]
        keep = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return boxes[keep], scores[keep]


def test_a_detector_is_verified_and_takes_any_number_of_boxes(tmp_path: Any) -> None:
    torch.manual_seed(0)
    module = Detect().eval()
    generator = torch.Generator().manual_seed(3)
    example = {"x": torch.randn(1, 3, 9, 7), "boxes": drawn(8, "two corners", generator)[0]}
    enginecast.compile(
        module, example=example, output=tmp_path / "b", dynamic=["boxes:0=1..20"], threads=1
    )
    with load(tmp_path / "b", threads=1) as engine:
        counts = set()
        for count in (1, 2, 12, 20):
            given = {"x": torch.randn(1, 3, 9, 7), "boxes": drawn(count, "two", generator)[0]}
            boxes, scores = module(**given)
            found = engine.run({name: tensor.numpy() for name, tensor in given.items()})
            torch.testing.assert_close(torch.from_numpy(found["output_0"]), boxes)
            torch.testing.assert_close(torch.from_numpy(found["output_1"]), scores)
            counts.add(len(boxes))
    assert len(counts) > 2
