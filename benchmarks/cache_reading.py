"""Text-encoder outputs on disk: an embedding cache against one file per text, as trainers do it.

    python benchmarks/cache_reading.py [--texts N] [--whole N] [--rounds N] [--folder DIR]
                                       [--out FILE.json]

Rows as T5 XXL gives them (4096 wide, bf16), of random and so incompressible values.  "masked":
texts of lengths as captions have them, of which a cache keeps the real rows.  "unmasked": all 512
rows of each text, as pipelines need that run their encoder without a mask.  Every layout is read
in the same random order, and copied into the same buffer of a batch that is padded to its longest
text.  CPU time of the process and time on the clock, per text, one thread, files in the page cache;
medians of rounds that visit the layouts in turn.  Layouts with large files hold fewer texts.

"memory" has no files: it is the copying that all layouts have in common.  "again" is a second pass
over what is open: the first one opens the cache and compares every row with its sum.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from cache_layouts import (
    BATCH,
    LONGEST,
    MEMORY,
    NPZ,
    OURS,
    PT,
    WIDTH,
    Layout,
    Read,
    Texts,
    make_layouts,
    timed,
)
from large import RESULTS, machine

from enginecast.runtime.values.arrays import Array

NOISE = 0.05
"""Of the copying: less than that beyond it cannot be distinguished from nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=2000, help="masked texts")
    parser.add_argument("--whole", type=int, default=200, help="unmasked texts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="of the disk to measure")
    parser.add_argument("--out", type=Path, default=RESULTS / "cache-reading.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = machine()  # before the run: the commit that is measured
    found["versions"] |= {name: version(name) for name in ("safetensors", "ml-dtypes", "xxhash")}
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(50), 0.6, options.texts), 4, LONGEST).astype(int)
    whole = np.full(options.whole, LONGEST)
    cases = {
        "masked": measure(options, Texts(lengths, masked=True)),
        "unmasked": measure(options, Texts(whole, masked=False)),
    }
    result = {"machine": found | {"threads": 1}, "cases": cases, "values": "random, incompressible"}
    result["wanted"] = {case: judge(case, one) for case, one in cases.items()}
    text = json.dumps(result, indent=1, sort_keys=True)
    options.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    print(options.out)


def measure(options: argparse.Namespace, texts: Texts) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        layouts = make_layouts(Path(folder), texts)
        rows: dict[str, dict[str, Any]] = {}
        for name, layout in layouts.items():
            cpu, wall = layout.write(range(layout.texts))
            size = sum(path.stat().st_size for path in layout.folder.rglob("*") if path.is_file())
            rows[name] = {"texts": layout.texts}
            rows[name] |= (
                {}
                if not size
                else {
                    "bytes_per_text": round(size / layout.texts),
                    "write_fsync_cpu_us": round(cpu / layout.texts * 1e6),
                    "write_fsync_wall_us": round(wall / layout.texts * 1e6),
                }
            )
        spent = rounds(layouts, texts, options.rounds)
    for name, (cpus, walls) in spent.items():
        rows.setdefault(name, {})["read_cpu_us"] = round(median(cpus) * 1e6, 1)
        rows[name]["read_wall_us"] = round(median(walls) * 1e6, 1)
    lengths = {"mean": round(float(texts.lengths.mean()), 1), "longest": int(texts.lengths.max())}
    return {"rows_per_text": lengths, "layouts": rows, "ratios": ratios(rows)}


def rounds(
    layouts: dict[str, Layout], texts: Texts, count: int
) -> dict[str, tuple[list[float], list[float]]]:
    """CPU and clock seconds per text of each layout, round by round; the first warms up."""
    buffer = np.zeros((BATCH, LONGEST, WIDTH), np.int16)
    spent: dict[str, tuple[list[float], list[float]]] = {}
    for index in range(count + 1):
        random = np.random.default_rng(index)
        for name, layout in layouts.items():
            order = [int(number) for number in random.permutation(layout.texts)]
            batches = [order[begin : begin + BATCH] for begin in range(0, len(order), BATCH)]
            passes = one_round(layout, texts, batches, buffer)
            require_right(texts, batches[-1], buffer, name)
            for label, (cpu, wall) in zip((name, f"{name}, again"), passes, strict=True):
                if index and (label == name or name == OURS):
                    cpus, walls = spent.setdefault(label, ([], []))
                    cpus.append(cpu / layout.texts)
                    walls.append(wall / layout.texts)
    return spent


def one_round(
    layout: Layout, texts: Texts, batches: Sequence[Sequence[int]], buffer: Array
) -> list[tuple[float, float]]:
    """Two passes over a layout, the first of which opens it."""
    opened: list[Read] = []

    def one_pass() -> None:
        for numbers in batches:
            fill(buffer, numbers, texts, opened[0])

    return [timed(lambda: opened.append(layout.open()), one_pass), timed(one_pass)]


def fill(buffer: Array, numbers: Sequence[int], texts: Texts, read: Read) -> None:
    """Copy texts into a batch that is padded to its longest."""
    longest = max(texts.lengths[number] for number in numbers)
    for row, number, values in zip(buffer, numbers, read(numbers), strict=False):
        length = texts.lengths[number]
        row[:length] = values[:length]
        row[length:longest] = 0


def require_right(texts: Texts, numbers: Sequence[int], batch: Array, name: str) -> None:
    for row, number in zip(batch, numbers, strict=False):
        wanted = texts.rows(number).view(np.int16)
        if not np.array_equal(row[: len(wanted)], wanted):
            raise RuntimeError(f"{name}: text {number} did not come back")


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """How many times our CPU time others take, with and without the copying; and parts of disk."""
    copying = rows[MEMORY]["read_cpu_us"]
    found = {}
    for name, row in rows.items():
        if name == MEMORY or name.startswith(OURS):
            continue
        for ours, label in ((OURS, "CPU"), (f"{OURS}, again", "CPU again")):
            theirs, spent = row["read_cpu_us"], rows[ours]["read_cpu_us"]
            found[f"{label}: {name}"] = round(theirs / spent, 2)
            beyond = (theirs - copying) / max(spent - copying, NOISE * copying)
            found[f"{label} beyond copying: {name}"] = round(beyond, 1)
        found[f"disk: of {name}"] = round(rows[OURS]["bytes_per_text"] / row["bytes_per_text"], 4)
    return found


def judge(case: str, result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What was to be reached, and whether it was.

    The copy into the batch is the same for all layouts, and of whole texts takes so long that none
    could be five times as fast as another: hence the ratios beyond it, besides the plain ones.
    """
    found = result["ratios"]
    times = [f"CPU again: {PT}", f"CPU: {PT}", f"CPU again beyond copying: {PT}"]
    times += [f"CPU again: {PT} padded", f"CPU: {PT} padded"] * (case == "masked")
    wanted = {name: (found[name], 5.0, found[name] >= 5) for name in times}
    disk, most = found[f"disk: of {NPZ}"], 1 / 3 if case == "masked" else 1 / 2
    wanted[f"disk: of {NPZ}"] = (disk, round(most, 3), disk <= most)
    return {
        name: {"value": value, "wanted": limit, "reached": reached}
        for name, (value, limit, reached) in wanted.items()
    }


if __name__ == "__main__":
    main()
