"""What the TensorRT gate finds, printed and as data."""

import io

import pytest
from rich.console import Console

from enginecast.cli.inspect.pages import print_network
from enginecast.compiler.inspection.network import NetworkCheck
from enginecast.exporters.tensorrt.gate.violations import Violation
from enginecast.runtime.bundle.manifest import ShapeRange

OPS = {"MatMul": 4, "com.microsoft::Gelu": 1, "Unique": 1}
PROFILE = (ShapeRange(name="ids", least=(1, 2), optimal=(4, 32), greatest=(8, 64)),)
FOUND = (
    Violation("operator", "node_1", "com.microsoft::Gelu", "h.0", "gpt.py:7", "one", "another"),
    Violation("range", "", "", "", "", "a range", "none"),
)


LIBRARY = "TensorRT-RTX 1.7.1.116"


def printed(violations: tuple[Violation, ...], *, parsed: bool, unknown: int = 0) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=160, markup=False, highlight=False)
    check = NetworkCheck("1.7", LIBRARY, parsed, OPS, PROFILE, violations, unknown=unknown)
    print_network(check, console)
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_a_page_shows_operators_violations_and_profile() -> None:
    assert printed(FOUND, parsed=False, unknown=3) == [
        "not every operator is one that TensorRT-RTX 1.7.1.116 takes: 2 violations, by the table of"
        " its answers; not yet run on real TensorRT by us",
        "operator n support",
        "MatMul 4 yes",
        "Unique 1 no importer",
        "com.microsoft::Gelu 1 an operator of the domain com.microsoft",
        "'node_1' (com.microsoft::Gelu, module 'h.0', gpt.py:7): expected one, got another"
        " [operator]",
        "the network: expected a range, got none [range]",
        "3 tensors are of unknown size, and not looked at for being too large",
        "input least tuned for greatest",
        "ids 1 x 2 4 x 32 8 x 64",
    ]


@pytest.mark.parametrize(
    ("violations", "parsed", "said"),
    [
        ((), True, f"{LIBRARY} parses this network; not run"),
        (FOUND[:1], True, f"{LIBRARY} does not take this network: 1 violation; not run"),
        (
            *((), False),
            f"every operator in this network is one that {LIBRARY} takes, by the table of its"
            " answers; not yet run on real TensorRT by us",
        ),
    ],
)
def test_the_first_line_says_who_answered(
    violations: tuple[Violation, ...], parsed: bool, said: str
) -> None:
    assert printed(violations, parsed=parsed)[0] == said
