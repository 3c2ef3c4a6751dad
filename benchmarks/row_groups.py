"""Many rows in one call, or in groups: what an engine on ONNX Runtime's CPU provider takes.

    python benchmarks/row_groups.py BUNDLE[,BUNDLE...] [--rows N] [--tokens N] [--rounds N]
        [--out FILE.json]

The bundles are of text encoders.  CPU time of the session alone, one thread, rounds in turns whose
order turns around; ratios to one call in the same round.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from large import RESULTS, machine

from enginecast import load
from enginecast.runtime.device.machine import processor
from enginecast.runtime.sessions.onnxruntime import CPU_PROVIDER, create_session, options_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / "row-groups.json")
    options = parser.parse_args()
    result: dict[str, Any] = {"rows": {}}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    for bundle in options.bundles.split(","):
        name, spent = measured(Path(bundle), options.rows, options.tokens, options.rounds)
        row: dict[str, Any] = {"rounds": options.rounds, "processor": processor()}
        for rows, seconds in spent.items():
            whole = spent[options.rows]
            ratios = [one / own for one, own in zip(whole, seconds, strict=True)]
            row[f"groups of {rows}"] = {
                "ms": round(1e3 * median(seconds), 1),
                "speed": round(median(ratios), 3),
            }
        result["rows"][name] = row
        print(name, json.dumps(row, indent=1))
    result["machine"] = machine()
    options.out.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def measured(
    bundle: Path, rows: int, tokens: int, rounds: int
) -> tuple[str, dict[int, list[float]]]:
    """CPU seconds by the rows of a group; the first round warms up."""
    with load(bundle, threads=1) as engine:
        record, inputs = engine.record, engine.inputs
        kind = record.quantized or engine.manifest.precision
        name = f"{engine.manifest.model.name} {kind} {rows}x{tokens}"
    options = options_for(engine.manifest.precision, CPU_PROVIDER, record.quantized)
    session = create_session(bundle / record.file, [CPU_PROVIDER], 1, options)
    ids = np.random.default_rng(1).integers(5, 1000, (rows, tokens))
    feeds = {spec.name: ids if spec.kind == "token_ids" else ids * 0 + 1 for spec in inputs}

    def grouped(size: int) -> Callable[[], None]:
        groups = [
            {
                name: np.ascontiguousarray(array[start : start + size])
                for name, array in feeds.items()
            }
            for start in range(0, rows, size)
        ]

        def run() -> None:
            for group in groups:
                session.run(None, group)

        return run

    sizes = [rows // 2**power for power in range(rows.bit_length()) if rows % 2**power == 0]
    runs = {size: grouped(size) for size in sizes[:5]}
    spent: dict[int, list[float]] = {size: [] for size in runs}
    for turn in range(rounds + 1):
        for size in list(runs)[:: -1 if turn % 2 else 1]:
            start = time.process_time()
            runs[size]()
            spent[size].append(time.process_time() - start)
    return name, {size: seconds[1:] for size, seconds in spent.items()}


if __name__ == "__main__":
    main()
