"""What plain `torch.onnx.export` makes of a case."""

import contextlib
import io
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch

from adversary.case import Case
from adversary.judge import Array, Taken, judge

DIMENSION = re.compile(r"(\w+):(\d+)=(\d+)\.\.(\d+)")


def plain(case: Case, folder: Path) -> str:
    """`right`, or what is the matter."""
    dims = [found.groups() for text in case.dynamic if (found := DIMENSION.match(text))]
    shapes: dict[str, dict[int, Any]] = {name: {} for name in case.example}
    symbols: dict[str, tuple[int, int]] = {}
    named: dict[str, list[int | str]] = {n: list(t.shape) for n, t in case.example.items()}
    for name, dim, low, high in dims:
        symbol = f"{name}_{dim}"
        shapes[name][int(dim)] = torch.export.Dim(symbol, min=int(low), max=int(high))
        symbols[symbol] = int(low), int(high)
        named[name][int(dim)] = symbol
    file = folder / "plain.onnx"
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(
                case.make().eval(),
                (),
                file,
                kwargs=case.inputs(),
                dynamo=True,
                dynamic_shapes=shapes if symbols else None,
                verbose=False,
            )
        session = _session(file)
    except Exception as error:
        return f"failed: {type(error).__name__}"
    wanted = {value.name for value in session.get_inputs()}

    def run(feeds: Mapping[str, Array]) -> list[Array]:
        found: list[Array] = session.run(None, {n: v for n, v in feeds.items() if n in wanted})
        return found

    taken = {
        name: Taken(str(tensor.dtype), tuple(named[name])) for name, tensor in case.example.items()
    }
    judged = judge(case, run, taken, symbols)
    return f"wrong: {judged.wrong}" if judged.wrong else "right"


def _session(file: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
