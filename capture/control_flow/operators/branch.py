"""An `if` whose predicate is data: both ways traced into `torch.cond`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.cond import cond_op
from torch.utils import _pytree as pytree

from enginecast.capture.control_flow.operators.probe import (
    Operands,
    Probe,
    probe,
    unaliased,
    with_modes,
)
from enginecast.capture.control_flow.operators.sites import Site
from enginecast.capture.control_flow.operators.values import (
    UNDEFINED,
    Leaf,
    as_predicate,
    reconcile,
    sizes,
)

Way = Callable[[], Any]
CHEAP = 4
"""Operators that may run on both ways rather than in a subgraph."""
MOST_NESTED = 8
"""Predicates inside each other: every level is traced three times."""
_depth = [0]


def branch(site: Site, predicate: Any, ways: tuple[Way, Way], names: Sequence[str]) -> Any:
    """What the way returns that `predicate` chooses; either returns a tuple as long as `names`.

    Raises:
        RewriteRefused: what they return does not fit together, or they do more than return it.
    """
    if _depth[0] >= MOST_NESTED:
        raise site.refuse(f"more than {MOST_NESTED} such places are inside each other")
    _depth[0] += 1
    try:
        return _branch(site, predicate, ways, names)
    finally:
        _depth[0] -= 1


def _branch(site: Site, predicate: Any, ways: tuple[Way, Way], names: Sequence[str]) -> Any:
    probes = (probe(site, ways[0]), probe(site, ways[1]))
    results = _aligned(site, names, probes[0].result, probes[1].result)
    leaves = results.leaves
    operands = Operands.of(site, probes, sizes=[leaf.shape for leaf in leaves])
    if all(leaf.dtype is None for leaf in leaves) and not operands.roots:
        if probes[0].impure or probes[1].impure:
            raise site.refuse("a way of it asserts something and computes nothing")
        site.done("nothing: neither way has an effect")
        return results.whole([leaf.constant for leaf in leaves])
    if _is_cheap(site, probes, results, operands):
        return _where(site, predicate, ways, results)
    subgraphs = [_subgraph(way, results, operands) for way in ways]
    if isinstance(predicate, Tensor):
        predicate = as_predicate(predicate)
    outputs = list(cond_op(predicate, subgraphs[0], subgraphs[1], operands.flat()))
    site.done("torch.cond")
    for root in reversed(operands.roots):
        root.copy_(outputs.pop())
    chosen = [leaf.constant if leaf.dtype is None else outputs.pop(0) for leaf in leaves]
    return results.whole(chosen)


@dataclass(frozen=True)
class _Aligned:
    """The values of two ways side by side."""

    leaves: list[Leaf]
    specs: list[Any]
    """The structure of each value."""

    def flat(self, values: Sequence[Any]) -> list[Any]:
        pairs = zip(values, self.specs, strict=True)
        return [leaf for value, spec in pairs for leaf in _flat(value, spec)]

    def tensors(self, values: Sequence[Any]) -> list[Tensor]:
        """What a way returns of its values: those that are tensors."""
        pairs = zip(self.leaves, self.flat(values), strict=True)
        return [leaf.tensor(value) for leaf, value in pairs if leaf.dtype is not None]

    def whole(self, chosen: Sequence[Any]) -> tuple[Any, ...]:
        """The values from their leaves."""
        values, start = [], 0
        for spec in self.specs:
            end = start + spec.num_leaves
            values.append(pytree.tree_unflatten(list(chosen[start:end]), spec))
            start = end
        return tuple(values)


def _aligned(site: Site, names: Sequence[str], one: Any, other: Any) -> _Aligned:
    """Raises RewriteRefused where a value has another structure on the other way."""
    leaves, specs = [], []
    for name, first, second in zip(names, one, other, strict=True):
        spec = pytree.tree_structure(second if first is UNDEFINED else first)
        try:
            pairs = list(zip(_flat(first, spec), _flat(second, spec), strict=True))
        except ValueError as error:
            raise site.refuse(f"{name} has another structure on either way") from error
        leaves += [reconcile(site, name, *pair) for pair in pairs]
        specs.append(spec)
    return _Aligned(leaves, specs)


def _flat(value: Any, spec: Any) -> list[Any]:
    """The leaves of `value`; of something UNDEFINED as many as `spec` has."""
    if value is UNDEFINED:
        return [UNDEFINED] * int(spec.num_leaves)
    leaves, found = pytree.tree_flatten(value)
    if found != spec:
        raise ValueError
    return leaves


def _subgraph(way: Way, results: _Aligned, operands: Operands) -> Callable[..., tuple[Tensor, ...]]:
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        operands.bind(arguments)
        tensors = results.tensors(way())
        outputs = unaliased(tensors, [*operands.tensors, *arguments])
        return (*outputs, *(root.clone() for root in operands.roots))

    return with_modes(run)


def _is_cheap(
    site: Site, probes: tuple[Probe, Probe], results: _Aligned, operands: Operands
) -> bool:
    """Whether `torch.where` over both ways is the same: few operators and values of one shape."""
    most = CHEAP if site.was == "ternary" else 0
    if operands.roots or any(one.impure or one.count > most or not one.simple for one in probes):
        return False
    pairs = zip(*(results.flat(one.result) for one in probes), results.leaves, strict=True)
    return all(leaf.dtype is None or sizes(one) == sizes(other) for one, other, leaf in pairs)


def _select(predicate: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """`torch.where`; ONNX Runtime has none for booleans."""
    if one.dtype != torch.bool:
        return torch.where(predicate, one, other)
    kept = torch.logical_and(torch.logical_not(predicate), other)
    return torch.logical_or(torch.logical_and(predicate, one), kept)


def _where(site: Site, predicate: Any, ways: tuple[Way, Way], results: _Aligned) -> Any:
    predicate = as_predicate(predicate)
    one, other = (results.flat(way()) for way in ways)
    chosen = [
        leaf.constant
        if leaf.dtype is None
        else _select(predicate, leaf.tensor(first), leaf.tensor(second))
        for leaf, first, second in zip(results.leaves, one, other, strict=True)
    ]
    site.done("torch.where")
    return results.whole(chosen)
