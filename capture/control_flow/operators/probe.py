"""Probe a piece of Python before it becomes a subgraph: what it reads, writes and returns, and
which modes are active.

A branch that becomes a subgraph takes every tensor from outside as an operand. Which ones these
are is found by running it once on fake tensors where nothing is traced.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.types import py_sym_types
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from enginecast.capture.control_flow.operators.sites import Site, running_module
from enginecast.capture.python.tensor_facts import storage, written_by
from enginecast.errors import EnginecastError
from enginecast.library_names import private

IMPURE = ("_assert_async", "_assert_scalar", "sym_constrain_range")
REDUCED = ("sum", "mean", "any", "all", "full", "zeros", "ones", "scalar_tensor", "clone")
FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")


class Probe(TorchDispatchMode):
    """Records the outside tensors that a run reads, and its effects; holds tensors so that their
    ids stay unique.

    Args:
        arguments: arguments of the run, which do not count as outside tensors.
    """

    supports_higher_order_operators = True

    def __init__(self, arguments: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.result: Any = None
        self.numbers: dict[str, SymInt] = {}
        self.written: dict[int, Tensor] = {}
        """By storage: what is written to."""
        self.impure = False
        """Whether it asserts something."""
        self.count = 0
        """Operators that ran."""
        self.simple = True
        """Whether they work on any values, element by element or on all of them."""
        self._arguments = arguments
        self._made: dict[int, Tensor] = {}
        self._taken: dict[int, Tensor] = {}
        self._symbols: set[str] = set()
        """Numbers that were read from tensors in here."""
        self._outside: set[str] = set()

    @property
    def tensors(self) -> list[Tensor]:
        """The outside tensors, in the order of their first use."""
        arguments = {id(tensor) for tensor in self._arguments}
        return [tensor for key, tensor in self._taken.items() if key not in arguments]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(getattr(func, "_schema", None), "name", func))
        if name not in FRESH:
            self.note((args, kwargs))
        if getattr(func, "_schema", None) is not None and func._schema.is_mutable:
            self.written |= {storage(each): each for each in written_by(func, args, kwargs)}
        self.impure = self.impure or any(word in name for word in IMPURE)
        self.count += 1
        self.simple = self.simple and _is_simple(func, name)
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            if id(leaf) in self._taken:
                continue
            if isinstance(leaf, Tensor):
                self._made[id(leaf)] = leaf
            for size in leaf.shape if isinstance(leaf, Tensor) else (leaf,):
                self._symbols |= _unbacked(size) - self._outside
        return result

    def note(self, tree: Any) -> None:
        """What of `tree` comes from outside."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and id(leaf) not in self._made:
                self._taken[id(leaf)] = leaf
                self._outside.update(*map(_unbacked, leaf.shape))
            elif isinstance(leaf, SymInt) and not _unbacked(leaf) & self._symbols:
                self._outside |= _unbacked(leaf)
                self.numbers.setdefault(str(leaf), leaf)


def _unbacked(size: Any) -> set[str]:
    if not isinstance(size, py_sym_types):
        return set()
    return {str(symbol) for symbol in free_unbacked_symbols(size)}


def _is_simple(func: Any, name: str) -> bool:
    """Whether an op cannot fail on data, as integer division by zero and indexing can."""
    if any(word in name for word in ("div", "remainder", "fmod")):
        return False
    return (
        torch.Tag.pointwise in getattr(func, "tags", ()) or name.removeprefix("aten::") in REDUCED
    )


def probe(site: Site, function: Callable[[], Any], arguments: Sequence[Tensor] = ()) -> Probe:
    """Run `function` on the fake tensors it reads, without a trace of it.

    Raises:
        RewriteRefused: it changed Python state besides its return value.
    """
    seen = Probe(arguments)
    before, cells = _state_now(), _cells(function)
    mode = private("torch._guards.detect_fake_mode", "a rewritten branch")()
    if mode is None:
        key = private("torch._C._TorchDispatchModeKey", "a rewritten branch").FAKE
        mode = private("torch._C._get_dispatch_mode", "a rewritten branch")(key)
    shapes = None if mode is None else mode.shape_env
    ignored = nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
    try:
        with disable_proxy_modes_tracing(), seen, ignored:
            seen.result = function()
    except EnginecastError:
        raise
    except Exception as error:  # the user's code, and whatever torch raises about it
        first = str(error).strip().split("\n")[0]
        said = f"one path of it fails: {type(error).__name__}: {first}"
        raise site.refuse(f"{said}; a check has its `raise` in the branch itself") from error
    _refuse_changes(site, before)
    for name, cell, content in cells:
        if cell.cell_contents is not content:
            cell.cell_contents = content
            raise site.refuse(f"a branch binds {name!r} of an enclosing function anew")
    seen.note(seen.result)
    return seen


@dataclass
class Operands:
    """The operands of subgraphs."""

    tensors: list[Tensor]
    numbers: list[SymInt]
    roots: list[Tensor]
    """Those of the tensors that a subgraph writes to; the new values are returned."""

    @classmethod
    def of(cls, site: Site, probes: Sequence[Probe], sizes: Sequence[Sequence[Any]]) -> "Operands":
        """The operands of subgraphs with these probes, which also create tensors of the `sizes`.

        Raises:
            RewriteRefused: a tensor that is written to has an alias.
        """
        tensors = list({id(t): t for one in probes for t in one.tensors}.values())
        numbers = {name: number for one in probes for name, number in one.numbers.items()}
        for size in (size for shape in sizes for size in shape):
            if isinstance(size, SymInt) and not free_unbacked_symbols(size):
                numbers.setdefault(str(size), size)
        written = {key for one in probes for key in one.written}
        roots = [tensor for tensor in tensors if storage(tensor) in written]
        if len({storage(tensor) for tensor in roots}) != len(roots):
            raise site.refuse("it writes into a tensor of which it reads a view from outside")
        known = {str(size) for tensor in tensors for size in tensor.shape}
        parts = {str(part): part for number in numbers.values() for part in _parts(number)}
        lifted = [number for name, number in parts.items() if name not in known]
        return cls(tensors, lifted, roots)

    def flat(self) -> tuple[Any, ...]:
        return (*self.tensors, *self.numbers)

    def bind(self, arguments: Sequence[Any]) -> None:
        """Within the block, outside tensors stand for the arguments of the traced subgraph."""
        mode = get_proxy_mode()
        written = {id(root) for root in self.roots}
        for outside, argument in zip(self.tensors, arguments, strict=False):
            inside = argument.clone() if id(outside) in written else argument
            if mode is not None and outside is not inside:
                tracer: Any = mode.tracer
                set_proxy_slot(outside, tracer, get_proxy_slot(inside, tracer))


def _parts(number: SymInt) -> list[SymInt]:
    """A number that the trace around a subgraph knows; of one that only the subgraph computes, the
    symbols that it computes it from.
    """
    mode, node = get_proxy_mode(), number.node
    tracer: Any = getattr(mode, "tracer", None)
    if tracer is None or node.expr.is_symbol or number in tracer.symnode_tracker:
        return [number]
    shapes = node.shape_env
    hints = {symbol: int(size) for symbol, size in shapes.backed_var_to_val.items()}
    symbols = sorted(node.expr.free_symbols, key=str)
    return [shapes.create_symintnode(symbol, hint=hints.get(symbol)) for symbol in symbols]


def computed(number: Any) -> Any:
    """A size that a probe found, computed anew where the trace of now does not know it."""
    if not isinstance(number, SymInt):
        return number
    parts = _parts(number)
    if any(part is number for part in parts):
        return number
    symbols = {part.node.expr: part for part in parts}
    evaluated = private("torch.utils._sympy.interp.sympy_interp", "a size of a branch")
    in_python = private(
        "torch.utils._sympy.reference.PythonReferenceAnalysis", "a size of a branch"
    )
    return evaluated(in_python, symbols, number.node.expr)


def unaliased(leaves: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`leaves` in row-major order, cloned where they have other strides, or share memory with
    `others` or each other.

    torch wants results of equal strides from both paths of a branch, and from every round of a
    loop those that the values had before it.
    """
    taken = {storage(other) for other in others if isinstance(other, Tensor)}
    is_dense = private("torch._prims_common.is_contiguous_or_false", "a rewritten branch")
    results = []
    for leaf in leaves:
        if storage(leaf) in taken or not is_dense(leaf):
            leaf = leaf.clone(memory_format=torch.contiguous_format)
        taken.add(storage(leaf))
        results.append(leaf)
    return results


def _state_now() -> list[tuple[str, dict[str, Any], dict[str, tuple[Any, int]]]]:
    """Path, attributes, and a copy of these with the length of every container among them."""
    return [
        (path, store, {name: (value, _length(value)) for name, value in store.items()})
        for path, owner in running_module().named_modules()
        for store in (vars(owner), owner._buffers, owner._parameters)
    ]


def _length(value: object) -> int:
    return len(value) if isinstance(value, list | dict | set) else 0


def _refuse_changes(
    site: Site, before: Sequence[tuple[str, dict[str, Any], dict[str, tuple[Any, int]]]]
) -> None:
    for path, store, old in before:
        for name in {**old, **store}:
            if name in old and name in store:
                value, length = old[name]
                if value is store[name] and length == _length(value):
                    continue
            if name in old:
                store[name] = old[name][0]
            else:
                del store[name]
            place = f"{path}.{name}" if path else name
            raise site.refuse(f"a branch changes the state of the module: {place}")


def _cells(function: Callable[[], Any]) -> list[tuple[str, CellType, object]]:
    """The names of enclosing functions that a function and those it calls may bind, with values."""
    found: dict[int, tuple[str, CellType, object]] = {}
    waiting: list[object] = [function]
    while waiting:
        inner = waiting.pop()
        if not isinstance(inner, FunctionType):
            continue
        for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                continue
            if id(cell) not in found:
                found[id(cell)] = name, cell, content
                waiting.append(content)
    return list(found.values())


class _Constants(TorchFunctionMode):
    """Makes tensors from Python values by operators: a subgraph with constants of its own does not
    survive `run_decompositions`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.__setitem__ and isinstance(args[2], bool | int | float):
            value = torch.full((), args[2], dtype=args[0].dtype, device=args[0].device)
            args = (*args[:2], value)
        elif func in (torch.tensor, torch.as_tensor):
            leaves = pytree.tree_leaves(args[0])
            are_numbers = all(isinstance(leaf, bool | int | float) for leaf in leaves)
            if 0 < len(leaves) <= 64 and are_numbers:
                return _filled(args[0], kwargs.get("dtype"), kwargs.get("device"))
        return func(*args, **kwargs)


def _filled(data: Any, dtype: torch.dtype | None, device: Any) -> Tensor:
    if isinstance(data, list | tuple):
        dtype = dtype or _dtype_of(data)
        return torch.stack([_filled(part, dtype, device) for part in data])
    return torch.full((), data, dtype=dtype or _dtype_of(data), device=device)


def _dtype_of(data: Any) -> torch.dtype:
    kinds = {type(leaf) for leaf in pytree.tree_leaves(data)}
    if float in kinds:
        return torch.get_default_dtype()
    return torch.int64 if int in kinds else torch.bool


def with_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run with the function modes of now: inside an operator they are not active.

    torch.export understands `x[i]` with a symbolic `i` through such a mode.
    """
    mode_stack = private("torch.overrides._get_current_function_mode_stack", "a rewritten branch")
    modes = mode_stack()

    def run(*arguments: Any) -> Any:
        active = {type(mode) for mode in mode_stack()}
        with ExitStack() as stack:
            for mode in (*modes, _Constants()):
                if type(mode) not in active:
                    stack.enter_context(mode)
            return function(*arguments)

    return run
