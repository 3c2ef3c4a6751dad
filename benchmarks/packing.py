"""What a packed program could save: ragged prompts in groups of `pad_rows="zero"`, and as one row.

    python benchmarks/packing.py FP32_BUNDLE INT8_BUNDLE [--rounds N] [--out FILE.json]

The bundles are of a T5 v1.1-base encoder, as `benchmarks/peers.py` keeps them.  "one row" is all
valid tokens as one prompt: linears and norms are those of a packed program, and attention reads
all tokens, which a packed program would not ("attention" is what that adds, its products alone).
CPU time, one thread, rounds in turns.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from large import RESULTS, machine
from peers_models import RAGGED

from enginecast import load
from enginecast.runtime.device.machine import processor

Array = np.ndarray[Any, Any]
LAYERS, HEADS, SIZE = 12, 12, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path, nargs=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "packing.json")
    options = parser.parse_args()
    mask = (np.arange(512) < np.array(RAGGED)[:, None]).astype(np.int64)
    ragged = _feeds(mask)
    row = _feeds(np.ones((1, sum(RAGGED)), np.int64))
    runs: dict[str, Callable[[], object]] = {}
    with ExitStack() as stack:
        for precision, path in zip(("fp32", "int8"), options.bundles, strict=True):
            engine = stack.enter_context(load(path, threads=1, pad_rows="zero"))
            runs[f"{precision}, groups"] = lambda engine=engine: engine.run(ragged)  # type: ignore[misc]
            runs[f"{precision}, one row"] = lambda engine=engine: engine.run(row)  # type: ignore[misc]
        runs["attention"] = _attention
        spent = _times(runs, options.rounds)
    result = {
        "machine": machine() | {"processor": processor(), "threads": 1},
        "rounds": options.rounds,
        "ms": {name: round(1e3 * median(seconds), 1) for name, seconds in spent.items()},
        "groups over one row": {
            name: round(median(np.divide(spent[f"{name}, groups"], spent[f"{name}, one row"])), 3)
            for name in ("fp32", "int8")
        },
        "groups over one row without attention": {
            name: round(median(_packed(spent, name)), 3) for name in ("fp32", "int8")
        },
    }
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, sort_keys=True))


def _feeds(mask: Array) -> dict[str, Array]:
    ids = np.random.default_rng(1).integers(5, 32000, mask.shape) * mask
    return {"input_ids": ids, "attention_mask": mask}


def _attention() -> None:
    """The products over all tokens that a packed program leaves out, in fp32."""
    tokens = sum(RAGGED)
    left, right = np.ones((tokens, SIZE), np.float32), np.ones((SIZE, tokens), np.float32)
    for _ in range(LAYERS * HEADS):
        scores = left @ right
        scores @ left


def _packed(spent: Mapping[str, list[float]], precision: str) -> list[float]:
    """How many times faster a packed program would be that pays nothing for packing."""
    used = sum(length**2 for length in RAGGED) / sum(RAGGED) ** 2
    found = zip(
        *(spent[n] for n in (f"{precision}, groups", f"{precision}, one row", "attention")),
        strict=True,
    )
    return [groups / (row - (1 - used) * attention) for groups, row, attention in found]


def _times(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each; the first round warms up."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            start = time.process_time()
            runs[name]()
            spent[name].append(time.process_time() - start)
    return {name: seconds[1:] for name, seconds in spent.items()}


if __name__ == "__main__":
    main()
