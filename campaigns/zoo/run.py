"""Run the zoo: one process imports the libraries once and forks a child for each model.

    python campaigns/zoo/run.py [--only bert,t5] [--jobs 2] [--keep DIR]

A full run writes campaigns/zoo/results.json and docs/results/zoo.md; a partial one updates their
rows. Types whose package is not installed are left out; their rows stay as they are.
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / place) for place in ("campaigns", "tests/support", "tests/cache")]

import msgspec

if TYPE_CHECKING:
    from children import Ended

    from zoo.examine import Outcome, Row

TIME = 150
"""Seconds of processor time that one model may take."""
CHILDREN = 2


def run(
    types: Sequence[str],
    workplace: Path,
    *,
    jobs: int = CHILDREN,
    keep: bool = False,
    eager_only: bool = False,
) -> Iterator["Row"]:
    """Examine each type in a process of its own; give the rows as they come."""
    from children import each

    from zoo.examine import examine

    _preload()

    def work(model_type: str, folder: Path) -> None:
        examine(model_type, folder, eager_only=eager_only)

    for ended in each(types, work, workplace, seconds=TIME, jobs=jobs, keep=keep):
        yield _row(ended)


def _preload() -> None:
    """Import what every child needs."""
    import onnxruntime  # noqa: F401
    import torch
    import transformers

    import zoo.examine  # noqa: F401

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    _warm_up()
    gc.freeze()


def _warm_up() -> None:
    """Let torch load here what it loads when it first exports: seconds, for every child."""
    import torch
    from torch.export import Dim

    import enginecast.ops  # noqa: F401 - registers our ops
    from enginecast.exporters.onnx.convert import convert

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    shapes = ({0: Dim("batch", min=1, max=9), 1: Dim("sequence", min=1, max=9)},)
    with torch.no_grad():
        program = torch.export.export(layer, (torch.zeros(3, 5, 8),), dynamic_shapes=shapes)
        convert(program, opset=23, reader="onnxruntime-cpu")


def _row(ended: "Ended[str]") -> "Row":
    from zoo.examine import Row

    try:
        row = msgspec.json.decode((ended.folder / "row.json").read_bytes(), type=Row)
    except FileNotFoundError:
        row = Row(ended.item)
    row.seconds = round(ended.seconds, 1)
    if ended.status:
        died: Outcome = "timed out" if ended.timed_out else "crashed"
        row.outcome = "not run in eager" if row.stage == "build" else died
        row.reason = f"{row.stage}: {f'more than {TIME} s' if ended.timed_out else ended.death}"
    return row


def main() -> None:
    """The command."""
    from zoo.table import RESULTS, merge, write_table
    from zoo.tiny import missing_package, model_types

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="model types, comma-separated")
    parser.add_argument("--jobs", type=int, default=CHILDREN)
    parser.add_argument("--keep", type=Path, help="folder for models, bundles and logs")
    parser.add_argument("--eager", action="store_true", help="stop there; write no results")
    arguments = parser.parse_args()
    types = arguments.only.split(",") if arguments.only else model_types()
    for package in sorted({missing_package(name) for name in types} - {""}):
        print(f"{package} is not installed: its model types are left out", flush=True)
    types = [name for name in types if not missing_package(name)]
    with tempfile.TemporaryDirectory(prefix="zoo-") as temporary:
        place = arguments.keep or Path(temporary)
        keep = arguments.keep is not None
        rows = run(types, place, jobs=arguments.jobs, keep=keep, eager_only=arguments.eager)
        for row in rows:
            print(
                f"{row.model_type}: {row.outcome} ({row.seconds} s) {row.reason[:160]}", flush=True
            )
            if not arguments.eager:
                merge([row], RESULTS)
    if not arguments.eager:
        write_table(RESULTS, ROOT / "docs" / "results" / "zoo.md")


if __name__ == "__main__":
    main()
