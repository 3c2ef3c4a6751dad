"""The functions that rewritten code calls instead of `if`, `while`, `for`, `and`, `assert` and so
on.

Everything is decided at run time: a predicate that is a plain value, or a tensor with data, stays
plain Python, and so does a condition on sizes that follows from their ranges. Only an open
predicate, on a fake tensor or a symbolic size, becomes structured control flow.
"""

import linecache
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from enginecast.capture.control_flow.operators.loops import (
    Appended,
    Count,
    State,
    loop_for,
    loop_while,
)
from enginecast.capture.control_flow.operators.probe import (
    Operands,
    computed,
    probe,
    unaliased,
    with_modes,
)
from enginecast.capture.control_flow.operators.selections import selected
from enginecast.capture.control_flow.operators.sites import (
    NOTHING,
    PYTHON,
    RewriteRefused,
    Site,
    site_of,
)
from enginecast.capture.control_flow.operators.values import (
    UNDEFINED,
    Leaf,
    as_predicate,
    common_size,
    is_open,
    reconcile,
    scalar,
    sizes,
    truth,
)
from enginecast.capture.python.raising import caught_at
from enginecast.library_names import aten, higher_order

MOST_ROUNDS = 100_000
"""Most iterations of a while loop that runs in Python; a longer one counts as endless."""
_open_sites: list[Site] = []
"""The sites of the open paths that are currently being traced."""
Body = Callable[[], Any]
Shape = tuple[Any, ...]
CHEAP = 4
"""Most operators that run on both paths rather than in a subgraph."""
FEW_PLACES = 16
"""Most elements of a mask for which a loop over true positions becomes one branch per position."""
MOST_NESTED = 8
"""Most nested predicates: every level is traced three times."""


def if_(
    place: int,
    test: Any,
    then: Callable[..., State],
    otherwise: Callable[..., State],
    state: State,
    names: Sequence[str],
) -> State:
    """Run one path, or both if `test` is open; each takes `state` and returns the values of
    `names`.
    """
    site = site_of(place)
    if not is_open(test):
        site.done(PYTHON)
        return then(*state) if test else otherwise(*state)
    paths = (
        _inside(site, lambda: then(*_copied(state))),
        _inside(site, lambda: otherwise(*_copied(state))),
    )
    try:
        _refuse_effects(site)
        result: State = _branched(site, truth(test), paths, names, state)
    except RewriteRefused as refused:
        if isinstance(test, Tensor) or free_unbacked_symbols(test):
            raise
        site.reason = f"the size is fixed by this place, since: {refused.message}"
        return then(*state) if test else otherwise(*state)
    return result


def if_return(
    place: int,
    test: Any,
    then: Callable[..., Any],
    otherwise: Callable[..., Any],
    state: State,
    name: str = "the returned value",
) -> Any:
    """The return value of a function that returns on both paths."""
    paths = (lambda *values: (then(*values),), lambda *values: (otherwise(*values),))
    [result] = if_(place, test, *paths, state, (name,))
    return result


def ternary(place: int, test: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`then() if test else otherwise()`."""
    return if_return(place, test, then, otherwise, (), "the value")


def while_(
    place: int,
    test: Callable[..., Any],
    body: Callable[..., State],
    state: State,
    names: Sequence[str],
    lists: Sequence[int] = (),
) -> State:
    """`while test(*state): state = body(*state)`."""
    site = site_of(place)
    for _ in range(MOST_ROUNDS):
        value = test(*state)
        if is_open(value):
            _refuse_effects(site)
            if lists:
                raise site.refuse(f"the list {names[lists[0]]} grows in it")
            return loop_while(site, test, _inside(site, body), state, names)
        if not value:
            site.done(PYTHON)
            return state
        state = body(*state)
    raise site.refuse(f"it has not ended after {MOST_ROUNDS} rounds")


def for_(
    place: int,
    values: Iterable[Any],
    body: Callable[..., State],
    state: State,
    names: Sequence[str],
    over: int | None = None,
    lists: Sequence[int] = (),
) -> State:
    """`for value in values: state = body(value, *state)`; ends when the value at `over` is true."""
    site = site_of(place)
    rows = values if isinstance(values, Tensor) else None
    if rows is not None and rows.dim() and isinstance(rows.shape[0], SymInt):
        values = range_(rows.shape[0])
    if isinstance(values, Count):
        _refuse_effects(site)
        state = tuple(Appended(list(v)) if i in lists else v for i, v in enumerate(state))
        is_over = None if over is None else (lambda *inner: inner[over])
        step = body if rows is None else (lambda index, *inner: body(rows[index], *inner))
        places = selected(rows) if rows is not None and over is None and not lists else None
        if places is not None and places[1] <= FEW_PLACES:
            return _for_selected(place, *places, body, state, names)
        try:
            return loop_for(site, values, _inside(site, step), state, names, is_over)
        except RewriteRefused:
            if places is None:
                raise
            return _for_selected(place, *places, body, state, names)
    for value in values:
        if over is not None and is_open(state[over]):
            go_on = (lambda *inner: inner, lambda *inner, v=value: body(v, *inner))
            state = if_(place, state[over], *go_on, state, names)
            continue
        state = body(value, *state)
        if over is not None and not is_open(state[over]) and state[over]:
            break
    site.done(PYTHON)
    return state


def _for_selected(
    place: int, mask: Tensor, count: int, body: Callable[..., State], state: State, names: Any
) -> State:
    """`for [index] in mask.nonzero(): state = body([index], *state)`."""
    for index in range(count):
        row = torch.tensor([index])  # a constant, whose number the code may read
        paths = (lambda *inner, row=row: body(row, *inner), lambda *inner: inner)
        state = if_(place, mask[index], *paths, state, names)
    return state


def assert_(place: int, test: Any, message: Callable[[], Any]) -> None:
    """`assert test, message()`; with an open tensor an assertion in the program."""
    if not _assert(site_of(place), test):
        raise AssertionError(*message())


def raise_if(place: int, test: Any, raising: Callable[..., None], state: State) -> None:
    """`if test: raising(*state)`, which raises; with an open tensor an assertion in the program."""
    if not _assert(site_of(place), not_(test)):
        raising(*state)


def _assert(site: Site, test: Any) -> bool:
    """Whether `test` holds; of an open one, the program checks that.

    Raises:
        RewriteRefused: the model goes on where it does not hold.
    """
    caught = caught_at() if is_open(test) else ""
    if caught and isinstance(test, Tensor):
        raise site.refuse(f"its error is caught at {caught}, and what follows is another path")
    if caught:
        return bool(test)
    if isinstance(test, Tensor) and is_open(test):
        site.done("_assert_async")
        code = linecache.getline(site.file, site.line).strip()  # which says what is checked
        aten._assert_async.msg(as_predicate(test), f"{code} raise" if code[-1:] == ":" else code)
    elif is_open(test):
        site.done("torch._check")
        torch._check(test)
    else:
        return bool(test)
    return True


def append(values: Any, value: Any) -> Any:
    """`values.append(value)`, which returns the list."""
    if isinstance(values, Appended):
        return values.append(value)
    values.append(value)
    return values


def into(place: int, container: Any) -> None:
    """Check a write into a container from outside of a branch, before it happens.

    Raises:
        RewriteRefused: the branch may not be taken, and the container is not a tensor.
    """
    if _open_sites and not isinstance(container, Tensor):
        kind = type(container).__name__
        raise _open_sites[-1].refuse(
            f"line {site_of(place).line} writes into a {kind} that it has from outside"
        )


def _inside(site: Site, path: Callable[..., Any]) -> Callable[..., Any]:
    """`path`, which belongs to the open `site`."""

    def run(*values: Any) -> Any:
        _open_sites.append(site)
        try:
            return path(*values)
        finally:
            _open_sites.pop()

    return run


def _refuse_effects(site: Site) -> None:
    if site.effects:
        raise site.refuse("; ".join(site.effects))


def _copied(state: State) -> State:
    """A copy with its own lists, so that a path's appends show only in its result."""
    return tuple(list(value) if type(value) is list else value for value in state)


def range_(*bounds: Any) -> Any:
    """`range(*bounds)`, or a `Count` if a bound is data or a dynamic size."""
    bounds = tuple(int_(bound) if isinstance(bound, Tensor) else bound for bound in bounds)
    if not any(isinstance(bound, SymInt) for bound in bounds):
        return range(*bounds)
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if not isinstance(step, int) or step < 1:
        return range(*bounds)
    return Count(start, (stop - start + step - 1) // step if step > 1 else stop - start, step)


def int_(value: Any) -> Any:
    """`int(value)`; a number that is read from a tensor remains symbolic."""
    if isinstance(value, Tensor) and is_open(value):
        value = scalar(value)
        return (value.trunc() if value.is_floating_point() else value).to(torch.int64).item()
    if isinstance(value, SymFloat):
        return torch.sym_int(value)
    return value if isinstance(value, SymInt) else int(value)


def float_(value: Any) -> Any:
    """`float(value)`; of an open tensor, the tensor itself in a floating dtype."""
    if isinstance(value, Tensor) and is_open(value):
        value = scalar(value)
        return value if value.is_floating_point() else value.to(torch.get_default_dtype())
    return value if isinstance(value, SymFloat) else float(value)


def bool_(value: Any) -> Any:
    """`bool(value)`; of an open value, a boolean tensor."""
    return as_predicate(value) if is_open(value) else bool(value)


def len_(value: Any) -> Any:
    """`len(value)`; for a tensor with a symbolic number of rows, that size."""
    if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], SymInt):
        return value.shape[0]
    return len(value)


def item(value: Any) -> Any:
    """`value.item()` in a predicate; of an open tensor, the tensor itself."""
    return scalar(value) if isinstance(value, Tensor) and is_open(value) else value.item()


def not_(value: Any) -> Any:
    """`not value`."""
    if not is_open(value):
        return not value
    value = truth(value)
    return torch.logical_not(value) if isinstance(value, Tensor) else torch.sym_not(value)


def and_(*parts: Callable[[], Any]) -> Any:
    """`first() and ...`; operands after an open value are always computed."""
    return _joined(parts, is_and=True)


def or_(*parts: Callable[[], Any]) -> Any:
    """`first() or ...`; operands after an open value are always computed."""
    return _joined(parts, is_and=False)


def and_value(place: int, *parts: Callable[[], Any]) -> Any:
    """`first() and ...` as a value: the first false operand, or the last."""
    return _first_of(place, parts, wanted=False)


def or_value(place: int, *parts: Callable[[], Any]) -> Any:
    """`first() or ...` as a value: the first true operand, or the last."""
    return _first_of(place, parts, wanted=True)


def _first_of(place: int, parts: Sequence[Callable[[], Any]], wanted: bool) -> Any:
    """The first value whose truth is the wanted one, or the last."""
    value = parts[0]()
    for part in parts[1:]:
        if not is_open(value):
            site_of(place).done(PYTHON)
            if bool(value) is wanted:
                return value
            value = part()
            continue
        other = part() if _is_boolean(value) else None
        if other is not None and _is_boolean(other):
            value = _both(truth(value), other, is_and=not wanted)
            continue
        known = wanted if _is_boolean(value) else value if wanted else 0
        here = partial(lambda found: found, known)
        value = ternary(place, value, *((here, part) if wanted else (part, here)))
    return value


def _is_boolean(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype == torch.bool and not value.dim()
    return isinstance(value, bool | SymBool)


def _joined(parts: Sequence[Callable[[], Any]], is_and: bool) -> Any:
    value = parts[0]()
    for part in parts[1:]:
        if is_open(value):
            value = _both(truth(value), truth(part()), is_and)
        elif bool(value) is not is_and:
            return value
        else:
            value = part()
    return value


def _both(one: Any, other: Any, is_and: bool) -> Any:
    """Both, or either; `one` is open."""
    if isinstance(other, bool):
        return one if other is is_and else other
    if isinstance(one, SymBool) and isinstance(other, SymBool):
        return one & other if is_and else one | other
    combine = torch.logical_and if is_and else torch.logical_or
    return combine(as_predicate(one), as_predicate(other))


def _branched(
    site: Site, predicate: Any, paths: tuple[Body, Body], names: Sequence[str], state: State
) -> Any:
    """The result of the path that `predicate` selects; each returns a tuple as long as `names`.

    Args:
        state: arguments of both paths.

    Raises:
        RewriteRefused: the paths return incompatible values, or have other effects.
    """
    if sum(each.was not in ("for", "while") for each in _open_sites) >= MOST_NESTED:
        raise site.refuse(f"more than {MOST_NESTED} such places are inside each other")
    probes = (probe(site, paths[0]), probe(site, paths[1]))
    kept = _kept(site, names, (probes[0].result, probes[1].result), state)
    results = _aligned(site, names, *kept)
    leaves = results.leaves
    operands = Operands.of(site, probes, sizes=[leaf.shape for leaf in leaves])
    if all(leaf.dtype is None for leaf in leaves) and not operands.roots:
        if probes[0].impure or probes[1].impure:
            raise site.refuse("a path of it asserts something and computes nothing")
        site.done(NOTHING)
        return results.whole([leaf.constant for leaf in leaves])
    # Where few operators run on values of one shape, both paths may.
    most = CHEAP if site.was in ("ternary", "and", "or") else 0
    pairs = zip(*(results.flat(one.result) for one in probes), leaves, strict=True)
    alike = all(leaf.dtype is None or sizes(one) == sizes(other) for one, other, leaf in pairs)
    is_harmless = all(one.simple and not one.impure and one.count <= most for one in probes)
    if alike and is_harmless and not operands.roots:
        predicate = as_predicate(predicate)
        both = zip(leaves, *(results.flat(path()) for path in paths), strict=True)
        chosen = [
            leaf.constant
            if leaf.dtype is None
            else _select(predicate, leaf.tensor(first), leaf.tensor(second))
            for leaf, first, second in both
        ]
        site.done("torch.where")
        return results.whole(chosen)
    if isinstance(predicate, Tensor):
        predicate = as_predicate(predicate)
    shapes = [
        _common_shape(predicate, one, other)
        for one, other in zip(*(results.tensors(each.result) for each in probes), strict=True)
    ]
    subgraphs = [_subgraph(path, results, operands, shapes) for path in paths]
    outputs = list(higher_order("cond")(predicate, subgraphs[0], subgraphs[1], operands.flat()))
    site.done("torch.cond")
    for root in reversed(operands.roots):
        root.copy_(outputs.pop())
    for index, shape in enumerate(shapes):
        if shape is not None:
            known = tuple(map(computed, shape))
            torch._check(outputs[index].shape[0] == math.prod(known))
            outputs[index] = outputs[index].view(known)
    tensors = iter(outputs)
    return results.whole(
        [each.constant if each.dtype is None else next(tensors) for each in leaves]
    )


def _kept(
    site: Site, names: Sequence[str], results: tuple[Any, Any], state: State
) -> tuple[list[Any], list[Any]]:
    """The results of two paths, where a tensor that one of them only drops (`mask = None`) stays:
    what follows is computed with it on either path, and compared with eager on both, at values of
    every size (see `enginecast.compiler.prepare.dropped_tensors`).
    """
    given = [value for value in state if isinstance(value, Tensor)]
    one, other = list(results[0]), list(results[1])
    for index, (first, second) in enumerate(zip(one, other, strict=True)):
        found = second if first is None else first if second is None else None
        if any(found is value for value in given):
            one[index] = other[index] = found
            site.drops = True
            site.done(f"{names[index]} as it was, which one path drops")
    return one, other


@dataclass(frozen=True)
class _Aligned:
    """The values of two paths, aligned."""

    leaves: list[Leaf]
    specs: list[Any]
    """The structure of each value."""

    def flat(self, values: Sequence[Any]) -> list[Any]:
        pairs = zip(values, self.specs, strict=True)
        return [leaf for value, spec in pairs for leaf in _flat(value, spec)]

    def tensors(self, values: Sequence[Any]) -> list[Tensor]:
        """The values of a path that are tensors."""
        pairs = zip(self.leaves, self.flat(values), strict=True)
        return [leaf.tensor(value) for leaf, value in pairs if leaf.dtype is not None]

    def whole(self, chosen: Sequence[Any]) -> tuple[Any, ...]:
        """The values rebuilt from their leaves."""
        left = iter(chosen)
        parts = ([next(left) for _ in range(spec.num_leaves)] for spec in self.specs)
        return tuple(map(pytree.tree_unflatten, parts, self.specs))


def _aligned(site: Site, names: Sequence[str], one: Any, other: Any) -> _Aligned:
    """Raises RewriteRefused where a value has another structure on the other path."""
    leaves, specs = [], []
    for name, first, second in zip(names, one, other, strict=True):
        spec = pytree.tree_structure(second if first is UNDEFINED else first)
        try:
            pairs = list(zip(_flat(first, spec), _flat(second, spec), strict=True))
        except ValueError as error:
            raise site.refuse(f"{name} has another structure on either path") from error
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


def _subgraph(
    path: Body, results: _Aligned, operands: Operands, shapes: Sequence[Shape | None]
) -> Callable[..., tuple[Tensor, ...]]:
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        operands.bind(arguments)
        tensors = unaliased(results.tensors(path()), [*operands.tensors, *arguments])
        flat = (
            tensor if shape is None else tensor.view(-1)
            for tensor, shape in zip(tensors, shapes, strict=True)
        )
        return (*flat, *(root.clone() for root in operands.roots))

    return with_modes(run)


def _common_shape(predicate: Any, one: Tensor, other: Tensor) -> Shape | None:
    """The shape to give the result of `cond`, whose paths then return it flat; None where cond
    itself finds one.

    torch's cond compares strides as expressions, which for sizes that vary it cannot read back from
    the sizes, and gives up on sizes that are written otherwise.
    """
    if not any(isinstance(size, SymInt) for size in (*one.shape[1:], *other.shape[1:])):
        return None
    shape = tuple(
        common_size(predicate, *pair) for pair in zip(one.shape, other.shape, strict=True)
    )
    return None if None in shape else shape


def _select(predicate: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """`torch.where`; ONNX Runtime has none for booleans."""
    if one.dtype != torch.bool:
        return torch.where(predicate, one, other)
    kept = torch.logical_and(torch.logical_not(predicate), other)
    return torch.logical_or(torch.logical_and(predicate, one), kept)
