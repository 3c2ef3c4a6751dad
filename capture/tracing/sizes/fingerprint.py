"""Fingerprint what a model computes at given sizes: equal fingerprints mean equal computations.

Eager and its program run on fake tensors, which have shapes and no values.  Each operator gives its
result a number made from its name, its arguments and the numbers of what it reads; so two outputs
with one number come from the same operators on the same inputs, whatever else was run on the way.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import FrameType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.locations import SourceLocation, calling_frames, calling_place
from enginecast.capture.python.preserve_caches import preserving_caches
from enginecast.capture.python.tensor_facts import storage, written_by
from enginecast.capture.sources.weights.empty import fake_weights
from enginecast.passes.ir.recurrences import AsOne

COPIES = frozenset({"clone", "lift_fresh", "lift_fresh_copy", "_to_copy"})
"""Give the values of their input; in memory of their own."""
ALIASES = frozenset({"alias", "detach", "contiguous"})
LIKE = {"lift_fresh_copy": "lift_fresh"}
"""Operators that are called otherwise in a program."""
RESHAPES = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "squeeze_", "unsqueeze"}
)
"""Give the values of their input in their order, in another shape."""
SELECTS = frozenset({"slice", "expand", "narrow"})
"""Give their input where the shape stays the same."""
PIECES = frozenset({"split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk"})
"""Cut their input into pieces; a trace may cut it by slices."""
KINDS = (torch.device, torch.layout, torch.memory_format)
"""Arguments that are the same for all that is compared."""
Observer = Callable[[FrameType, str, Any], None]
"""A function for `sys.setprofile`."""
DIGITS = 12
"""Of a number computed from sizes: sympy adds in another order than Python."""


@dataclass(frozen=True)
class Step:
    """An operator that ran."""

    name: str
    number: int
    place: SourceLocation | None
    """The line of model code that called it."""
    is_live: bool = True
    """Whether an output depends on it."""
    callers: tuple[SourceLocation, ...] = ()
    """The lines that a trace would note of the code that led there, in a run on real tensors."""


@dataclass(frozen=True)
class Walk:
    """A run on fake tensors."""

    steps: tuple[Step, ...]
    outputs: tuple[tuple[int, tuple[int, ...]], ...]
    """Number and shape of each."""
    writes: bool
    """Whether an operator wrote into a tensor, so that it matters which tensors share memory."""
    has_strangers: bool = False
    """Whether it read a tensor that is neither an input, nor a weight, nor was computed."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(shape for _, shape in self.outputs)

    def leaves(self, other: "Walk") -> Step | None:
        """The first step that the other walk does not have."""
        known = {step.number for step in other.steps}
        return next((step for step in self.steps if step.number not in known), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(step.name for step in self.steps)


class Numbering(TorchDispatchMode):
    """Numbers what operators compute.

    Args:
        known: numbers of tensors that were there before.
        copies_count: whether a copy is not the tensor that it copies, since something writes.
        noted: the functions whose lines a trace notes beside those of each `forward`, as file and
            name: steps keep these lines, too.
        observer: profiles the run, but for what operators do: that is most of it.
    """

    def __init__(
        self,
        known: Sequence[tuple[Tensor, str]],
        copies_count: bool,
        observer: Observer | None = None,
        noted: Collection[tuple[str, str]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noted = noted
        self.steps: list[Step] = []
        self.writes = False
        self.has_strangers = False
        self._copies_count = copies_count
        self._observer = observer
        self._kept: list[Tensor] = []  # so that no id is given twice
        self._numbers: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._made_by: dict[int, int] = {}
        self._written_by: dict[int, int] = {}
        self._views: dict[int, tuple[int, tuple[int, ...]]] = {}
        for tensor, name in known:
            self._note(tensor, hash(name))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._observer is None:
            return self._run(func, args, kwargs)
        with _profiled_by(None):
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        before = self._steps_of((args, kwargs)) | 1 << len(self.steps)
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if isinstance(func, OpOverload) else str(func)
        name = LIKE.get(name, name)
        if name == "lift_fresh":  # a number that the code has written out
            self._note(args[0], _constant(args[0]))
        if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            return result
        number = self._number(name, args, kwargs or {}, result)
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        numbers = self._pieces(args, kwargs or {}, outputs) if name in PIECES else []
        for index, output in enumerate(outputs):
            own = hash((number, index)) if index else number
            self._note(output, numbers[index] if numbers else own)
            self._made_by[id(output)] = before
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self.writes = True
            for tensor in written_by(func, args, kwargs or {}):
                self._note(tensor, number)
                self._written[storage(tensor)] = number
                self._written_by[storage(tensor)] = before
        self.steps.append(Step(name, number, calling_place(), callers=self._callers()))
        return result

    def _callers(self) -> tuple[SourceLocation, ...]:
        if self._noted is None:
            return ()
        frames = ((frame, frame.f_code) for frame in calling_frames())
        return tuple(
            SourceLocation(code.co_filename, frame.f_lineno or 0)
            for frame, code in frames
            if code.co_name == "forward" or (code.co_filename, code.co_name) in self._noted
        )

    def steps_for(self, outputs: Sequence[Tensor]) -> tuple[Step, ...]:
        """The steps, marked by whether one of `outputs` depends on them."""
        live = self._steps_of(outputs)
        return tuple(
            replace(step, is_live=bool(live >> index & 1)) for index, step in enumerate(self.steps)
        )

    def _steps_of(self, tree: Any) -> int:
        """The steps that what is in `tree` was computed by: bit n stands for step n."""
        found = 0
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor):
                found |= self._made_by.get(id(leaf), 0)
                if self._written_by:
                    found |= self._written_by.get(storage(leaf), 0)
        return found

    def of(self, tensor: Tensor) -> int:
        """The number of a tensor."""
        number = self._numbers.get(id(tensor))
        if number is None:
            self.has_strangers = True
            number = _constant(tensor)
            self._note(tensor, number)
        written = self._written.get(storage(tensor)) if self._written else None
        return number if written is None else hash((number, written))

    def _note(self, tensor: Tensor, number: int) -> None:
        self._kept.append(tensor)
        self._numbers[id(tensor)] = number

    def _number(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
        first = args[0] if args else None
        if isinstance(first, Tensor) and isinstance(result, Tensor):
            is_cast = result.dtype != first.dtype
            if name in ALIASES or (name in COPIES and not self._copies_count and not is_cast):
                return self.of(first)
            if name in SELECTS and result.shape == first.shape:
                return self.of(first)
            if name in RESHAPES:
                return self._reshaped(self.of(first), tuple(first.shape), tuple(result.shape))
        if name == "scalar_tensor":  # torch.tensor of a size, which eager writes out
            return _constant(result)
        if name == "stack" and all(self.of(part) == _constant(part) for part in args[0]):
            return _constant(result)
        if name == "slice":
            args, kwargs = [first, *_bounds(first, *args[1:], **kwargs)], {}
        parts = pytree.tree_leaves((args, dict(sorted(kwargs.items()))))
        dtypes = [str(x.dtype) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return hash((name, *map(self._part, parts), *dtypes))

    def _pieces(self, args: Any, kwargs: Mapping[str, Any], pieces: Sequence[Tensor]) -> list[int]:
        """Numbers of pieces that lie one behind the other: those of slices."""
        whole, start, numbers = args[0], 0, []
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0) % whole.ndim
        for piece in pieces:
            end = start + piece.shape[dim]
            numbers.append(self._number("slice", [whole, dim, start, end], {}, piece))
            start = end
        return numbers

    def _reshaped(self, number: int, now: tuple[int, ...], shape: tuple[int, ...]) -> int:
        base, before = self._views.get(number, (number, now))
        if before == shape:
            return base
        reshaped = hash(("view", base, shape))
        self._views[reshaped] = base, before
        return reshaped

    def _part(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.of(value)
        if isinstance(value, float):
            return float(f"{value:.{DIGITS}g}")
        return "" if isinstance(value, KINDS) else str(value)


def _constant(tensor: Tensor) -> int:
    return hash(("constant", tuple(tensor.shape), str(tensor.dtype)))


def _bounds(tensor: Any, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1) -> Any:
    """What a slice takes, however it is written: an end that is left out is a very large one."""
    if not all(isinstance(value, (int, NoneType)) for value in (start, end, step)):
        return dim, start, end, step
    return dim % tensor.ndim, *slice(start, end, step).indices(tensor.shape[dim])


@dataclass(frozen=True)
class Walker:
    """Walks eager and program at sizes of their inputs."""

    module: nn.Module
    """With fake weights, and returns tensors by name."""
    program: ExportedProgram
    specs: Sequence[InputSpec]
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    _walks: dict[Any, Walk] = field(default_factory=dict, repr=False)
    """Of eager, by sizes and by what counts: the line of a difference asks for the same again."""

    def __post_init__(self) -> None:
        fake_weights(self.module, self.mode)

    def eager(
        self,
        sizes: Mapping[str, int],
        copies_count: bool = False,
        observer: Observer | None = None,
    ) -> Walk:
        """What eager computes; raises what its code raises."""
        key = (tuple(sizes.items()), copies_count)
        if key not in self._walks:
            inputs = self._inputs(sizes)
            known = [(tensor, name) for name, tensor in (*inputs.items(), *_state(self.module))]
            numbering = Numbering(known, copies_count, observer)
            with _profiled_by(observer) if observer else nullcontext():
                self._walks[key] = self._walk(lambda: self.module(**inputs), numbering)
        return self._walks[key]

    def captured(self, sizes: Mapping[str, int], copies_count: bool = False) -> Walk:
        """What the program computes."""
        inputs = self._inputs(sizes)
        state = _state(self.module)
        first = {id(tensor): name for name, tensor in state}
        names = {name: first[id(tensor)] for name, tensor in state}
        known = []
        values = []
        nodes = {node.name: node for node in self.program.graph.nodes if node.op == "placeholder"}
        for spec in self.program.graph_signature.input_specs:
            fake = nodes[spec.arg.name].meta.get("val")
            if spec.kind == InputKind.USER_INPUT:
                value = inputs.get(spec.arg.name)
            elif isinstance(fake, Tensor):
                with self.mode:
                    value = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
            else:
                value = None
            values.append(value)
            if isinstance(value, Tensor):
                target = str(spec.target or spec.arg.name)
                known.append((value, names.get(target, target)))
        run = _Run(self.program.graph_module, self.mode)
        return self._walk(lambda: run.run(*values), Numbering(known, copies_count))

    def real(
        self,
        module: nn.Module,
        inputs: Mapping[str, Tensor],
        noted: Collection[tuple[str, str]],
    ) -> Walk:
        """What eager computes on real tensors, for which it is run once or twice."""
        known = [(tensor, name) for name, tensor in (*inputs.items(), *_state(module))]
        numbering = partial(Numbering, known, noted=noted)
        found = self._walk(lambda: module(**inputs), numbering(copies_count=False), nullcontext())
        if not found.writes:
            return found
        return self._walk(lambda: module(**inputs), numbering(copies_count=True), nullcontext())

    def _walk(
        self,
        call: Callable[[], Any],
        numbering: Numbering,
        mode: AbstractContextManager[Any] | None = None,
    ) -> Walk:
        fake = self.mode if mode is None else mode
        with torch.no_grad(), preserving_caches(self.module), fake, numbering, AsOne():
            result = call()
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        found = tuple((numbering.of(tensor), tuple(tensor.shape)) for tensor in outputs)
        return Walk(numbering.steps_for(outputs), found, numbering.writes, numbering.has_strangers)

    def _inputs(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        with self.mode:
            return {
                spec.name: torch.empty(
                    [dim.size_in(sizes) for dim in spec.dims],
                    dtype=spec.dtype,
                )
                for spec in self.specs
            }


@contextmanager
def _profiled_by(observer: Observer | None) -> Iterator[None]:
    before = sys.getprofile()
    sys.setprofile(observer)
    try:
        yield
    finally:
        sys.setprofile(before)


def _state(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers; one that is tied has several names, the first of them last."""
    parameters = module.named_parameters(remove_duplicate=False)
    return [*parameters, *module.named_buffers(remove_duplicate=False)][::-1]


class _Run(Interpreter):
    """Runs a program's graph on fake tensors."""

    def __init__(self, graph: GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(graph)
        self._mode = mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return self._mode.from_tensor(value) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(target, HigherOrderOperator) and target.name().startswith("wrap"):
            index = next(i for i, value in enumerate(args) if isinstance(value, GraphModule))
            return _Run(args[index], self._mode).run(*args[index + 1 :])
        return super().call_function(target, args, kwargs)
