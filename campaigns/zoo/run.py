"""The zoo: every model type of transformers, in a child of its own.

Types whose package is not installed are left out; their rows stay as they are.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime  # noqa: F401 - every child needs it
import torch
import transformers
from harness import Campaign, Ended
from torch.export import Dim

import enginecast.ops  # noqa: F401 - registers our ops
from enginecast.exporters.onnx.convert import convert
from zoo.examine import Row, examine
from zoo.table import PAGE, STORE, page
from zoo.tiny import missing_package, model_types


class Zoo(Campaign[str, Row]):
    """A row for each model type."""

    row, store, page = Row, STORE, PAGE
    seconds = 150
    memory = 12 << 30

    def items(self) -> Sequence[str]:
        return model_types()

    def lacks(self, item: str) -> str:
        package = missing_package(item)
        return f"{package} is not installed" if package else ""

    def prepare(self, folder: Path) -> None:
        """Let torch load here what it loads when it first exports: seconds, for every child."""
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(1)
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        shapes = ({0: Dim("batch", min=1, max=9), 1: Dim("sequence", min=1, max=9)},)
        with torch.no_grad():
            program = torch.export.export(layer, (torch.zeros(3, 5, 8),), dynamic_shapes=shapes)
            convert(program, opset=23, reader="onnxruntime-cpu")

    def examine(self, item: str, folder: Path) -> Row:
        return examine(item, folder)

    def ended(self, row: Row, child: Ended[str]) -> None:
        row.seconds = round(child.seconds, 1)
        if child.status:
            row.outcome = "not run in eager" if row.stage == "build" else child.outcome
            row.reason = f"{row.stage}: {child.reason}"

    def said(self, row: Row) -> str:
        return f"{row.model_type}: {row.outcome} ({row.seconds} s) {row.reason[:160]}"

    def render(self, found: Mapping[str, Any]) -> str:
        return page(found)


CAMPAIGN = Zoo()
