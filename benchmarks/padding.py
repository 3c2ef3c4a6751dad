"""What padding costs: prompts padded to 512 tokens, in eager and in engines that leave it out.

    python benchmarks/padding.py [--layers N] [--rounds N] [--only NAME,...] [--out FILE.json]

A T5 v1.1-base-shaped encoder with seeded random weights.  CPU time of the process, one thread,
medians of interleaved rounds whose order turns around; what is reported is ratios to eager on the
padded inputs.  "by hand" is a call on inputs that were cut to the longest prompt.  "products" is
the time of the linears alone over the valid tokens, by torch in fp32.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from large import RESULTS, machine
from torch import Tensor, nn

from enginecast import load
from enginecast.compiler.request import ExportRequest
from enginecast.compiler.session import export
from enginecast.runtime.engine import Engine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from rig import BASE, Rig

CASES = {
    "8 prompts padded to 512": ([23, 49, 33, 16, 57, 57, 56, 50], 512),
    "1 prompt of 400 padded to 512": ([400], 512),
    "1 prompt of 100 padded to 128": ([100], 128),
}
Arrays = Mapping[str, np.ndarray[Any, Any]]
Run = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="fp32,int8")
    parser.add_argument("--out", type=Path, default=RESULTS / "padding.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found_machine = machine() | {"threads": 1}  # before the run: the commit that is measured
    rig = Rig(layers=options.layers, sizes=BASE)
    model = rig.make()
    result: dict[str, Any] = {"machine": found_machine, "layers": options.layers}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model.save_pretrained(Path(folder) / "model")
        engines = {}
        for precision in options.only.split(","):
            bundle = Path(folder) / precision
            done = export(
                ExportRequest(str(Path(folder) / "model"), bundle, precision=precision, threads=1)
            )
            assert done.bundle is not None, done.report.verdict.reasons
            result["padding"] = done.bundle.manifest.padding.side  # type: ignore[union-attr]
            engines[precision] = stack.enter_context(load(bundle, threads=1))
        result["cases"] = {
            name: _case(model, engines, padded(*sizes), options.rounds)
            for name, sizes in CASES.items()
        }
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))


def padded(lengths: list[int], width: int) -> Arrays:
    """Prompts of these lengths."""
    random = np.random.default_rng(9)
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
    ids = random.integers(2, BASE.vocabulary, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


def _case(
    model: nn.Module, engines: Mapping[str, Engine], given: Arrays, rounds: int
) -> dict[str, Any]:
    """Times as ratios to eager, and how far a call without padding is from a full one."""
    longest = int(given["attention_mask"].sum(1).max())
    cut = {name: np.ascontiguousarray(array[:, :longest]) for name, array in given.items()}
    valid = given["attention_mask"] != 0
    runs: dict[str, Run] = {
        "eager": lambda: _eager(model, given),
        "eager, by hand": lambda: _eager(model, cut),
        "products": _products(model, int(valid.sum())),
    }
    found: dict[str, Any] = {}
    for name, engine in engines.items():
        left_out = engine.run(given, pad_rows="zero")["last_hidden_state"][valid]
        exact = engine.run(given)["last_hidden_state"][valid]
        found[f"{name}: relative difference"] = float(
            np.linalg.norm(left_out - exact) / np.linalg.norm(exact)
        )
        runs |= _calls(name, engine, given, cut)
    spent = _times(runs, rounds)
    eager = np.array(spent["eager"])
    for name, seconds in spent.items():
        ratios = eager / np.array(seconds)
        found[name] = {
            "ms": round(1e3 * median(seconds), 1),
            "times eager": round(float(np.median(ratios)), 2),
            "spread": [round(float(x), 2) for x in np.quantile(ratios, (0.1, 0.9))],
        }
    return found


def _calls(name: str, engine: Engine, given: Arrays, cut: Arrays) -> dict[str, Run]:
    return {
        f"{name}, nothing left out": lambda: engine.run(given, pad_rows="exact"),
        f"{name}, by hand": lambda: engine.run(cut, pad_rows="exact"),
        f"{name}, left out": lambda: engine.run(given, pad_rows="zero"),
    }


def _times(runs: Mapping[str, Run], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each; the first round warms up."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        for name in list(runs) if index % 2 else list(reversed(runs)):
            start = time.process_time()
            runs[name]()
            spent[name].append(time.process_time() - start)
    return {name: seconds[1:] for name, seconds in spent.items()}


def _eager(model: nn.Module, given: Arrays) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(
            **{name: torch.from_numpy(array) for name, array in given.items()}
        ).last_hidden_state
    return found


def _products(model: nn.Module, tokens: int) -> Run:
    """All linears of the model, over this many rows."""
    weights = [one.weight.detach() for one in model.modules() if isinstance(one, nn.Linear)]
    rows = {weight.shape[1]: torch.randn(tokens, weight.shape[1]) for weight in weights}

    def run() -> None:
        for weight in weights:
            nn.functional.linear(rows[weight.shape[1]], weight)

    return run


if __name__ == "__main__":
    main()
