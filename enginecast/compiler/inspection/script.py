"""A file of TorchScript: its arguments, weights and operators."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from enginecast.capture.sources.base.source import Source
from enginecast.exporters.torchscript.lower import branches, graph_ops


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
