"""Which of Triton's backends runs an engine, and what it has to be told of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import EngineRecord, Manifest
from enginecast.runtime.sessions.integer_sums import ANY_CPU, SUMS

TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "bfloat16": "TYPE_BF16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
}
"""Triton's types by ours."""

INSTEAD = "Export with --target onnxruntime, or add that engine with --also onnxruntime."


@dataclass(frozen=True)
class Backend:
    """How Triton runs an engine file.

    Args:
        name: of the backend.
        file: the name that it looks for.
        platform: the older way to name it, where the backend has one; empty: none.
        weights: whether the engine file refers to a file of weights beside it.
        indexed: whether it goes by numbers at the end of names: `x__0`.
        on_gpu: whether it runs on a GPU.
        level: of graph optimization; None: the backend's own.
        parameters: of the backend.
        batch_reason: why it takes no batches; empty: it does.
        notes: what its user should know.
    """

    name: str
    file: str
    platform: str = ""
    weights: bool = False
    indexed: bool = False
    on_gpu: bool = False
    level: int | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    batch_reason: str = ""
    notes: tuple[str, ...] = ()


def choose(
    manifest: Manifest, target: str | None = None, device: str | None = None
) -> tuple[EngineRecord, Backend]:
    """The first engine of a bundle that Triton can run, or the one of a target.

    Args:
        device: "cpu" or "cuda"; None: what the engine was judged for.

    Raises:
        UsageError: there is none, with the reason for each.
    """
    reasons = []
    for record in manifest.engines:
        if target is not None and record.target != target:
            continue
        try:
            return record, backend_of(manifest, record, device)
        except UsageError as error:
            reasons.append(error)
    if not reasons:
        known = ", ".join(record.target for record in manifest.engines)
        raise UsageError(f"--target: expected {known}, got {target}")
    if len(reasons) == 1:
        raise reasons[0]
    raise UsageError("; ".join(one.message for one in reasons), hint=reasons[0].hint)


def backend_of(manifest: Manifest, record: EngineRecord, device: str | None = None) -> Backend:
    """The backend of an engine.

    Args:
        device: as `choose` takes it.

    Raises:
        UsageError: Triton cannot run it, or not on this device.
    """
    if device not in (None, "cpu", "cuda"):
        raise UsageError(f"--device: expected cpu or cuda, got {device}")
    if record.target not in _BACKENDS:
        raise UsageError(_unserved(record.target), hint=INSTEAD)
    judged = _is_for_gpu(record)
    on_gpu = judged if device is None else device == "cuda"
    if on_gpu != judged and record.target not in _TAKES_ANY_DEVICE:
        raise UsageError(
            f"--device: {record.file} runs on {'cuda' if judged else 'cpu'} alone, got {device}"
        )
    backend = _BACKENDS[record.target](record, on_gpu)
    if record.target not in _TAKES_BF16:
        for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
            for spec in specs:
                if spec.dtype == "bfloat16":
                    raise UsageError(
                        f"{record.file}: {kind} {spec.name!r} is bfloat16, which Triton's"
                        f" {backend.name} backend does not take",
                        hint="Export in fp32 or fp16, or the output in float32.",
                    )
    return backend


def require_servable(targets: Sequence[str]) -> None:
    """Refuse targets that Triton has no backend for, before an export begins.

    Raises:
        UsageError: none of them can be served.
    """
    if not any(target in _BACKENDS for target in targets):
        raise UsageError(f"--triton: {_unserved(targets[0])}", hint=INSTEAD)


def _is_for_gpu(record: EngineRecord) -> bool:
    """Whether an engine was judged on a GPU, or for one by emulation."""
    judged = (record.verdict.where.provider, record.verdict.arithmetic, *record.providers[:1])
    return any(word in one.lower() for one in judged for word in ("cuda", "tensorrt", "trt"))


def _unserved(target: str) -> str:
    return f"an engine of {target}: Triton has no backend that runs it as it was verified"


def _onnxruntime(record: EngineRecord, on_gpu: bool) -> Backend:
    notes: list[str] = []
    parameters: dict[str, str] = {}
    level = None
    if record.quantized:
        # Its extended level would turn DequantizeLinear and MatMul into integer products.
        level = -1
        notes.append(
            "Graph optimization is limited to the basic level, so that ONNX Runtime keeps the"
            " quantization that was verified."
        )
    if record.quantized == "int8" and not on_gpu and record.requires.get(SUMS) != ANY_CPU:
        notes.append(
            "On x86 CPUs without VNNI, its int8 products may saturate, and Triton does not notice."
        )
    if record.precision == "fp16" and not on_gpu:
        # The layout optimizers of the last level crash on some fp16 graphs; see `options_for`.
        level = level or 1
        parameters["enable_mem_arena"] = "0"
    if record.minimum_runtime:
        notes.append(f"The Triton release must have {record.minimum_runtime}.")
    return Backend(
        "onnxruntime",
        "model.onnx",
        "onnxruntime_onnx",
        weights=True,
        on_gpu=on_gpu,
        level=level,
        parameters=parameters,
        notes=tuple(notes),
    )


def _tensorrt(record: EngineRecord, on_gpu: bool) -> Backend:
    if record.network is not None:
        raise UsageError(
            f"{record.file}: the plan has no weights: Triton cannot fill it from {record.network}",
            hint="Export without --trt-strip-weights, or serve the ONNX Runtime engine.",
        )
    needs = ", ".join(f"{name} {value}" for name, value in sorted(record.requires.items()))
    note = "A plan runs on the GPU architecture and the TensorRT version that it was built with"
    return Backend(
        "tensorrt",
        "model.plan",
        "tensorrt_plan",
        on_gpu=on_gpu,
        notes=(f"{note}{f' ({needs})' if needs else ''}.",),
    )


def _openvino(_: EngineRecord, on_gpu: bool) -> Backend:
    return Backend(
        "openvino",
        "model.onnx",
        weights=True,
        on_gpu=on_gpu,
        batch_reason="Triton's OpenVINO backend runs batches of one fixed size only",
    )


def _torchscript(_: EngineRecord, on_gpu: bool) -> Backend:
    return Backend(
        "pytorch",
        "model.pt",
        "pytorch_libtorch",
        indexed=True,
        on_gpu=on_gpu,
        parameters={"DISABLE_OPTIMIZED_EXECUTION": "true"},
        notes=(
            "The PyTorch backend goes by numbers at the end of names: inputs and outputs are"
            " called NAME__0, NAME__1, ...",
            "A TorchScript file is code. The server's libtorch must not be older than the torch"
            " that wrote it.",
        ),
    )


_BACKENDS = {
    "onnxruntime": _onnxruntime,
    "tensorrt": _tensorrt,
    "openvino": _openvino,
    "torchscript": _torchscript,
}
_TAKES_ANY_DEVICE = frozenset({"onnxruntime"})
_TAKES_BF16 = frozenset({"tensorrt"})
