"""One row of the TensorRT acceptance run: an engine is exported, verified, loaded and looked at.

A row has, beside what gpu_run.py says of ms, error, lowest_cosine and make_seconds,

    verdict            of the export, on the device: outcome, engine, errors and limits by output
    backend            what ran: "tensorrt"
    requires, profile  what the engine asks of a machine, and the shapes that it was built for
    layers             what TensorRT's inspector says: fusions that were kept, dtypes
    file_bytes         of the engine's own file
    failed             instead of all these: what the export or the load said
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from gpu_models import Case
from gpu_results import distance
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from trt_models import OUTPUT, Subject

import enginecast
from enginecast.compiler.request import ModelOptions
from enginecast.errors import EnginecastError
from enginecast.exporters.registry import target_of
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.runtime.engine import Engine

CHAIN = ("tensorrt", "onnxruntime-cuda", "onnxruntime-cpu")


@dataclass(frozen=True)
class Build:
    """One way to make an engine of a model."""

    name: str
    """Of the row: "tensorrt-onnx"."""
    target: str
    backend: str
    """As `load`'s `prefer` calls it."""
    route: str = ""
    """Of TensorRT: "onnx" or "torch"."""

    @property
    def device(self) -> str:
        return "cpu" if self.backend.endswith("-cpu") else "cuda"


BUILDS = {
    one.name: one
    for one in (
        Build("tensorrt-onnx", "tensorrt", "tensorrt", "onnx"),
        Build("tensorrt-torch", "tensorrt", "tensorrt", "torch"),
        Build("onnxruntime-cuda", "onnxruntime", "onnxruntime-cuda"),
        Build("onnxruntime-cpu", "onnxruntime", "onnxruntime-cpu"),
    )
}


@dataclass(frozen=True)
class Ready:
    """An engine on the inputs of its case."""

    engine: Engine
    feeds: dict[str, Tensor]

    def run(self) -> Tensor:
        """Inputs and output stay on the device."""
        found = self.engine.run(self.feeds, as_dlpack=True, check_finite=False)
        tensor: Tensor = from_dlpack(found[OUTPUT])
        return tensor


def pipeline_of(precision: str, build: Build, arch: str | None) -> str | None:
    """None: the preset.  fp8 is for every layer whose error allows it, faster or not."""
    if precision != "fp8":
        return None
    text = target_of(build.target).pipeline("fp8", device=build.device, arch=arch)
    name, given, rest = text.partition("plan-fp8{")
    if given:
        return f"{name}plan-fp8{{min_gain=0.0 {rest}"
    return text.replace("plan-fp8", "plan-fp8{min_gain=0.0}")


def export(
    subject: Subject,
    folder: Path,
    output: Path,
    precision: str,
    build: Build,
    arch: str | None,
    also: Sequence[str] = (),
) -> Any:
    """Export and verify; the bundle."""
    pipeline = pipeline_of(precision, build, arch)
    options: dict[str, Any] = {"arch": arch} if pipeline is not None else {}
    if build.route:
        route: Any = build.route
        options["target_options"] = TensorRTOptions(route=route, optimal=subject.optimal())
    return enginecast.compile(
        folder,
        output,
        target=build.target,
        precision=None if pipeline is not None else precision,
        pipeline=pipeline,
        device=build.device,
        also=also,
        options=ModelOptions(dynamic=subject.dynamic),
        **options,
    )


def make_row(
    row: dict[str, Any],
    subject: Subject,
    folder: Path,
    output: Path,
    precision: str,
    build: Build,
    arch: str | None,
    case: Case,
    reference: Tensor,
) -> Ready | None:
    """Fill a row; None where there is no engine, and the row says why."""
    start = time.perf_counter()
    row["stopped"] = "the run ended while it was made"
    try:
        export(subject, folder, output, precision, build, arch)
        row["make_seconds"] = round(time.perf_counter() - start, 1)
        engine = enginecast.load(
            output, prefer=[build.backend], allow_code=True, require="verified-by-emulation"
        )
        ready = Ready(engine, dict(case.inputs))
        row |= details_of(engine)
        row["error"], row["lowest_cosine"] = distance(ready.run(), reference, case.valid)
    except EnginecastError as error:
        row["failed"] = f"{type(error).__name__} ({error.exit_code}): {error}"
        return None
    except Exception as error:  # whatever a library raises, the other rows count
        row["failed"] = f"{type(error).__name__}: {error}"[:2000]
        return None
    finally:
        del row["stopped"]
    return ready


def details_of(engine: Engine) -> dict[str, Any]:
    """What the bundle and the runtime say of an engine."""
    record = engine.record
    manifest = engine.manifest
    return {
        "backend": engine.backend,
        "provider": engine.provider,
        "verdict": msgspec.to_builtins(engine.verdict),
        "requires": record.requires,
        "profile": msgspec.to_builtins(record.profile),
        "layers": list(engine.layers()),
        "file_bytes": (engine.folder / record.file).stat().st_size,
        "quantization": msgspec.to_builtins(manifest.quantization),
        "notes": list(manifest.notes),
    }


def chain_row(
    row: dict[str, Any], subject: Subject, folder: Path, output: Path, build: Build
) -> None:
    """A bundle with two engines, loaded by preference; the first backend has to be the one."""
    also = ("onnxruntime",) if build.target == "tensorrt" else ()
    prefer = CHAIN[CHAIN.index(build.backend) :]
    try:
        export(subject, folder, output, "fp32", build, None, also)
        with enginecast.load(output, prefer=prefer, allow_code=True) as engine:
            row["prefer"], row["backend"] = list(prefer), engine.backend
            row["engines"] = [one.target for one in engine.manifest.engines]
    except EnginecastError as error:
        row["failed"] = f"{type(error).__name__} ({error.exit_code}): {error}"
        return
    if row["backend"] != build.backend:
        row["failed"] = f"expected {build.backend} first, got {row['backend']}"


def reference_of(eager: Callable[..., Tensor], case: Case) -> Tensor:
    """What eager gives in fp32, in CPU memory."""
    with torch.no_grad():
        return eager(**case.inputs).cpu().float()
