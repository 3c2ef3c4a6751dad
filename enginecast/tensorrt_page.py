"""What the TensorRT gate finds, on a terminal: operators, violations, the profile."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console

from enginecast.exporters.tensorrt_operators import table as known
from enginecast.exporters.tensorrt_operators import unsupported
from enginecast.exporters.tensorrt_violations import Violation
from enginecast.runtime.manifest import ShapeRange
from enginecast.terminal import say, table

NOT_RUN = "not yet run on real TensorRT by us"


def print_gate(
    violations: Sequence[Violation],
    version: str,
    profile: Sequence[ShapeRange],
    console: Console,
    *,
    ops: Mapping[str, int] | None = None,
    unknown: int = 0,
) -> None:
    """Tables of what `check_ready` found.

    Args:
        violations: as it gave them.
        version: of TensorRT, such as "11.0".
        profile: of the inputs that vary; empty: all are fixed.
        console: where to.
        ops: how often each operator stands in the graph, "domain::Op" outside ONNX's own domain.
        unknown: of how many tensors the largest size is not known, and was not looked at.
    """
    say(console, f"TensorRT {version}: {_verdict(violations)}; {NOT_RUN}")
    if ops:
        shown = table("operator", "n", "support", whole=2)
        for name, count in sorted(ops.items()):
            shown.add_row(name, str(count), support(name, version))
        console.print(shown)
    for found in violations:
        say(console, f"  {found}")
    if unknown:
        several = "1 tensor is" if unknown == 1 else f"{unknown} tensors are"
        say(console, f"{several} of unknown size, and not looked at for being too large")
    if profile:
        shown = table("input", "least", "tuned for", "greatest", whole=4)
        for row in profile:
            shown.add_row(row.name, *map(_shape, (row.least, row.optimal, row.greatest)))
        console.print(shown)


def support(name: str, version: str) -> str:
    """What is documented of an operator, in words: "since 10.15", "not documented".

    Raises:
        UsageError: the version is none.
    """
    domain, _, op = name.rpartition("::")
    reason = unsupported(domain, op, version)
    if reason:
        return reason
    since = known().operators[op].since
    return f"since {since}" if since else "yes"


def to_json(
    violations: Sequence[Violation],
    version: str,
    profile: Sequence[ShapeRange],
    *,
    ops: Mapping[str, int] | None = None,
    unknown: int = 0,
) -> dict[str, Any]:
    """The same as data."""
    return {
        "version": version,
        "ready": not violations,
        "run": NOT_RUN,
        "operators": {
            name: {"count": count, "support": support(name, version)}
            for name, count in sorted((ops or {}).items())
        },
        "violations": [asdict(found) for found in violations],
        "unknown_sizes": unknown,
        "profile": msgspec.to_builtins(list(profile)),
    }


def _verdict(violations: Sequence[Violation]) -> str:
    if not violations:
        return "the network is one that its parser is documented to take"
    count = "1 violation" if len(violations) == 1 else f"{len(violations)} violations"
    return f"the network is not one that its parser is documented to take: {count}"


def _shape(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes)) or "scalar"
