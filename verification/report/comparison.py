"""Compare two reports: one precision with another, or a version with the next."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from enginecast.runtime.bundle.manifest import Manifest
from enginecast.verification.metrics import times
from enginecast.verification.report.data import PassCheck, PlannedLayer, Report
from enginecast.verification.report.tables import size
from enginecast.verification.verdict import verdict_line

WORSE = 1.2
"""How many times as large an error has to be, for others move from run to run."""


@dataclass(frozen=True)
class Side:
    """A report, and what the manifest beside it says where there is one."""

    path: str
    report: Report
    manifest: Manifest | None = None
    """None: the engine was rejected."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Of the model; empty: a rejected engine of an older version does not say."""
        if self.manifest is not None:
            return self.manifest.model.fingerprint
        return {} if self.report.origin is None else self.report.origin.fingerprint

    @property
    def version(self) -> str:
        """Of enginecast; empty: likewise."""
        if self.manifest is not None:
            return self.manifest.enginecast
        return "" if self.report.origin is None else self.report.origin.enginecast

    @property
    def size(self) -> int:
        """Bytes of the engines with their weights; 0: nothing was published."""
        if self.manifest is None:
            return 0
        engines = {x for e in self.manifest.engines for x in (e.file, e.weights, e.network) if x}
        return sum(file.size for file in self.manifest.files if file.name in engines)


@dataclass(frozen=True)
class Line:
    """One fact of both sides."""

    name: str
    one: str
    other: str
    change: str = ""
    """In words: "2.1x", "-40%"; empty: there is no measure, or nothing changed."""
    is_worse: bool = False
    values: tuple[Any, Any] = (None, None)
    """For programs."""

    @property
    def differs(self) -> bool:
        return self.one != self.other


@dataclass(frozen=True)
class Comparison:
    """The differences between two engines."""

    one: Side
    other: Side
    warnings: tuple[str, ...]
    """Why some of it compares unlike things."""
    groups: Mapping[str, tuple[Line, ...]] = field(default_factory=dict)
    """Lines by heading."""

    def to_json(self) -> dict[str, Any]:
        """What `report A B --json` prints."""
        return {
            "one": self.one.path,
            "other": self.other.path,
            "same_model": same_model(self.one, self.other),
            "warnings": list(self.warnings),
            "groups": {
                heading: [
                    {
                        "name": line.name,
                        "one": line.values[0] if line.values != (None, None) else line.one,
                        "other": line.values[1] if line.values != (None, None) else line.other,
                        "differs": line.differs,
                        "worse": line.is_worse,
                    }
                    for line in lines
                ]
                for heading, lines in self.groups.items()
            },
        }


def same_model(one: Side, other: Side) -> bool | None:
    """Whether both are of the same weights and config; None: one does not say."""
    if not one.fingerprint or not other.fingerprint:
        return None
    return dict(one.fingerprint) == dict(other.fingerprint)


def compare(one: Side, other: Side) -> Comparison:
    """Compare two reports, whatever they are of."""
    reports = (one.report, other.report)
    groups = {
        "Engine": (*_identity(one, other), *_figures(one, other)),
        "Outputs": tuple(_outputs(*reports)),
        "Passes": tuple(_passes(*reports)),
        "Fusions": tuple(_fusions(*reports)),
        "Quantization": tuple(_plan(*reports)),
        "Time by op": tuple(_ops(*reports)),
        "Steps": tuple(_steps(*reports)),
        "Versions": tuple(_texts(_versions(one.report), _versions(other.report))),
    }
    shown = {name: lines for name, lines in groups.items() if lines}
    return Comparison(one, other, tuple(_warnings(one, other)), shown)


def _warnings(one: Side, other: Side) -> Iterator[str]:
    same = same_model(one, other)
    if same is None:
        yield "one of the reports does not say which model it is of: figures may be of two models"
    if same is False:
        parts = sorted(
            name
            for name in {*one.fingerprint, *other.fingerprint}
            if one.fingerprint.get(name) != other.fingerprint.get(name)
        )
        yield (
            f"these are engines of different models ({', '.join(parts)} differ): errors and times"
            " are not of the same work"
        )
    if one.report.floor_dtype != other.report.floor_dtype:
        yield (
            f"errors are in units of different floors: eager {one.report.floor_dtype} and eager"
            f" {other.report.floor_dtype}; the relative L2 errors compare"
        )
    profiles = [side.report.profile for side in (one, other)]
    shapes = [dict(profile.shapes) for profile in profiles if profile is not None]
    if len(shapes) == 2 and shapes[0] != shapes[1]:
        yield "the engines were timed at different shapes"
    if one.report.verdict.where.device != other.report.verdict.where.device:
        yield "the engines were judged on different devices"


def _identity(one: Side, other: Side) -> Iterator[Line]:
    def facts(side: Side) -> dict[str, str]:
        report = side.report
        return {
            "model": report.model,
            "fingerprint": " ".join(v[:12] for v in side.fingerprint.values()) or "-",
            "target": report.target,
            "precision": report.precision,
            "pipeline": report.pipeline or "none",
            "enginecast": side.version or "-",
            "date": report.origin.date if report.origin else "-",
            "verdict": verdict_line(report.verdict, report.floor_dtype),
        }

    became_wrong = other.report.verdict.outcome == "rejected" != one.report.verdict.outcome
    known = facts(one), facts(other)
    for name in known[0]:
        worse = became_wrong and name == "verdict"
        yield Line(name, known[0][name], known[1][name], is_worse=worse)


def _figures(one: Side, other: Side) -> Iterator[Line]:
    def pair(of: Callable[[Side], float | None]) -> tuple[float | None, float | None]:
        return of(one) or None, of(other) or None

    def in_nodes(side: Side) -> float | None:
        profile = side.report.profile
        return None if profile is None else sum(layer.microseconds for layer in profile.layers)

    yield _number("size", pair(lambda side: side.size), lambda n: size(int(n)))
    yield _number("nodes", pair(lambda side: side.report.nodes), lambda n: f"{n:,.0f}")
    yield Line("speed", one.report.speed or "-", other.report.speed or "-")
    machines = [side.report.timed.machine if side.report.timed else "-" for side in (one, other)]
    yield Line("timed on", machines[0], machines[1])
    spent = in_nodes(one), in_nodes(other)
    yield _number("time in nodes", spent, lambda us: f"{us / 1000:.2f} ms")
    export = pair(lambda side: sum(side.report.seconds.values()))
    yield _number("export", export, lambda s: f"{s:.1f} s")


def _number(
    name: str,
    pair: Sequence[float | None],
    shown: Callable[[float], str],
    *,
    judged: bool = False,
) -> Line:
    """A line of numbers of which less is better.

    Args:
        pair: of the one, and of the other.
        judged: whether more is marked as worse.
    """
    one, other = pair
    left, right = ("-" if each is None else shown(each) for each in pair)
    change = ""
    if one and other and one != other:
        change = f"{other / one:.2f}x" if 0.01 < other / one < 100 else f"{other / one:.1e}x"
    worse = judged and one is not None and other is not None and other > one * WORSE
    return Line(name, left, right, change, worse, (one, other))


def _steps(one: Report, other: Report) -> Iterator[Line]:
    for step in dict.fromkeys([*one.seconds, *other.seconds]):
        values = [report.seconds.get(step) for report in (one, other)]
        yield _number(step, values, lambda s: f"{s:.2f} s")


def _texts(
    one: Mapping[str, str], other: Mapping[str, str], worse: Set[str] = frozenset()
) -> Iterator[Line]:
    for name in dict.fromkeys([*one, *other]):
        left, right = one.get(name, "-"), other.get(name, "-")
        yield Line(name, left, right, is_worse=name in worse and left != right)


def _outputs(one: Report, other: Report) -> Iterator[Line]:
    known = [{o.name: o for o in report.verdict.outputs} for report in (one, other)]
    for name in dict.fromkeys([*known[0], *known[1]]):
        pair = [side.get(name) for side in known]
        if None in pair:
            texts = ["-" if each is None else "there" for each in pair]
            yield Line(name, texts[0], texts[1])
            continue
        # What a precision costs is not a fault: beside another one, units of its floor are judged.
        alike = one.floor_dtype == other.floor_dtype
        fields: Sequence[tuple[str, str, Callable[[float], str], bool]] = (
            ("error", "relative L2", "{:.2e}".format, alike),
            ("ratio", "error over eager's", times, True),
            ("floor", "eager's own error", "{:.2e}".format, False),
            ("cosine", "least cosine", "{:.7f}".format, False),
            ("sqnr_db", "SQNR dB", "{:.1f}".format, False),
        )
        for field_name, title, show, judged in fields:
            a, b = (getattr(each, field_name) for each in pair)
            if a is None and b is None:
                continue
            line = _number(f"{name}: {title}", (a, b), show, judged=judged)
            if field_name in ("cosine", "sqnr_db"):  # of which more is better
                line = replace(line, change="")
            elif field_name in ("error", "ratio") and b is None:
                line = replace(line, is_worse=True)
            yield line


def _passes(one: Report, other: Report) -> Iterator[Line]:
    def text(check: PassCheck) -> str:
        error = "not finite" if check.worst_error is None else f"{check.worst_error:.1e}"
        error = "equal" if check.worst_error == 0 else error
        broken = " BROKEN" if check.failure else ""
        return f"{check.rewritten} rewritten, {check.left_alone} left, {error}{broken}"

    before, after = ({check.name: text(check) for check in r.passes} for r in (one, other))
    yield from _texts(before, after, {check.name for check in other.passes if check.failure})


def _fusions(one: Report, other: Report) -> Iterator[Line]:
    left, right = (
        {f.kind: f"{f.engine} of {f.expected}" for f in report.fusions} for report in (one, other)
    )
    before = {f.kind: f.engine for f in one.fusions}
    fewer = {f.kind for f in other.fusions if f.engine < before.get(f.kind, 0)}
    yield from _texts(left, right, fewer)


def _plan(one: Report, other: Report) -> Iterator[Line]:
    plans = (one.plan, other.plan)
    if plans == (None, None):
        return
    stored = [None if p is None else float(sum(x.bytes for x in p.layers)) for p in plans]
    yield _number("bytes", stored, lambda n: size(int(n)))
    for name in ("predicted_error", "max_error"):
        values: list[float | None] = [None if p is None else getattr(p, name) for p in plans]
        yield _number(name.replace("_", " "), values, "{:.2e}".format)
    counts = []
    for plan in plans:
        found = Counter(layer.choice for layer in plan.layers) if plan is not None else {}
        counts.append(", ".join(f"{n} {choice}" for choice, n in sorted(found.items())) or "-")
    yield Line("layers", counts[0], counts[1])
    if None in plans:
        return
    layers = [{x.module or x.kind: x for x in plan.layers} for plan in plans if plan is not None]
    for module in dict.fromkeys([*layers[0], *layers[1]]):
        left, right = (_layer(side.get(module)) for side in layers)
        if left != right:
            yield Line(module, left, right)


def _layer(layer: PlannedLayer | None) -> str:
    if layer is None:
        return "-"
    if layer.choice == "keep":
        return "keep"
    error = "" if layer.error is None else f", error {layer.error:.1e}"
    return f"{layer.choice} {layer.bits} bits{error}"


def _ops(one: Report, other: Report) -> Iterator[Line]:
    if one.profile is None or other.profile is None:
        return
    sums: list[dict[str, float]] = [{}, {}]
    for found, profile in zip(sums, (one.profile, other.profile), strict=True):
        for layer in profile.layers:
            found[layer.op] = found.get(layer.op, 0.0) + layer.microseconds
    names = {*sums[0], *sums[1]}
    for op in sorted(names, key=lambda op: (-max(s.get(op, 0.0) for s in sums), op)):
        yield _number(op, [s.get(op) for s in sums], lambda us: f"{us:,.0f} µs")


def _versions(report: Report) -> dict[str, str]:
    found = dict(report.verdict.where.versions)
    if report.origin is not None:
        found |= dict(report.origin.packages)
        found |= {"python": report.origin.python, "platform": report.origin.platform}
    return found
