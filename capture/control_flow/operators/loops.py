"""Loops whose number of iterations depends on data or a dynamic size: `while_loop` and `scan`.

A list that grows in such a loop becomes one tensor with a row per iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.types import py_sym_types
from torch.utils import _pytree as pytree

from enginecast.capture.control_flow.operators.probe import (
    Operands,
    Probe,
    probe,
    unaliased,
    with_modes,
)
from enginecast.capture.control_flow.operators.sites import RewriteRefused, Site
from enginecast.capture.control_flow.operators.values import (
    UNDEFINED,
    as_predicate,
    as_tensor,
    scalar_dtype,
    sizes,
)
from enginecast.errors import CaptureError
from enginecast.library_names import higher_order

State = tuple[Any, ...]
Test = Callable[..., Any]
Body = Callable[..., State]
_MOVES = object()
"""Placeholder among a loop's values for one that is carried as a tensor."""


@dataclass(frozen=True)
class Count:
    """`range(start, start + count * step, step)` whose bounds are data or dynamic sizes."""

    start: Any
    count: Any
    step: int

    def at(self, index: Tensor) -> Any:
        """The value of the range in an iteration."""
        number = index.item()
        torch._check(number >= 0)
        if not free_unbacked_symbols(self.count):  # else torch would conclude that it is positive
            torch._check(number < self.count)
        return self.start + self.step * number

    def rest(self) -> "Count":
        """The range without its first value."""
        return Count(self.start + self.step, self.count - 1, self.step)


@dataclass(frozen=True)
class Appended:
    """A list while a loop that appends to it is traced."""

    before: list[Any]
    new: tuple[Any, ...] = ()
    """Values appended in the traced iteration."""

    def append(self, value: Any) -> "Appended":
        return Appended(self.before, (*self.new, value))

    def settled(self) -> "Appended":
        """The list after an iteration that ran in Python."""
        return Appended([*self.before, *self.new])


class Row:
    """All rows as one item, for torch functions that expect a list of tensors."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {"dim": 0, **(kwargs or {})}
        [row] = args[0]
        dim = args[1] if len(args) > 1 else named["dim"]
        rows: Tensor = row.rows
        if function is torch.stack:
            return rows.movedim(0, dim)
        if function in (torch.cat, torch.concat, torch.concatenate):
            dim = dim % (rows.dim() - 1)
            return rows.movedim(0, dim).flatten(dim, dim + 1)
        raise CaptureError(
            f"a list that grew in a loop over a dynamic size is given to {function.__name__}; "
            "only torch.stack and torch.cat are understood"
        )


class Rows(list[Any]):
    """The list after the loop: it can be stacked, concatenated, indexed and measured."""

    @classmethod
    def of(cls, before: Sequence[Any], rows: Tensor) -> "Rows":
        if before:
            rows = torch.cat([torch.stack(list(before)), rows])
        return cls([Row(rows)])

    @property
    def _rows(self) -> Tensor:
        row: Row = super().__getitem__(0)
        return row.rows

    def __len__(self) -> int:
        return self._rows.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    def append(self, value: Any) -> None:
        raise CaptureError("a list that grew in a loop over a dynamic size grows again afterwards")

    extend = insert = append  # type: ignore[assignment]


@dataclass(frozen=True)
class _Carried:
    """The values of a loop: those carried between iterations, as tensors, and those that never
    change.
    """

    site: Site
    names: Sequence[str]
    first: list[Tensor]
    leaves: list[Any]
    """By position: the value that never changes, or `_MOVES`."""
    spec: Any

    def state(self, tensors: Sequence[Any]) -> State:
        waiting = iter(tensors)
        leaves = [next(waiting) if leaf is _MOVES else leaf for leaf in self.leaves]
        state: State = pytree.tree_unflatten(leaves, self.spec)
        return state

    def tensors(self, state: State) -> list[Tensor]:
        leaves = _leaves(self.site, self.names, state, self.spec)
        pairs = zip(leaves, self.leaves, strict=True)
        moving = zip((leaf for leaf, known in pairs if known is _MOVES), self.first, strict=True)
        return [as_tensor(leaf, first.dtype) for leaf, first in moving]

    def probes(self, functions: Sequence[Test], *others: Tensor) -> list[Probe]:
        """Runs of functions of the state on stand-ins for it, and on `others`."""
        stand_ins = [_like(tensor) for tensor in self.first]
        arguments = [*stand_ins, *others]
        return [
            probe(self.site, lambda: function(*self.state(stand_ins)), arguments)  # noqa: B023
            for function in functions  # called at once
        ]

    def operands(self, probes: Sequence[Probe]) -> Operands:
        return Operands.of(self.site, probes, [tensor.shape for tensor in self.first])


def loop_while(site: Site, test: Test, body: Body, state: State, names: Sequence[str]) -> State:
    """Trace `while test(*state): state = body(*state)` into `while_loop`.

    A tensor from outside that an iteration writes to is carried like the state; its final value is
    written back.

    Raises:
        RewriteRefused: a value changes its shape, dtype or kind between iterations.
    """
    carried = _carry(site, body, state, names)
    operands = carried.operands(carried.probes([test, body]))
    size, roots = len(carried.first), operands.roots
    are_roots = [any(tensor is root for root in roots) for tensor in operands.tensors]

    def bind(arguments: Sequence[Any]) -> Sequence[Any]:
        """Bind the outside tensors; return the arguments that are the state."""
        written = iter(arguments[size : size + len(roots)])
        others = iter(arguments[size + len(roots) :])
        operands.bind([next(written if is_root else others) for is_root in are_roots])
        return arguments[:size]

    def run_test(*arguments: Any) -> Tensor:
        return as_predicate(test(*carried.state(bind(arguments))))

    def run_body(*arguments: Any) -> tuple[Tensor, ...]:
        inner = [argument.clone() for argument in bind(arguments)]
        outputs = carried.tensors(body(*carried.state(inner)))
        results = unaliased(outputs, [*operands.tensors, *arguments, *inner])
        return (*results, *(root.clone() for root in roots))

    first = unaliased(carried.first, operands.tensors)
    held = zip(operands.tensors, are_roots, strict=True)
    rest: tuple[Any, ...] = (
        *(tensor for tensor, is_root in held if not is_root),
        *operands.numbers,
    )
    given = (*first, *(root.clone() for root in roots))
    while_loop = higher_order("while_loop")
    outputs = list(while_loop(with_modes(run_test), with_modes(run_body), given, rest))
    for root in reversed(roots):
        root.copy_(outputs.pop())
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

    Lists that only grow become one tensor with a row per iteration (`scan`).
    """
    trace = _scan if any(isinstance(value, Appended) for value in state) else _counted
    try:
        return trace(site, count, body, state, names, is_over)
    except RewriteRefused:
        if not statically_known_true(count.count > 1):
            raise
    state = body(count.start, *state)  # now everything has the shape that it keeps
    state = tuple(value.settled() if isinstance(value, Appended) else value for value in state)
    return trace(site, count.rest(), body, state, names, is_over)


def _counted(
    site: Site, count: Count, body: Body, state: State, names: Sequence[str], is_over: Test | None
) -> State:
    def test(index: Tensor, *inner: Any) -> Any:
        goes_on = index < count.count
        if is_over is None:
            return goes_on
        return torch.logical_and(goes_on, torch.logical_not(as_predicate(is_over(*inner))))

    def step(index: Tensor, *inner: Any) -> State:
        return (index + 1, *body(count.at(index), *inner))

    first = torch.zeros((), dtype=torch.int64)
    return loop_while(site, test, step, (first, *state), ("the counter", *names))[1:]


def _scan(
    site: Site, count: Count, body: Body, state: State, names: Sequence[str], is_over: Test | None
) -> State:
    if is_over is not None:
        raise site.refuse("a list grows in it, and it may end early")
    if free_unbacked_symbols(count.count) and not statically_known_true(count.count > 0):
        raise site.refuse(
            "a list grows in it, and it may go no round; torch._check(n > 0) on the number of"
            " rounds says that it goes one"
        )
    lists = [place for place, value in enumerate(state) if isinstance(value, Appended)]
    index = _like(torch.zeros((), dtype=torch.int64))

    def step(*inner: Any) -> State:
        return body(count.at(index), *inner)

    carried = _carry(site, step, state, names)
    [seen] = carried.probes([step], index)
    operands = carried.operands([seen])
    if operands.roots:
        raise site.refuse("a list grows in it, and it writes into a tensor from outside")
    size = len(carried.first)
    for place in lists:
        new = seen.result[place].new
        if len(new) != 1 or not isinstance(new[0], Tensor):
            grown = f"{len(new)} values a round, not one tensor"
            raise site.refuse(f"the list {names[place]} grows by {grown}")
        if any(map(free_unbacked_symbols, new[0].shape)):  # a scan stacks them
            raise site.refuse(f"the list {names[place]} grows by tensors whose sizes differ")

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        operands.bind(arguments[size + 1 :])
        inner = [argument.clone() for argument in arguments[:size]]
        after = body(count.at(arguments[size]), *carried.state(inner))
        outputs = [*carried.tensors(after), *(after[place].new[0] for place in lists)]
        return tuple(unaliased(outputs, [*operands.tensors, *arguments, *inner]))

    first = unaliased(carried.first, operands.tensors)
    rounds = torch.arange(count.count)
    outputs = list(higher_order("scan")(with_modes(run), first, [rounds], operands.flat()))
    site.done("scan")
    after = list(carried.state(outputs[:size]))
    for place, rows in zip(lists, outputs[size:], strict=True):
        after[place] = Rows.of(state[place].before, rows)
    return tuple(after)


def _carry(site: Site, body: Body, state: State, names: Sequence[str]) -> _Carried:
    """The initial values, as tensors of the dtype that the body returns."""
    leaves, spec = pytree.tree_flatten(state)
    results = _leaves(site, names, probe(site, lambda: body(*state)).result, spec)
    labels = [
        name for name, value in zip(names, state, strict=True) for _ in pytree.tree_leaves(value)
    ]
    tensors = [_first(site, *each) for each in zip(labels, leaves, results, strict=True)]
    pairs = zip(leaves, tensors, strict=True)
    carried = _Carried(
        site,
        names,
        [tensor for tensor in tensors if tensor is not None],
        [leaf if tensor is None else _MOVES for leaf, tensor in pairs],
        spec,
    )
    [seen] = carried.probes([lambda *inner: carried.tensors(body(*inner))])
    moving = [label for label, tensor in zip(labels, tensors, strict=True) if tensor is not None]
    for name, one, other in zip(moving, carried.first, seen.result, strict=True):
        if one.dtype != other.dtype:
            raise site.refuse(f"{name} is {one.dtype} before a round and {other.dtype} after it")
        if sizes(one) != sizes(other):
            shapes = f"{list(one.shape)} before a round and {list(other.shape)} after it"
            raise site.refuse(f"{name} has the shape {shapes}")
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
        dtype = torch.promote_types(dtype, result.dtype)
        if result.dim() and not isinstance(
            value, py_sym_types
        ):  # a number acts like one for each element
            return torch.full(result.shape, value, dtype=dtype)
    elif (after := scalar_dtype(result)) is not None:
        dtype = torch.promote_types(dtype, after)
    return as_tensor(0 if value is UNDEFINED else value, dtype)


def _like(tensor: Tensor) -> Tensor:
    """A new fake tensor like the given one."""
    with disable_proxy_modes_tracing():
        return torch.empty_like(tensor)


def _leaves(site: Site, names: Sequence[str], state: State, spec: Any) -> list[Any]:
    leaves, found = pytree.tree_flatten(state)
    if found != spec:
        raise site.refuse(f"a value changes its structure from round to round ({', '.join(names)})")
    return leaves
