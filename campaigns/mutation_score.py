"""Random faults in published engines, and how many of them a verification finds.

    python campaigns/mutation_score.py [--families t5,vit] [--precisions fp32,fp16] [--faults 40]

The rows are kept in docs/results/mutations.json; docs/results/mutations.md has them as a table.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "tests/support")]

from exports import Exports, reseal
from mutations import GRAPH, WEIGHTS, Edit, drop_mask, edit_graph
from onnx import numpy_helper
from rows import DOCS, put_between, table
from safetensors import safe_open

from enginecast.compiler.verify.bundle import verify_bundle
from enginecast.errors import EnginecastError
from enginecast.runtime.load import load
from enginecast.verification.reference import REFERENCE_NAME, read_reference

RESULTS = DOCS / "results" / "mutations.json"
PAGE = DOCS / "results" / "mutations.md"
COLUMNS = (
    *("family", "precision", "found", "changes nothing", "below the floor", "below the limit"),
    "escapes",
)
BEGIN, END = "<!-- begin: written by make mutations -->", "<!-- end -->"
FAMILIES = ("t5", "bert", "llama", "vit", "family-unet")
PRECISIONS = ("fp32", "fp16", "int8")
FAULTS = 40
HEADS = 4
Outputs = list[dict[str, Any]]
Draw = Callable[[Path, random.Random], tuple[str, Edit] | None]


@dataclass
class Score:
    """What became of the faults of one engine."""

    family: str
    precision: str
    found: int = 0
    """Rejected, or the engine does not load or run."""
    silent: int = 0
    """Not found, and no output of any case has another bit."""
    small: int = 0
    """Not found, and no output moves by more than the noise floor."""
    below_limit: int = 0
    """Not found; an output moves by more than the floor, and by less than the limit over it."""
    escaped: list[str] = field(default_factory=list)
    """Not found, although an output moves by more than the limit."""


def score(exports: Exports, family: str, precision: str, faults: int, place: Path) -> Score:
    """Draw faults until there are as many as asked for, each in a copy of the engine."""
    bundle = exports(family, precision).folder
    before = run(bundle)
    result = Score(family.removeprefix("family-"), precision)
    draw = random.Random(f"{family} {precision}")
    for number in range(faults):
        name, edit = fault(bundle, draw, number)
        copy = place / f"{family}-{precision}-{number}"
        shutil.copytree(bundle, copy)
        edit(copy)
        reseal(copy)
        judge(result, name, copy, before)
        shutil.rmtree(copy)
    return result


def judge(result: Score, name: str, copy: Path, before: Outputs) -> None:
    """Verify the copy, and say how far it is off where that finds nothing."""
    try:
        check = verify_bundle(copy, threads=1)
    except EnginecastError:
        result.found += 1
        return
    if check.verdict.outcome == "rejected":
        result.found += 1
        return
    judged = {output.name: output for output in check.verdict.outputs}
    moved: dict[str, float] = {}
    for now, then in zip(run(copy), before, strict=True):
        for key in then:
            moved[key] = max(moved.get(key, 0.0), distance(now[key], then[key]))
    floors: float = max(
        moved[key] / (found.floor or 1e-8) for key, found in judged.items() if key in moved
    )
    limit = max(found.limit or 0.0 for found in judged.values())
    if not any(moved.values()):
        result.silent += 1
    elif floors <= 1:
        result.small += 1
    elif floors <= limit:
        result.below_limit += 1
    else:
        result.escaped.append(f"{name}: {floors:.1f} floors")


def run(bundle: Path) -> Outputs:
    """What the engine gives for the stored cases, without the rows of padding, which are not
    judged.
    """
    reference = read_reference(bundle / REFERENCE_NAME)
    found = []
    with load(bundle, require="verified-by-emulation", threads=1) as engine:
        for case in reference.cases:
            outputs = dict(engine.run(case.inputs, check_finite=False))
            for name in reference.masked & outputs.keys():
                mask = case.inputs[str(reference.mask_input)].astype(bool)
                outputs[name] = outputs[name][mask]
            found.append(outputs)
    return found


def distance(now: Any, then: Any) -> float:
    """Relative L2."""
    with np.errstate(all="ignore"):
        now, then = (np.nan_to_num(np.asarray(a, np.float64)) for a in (now, then))
        return float(np.linalg.norm(now - then)) / max(float(np.linalg.norm(then)), 1e-30)


def fault(bundle: Path, draw: random.Random, number: int) -> tuple[str, Edit]:
    """The kinds in turn; one that this engine has no place for gives way to the next."""
    for step in range(len(KINDS)):
        if found := KINDS[(number + step) % len(KINDS)](bundle, draw):
            return found
    raise AssertionError("no fault fits")


def tensors(bundle: Path) -> dict[str, Any]:
    """The stored weights of more than one element."""
    with safe_open(bundle / WEIGHTS, framework="np") as file:
        found = {name: file.get_tensor(name) for name in sorted(file.keys())}
    return {name: array for name, array in found.items() if array.size > 1 and array.any()}


def weight(bundle: Path, draw: random.Random, matrices: bool = False) -> tuple[str, Any]:
    found = tensors(bundle)
    return draw.choice([(n, a) for n, a in found.items() if not matrices or a.ndim > 1])


def replaced(name: str, what: str, array: Any, changed: Any) -> tuple[str, Edit]:
    """The fault that stores another tensor in the place of one."""

    def edit(bundle: Path) -> None:
        path, old = bundle / WEIGHTS, array.tobytes()
        data = path.read_bytes()
        assert old in data
        new = np.asarray(changed).astype(array.dtype).tobytes()
        path.write_bytes(data.replace(old, new, 1))

    return f"{name} {what}", edit


def zeroed(bundle: Path, draw: random.Random) -> tuple[str, Edit]:
    name, array = weight(bundle, draw)
    return replaced(name, "zeroed", array, np.zeros_like(array))


def scaled(bundle: Path, draw: random.Random) -> tuple[str, Edit] | None:
    found = {n: a for n, a in tensors(bundle).items() if a.dtype.kind == "f"}
    if not found:
        return None  # scales of quantized weights may all be in the graph
    name, array = draw.choice(list(found.items()))
    return replaced(name, "scaled by 1.001", array, array.astype(np.float64) * 1.001)


def swapped(bundle: Path, draw: random.Random) -> tuple[str, Edit]:
    name, array = weight(bundle, draw, matrices=True)
    one, two = draw.sample(range(len(array)), 2) if len(array) > 1 else (0, 0)
    changed = array.copy()
    changed[[one, two]] = array[[two, one]]
    return replaced(name, f"rows {one} and {two} swapped", array, changed)


def without_head(bundle: Path, draw: random.Random) -> tuple[str, Edit]:
    """A quarter of the rows are zero, as of a head that was dropped."""
    name, array = weight(bundle, draw, matrices=True)
    rows = max(1, len(array) // HEADS)
    start = rows * draw.randrange(max(1, len(array) // rows))
    changed = array.copy()
    changed[start : start + rows] = 0
    return replaced(name, f"rows {start} to {start + rows} dropped", array, changed)


def attribute(kinds: Sequence[str], change: Callable[[Any], Any]) -> Draw:
    """Another value of one attribute of one node."""

    def drawn(bundle: Path, draw: random.Random) -> tuple[str, Edit] | None:
        graph = onnx.load(bundle / GRAPH, load_external_data=False).graph
        found = [
            (index, a.name)
            for index, node in enumerate(graph.node)
            for a in node.attribute
            if a.name in kinds and (a.HasField("i") or a.HasField("f"))
        ]
        if not found:
            return None
        index, name = draw.choice(found)

        def edit(graph: onnx.GraphProto) -> None:
            (chosen,) = [a for a in graph.node[index].attribute if a.name == name]
            kind = "f" if chosen.HasField("f") else "i"
            setattr(chosen, kind, change(getattr(chosen, kind)))

        label = f"{name} of {graph.node[index].op_type} {graph.node[index].name}"
        return label, lambda copy: edit_graph(copy, edit)

    return drawn


def constant(bundle: Path, draw: random.Random) -> tuple[str, Edit] | None:
    """A number in the graph is off by one."""
    graph = onnx.load(bundle / GRAPH, load_external_data=False).graph
    found = [
        index
        for index, tensor in enumerate(graph.initializer)
        if not tensor.external_data and numpy_helper.to_array(tensor).size
    ]
    if not found:
        return None
    index = draw.choice(found)

    def edit(graph: onnx.GraphProto) -> None:
        tensor = graph.initializer[index]
        array = numpy_helper.to_array(tensor).copy()
        array.reshape(-1)[0] = (
            not array.reshape(-1)[0] if array.dtype == bool else array.flat[0] + 1
        )
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    label = f"{graph.initializer[index].name} off by one"
    return label, lambda copy: edit_graph(copy, edit)


def left_out(bundle: Path, draw: random.Random) -> tuple[str, Edit]:
    """A node hands on its first input."""
    graph = onnx.load(bundle / GRAPH, load_external_data=False).graph
    index = draw.choice([i for i, node in enumerate(graph.node) if len(node.output) == 1])

    def edit(graph: onnx.GraphProto) -> None:
        node = graph.node[index]
        node.op_type, node.domain = "Identity", ""
        del node.input[1:]
        del node.attribute[:]

    node = graph.node[index]
    return f"{node.op_type} {node.name} left out", lambda copy: edit_graph(copy, edit)


def unmasked(bundle: Path, draw: random.Random) -> tuple[str, Edit] | None:
    graph = onnx.load(bundle / GRAPH, load_external_data=False).graph
    found = [value.name for value in graph.input if "mask" in value.name]
    return (f"{found[0]} dropped", drop_mask(found[0])) if found else None


KINDS: tuple[Draw, ...] = (
    zeroed,
    scaled,
    swapped,
    without_head,
    attribute(("epsilon",), lambda value: value * 10),
    attribute(("axis",), lambda value: 0 if value else 1),
    constant,
    left_out,
    attribute(("scale", "alpha"), lambda value: value * 1.01),
    unmasked,
)


def line(row: Score) -> tuple[object, ...]:
    """The cells of a score."""
    counts = (row.found, row.silent, row.small, row.below_limit)
    return row.family, row.precision, *counts, "; ".join(row.escaped) or "none"


def write(scores: Sequence[Score]) -> None:
    """Keep the scores, and write the table into the page."""
    RESULTS.write_text(json.dumps([asdict(s) for s in scores], indent=1) + "\n", encoding="utf-8")
    lines = "\n".join(table(COLUMNS, map(line, scores)))
    put_between(PAGE, BEGIN, END, f"\n\n{lines}\n\n")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--faults", type=int, default=FAULTS)
    options = parser.parse_args()
    kept = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    scores = {(row["family"], row["precision"]): Score(**row) for row in kept}
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        place = Path(temporary)
        exports = Exports(place)
        for family in options.families.split(","):
            for precision in options.precisions.split(","):
                made = score(exports, family, precision, options.faults, place)
                scores[made.family, made.precision] = made
                write(list(scores.values()))
                print(*line(made), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
