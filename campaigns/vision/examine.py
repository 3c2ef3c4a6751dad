"""One model through the pipeline: exported, judged, changed, exported in fp16."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from exports import reseal
from harness import keep_rows, one_line, without_folders
from product import export, reasons
from safetensors.numpy import load_file
from zoo.judge import judge

from enginecast.capture.inputs.specs import from_example
from enginecast.compiler.verify.bundle import verify_bundle
from enginecast.errors import EnginecastError
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from vision.models import ENTRIES, made

WEIGHTS = "weights.safetensors"
Array = np.ndarray[Any, Any]


@dataclass
class Row:
    """What became of one model; `fp32` is verified only where the zoo's judge agreed, too."""

    name: str
    family: str = ""
    parameters: int = 0
    fp32: str = "not built"
    engine: str = ""
    """The file that runs."""
    sizes: str = ""
    """Dimensions that vary, and how many draws the judge compared."""
    fp16: str = ""
    mutation: str = ""
    seconds: float = 0.0
    reason: str = ""
    notes: list[str] = field(default_factory=list)


def examine(name: str, folder: Path) -> Row:
    """Take one model through all stages; what the folder keeps says how far it came."""
    entry = ENTRIES[name]
    row = Row(name, entry.family)
    try:
        module, example = made(name)
    except Exception as error:  # of the package
        row.reason = one_line(f"{type(error).__name__}: {error}", 600)
        return row
    row.parameters = sum(parameter.numel() for parameter in module.parameters())
    row.fp32 = "crashed"
    keep_rows([row], folder)
    code, reported = export(f"vision.models:{name}", folder / "fp32", entry.options)
    if code:
        row.fp32, row.reason = _ended(code, reported)
        return row
    bundle = folder / "fp32"
    with load(bundle, threads=1, allow_code=True) as engine:
        judged = judge(engine, module, from_example(example))
        row.engine = engine.manifest.engines[0].file
        row.sizes = sizes_of(engine, judged.compared)
    row.fp32 = "silently wrong" if judged.wrong or not judged.compared else "verified"
    row.reason = one_line("; ".join(judged.wrong[:2]), 600)
    row.notes = [without_folders(note) for note in reported.get("notes", ())]
    keep_rows([row], folder)
    row.mutation = changed(bundle)
    keep_rows([row], folder)
    if entry.fp16 and row.engine == "engine.onnx":
        code, reported = export(
            f"vision.models:{name}", folder / "fp16", ("--precision", "fp16", *entry.options)
        )
        row.fp16 = reported.get("verdict", {}).get("outcome", "verified")
        if code:
            outcome, why = _ended(code, reported)
            row.fp16 = f"{outcome}: {why}"
    return row


def _ended(code: int, reported: dict[str, Any]) -> tuple[str, str]:
    """How an export ended that published nothing, and why: one reason."""
    if code in (2, 3):
        lines = str(reported.get("message", "")).splitlines()
        said = [line for line in lines if line.strip() and not line.startswith("    ")]
        return "refused", one_line(" ".join(said), 600)
    if code == 1:
        return "rejected", one_line(reasons(reported)[0], 600)
    return "crashed", f"exit code {code}"


def sizes_of(engine: Engine, compared: int) -> str:
    """The symbols with their ranges, and how many draws were compared."""
    found = [f"{name} {low}..{high}" for name, (low, high) in engine.manifest.symbols.items()]
    return f"{', '.join(found) or 'fixed'}; {compared} compared"


def changed(bundle: Path) -> str:
    """Whether `verify` finds that the largest weight has lost a quarter of its rows; "" where the
    bundle keeps no weight of two dimensions or more.
    """
    with load(bundle, threads=1, allow_code=True) as engine:
        path = bundle / engine.manifest.engines[0].file
    if (bundle / WEIGHTS).exists():
        name = _change_array(bundle / WEIGHTS)
    elif path.suffix == ".onnx":
        name = _change_graph(path)
    else:
        name = _change_script(path)
    if not name:
        return ""
    reseal(bundle)
    try:
        outcome = verify_bundle(bundle, threads=1, allow_code=True).verdict.outcome
    except EnginecastError:
        outcome = "rejected"
    return "found" if outcome == "rejected" else f"not found ({name})"


def _without_rows(array: Array) -> Array:
    """A copy whose first quarter is zero."""
    other = array.copy()
    other[: max(1, len(array) // 4)] = 0
    return other


def _starts(array: Array) -> bool:
    """Whether the rows that are taken away hold anything."""
    return bool((array != _without_rows(array)).any())


def _change_array(path: Path) -> str:
    every = load_file(path)
    arrays = {name: array for name, array in every.items() if array.dtype.kind == "f"}
    arrays = {name: array for name, array in arrays.items() if array.ndim > 1 and _starts(array)}
    if not arrays:
        return ""
    name, array = max(arrays.items(), key=lambda item: item[1].size)
    data, old = path.read_bytes(), np.ascontiguousarray(array).tobytes()
    if old not in data:
        return ""
    path.write_bytes(data.replace(old, _without_rows(array).tobytes(), 1))
    return str(name)


def _change_graph(path: Path) -> str:
    """The same for weights that are small, and so stay in the graph."""
    model = onnx.load(path)
    found = [
        (tensor, array)
        for tensor in model.graph.initializer
        if (array := onnx.numpy_helper.to_array(tensor)).dtype.kind == "f" and array.ndim > 1
    ]
    if not found:
        return ""
    tensor, array = max(found, key=lambda each: each[1].size)
    tensor.CopyFrom(onnx.numpy_helper.from_array(_without_rows(array), tensor.name))
    onnx.save(model, path)
    return str(tensor.name)


def _change_script(path: Path) -> str:
    script = torch.jit.load(path)
    found = {n: p for n, p in script.named_parameters() if p.ndim > 1 and p.is_floating_point()}
    if not found:
        return ""
    name = max(found, key=lambda each: found[each].numel())
    with torch.no_grad():
        found[name].copy_(torch.from_numpy(_without_rows(found[name].numpy())))
    script.save(path)
    return str(name)


def prepare() -> None:
    """Once in a process: what would only cost time."""
    torch.set_num_threads(1)
    torch.nn.init.trunc_normal_ = _plain_normal


def _plain_normal(
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator).clamp_(a, b)
