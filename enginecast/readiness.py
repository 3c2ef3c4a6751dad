"""What TensorRT's parser would say of a plan's program, on any machine: for `inspect`."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.export import ExportedProgram

from enginecast.devices import TENSORRT
from enginecast.engines import order_of
from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.onnx import op_counts
from enginecast.exporters.tensorrt_gate import Violation, check_ready, refusal_of
from enginecast.exporters.tensorrt_gate_shapes import unknown_sizes
from enginecast.exporters.tensorrt_onnx import tensorrt_onnx
from enginecast.exporters.tensorrt_profiles import profile_of
from enginecast.plan import Plan
from enginecast.prepare import Prepared
from enginecast.runtime.manifest import ShapeRange
from enginecast.runtime.tensorrt_library import import_tensorrt, newest_version, short_version
from enginecast.tensorrt_page import print_gate, to_json


@dataclass(frozen=True)
class Readiness:
    """What a version of TensorRT is documented to make of a network."""

    version: str
    ops: Mapping[str, int]
    profile: tuple[ShapeRange, ...]
    violations: tuple[Violation, ...]
    unknown: int
    """Tensors whose largest size is not known, and was not looked at."""
    refusal: LoweringError | None
    """What an export would end with; None: the parser is documented to take the network."""

    def to_json(self) -> dict[str, Any]:
        found = self.violations, self.version, self.profile
        return to_json(*found, ops=self.ops, unknown=self.unknown)

    def show(self, console: Console) -> None:
        found = self.violations, self.version, self.profile
        print_gate(*found, console, ops=self.ops, unknown=self.unknown)


def readiness_of(prepared: Prepared, plan: Plan, program: ExportedProgram) -> Readiness | None:
    """Look at the network of a plan; None for another target.

    Args:
        program: after the plan's passes.

    Raises:
        UsageError: a shape to tune for does not fit the inputs.
    """
    if plan.target != TENSORRT:
        return None
    version = _version()
    with tempfile.TemporaryDirectory() as folder:
        order = order_of(prepared, plan, program, Path(folder))
        profile = profile_of(order.inputs, order.ranges, order.tensorrt)
        try:
            model = tensorrt_onnx(order).model
        except LoweringError as error:  # an op has no ONNX form
            return Readiness(version, {}, profile, (), 0, error)
    found = check_ready(
        model,
        version=version,
        inputs=order.inputs,
        ranges=order.ranges,
        optimal=order.tensorrt.optimal,
        profile=profile,
    )
    refusal = refusal_of(found, version, shown=0) if found else None
    unknown = unknown_sizes(model.graph, order.ranges)
    return Readiness(version, op_counts(model), profile, tuple(found), unknown, refusal)


def _version() -> str:
    """Of the TensorRT that is here; else the newest one that this was written for."""
    try:
        return short_version(import_tensorrt("inspect").__version__)
    except MissingError:
        return newest_version()
