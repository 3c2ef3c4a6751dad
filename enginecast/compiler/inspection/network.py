"""What TensorRT and TensorRT-RTX make of a network, on any machine."""

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
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
from enginecast.exporters.tensorrt.gate.operators import table, unsupported
from enginecast.exporters.tensorrt.gate.parser import check_parsed
from enginecast.exporters.tensorrt.gate.shape_rules import unknown_sizes
from enginecast.exporters.tensorrt.lower import lowering, tensorrt_onnx
from enginecast.exporters.tensorrt.profiles import profiles_of
from enginecast.exporters.tensorrt.target import TensorRT
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.registry import build
from enginecast.runtime.bundle.manifest import ShapeRange
from enginecast.runtime.device.versions import short_version
from enginecast.runtime.sessions.tensorrt.library import RTX, import_tensorrt

NOT_RUN = "not yet run on real {} by us"


@dataclass(frozen=True)
class NetworkCheck:
    """What TensorRT or TensorRT-RTX makes of a network."""

    version: str
    """Of the library, such as "11.0"; where it is not installed, of what answered in its place."""
    library: str
    """What answered, with its version: "TensorRT-RTX 1.7.1.116"."""
    parsed: bool
    """Whether it parsed this network; else its answers about each operator are a table's."""
    operators: Mapping[str, int]
    """How often each stands in the graph, "domain::Op" outside ONNX's own domain."""
    profile: tuple[ShapeRange, ...]
    """Of the inputs that vary; empty: all are fixed."""
    violations: tuple[Violation, ...]
    title: str = "TensorRT"
    """Of the library that was asked for."""
    plugins: bool = False
    """Whether TensorRT's plugins are there."""
    unknown: int = 0
    """Tensors whose largest size is not known, and was not looked at."""
    refusal: LoweringError | None = None
    """What an export would end with; None: the network is taken."""

    def to_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "library": self.library,
            "parsed": self.parsed,
            "ready": not self.violations,
            "run": NOT_RUN.format(self.title),
            "operators": {
                name: {"count": count, "support": self.support(name)}
                for name, count in sorted(self.operators.items())
            },
            "violations": [asdict(found) for found in self.violations],
            "unknown_sizes": self.unknown,
            "profile": msgspec.to_builtins(list(self.profile)),
        }

    def support(self, name: str) -> str:
        """What is known of an operator: "yes", or why it is not taken."""
        domain, _, op = name.rpartition("::")
        return unsupported(domain, op, plugins=self.plugins) or "yes"

    def summary(self) -> str:
        """Who says what of the network, in a line."""
        count = len(self.violations)
        several = "1 violation" if count == 1 else f"{count} violations"
        if self.parsed:
            said = f"does not take this network: {several}" if count else "parses this network"
            return f"{self.library} {said}; not run"
        what = "every operator in this network is one that {} takes"
        if count:
            what = f"not every operator is one that {{}} takes: {several}"
        not_run = NOT_RUN.format(self.title)
        return f"{what.format(self.library)}, by the table of its answers; {not_run}"


def check_network(
    prepared: Prepared, config: EngineConfig, program: ExportedProgram
) -> NetworkCheck | None:
    """Look at the network of a plan, before the lowering passes; None for another target."""
    target = target_of(config.target)
    if not isinstance(target, TensorRT):
        return None
    library, trt = target.library, None
    with suppress(MissingError):
        trt = import_tensorrt("inspect", library)
    answering = table().library if trt is None else library.version(trt)
    check = NetworkCheck(
        version=short_version(answering.split()[-1]),
        library=table().library,
        parsed=False,
        operators={},
        profile=(),
        violations=(),
        title=library.title,
        plugins=library.has_plugins,
    )
    lowered = structural_copy(program)
    with tempfile.TemporaryDirectory() as folder:
        request = lowering_request(prepared, config, lowered, Path(folder))
        profiles = profiles_of(
            request.inputs, request.ranges, request.options, request.sums, request.steps
        )
        check = replace(check, profile=tuple(one for each in profiles for one in each))
        try:
            run_pipeline(build(lowering("onnx")), lowered, prepared.context)
            model = tensorrt_onnx(request)
        except LoweringError as error:  # an op has no ONNX form
            return replace(check, refusal=error)
    refused = check_parsed(trt, model) if trt is not None and library is RTX else None
    if refused is not None:
        check = replace(check, parsed=True, library=answering)
    found = check_ready(
        model,
        plugins=library.has_plugins,
        parsed=refused == [],
        inputs=request.inputs,
        ranges=request.ranges,
    )
    # The parser stops at a node; the table knows the others, and what the builder refuses.
    nodes = {violation.node for violation in refused or ()}
    found = [*(refused or ()), *(violation for violation in found if violation.node not in nodes)]
    return replace(
        check,
        operators=op_counts(model),
        violations=tuple(found),
        unknown=unknown_sizes(model.graph, request.ranges) if library.has_plugins else 0,
        refusal=refusal_of(found, check.library, library.name, shown=0) if found else None,
    )
