"""Patterns: algebra over placeholders, the attempt that got farthest, and the pass of the docs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import count, notes, outputs, program_of, reasons, relative_error, rewritten
from torch import Tensor
from torch.fx import Node

from enginecast.passes import registry
from enginecast.passes.ir.base import Pass
from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.pattern import (
    Number,
    Pattern,
    Value,
    op,
    pattern,
)

DOCS = Path(__file__).parents[2] / "docs"
sin, cos, tanh = op(aten.sin.default), op(aten.cos.default), op(aten.tanh.default)


def node_of(function: Callable[[Tensor], Any], target: object) -> Node:
    """The last call of an op in a captured function."""
    nodes: list[Node] = list(program_of(function, torch.randn(2, 5)).graph.nodes)
    return [node for node in nodes if node.target is target][-1]


@pattern
def line(x: Value, slope: Number, offset: Number) -> Pattern:
    return x * slope + offset


def test_placeholders_bind_what_stands_in_either_order() -> None:
    for function in (lambda x: x * 3 + 2, lambda x: 2 + 3 * x):
        found = line.match(node_of(function, aten.add.Tensor))
        assert found.node("x").op == "placeholder"
        assert (found.number("slope"), found.number("offset")) == (3.0, 2.0)
        assert found.root.target is aten.add.Tensor


def test_the_pass_in_the_docs_works(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "extend" / "write-a-pass.md").read_text("utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    namespace: dict[str, Any] = {"__name__": __name__}
    exec(compile(code, "write-a-pass.md", "exec"), namespace)
    cls: type[Pass] = namespace["FuseSilu"]
    monkeypatch.setattr(registry, "pass_class", lambda name: cls)
    before = program_of(lambda x: (x * x.sigmoid(), x.sigmoid().sin()), torch.randn(2, 5))
    after, sites = rewritten(before, "fuse-silu")
    assert (len(notes(sites)), count(after, "silu")) == (1, 1)
    assert reasons(sites) == ["sin.default reads the sigmoid, expected a product with its input"]
    x = torch.randn(3, 7)
    assert relative_error(outputs(after, x)[0], outputs(before, x)[0]) < 1e-6
