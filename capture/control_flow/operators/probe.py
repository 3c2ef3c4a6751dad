"""Run a piece of Python on fake tensors to see what it reads, writes and returns.

A branch that becomes a subgraph takes every tensor from outside as an operand. Which ones these
are is found by running it once where nothing is traced.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    set_proxy_slot,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from enginecast.capture.control_flow.operators.sites import Site, running_module
from enginecast.errors import EnginecastError

IMPURE = ("_assert_async", "_assert_scalar", "sym_constrain_range")
REDUCED = ("sum", "mean", "any", "all", "full", "zeros", "ones", "scalar_tensor", "clone")
FRESH = ("aten::lift_fresh", "aten::lift_fresh_copy", "aten::lift")


class _Recorder(TorchDispatchMode):
    """Which tensors and symbolic numbers the operators take that they did not make themselves."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, Tensor] = {}
        self.tensors: dict[int, Tensor] = {}
        self.numbers: dict[str, SymInt] = {}
        self.written: dict[int, Tensor] = {}
        self.symbols: set[str] = set()
        """Numbers that were read from tensors in here."""
        self.outside: set[str] = set()
        self.impure = False
        self.simple = True
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(getattr(getattr(func, "_schema", None), "name", func))
        if name not in FRESH:
            self.note((args, kwargs))
        self._note_writes(func, args, kwargs)
        self.impure = self.impure or any(word in name for word in IMPURE)
        self.count += 1
        self.simple = self.simple and _is_simple(func, name)
        result = func(*args, **kwargs)
        for leaf in pytree.tree_leaves(result):
            self._note_made(leaf)
        return result

    def _note_made(self, leaf: Any) -> None:
        if isinstance(leaf, Tensor) and id(leaf) not in self.tensors:
            self.made[id(leaf)] = leaf
        sizes = leaf.shape if isinstance(leaf, Tensor) else (leaf,)
        for size in sizes if id(leaf) not in self.tensors else ():
            if is_symbolic(size):
                found = {str(symbol) for symbol in free_unbacked_symbols(size)}
                self.symbols |= found - self.outside

    def note(self, tree: Any) -> None:
        """What of `tree` comes from outside."""
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and id(leaf) not in self.made:
                self.tensors[id(leaf)] = leaf
                for size in leaf.shape:
                    self.outside |= {str(symbol) for symbol in free_unbacked_symbols(size)}
            elif isinstance(leaf, SymInt):
                symbols = {str(symbol) for symbol in free_unbacked_symbols(leaf)}
                if not symbols & self.symbols:
                    self.outside |= symbols
                    self.numbers.setdefault(str(leaf), leaf)

    def _note_writes(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        schema = getattr(func, "_schema", None)
        if schema is None or not schema.is_mutable:
            return
        for argument, value in zip(schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in pytree.tree_leaves(value):
                    self.written[storage(leaf)] = leaf
        for argument in schema.arguments:
            if argument.name in kwargs and argument.alias_info and argument.alias_info.is_write:
                self.written[storage(kwargs[argument.name])] = kwargs[argument.name]


@dataclass
class Probe:
    """What a run saw."""

    result: Any
    tensors: list[Tensor]
    """From outside, in the order of their first use."""
    numbers: dict[str, SymInt]
    written: set[int]
    """The storages that are written to."""
    impure: bool
    """Whether it asserts something."""
    count: int
    """Operators that ran."""
    simple: bool
    """Whether they work on any values, element by element or on all of them."""
    kept: list[Any] = field(default_factory=list)
    """Keeps what is known by its id alive."""


def _is_simple(func: Any, name: str) -> bool:
    """Integer division by zero is an error, and so is an index that is too large."""
    if any(word in name for word in ("div", "remainder", "fmod")):
        return False
    return (
        torch.Tag.pointwise in getattr(func, "tags", ()) or name.removeprefix("aten::") in REDUCED
    )


def storage(tensor: Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


def probe(site: Site, function: Callable[[], Any]) -> Probe:
    """Run `function` on the fake tensors it reads, without a trace of it.

    Raises:
        RewriteRefused: it changed something in Python besides what it returns.
    """
    recorder = _Recorder()
    before = state_now()
    shapes = _shape_env()
    ignored = nullcontext() if shapes is None else shapes.ignore_fresh_unbacked_symbols()
    try:
        with disable_proxy_modes_tracing(), recorder, ignored:
            result = function()
    except EnginecastError:
        raise
    except Exception as error:  # the user's code, and whatever torch raises about it
        first = str(error).strip().split("\n")[0]
        raise site.refuse(f"one way of it fails: {type(error).__name__}: {first}") from error
    refuse_changes(site, before)
    recorder.note(pytree.tree_leaves(result))
    tensors = [tensor for key, tensor in recorder.tensors.items() if key not in recorder.made]
    outside = {storage(tensor) for tensor in tensors}
    return Probe(
        result=result,
        tensors=tensors,
        numbers=recorder.numbers,
        written={key for key in recorder.written if key in outside},
        impure=recorder.impure,
        count=recorder.count,
        simple=recorder.simple,
        kept=[*recorder.made.values()],
    )


@dataclass
class Operands:
    """What subgraphs take from outside."""

    tensors: list[Tensor]
    numbers: list[SymInt]
    roots: list[Tensor]
    """Those of the tensors that a subgraph writes to; the new values are returned."""

    @classmethod
    def of(
        cls,
        site: Site,
        probes: Sequence[Probe],
        without: Sequence[Tensor] = (),
        sizes: Sequence[Sequence[Any]] = (),
    ) -> "Operands":
        """The operands of subgraphs that do what the probes saw, `without` their own arguments.

        They may make tensors of the shapes `sizes`.

        Raises:
            RewriteRefused: a tensor that is written to is known by two names.
        """
        arguments = {id(tensor) for tensor in without}
        tensors = {id(t): t for one in probes for t in one.tensors if id(t) not in arguments}
        numbers = {name: number for one in probes for name, number in one.numbers.items()}
        for size in (size for shape in sizes for size in shape):
            if isinstance(size, SymInt) and not free_unbacked_symbols(size):
                numbers.setdefault(str(size), size)
        written = {key for one in probes for key in one.written}
        roots = [tensor for tensor in tensors.values() if storage(tensor) in written]
        if len({storage(tensor) for tensor in roots}) != len(roots):
            raise site.refuse("it writes into a tensor of which it reads a view from outside")
        return cls(list(tensors.values()), _lifted(numbers, tensors.values()), roots)

    def flat(self) -> tuple[Any, ...]:
        return (*self.tensors, *self.numbers)

    def bind(self, arguments: Sequence[Any]) -> None:
        """Let the tensors from outside stand for the arguments of the subgraph being traced."""
        written = {id(root) for root in self.roots}
        for outside, argument in zip(self.tensors, arguments, strict=False):
            same(outside, argument.clone() if id(outside) in written else argument)


def same(outside: Tensor, inside: Tensor) -> None:
    """Let `outside` mean `inside` in the graph that is being traced."""
    mode = get_proxy_mode()
    if mode is None or outside is inside:
        return
    tracer: Any = mode.tracer
    set_proxy_slot(outside, tracer, get_proxy_slot(inside, tracer))


def unaliased(leaves: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`leaves`, cloned where they share memory with `others` or each other."""
    taken = {storage(other) for other in others if isinstance(other, Tensor)}
    results = []
    for leaf in leaves:
        if storage(leaf) in taken:
            leaf = leaf.clone()
        taken.add(storage(leaf))
        results.append(leaf)
    return results


def is_symbolic(value: object) -> bool:
    return isinstance(value, SymInt | SymFloat | SymBool)


def _lifted(numbers: Mapping[str, SymInt], tensors: Any) -> list[SymInt]:
    """Those that are no size of an operand anyhow."""
    sizes = {str(size) for tensor in tensors for size in tensor.shape}
    return [number for name, number in numbers.items() if name not in sizes]


def _shape_env() -> Any:
    mode = detect_fake_mode()
    mode = mode or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    return None if mode is None else mode.shape_env


def state_now() -> dict[tuple[str, str], Any]:
    """Every attribute of every module, and the length of every container among them."""
    module = running_module()
    state: dict[tuple[str, str], Any] = {}
    for path, owner in module.named_modules() if module is not None else ():
        for store in (vars(owner), owner._buffers, owner._parameters):
            for name, value in store.items():
                size = len(value) if isinstance(value, list | dict | set) else 0
                state[path, str(name)] = (value, size)
    return state


def refuse_changes(site: Site, before: Mapping[tuple[str, str], Any]) -> None:
    after = state_now()
    for key in {**before, **after}:
        old, new = before.get(key), after.get(key)
        if old is None or new is None or old[0] is not new[0] or old[1] != new[1]:
            path, name = key
            _put_back(path, name, old)
            raise site.refuse(f"a branch changes the state of the module: {_dotted(path, name)}")


def _put_back(path: str, name: str, old: Any) -> None:
    module = running_module()
    assert module is not None
    owner = module.get_submodule(path)
    for store in (owner._buffers, owner._parameters, vars(owner)):
        if name in store:
            if old is None:
                store.pop(name)
            else:
                store[name] = old[0]
            return


def _dotted(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
