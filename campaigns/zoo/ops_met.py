"""Which ops captured models call: those of the families, and of all that the zoo holds.

    python campaigns/zoo/ops_met.py [TYPE ...]  what these types of transformers call, or all

Models come and go with transformers, and ops with torch's tracer: what was met once is kept.
"""

import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
if __name__ == "__main__":
    root = Path(__file__).parents[2]
    sys.path[:0] = [str(root / place) for place in ("campaigns", "tests/support")]

import torch
from family_models import FAMILIES
from torch.export import ExportedProgram

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.sources.open_source import open_source
from enginecast.passes.ir.blocks import all_nodes
from zoo.tiny import build, model_types, save

MET = Path(__file__).with_suffix(".txt")
SECONDS = 120
"""That one model may take."""


def ops_of(program: ExportedProgram) -> set[str]:
    """The ops that a program calls, its blocks included: "aten.add.Tensor"."""
    calls = (node.target for node in all_nodes(program) if node.op == "call_function")
    return {str(op) for op in calls if isinstance(op, torch._ops.OpOverload)}


def family_ops(name: str) -> set[str]:
    """Those of a family's model."""
    family = next(one for one in FAMILIES if one.name == name)
    with tempfile.TemporaryDirectory() as folder:
        made = family.make(Path(folder))
        return _exported(family.factory or str(made), allow_code=family.factory is not None)


def zoo_ops(model_type: str) -> set[str]:
    """Those of the first tiny model of a type that is captured; empty when none is."""
    for model in build(model_type):
        with tempfile.TemporaryDirectory() as folder:
            try:
                return _exported(str(save(model, Path(folder))))
            except Exception:  # whatever the model's code raises: the zoo says why
                continue
    return set()


def _exported(model: str, *, allow_code: bool = False) -> set[str]:
    source = open_source(model, allow_code=allow_code)
    specs = source.inputs()
    inputs = sample(specs, example_sizes(specs), 0)
    with torch.no_grad():
        return ops_of(torch.export.export(source.eager(), (), inputs, strict=False))


def _in_time(job: tuple[bool, str]) -> set[str]:
    is_family, name = job
    signal.alarm(SECONDS)  # ends the process, and the pool starts another
    try:
        return family_ops(name) if is_family else zoo_ops(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return set()
    finally:
        signal.alarm(0)


def met() -> set[str]:
    """What was met so far."""
    return set(MET.read_text("utf-8").split())


def add(found: Iterable[str]) -> None:
    """Keep what was met, one a line."""
    MET.write_text("\n".join(sorted(met() | set(found))) + "\n", encoding="utf-8")


def _jobs(types: list[str]) -> Iterator[tuple[bool, str]]:
    if not types:
        yield from ((True, family.name) for family in FAMILIES)
    yield from ((False, name) for name in types or model_types())


if __name__ == "__main__":
    torch.set_num_threads(1)
    for job in _jobs(sys.argv[1:]):
        with get_context("fork").Pool(1) as pool:
            try:
                add(pool.apply_async(_in_time, (job,)).get(SECONDS + 5))
            except Exception as error:
                print(f"{job[1]}: {type(error).__name__}", file=sys.stderr)
