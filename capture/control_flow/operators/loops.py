"""Loops of which the number of rounds is data or a dynamic size: `while_loop` and `scan`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils import _pytree as pytree

from enginecast.capture.control_flow.operators.lists import Appended, Rows
from enginecast.capture.control_flow.operators.modes import with_modes
from enginecast.capture.control_flow.operators.probe import (
    Operands,
    Probe,
    is_symbolic,
    probe,
    unaliased,
)
from enginecast.capture.control_flow.operators.sites import RewriteRefused, Site
from enginecast.capture.control_flow.operators.values import (
    UNDEFINED,
    as_predicate,
    as_tensor,
    scalar_dtype,
    wider,
)

State = tuple[Any, ...]
Test = Callable[..., Any]
Body = Callable[..., State]


@dataclass(frozen=True)
class Count:
    """`range(start, start + count * step, step)` where a bound is data or a dynamic size."""

    start: Any
    count: Any
    step: int

    def at(self, index: SymInt) -> Any:
        return self.start + self.step * index

    def rest(self) -> "Count":
        """Without the first round."""
        return Count(self.start + self.step, self.count - 1, self.step)


@dataclass(frozen=True)
class _Carried:
    """The values of a loop: what goes from round to round, as tensors, and what never changes."""

    first: list[Tensor]
    fixed: list[Any]
    """By position: the value, or None where a tensor is carried."""
    moving: list[bool]
    spec: Any

    def state(self, tensors: Sequence[Any]) -> State:
        waiting = list(tensors)
        pairs = zip(self.fixed, self.moving, strict=True)
        leaves = [waiting.pop(0) if moves else value for value, moves in pairs]
        state = pytree.tree_unflatten(leaves, self.spec)
        assert isinstance(state, tuple)
        return state

    def tensors(self, site: Site, names: Sequence[str], state: State) -> list[Tensor]:
        leaves = _leaves(site, names, state, self.spec)
        moving = [leaf for leaf, moves in zip(leaves, self.moving, strict=True) if moves]
        pairs = zip(moving, self.first, strict=True)
        return [as_tensor(leaf, first.dtype) for leaf, first in pairs]


def loop_while(site: Site, test: Test, body: Body, state: State, names: Sequence[str]) -> State:
    """Trace `while test(*state): state = body(*state)` into `while_loop`.

    Raises:
        RewriteRefused: a value changes its shape, dtype or kind from round to round.
    """
    carried = _carry(site, body, state, names)
    probes = _probes(site, carried, [test, body])
    operands = _operands(site, probes, carried)
    if operands.roots:
        raise site.refuse("it writes into a tensor from outside the loop")
    size = len(carried.first)

    def run_test(*arguments: Any) -> Tensor:
        operands.bind(arguments[size:])
        return as_predicate(test(*carried.state(arguments[:size])))

    def run_body(*arguments: Any) -> tuple[Tensor, ...]:
        operands.bind(arguments[size:])
        inner = [argument.clone() for argument in arguments[:size]]
        outputs = carried.tensors(site, names, body(*carried.state(inner)))
        return tuple(unaliased(outputs, [*operands.tensors, *arguments, *inner]))

    first = tuple(unaliased(carried.first, operands.tensors))
    outputs = while_loop_op(with_modes(run_test), with_modes(run_body), first, operands.flat())
    site.done("while_loop")
    return carried.state(outputs)


def loop_for(
    site: Site,
    count: Count,
    body: Body,
    state: State,
    names: Sequence[str],
    is_over: Test | None = None,
) -> State:
    """Trace `for i in count: state = body(i, *state)`, which `is_over(*state)` ends early.

    Lists that only grow become one tensor with a row for each round (`scan`).
    """
    try:
        if any(isinstance(value, Appended) for value in state):
            return _scan(site, count, body, state, names, is_over)
        return _counted(site, count, body, state, names, is_over)
    except RewriteRefused:
        if not statically_known_true(count.count > 1):
            raise
    state = body(count.start, *state)  # now everything has the shape that it keeps
    state = tuple(value.settled() if isinstance(value, Appended) else value for value in state)
    return _again(site, count.rest(), body, state, names, is_over)


def _again(site: Site, count: Count, body: Body, state: State, *rest: Any) -> State:
    if any(isinstance(value, Appended) for value in state):
        return _scan(site, count, body, state, *rest)
    return _counted(site, count, body, state, *rest)


def _counted(
    site: Site, count: Count, body: Body, state: State, names: Sequence[str], is_over: Test | None
) -> State:
    def test(index: Tensor, *inner: Any) -> Any:
        goes_on = index < count.count
        if is_over is None:
            return goes_on
        return torch.logical_and(goes_on, torch.logical_not(as_predicate(is_over(*inner))))

    def step(index: Tensor, *inner: Any) -> State:
        return (index + 1, *body(count.at(_number(index, count.count)), *inner))

    first = torch.zeros((), dtype=torch.int64)
    return loop_while(site, test, step, (first, *state), ("the counter", *names))[1:]


def _scan(
    site: Site, count: Count, body: Body, state: State, names: Sequence[str], is_over: Test | None
) -> State:
    if is_over is not None:
        raise site.refuse("a list grows in it, and it may end early")

    def step(index: Tensor, *inner: Any) -> State:
        return body(count.at(_number(index, count.count)), *inner)

    lists = [place for place, value in enumerate(state) if isinstance(value, Appended)]
    index = _like(torch.zeros((), dtype=torch.int64))
    carried = _carry(site, lambda *inner: step(index, *inner), state, names)
    [seen] = _probes(site, carried, [lambda *inner: step(index, *inner)])
    operands = _operands(site, [seen], carried, index)
    if operands.roots:
        raise site.refuse("it writes into a tensor from outside the loop")
    size = len(carried.first)
    grown = [_grown(site, names[place], seen.result[place]) for place in lists]

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        operands.bind(arguments[size + 1 :])
        inner = [argument.clone() for argument in arguments[:size]]
        after = step(arguments[size], *carried.state(inner))
        rows = [row for place in lists for row in after[place].new]
        outputs = [*carried.tensors(site, names, after), *rows]
        return tuple(unaliased(outputs, [*operands.tensors, *arguments, *inner]))

    first = unaliased(carried.first, operands.tensors)
    rounds = torch.arange(count.count)
    outputs = list(scan_op(with_modes(run), first, [rounds], operands.flat()))
    site.done("scan")
    after = list(carried.state(outputs[:size]))
    stacked = outputs[size:]
    for place, each in zip(lists, grown, strict=True):
        after[place] = Rows.of(state[place].before, [stacked.pop(0) for _ in range(each)])
    return tuple(after)


def _grown(site: Site, name: str, value: Appended) -> int:
    if len(value.new) != 1 or not isinstance(value.new[0], Tensor):
        raise site.refuse(
            f"the list {name} grows by {len(value.new)} values a round, not one tensor"
        )
    return 1


def _number(index: Tensor, count: Any) -> Any:
    number = index.item()
    torch._check(number >= 0)
    if not free_unbacked_symbols(count):  # torch would conclude that a count from data is positive
        torch._check(number < count)
    return number


def _carry(site: Site, body: Body, state: State, names: Sequence[str]) -> _Carried:
    """The first values, as tensors of the dtype that the body gives them."""
    leaves, spec = pytree.tree_flatten(state)
    results = _leaves(site, names, probe(site, lambda: body(*state)).result, spec)
    first, fixed, moving = [], [], []
    labels = _labels(names, state)
    for name, value, result in zip(labels, leaves, results, strict=True):
        tensor = _first(site, name, value, result)
        moving.append(tensor is not None)
        fixed.append(None if tensor is not None else value)
        first += [] if tensor is None else [tensor]
    carried = _Carried(first, fixed, moving, spec)
    _check_stable(site, body, carried, [n for n, m in zip(labels, moving, strict=True) if m], names)
    return carried


def _first(site: Site, name: str, value: Any, result: Any) -> Tensor | None:
    if isinstance(value, Appended):
        return None
    if isinstance(value, Tensor):
        return value
    if value is UNDEFINED and isinstance(result, Tensor):
        return torch.zeros(result.shape, dtype=result.dtype)
    dtype = scalar_dtype(result if value is UNDEFINED else value)
    if dtype is None and value is result:
        return None
    if dtype is None:
        raise site.refuse(f"{name} is {value!r:.40} before the loop and something else in it")
    if isinstance(result, Tensor):
        dtype = wider(dtype, result.dtype)
        if result.dim() and not is_symbolic(value):  # a number acts like one for each element
            return torch.full(result.shape, value, dtype=dtype)
    elif (after := scalar_dtype(result)) is not None:
        dtype = wider(dtype, after)
    return as_tensor(0 if value is UNDEFINED else value, dtype)


def _check_stable(
    site: Site, body: Body, carried: _Carried, labels: Sequence[str], names: Sequence[str]
) -> None:
    [seen] = _probes(site, carried, [lambda *inner: carried.tensors(site, names, body(*inner))])
    for name, one, other in zip(labels, carried.first, seen.result, strict=True):
        if one.dtype != other.dtype:
            raise site.refuse(f"{name} is {one.dtype} before a round and {other.dtype} after it")
        if [str(size) for size in one.shape] != [str(size) for size in other.shape]:
            shapes = f"{list(one.shape)} before a round and {list(other.shape)} after it"
            raise site.refuse(f"{name} has the shape {shapes}")


def _probes(site: Site, carried: _Carried, functions: Sequence[Test]) -> list[Probe]:
    stand_ins = [_like(tensor) for tensor in carried.first]
    seen = []
    for function in functions:
        one = probe(site, lambda: function(*carried.state(stand_ins)))  # noqa: B023, called at once
        arguments = {id(tensor) for tensor in stand_ins}
        one.tensors = [tensor for tensor in one.tensors if id(tensor) not in arguments]
        one.kept.append(stand_ins)
        seen.append(one)
    return seen


def _operands(
    site: Site, probes: Sequence[Probe], carried: _Carried, *arguments: Tensor
) -> Operands:
    return Operands.of(
        site, probes, without=arguments, sizes=[tensor.shape for tensor in carried.first]
    )


def _like(tensor: Tensor) -> Tensor:
    """A fake tensor like it that nothing else holds."""
    with disable_proxy_modes_tracing():
        return torch.empty_like(tensor)


def _labels(names: Sequence[str], state: State) -> list[str]:
    return [
        name
        for name, value in zip(names, state, strict=True)
        for _ in pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)
    ]


def _leaves(site: Site, names: Sequence[str], state: State, spec: Any) -> list[Any]:
    leaves, found = pytree.tree_flatten(state)
    if found != spec:
        raise site.refuse(f"a value changes its structure from round to round ({', '.join(names)})")
    return leaves
