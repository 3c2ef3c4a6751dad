"""int8 on a CPU: error, time and size of our engines and of ONNX Runtime's own quantizer.

    python benchmarks/int8_cpu.py [--small] [--layers N] [--rounds N] [--out FILE.json]

A T5 v1.1-base-shaped encoder with seeded random weights and the planted outliers of
tests/support/rig.py.
Error: the lowest cosine of a row, and the relative L2 error, over the valid tokens of ragged
prompts, against eager fp32.  Time: CPU time of the process, one thread, medians of interleaved
rounds whose order turns around; what is reported is ratios.  Size: model and weights, as a part of
those of the fp32 engine.  Random weights are not trained ones: rows compare with one another only.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from large import RESULTS, machine
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor
from transformers import T5EncoderModel

from enginecast import load
from enginecast.compiler.request import ExportRequest
from enginecast.compiler.session import export
from enginecast.verification.metrics import measure, row_mask

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from rig import BASE, Rig, Sizes, prompts

SMALL = Sizes(width=256, inner=512, heads=4, head_size=64, vocabulary=1024)
TOKENS = (128, 512)
Arrays = Mapping[str, np.ndarray[Any, Any]]
OURS: dict[str, dict[str, Any]] = {
    "enginecast fp32": {},
    "enginecast int8": {"precision": "int8"},
    "enginecast int8-storage": {"precision": "int8-storage"},
    # It is to be timed and measured, however far it is off.
    "enginecast int4-storage": {"precision": "int4-storage", "max_error": 0.9},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny encoder, a few rounds")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found_machine = machine() | {"threads": 1}  # before the run: the commit that is measured
    rig = Rig(layers=options.layers or (2 if options.small else 12), sizes=BASE)
    rig = replace(rig, sizes=SMALL) if options.small else rig
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        result = Comparison(rig, Path(folder), stack).run(
            options.rounds or (3 if options.small else 9)
        )
    result["machine"] = found_machine
    out = options.out or RESULTS / f"int8-cpu{'-small' if options.small else ''}.json"
    out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))
    print(out)


class Comparison:
    """All rows on one model.

    Args:
        rig: of the model.
        folder: for the model and the engines.
        stack: closes the engines.
    """

    def __init__(self, rig: Rig, folder: Path, stack: ExitStack) -> None:
        self._rig, self._folder, self._stack = rig, folder, stack
        self._model = rig.make()
        self._runs: dict[str, Callable[[Arrays], Any]] = {"eager fp32": self._eager}
        self._rows: dict[str, dict[str, Any]] = {"eager fp32": {}}

    def run(self, rounds: int) -> dict[str, Any]:
        """Make every engine, then compare them."""
        model = self._folder / "model"
        self._model.save_pretrained(model)
        for name, wanted in OURS.items():
            self._add_ours(name, model, wanted)
        self._add_peers()
        self._judge()
        times = {f"1x{tokens}": self._times(tokens, rounds) for tokens in TOKENS}
        fp32 = self._rows["enginecast fp32"]["bytes"]
        for name, row in self._rows.items():
            if "bytes" in row:
                row["size"] = round(row["bytes"] / fp32, 4)
            for shape, spent in times.items():
                if name in spent:
                    row[f"speed over eager {shape}"] = round(spent["eager fp32"] / spent[name], 3)
                    ratio = spent["enginecast fp32"] / spent[name]
                    row[f"speed over ONNX Runtime fp32 {shape}"] = round(ratio, 3)
        sizes = self._rig.sizes
        shape = {"layers": self._rig.layers, "width": sizes.width, "inner": sizes.inner}
        return {"model": shape | {"vocabulary": sizes.vocabulary}, "rows": self._rows}

    def _add_ours(self, name: str, model: Path, wanted: dict[str, Any]) -> None:
        start = time.process_time()
        bundle = self._folder / name.replace(" ", "-")
        done = export(ExportRequest(str(model), bundle, **wanted, threads=1))
        verdict = done.report.verdict
        row: dict[str, Any] = {"export_cpu_seconds": round(time.process_time() - start, 1)}
        self._rows[name] = row
        if done.bundle is None:
            row["rejected"] = list(verdict.reasons)
            return
        files = [bundle / "engine.onnx", *bundle.glob("weights*.safetensors")]
        row["bytes"] = sum(file.stat().st_size for file in files)
        row["layers"] = _choices(bundle / "plan.json")
        engine = self._stack.enter_context(load(bundle, threads=1))
        self._runs[name] = lambda given: engine.run(dict(given))["last_hidden_state"]

    def _add_peers(self) -> None:
        """ONNX Runtime's own quantizer on what torch.onnx gives, and without the widest linears."""
        plain = self._folder / "plain.onnx"
        _export_plain(self._model, self._inputs(1, 16), plain)
        self._add_peer("torch.onnx fp32", plain)
        wide = _products_over(plain, self._rig.sizes.inner)
        for name, kept in {"quantize_dynamic": [], "quantize_dynamic, wo in fp32": wide}.items():
            path = self._folder / f"{'kept' if kept else 'all'}.onnx"
            quantize_dynamic(
                plain,
                path,
                per_channel=True,
                weight_type=QuantType.QInt8,
                op_types_to_quantize=["MatMul", "Gather"],  # of Attention it makes a broken node
                nodes_to_exclude=kept,
                use_external_data_format=True,
            )
            self._add_peer(name, path)

    def _add_peer(self, name: str, path: Path) -> None:
        files = [path, *path.parent.glob(f"{path.name}.data")]
        self._rows[name] = {"bytes": sum(file.stat().st_size for file in files)}
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        settings.log_severity_level = 4
        session = onnxruntime.InferenceSession(path, settings, ["CPUExecutionProvider"])
        self._runs[name] = lambda given: session.run(None, dict(given))[0]

    def _judge(self) -> None:
        """Errors over the valid tokens of ragged prompts that no engine was calibrated on."""
        given = self._inputs(6, 128)
        arrays = {name: tensor.numpy() for name, tensor in given.items()}
        wanted = self._eager(arrays)
        mask = row_mask(wanted.shape, arrays["attention_mask"])
        for name, run in self._runs.items():
            found = measure(run(arrays), wanted, mask)
            self._rows[name]["lowest_row_cosine"] = round(found.cosine, 6)
            self._rows[name]["relative_error"] = round(found.relative, 5)
            self._rows[name]["worst_row"] = round(found.worst_row, 5)

    def _times(self, tokens: int, rounds: int) -> dict[str, float]:
        """Median CPU seconds of one prompt without padding; the first two rounds warm up."""
        given = {name: tensor.numpy() for name, tensor in self._inputs(1, tokens).items()}
        spent: dict[str, list[float]] = {name: [] for name in self._runs}
        for index in range(rounds + 2):
            for name in list(self._runs) if index % 2 else list(reversed(self._runs)):
                start = time.process_time()
                self._runs[name](given)
                spent[name].append(time.process_time() - start)
        return {name: median(values[2:]) for name, values in spent.items()}

    def _inputs(self, count: int, tokens: int) -> dict[str, Tensor]:
        return prompts(count, tokens=tokens, seed=9, vocabulary=self._rig.sizes.vocabulary)

    def _eager(self, given: Arrays) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            tensors = {name: torch.from_numpy(array) for name, array in given.items()}
            found: Tensor = self._model(**tensors).last_hidden_state
        return found.numpy()


def _export_plain(model: T5EncoderModel, inputs: Mapping[str, Tensor], path: Path) -> None:
    """What a user gets from torch.onnx alone, its dims dynamic."""
    dynamic = {name: dict.fromkeys(range(2), torch.export.Dim.DYNAMIC) for name in inputs}
    two = {name: torch.cat([tensor, tensor]) for name, tensor in inputs.items()}
    with torch.no_grad():
        torch.onnx.export(
            model,
            (),
            path,
            kwargs=two,
            dynamic_shapes=dynamic,
            dynamo=True,
            opset_version=23,
            verbose=False,
        )


def _products_over(path: Path, channels: int) -> list[str]:
    """The nodes that multiply by a stored matrix [channels, ...]: T5's `wo`."""
    graph = onnx.load(path, load_external_data=False).graph
    wide = {tensor.name for tensor in graph.initializer if tensor.dims[:1] == [channels]}
    return [n.name for n in graph.node if n.op_type == "MatMul" and set(n.input) & wide]


def _choices(path: Path) -> dict[str, int]:
    """How many layers of a plan got which form."""
    if not path.exists():
        return {}
    found: dict[str, int] = {}
    for layer in json.loads(path.read_text(encoding="utf-8"))["layers"]:
        form = " ".join(str(layer[key]) for key in ("kind", "choice"))
        form = f"{form}, weights by {layer['weights']}, activations by {layer['activations']}"
        found[form] = found.get(form, 0) + 1
    return found


if __name__ == "__main__":
    main()
