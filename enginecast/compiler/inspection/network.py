"""What TensorRT's parser is documented to make of a network, on any machine."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch.export import ExportedProgram

from enginecast.compiler.engines.lower_and_run import lowering_request
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.errors import LoweringError, MissingError
from enginecast.exporters.onnx.lower import op_counts
from enginecast.exporters.registry import target_of
from enginecast.exporters.tensorrt.gate.check import Violation, check_ready, refusal_of
from enginecast.exporters.tensorrt.gate.operators import table as known
from enginecast.exporters.tensorrt.gate.operators import unsupported
from enginecast.exporters.tensorrt.gate.shape_rules import unknown_sizes
from enginecast.exporters.tensorrt.lower import lowering, tensorrt_onnx
from enginecast.exporters.tensorrt.profiles import profiles_of
from enginecast.exporters.tensorrt.target import TensorRT
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build
from enginecast.runtime.bundle.manifest import ShapeRange
from enginecast.runtime.device.versions import short_version
from enginecast.runtime.sessions.tensorrt.library import import_tensorrt, newest_version

NOT_RUN = "not yet run on real TensorRT by us"


@dataclass(frozen=True)
class NetworkCheck:
    """What a version of TensorRT is documented to make of a network."""

    version: str
    """Of TensorRT, such as "11.0"."""
    operators: Mapping[str, int]
    """How often each stands in the graph, "domain::Op" outside ONNX's own domain."""
    profile: tuple[ShapeRange, ...]
    """Of the inputs that vary; empty: all are fixed."""
    violations: tuple[Violation, ...]
    unknown: int = 0
    """Tensors whose largest size is not known, and was not looked at."""
    refusal: LoweringError | None = None
    """What an export would end with; None: the parser is documented to take the network."""

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "ready": not self.violations,
            "run": NOT_RUN,
            "operators": {
                name: {"count": count, "support": support(name, self.version)}
                for name, count in sorted(self.operators.items())
            },
            "violations": [asdict(found) for found in self.violations],
            "unknown_sizes": self.unknown,
            "profile": msgspec.to_builtins(list(self.profile)),
        }


def support(name: str, version: str) -> str:
    """What is documented of an operator, in words: "since 10.15", "not documented"."""
    domain, _, op = name.rpartition("::")
    reason = unsupported(domain, op, version)
    if reason:
        return reason
    found = known().operators.get(op)  # None: one of the parser's own
    return f"since {found.since}" if found and found.since else "yes"


def check_network(
    prepared: Prepared, config: EngineConfig, program: ExportedProgram
) -> NetworkCheck | None:
    """Look at the network of a plan, before the lowering passes; None for another target."""
    if not isinstance(target_of(config.target), TensorRT):
        return None
    try:
        version = short_version(import_tensorrt("inspect").__version__)
    except MissingError:
        version = newest_version()
    lowered = structural_copy(program)
    with tempfile.TemporaryDirectory() as folder:
        request = lowering_request(prepared, config, lowered, Path(folder))
        profiles = profiles_of(request.inputs, request.ranges, request.options)
        profile = tuple(one for each in profiles for one in each)
        try:
            run_pipeline(build(lowering("onnx")), lowered, prepared.context)
            model = tensorrt_onnx(request)
        except LoweringError as error:  # an op has no ONNX form
            return NetworkCheck(version, {}, profile, (), refusal=error)
    found = check_ready(model, version=version, inputs=request.inputs, ranges=request.ranges)
    refusal = refusal_of(found, version, shown=0) if found else None
    unknown = unknown_sizes(model.graph, request.ranges)
    return NetworkCheck(version, op_counts(model), profile, tuple(found), unknown, refusal)
