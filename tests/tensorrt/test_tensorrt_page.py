"""What the TensorRT gate finds, printed and as data."""

import io

from rich.console import Console

from enginecast.cli.inspect.pages import print_network
from enginecast.compiler.inspection.network import NetworkCheck
from enginecast.exporters.tensorrt.gate.violations import Violation
from enginecast.runtime.bundle.manifest import ShapeRange

OPS = {"MatMul": 4, "RMSNormalization": 2, "Swish": 1, "com.microsoft::Gelu": 1, "Unique": 1}
PROFILE = (ShapeRange(name="ids", least=(1, 2), optimal=(4, 32), greatest=(8, 64)),)
FOUND = (
    Violation("domain", "node_1", "com.microsoft::Gelu", "h.0", "gpt.py:7", "one", "another"),
    Violation("opset", "", "", "", "", "an opset of 9 to 24", "25"),
)


def printed(violations: tuple[Violation, ...], unknown: int = 0) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=160, markup=False, highlight=False)
    print_network(NetworkCheck("10.15", OPS, PROFILE, violations, unknown), console)
    return [" ".join(line.split()) for line in file.getvalue().splitlines()]


def test_a_page_shows_operators_violations_and_profile() -> None:
    assert printed(FOUND, unknown=3) == [
        "TensorRT 10.15: the network is not one that its parser is documented to take: 2"
        " violations; not yet run on real TensorRT by us",
        "operator n support",
        "MatMul 4 yes",
        "RMSNormalization 2 since 10.15",
        "Swish 1 documented since TensorRT 11.0",
        "Unique 1 documented as not taken",
        "com.microsoft::Gelu 1 an operator of the domain com.microsoft",
        "'node_1' (com.microsoft::Gelu, module 'h.0', gpt.py:7): expected one, got another"
        " [domain]",
        "the network: expected an opset of 9 to 24, got 25 [opset]",
        "3 tensors are of unknown size, and not looked at for being too large",
        "input least tuned for greatest",
        "ids 1 x 2 4 x 32 8 x 64",
    ]
