"""What `enginecast inspect` says of a file of TorchScript: its arguments, weights and operators."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from enginecast.capture.sources.source import Source
from enginecast.cli.terminal.output import say
from enginecast.exporters.torchscript.lower import branches, graph_ops
from enginecast.verification.report.layout import print_table


@dataclass(frozen=True)
class ScriptInspection:
    """What a TorchScript module holds; nothing of it was run."""

    model: str
    inputs: tuple[str, ...]
    """Arguments of forward, each as NAME: TYPE."""
    returns: str
    """The type of the result."""
    weights: dict[str, int]
    """Elements of the parameters and buffers by dtype."""
    script_branches: int
    """Branches and loops that depend on inputs."""
    operators: dict[str, int]
    """How often each stands in the code of forward and of what it calls."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def inspect_script(source: Source) -> ScriptInspection:
    """Read the code and the weights of a script."""
    script = source.given_script()
    assert script is not None
    forward: Any = script.forward
    schema = forward.schema
    elements: Counter[str] = Counter()
    for tensor in source.weights().values():
        elements[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return ScriptInspection(
        source.name,
        tuple(f"{argument.name}: {argument.type}" for argument in schema.arguments[1:]),
        ", ".join(str(returned.type) for returned in schema.returns),
        dict(sorted(elements.items())),
        branches(script),
        graph_ops(script),
    )


def print_script(found: ScriptInspection, console: Console) -> None:
    """Print it as tables."""
    say(console, f"{found.model}: a TorchScript module, which returns {found.returns}")
    for given in found.inputs:
        say(console, f"input {given}")
    for dtype, count in found.weights.items():
        say(console, f"weights: {count:,} elements in {dtype}")
    where = "none" if not found.script_branches else str(found.script_branches)
    say(console, f"branches and loops that depend on inputs: {where}")
    rows = ((name, str(count)) for name, count in found.operators.items())
    print_table(console, ("operator", "times"), rows)
    say(
        console,
        "an export calls it as it is (--target torchscript), or converts it where it has no"
        " branches (--target onnxruntime in fp32)",
    )
