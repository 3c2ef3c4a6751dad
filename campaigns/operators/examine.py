"""One operator through the export, dtype by dtype, and its bundle against eager."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from adversary.case import Case
from adversary.judge import KINDS, Array, Taken, TurnedAwayError, judge
from harness import one_line
from torch import Tensor

import enginecast
from enginecast.errors import EnginecastError, InputError
from enginecast.passes.presets import PrecisionName
from operators.samples import DTYPES, NOT_ASKED, PRECISIONS, REALS, Call, Calls, Inside, calls

Outcome = Literal[
    "verified", "refused", "rejected", "crashed", "timed out", "silently wrong", "not asked"
]
OUTCOMES: tuple[Outcome, ...] = (
    "verified",
    "refused",
    "rejected",
    "crashed",
    "timed out",
    "silently wrong",
)
WORST: tuple[Outcome, ...] = (
    "silently wrong",
    "crashed",
    "timed out",
    "rejected",
    "refused",
    "verified",
)
FLOORS: Mapping[str, float] = {"nn.functional.tanhshrink": 1e-7}
"""Differences that are roundings of what a result is the small difference of."""
_OUTCOMES: Mapping[int, Outcome] = {1: "rejected", 70: "crashed"}
"""By exit code."""


def _some(values: Sequence[float]) -> Callable[[Sequence[int], np.random.Generator], Array]:
    """Half of the values random, the others near one of a few, no two of which cancel."""

    def draw(shape: Sequence[int], random: np.random.Generator) -> Array:
        found = np.asarray(random.standard_normal(shape))
        special = random.choice(np.array(values), shape) * random.uniform(1.0, 1.3, shape)
        drawn: Array = np.where(random.random(shape) < 0.5, found, special)
        return drawn

    return draw


Draw = Callable[[Sequence[int], np.random.Generator], Array]
VALUES: Mapping[str, Draw] = {
    **KINDS,
    "signed zeros": _some([0.0, -0.0]),
    "largest": _some([1.0e17, -1.0e17, 1.0e12]),
    "smallest": _some([1.2e-38, -1.2e-38, 1.0e-30]),
}
"""What inputs are drawn as, besides the example."""
OUTSIDE_FP16 = ("minute", "largest", "smallest")
"""Those that fp16 does not hold."""
LEAST_FP16 = 2.0**-24
"""The smallest number of fp16."""
NOT_FINITE: Mapping[str, Draw] = {
    "infinities": _some([np.inf, -np.inf, 0.0, -0.0]),
    "an infinity": _some([np.inf]),
    "not numbers": _some([np.nan]),
}
"""What engines refuse as inputs, and models compute inside."""
MADE_INSIDE: Mapping[str, Draw] = {
    "random": KINDS["random"],
    "infinities inside": _some([1.2e38, -1.2e38, 0.0]),
    "an infinity inside": _some([1.2e38]),
    "not numbers inside": _some([2.0e38]),
}
"""What `Inside` makes those of."""
UNDEFINED = ("int", "long", "short", "char", "byte", "to", "histc", "bincount")
"""Operators that make integers of floats: torch leaves open what of infinities and NaN."""
BY_ZEROS = (
    *("nn.functional.interpolate", "nn.functional.upsample", "_upsample"),
    *("fft.", "stft", "istft"),
)
"""Operators whose factors of zero make NaN of infinities in torch, in an engine, or in both."""


@dataclass
class Cell:
    """What became of an operator in one dtype."""

    outcome: Outcome
    reason: str = ""
    samples: int = 0
    verified: int = 0
    """How many of the samples were."""


@dataclass
class Row:
    """What became of an operator."""

    name: str
    cells: dict[str, Cell] = field(default_factory=dict)
    reason: str = ""
    """Why it was not asked."""
    seconds: float = 0.0
    inside: bool = False
    """Whether it was compared on infinities and NaN that arise inside, too."""


def examine(
    names: Sequence[str], folder: Path, columns: Sequence[str] = tuple(DTYPES)
) -> list[Row]:
    """Export operators in each dtype.

    All samples of all operators in a precision are one module first.  Where that is not verified
    in all sizes, those of half of the operators are, then those of one, those of each dtype of it,
    each alone.
    """
    rows = [
        Row(name, reason=NOT_ASKED.get(name, ""), inside="float32" in columns) for name in names
    ]
    usual: PrecisionName = "fp32"
    for precision in dict.fromkeys(PRECISIONS.get(column, usual) for column in columns):
        chosen = [column for column in columns if PRECISIONS.get(column, usual) == precision]
        found = {
            row.name: {} if row.reason else {column: calls(row.name, column) for column in chosen}
            for row in rows
        }
        _examine([row for row in rows if not row.reason], found, folder, precision)
    for row in rows:
        row.cells = {column: row.cells[column] for column in DTYPES if column in row.cells}
    return rows


def _examine(
    rows: Sequence[Row],
    found: Mapping[str, Mapping[str, list[Call]]],
    folder: Path,
    precision: PrecisionName,
) -> None:
    started = time.process_time()
    every = [call for row in rows for each in found[row.name].values() for call in each]
    columns = {row.name: {c: f for c, f in found[row.name].items() if f} for row in rows}
    together = Cell("refused")
    if len(every) > 1:
        together = export(every, _new(folder), precision, in_all_sizes=len(rows) > 1)
    if together.verified:
        for row in rows:
            row.cells |= {c: _verified(len(each)) for c, each in columns[row.name].items()}
            row.seconds = round(row.seconds + (time.process_time() - started) / len(rows), 1)
    elif len(rows) > 1:
        _examine(rows[: len(rows) // 2], found, folder, precision)
        _examine(rows[len(rows) // 2 :], found, folder, precision)
    elif rows:
        [row] = rows
        row.cells |= {
            column: _by_dtype(each, _new(folder), precision)
            for column, each in columns[row.name].items()
        }
        row.seconds = round(row.seconds + time.process_time() - started, 1)


def _new(folder: Path) -> Path:
    """A folder in a folder that there was not before."""
    return folder / str(len(list(folder.iterdir())))


def _verified(samples: int) -> Cell:
    return Cell("verified", "", samples, samples)


def _by_dtype(found: Sequence[Call], folder: Path, precision: PrecisionName) -> Cell:
    folder.mkdir()
    together = export(found, _new(folder), precision)
    if together.outcome == "verified" or len(found) == 1:
        return together
    alone = [export([call], _new(folder), precision) for call in found]
    verified = sum(cell.verified for cell in alone)
    if verified == len(found):  # refused only for what calls share, such as a batch of all
        return _verified(verified)
    worst = min(alone, key=lambda cell: WORST.index(cell.outcome))
    call = found[alone.index(worst)]
    return Cell(worst.outcome, f"{worst.reason} ({call.said[:90]})", len(found), verified)


def export(
    found: Sequence[Call],
    folder: Path,
    precision: PrecisionName = "fp32",
    *,
    in_all_sizes: bool = False,
) -> Cell:
    """Export a module of these calls, and judge what was published.

    Args:
        precision: of the engine.
        in_all_sizes: do not take a bundle whose batch was fixed for verified.
    """
    module = Calls(found)
    cell = Cell("crashed", samples=len(found))
    try:
        bundle = enginecast.compile(
            module,
            folder,
            example=module.example(),
            precision=precision,
            threads=1,
            fallback="none",
        )
    except EnginecastError as error:
        cell.outcome = _OUTCOMES.get(error.exit_code, "refused")
        cell.reason = one_line(f"{type(error).__name__}: {error.message}", 300)
        return cell
    except Exception as error:
        cell.reason = one_line(f"{type(error).__name__}: {error}", 300)
        return cell
    wrong = judged(module, bundle.root, precision=precision)
    if precision == "fp32":
        wrong = wrong or judged_inside(found, bundle.root, folder)
    if wrong:
        return Cell("silently wrong", one_line(wrong, 300), len(found))
    if in_all_sizes and not bundle.manifest.symbols and _has_batch(found[0].inputs[0]):
        return Cell("refused", "the batch was fixed", len(found))
    return _verified(len(found))


def _has_batch(x: Tensor) -> bool:
    return x.dim() > 0 and x.shape[0] > 1


def judged(
    module: Calls,
    bundle: Path,
    values: Mapping[str, Draw] = VALUES,
    *,
    precision: str = "fp32",
    is_checked: bool = True,
) -> str:
    """Compare a bundle with eager on fresh inputs; how it differs, or nothing.

    Args:
        precision: of eager and of the engine.
        is_checked: run it as everybody does; else below its check of inputs.
    """
    floor = max(FLOORS.get(call.name, 0.0) for call in module.calls)
    if precision == "fp16":
        floor = max(floor, LEAST_FP16)
        values = {kind: draw for kind, draw in values.items() if kind not in OUTSIDE_FP16}
    again = type(module)
    case = Case(
        "operators",
        "calls",
        lambda: again(module.calls),
        module.example(),
        "right",
        precision=precision,
        floor=floor,
    )
    manifest = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))
    taken = {
        one["name"]: Taken(one["dtype"], tuple(one["shape"]), one["minimum"], one["maximum"])
        for one in manifest["inputs"]
    }
    symbols = {name: (low, high) for name, (low, high) in manifest["symbols"].items()}
    outputs = [output["name"] for output in manifest["outputs"]]
    with enginecast.load(bundle, threads=1) as engine:

        def run(feeds: Mapping[str, Array]) -> list[Array]:
            fed = {name: feeds[name].astype(kind.dtype) for name, kind in taken.items()}
            if not is_checked:
                below = engine._open().run_to_host(fed, outputs)
                return [np.asarray(below[name]) for name in outputs]
            try:
                given = engine.run(fed, check_finite=False)
            except InputError as error:
                raise TurnedAwayError(error.message) from error
            return [np.asarray(given[name]) for name in outputs]

        result = judge(case, run, taken, symbols if is_checked else {}, values)
    if result.wrong or result.compared:
        return result.wrong
    return "eager takes none of the inputs that the bundle declares"


def judged_inside(found: Sequence[Call], bundle: Path, folder: Path) -> str:
    """Compare a bundle with eager where infinities and NaN arise inside; how it differs.

    An engine refuses them as inputs, so it runs below that check.  What differs there is exported
    again behind operators that make infinities and NaN of numbers: an export may know that an input
    has none.
    """
    calls = [call for call in found if call.dtype in REALS and not _is_undefined(call)]
    if len(calls) < len(found) or not judged(Calls(found), bundle, NOT_FINITE, is_checked=False):
        return ""
    module = Inside(found)
    try:
        inside = enginecast.compile(
            module,
            folder.with_name(f"{folder.name}-inside"),
            example=module.example(),
            threads=1,
            fallback="none",
        )
    except EnginecastError:
        return ""  # nothing is published
    return judged(module, inside.root, MADE_INSIDE)


def _is_undefined(call: Call) -> bool:
    """Whether infinities and NaN are not compared: rows that are unique along a dimension are
    sorted by comparisons, which are all false of NaN.
    """
    by_rows = call.name == "unique" and call.leaves[-1] is not None
    return by_rows or call.name.startswith((*UNDEFINED, *BY_ZEROS))
