"""Give the whole program one compute dtype, with casts only between precision classes.

    before (captured from a checkpoint whose `wo` is fp32, the rest fp16):
        %h: f32 = aten.mul(...)
        %y: f32 = aten.linear(%h, %wo: f32)
        %norm: "expected scalar type Float but found Half", or an engine that ONNX Runtime refuses
        to load
    after unify-dtype{to=fp16}:
        %wo_f16: f16 = aten.to.dtype(%wo, f16)
        %y: f16 = aten.linear(%h: f16, %wo_f16)

Which value takes which dtype is decided in `dtype_classes`.  Every float-to-float cast of the
source is dropped and the casts that the classes need are put in.  Fill values that the target
cannot hold (-3.4e38 in fp16 is -inf, and a fully masked row then NaN) become its largest finite
value.  Integer paths stay as they are.

`residual=fp32` keeps the residual stream, its norms and what else is computed from it up to the
next linear in fp32, and the branches in the compute dtype:

    after unify-dtype{to=fp16 residual=fp32}:
        %branch: f16 = aten.linear(...)
        %branch_f32: f32 = aten.to.dtype(%branch, f32)
        %h: f32 = aten.add(%residual: f32, %branch_f32)
        %norm: f32 = ...
        %norm_f16: f16 = aten.to.dtype(%norm, f16)

Clamps that transformers puts around fp16 values (`inf_clamps`) are dropped: whether a program has
them depends on the dtype it was captured in.  Where values leave the range, the result is infinite
then, which verification sees, and not finite and wrong.

Where a model in fp32 computes in 16 bits by itself, in fp32 and fp64 each of these values is still
rounded:

    before:                              after unify-dtype{to=fp32}:
        %h: f16 = aten.to.dtype(%x, f16)     %x_f16: f16 = aten.to.dtype(%x, f16)
        %y: f16 = aten.mul(%h, 1.001)        %h: f32 = aten.to.dtype(%x_f16, f32)
                                             %y: f32 = aten.mul(%h, 1.001), rounded likewise

Must not happen, and is checked at the end: an op that reads two float dtypes, and a cast that
stands at no border (`cast_borders`).
"""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.analyses.residual_stream import residual_stream
from enginecast.passes.ir.base import Pass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.block_view import opened
from enginecast.passes.ir.blocks import (
    all_modules,
    all_nodes,
    blocks,
    is_structured,
    operands,
    set_operand,
)
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    dtype_of,
    erase_dead,
    first_input,
    is_complex,
    is_float,
    take_place,
    value,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.ir.effects import is_metadata_check
from enginecast.passes.ir.match import is_call, is_float_cast
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_classes, module_path, source_line
from enginecast.passes.ir.text import DTYPES, dtype_text
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.lower.lift_weights import lift_weights
from enginecast.passes.precision.cast_borders import check_casts, mark_border, mark_rounding
from enginecast.passes.precision.dtype_classes import (
    KEPT_HIGH,
    Class,
    classify,
    is_binding_cast,
    result_classes,
)
from enginecast.passes.precision.inf_clamps import drop_inf_clamps
from enginecast.passes.precision.out_of_range import is_beyond, is_marked, kept_in_fp32

HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class UnifyDtype(Pass):
    """Give every float op one compute dtype."""

    name: ClassVar[str] = "unify-dtype"
    promise: ClassVar[Promise] = "precision"
    covers_blocks: ClassVar[bool] = True

    to: Literal["fp16", "bf16", "fp32", "fp64"] = "fp32"
    """The compute dtype. fp64 makes the reference program that errors are measured from."""
    keep: tuple[str, ...] = ()
    """Regular expressions (re.search) on module paths: these modules compute in fp32."""
    keep_classes: tuple[str, ...] = ()
    """Class names of modules that compute in fp32, e.g. T5LayerFF."""
    residual: Literal["same", "fp32"] = "same"
    """fp32: sums of the residual stream and their norms stay in fp32; same: they are as `to`."""

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(all_nodes(program)):  # metadata asserts pin the captured dtypes
            if is_metadata_check(node):
                node.graph.erase_node(node)
        for clamp in drop_inf_clamps(program):
            log.done(clamp, "the source's inf-clamp dropped: it is there in fp16 alone")
        kept = self.kept(program)
        classes = classify(program, frozenset(kept))
        rounded = {} if DTYPES[self.to] in HALVES else self.halves(program)
        _clamp_fills(program, classes, DTYPES[self.to], log)
        _Retyper(program, classes, DTYPES[self.to], log, rounded=rounded).run()
        lift_weights(program, SiteLog(PassContext()))
        for module in all_modules(program):
            erase_dead(module.graph)
        check_one_dtype_per_op(program)
        check_casts(program)
        return log.sites

    def ensures(self, program: ExportedProgram) -> None:
        check_casts(program)

    def halves(self, program: ExportedProgram) -> dict[Node, torch.dtype]:
        """The values that stay rounded to 16 bits where it computes in more."""
        return in_halves(program)

    def kept(self, program: ExportedProgram) -> set[Node]:
        """The nodes that compute in fp32 because the options say so.

        Raises:
            PassError: an option finds nothing in this program.
        """
        kept: set[Node] = set()
        for pattern in self.keep:
            try:
                search = re.compile(pattern).search
            except re.error as error:
                raise PassError(f"keep={pattern!r} is not a regular expression: {error}") from error
            nodes = {node for node in all_nodes(program) if search(module_path(node))}
            kept |= _calls(nodes, f"keep={pattern!r}")
        for name in self.keep_classes:
            nodes = {node for node in all_nodes(program) if name in module_classes(node)}
            kept |= _calls(nodes, f"keep_classes={name!r}")
        if self.to == "fp16":
            kept |= kept_in_fp32(program)
        if self.residual == "same":
            return kept
        stream = residual_stream(program)
        if not stream:
            raise PassError(
                "residual=fp32 finds no residual sum in the program",
                hint="It is for models with a residual stream; leave it out, or keep modules in"
                " fp32 with keep and keep_classes.",
            )
        return kept | stream


def check_one_dtype_per_op(program: ExportedProgram) -> None:
    """Raise PassError, naming every op that reads floats of two dtypes."""
    mixed = []
    for node in all_nodes(program):
        if node.op != "call_function" or is_structured(node):
            continue
        found = {dtype_of(s) for s in node.all_input_nodes if is_float(s)}
        if len(found) > 1:
            names = " and ".join(sorted(dtype_text(d) for d in found if d is not None))
            place = f"{module_path(node)} {source_line(node)}".strip()
            mixed.append(f"  {node.name} reads {names} ({place})")
    if mixed:
        raise PassError("ops that mix float dtypes are left:\n" + "\n".join(mixed))


def _calls(found: set[Node], option: str) -> set[Node]:
    """The calls among what an option means; there has to be one."""
    calls = {node for node in found if node.op == "call_function"}
    if not calls:
        raise PassError(
            f"{option} matches no module of the program",
            hint="--skip-modules-pattern sets keep, --skip-modules-classes sets keep_classes."
            " Module paths look like encoder.block.0.layer.1.",
        )
    return calls


def in_halves(program: ExportedProgram, *, is_whole: bool | None = None) -> dict[Node, torch.dtype]:
    """The values that a model in fp32 computes in 16 bits by itself, each with its dtype; none of a
    program that is in 16 bits as a whole.

    Args:
        is_whole: whether it is; None: if one of its inputs or weights is.
    """
    if is_whole is None:
        weights = weight_specs(program)
        is_whole = any(
            dtype_of(node) in HALVES
            and (
                node.name not in weights or weights[node.name].kind is not InputKind.CONSTANT_TENSOR
            )
            and not all(map(is_binding_cast, node.users))
            for node in program.graph.find_nodes(op="placeholder")
        )
    rounded: dict[Node, torch.dtype] = {}
    for node in [] if is_whole else all_nodes(program):
        dtype = dtype_of(node) if node.op == "call_function" and is_float(node) else None
        moves = has(node, Trait.MOVES) and not is_float_cast(node)
        if dtype in HALVES and not moves and not is_binding_cast(node):
            rounded[node] = dtype
    return rounded


def _clamp_fills(
    program: ExportedProgram, classes: dict[Node, Class], to: torch.dtype, log: SiteLog
) -> None:
    """Bring literal fill values that the target cannot hold into its finite range, and limits of a
    divisor that it would take for zero to its smallest number.
    """
    largest, smallest = torch.finfo(to).max, torch.finfo(to).smallest_normal * torch.finfo(to).eps

    def clamp(argument: Any) -> Any:
        if isinstance(argument, float) and largest < abs(argument) < float("inf"):
            return largest if argument > 0 else -largest
        return argument

    for node in all_nodes(program):
        kind = classes.get(node, Class.ISLAND)
        # What is computed from integers keeps its literals (a rotary base of 1e6) and is clamped
        # where it meets the stream; a fill is not computed with.
        literal = has(node, Trait.FILLS if kind is Class.EXACT else Trait.LITERAL)
        if not literal or kind is Class.ISLAND or is_marked(node):
            continue
        clamps = is_call(node, aten.clamp_min.default, aten.clamp.default)
        low = node.args[1] if clamps and len(node.args) > 1 else 0.0
        if isinstance(low, float) and 0.0 < low < smallest:  # or 0 / 0 would follow
            node.args = (node.args[0], smallest, *node.args[2:])
            log.done(
                node, f"limit {low:.3g} raised to {smallest:.3g}, the smallest {dtype_text(to)}"
            )
        if has(node, Trait.FILLS):  # the only numbers among their arguments are fills
            node.args = torch.fx.node.map_aggregate(
                node.args, lambda a: float(a) if type(a) is int else a
            )
        args = torch.fx.node.map_aggregate(node.args, clamp)
        kwargs = torch.fx.node.map_aggregate(node.kwargs, clamp)
        if (args, kwargs) != (node.args, node.kwargs):
            node.args, node.kwargs = args, kwargs
            log.done(
                node, f"fill value clamped to {largest:.5g}, the largest finite {dtype_text(to)}"
            )


class _Retyper:
    """Walks a graph once: drops the casts of the source, puts in those that the classes need.

    Args:
        log: gets a site for every border and every cast of the source that changed a dtype.
        results: of a block: the dtype of each float result; None: they are as `to`.
        rounded: values that the source computes in 16 bits, and are rounded to them here, too.
    """

    def __init__(
        self,
        program: ProgramView,
        classes: dict[Node, Class],
        to: torch.dtype,
        log: SiteLog,
        results: Sequence[torch.dtype | None] | None = None,
        rounded: Mapping[Node, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self.program = program
        self.rounded = rounded
        self.results = results
        self.classes = classes
        self.low = to
        self.high = to if to is torch.float64 else torch.float32
        self.log = log
        self.casts: dict[tuple[Node, torch.dtype], Node] = {}
        self.fakes = _Fakes(shares=to is torch.float64)
        views = self.program.graph.find_nodes(op="call_function", target=aten.view.dtype)
        self.read_as_bits = {node: dtype_of(first_input(node)) for node in views}
        self.weights = weight_specs(program)
        # Casts of placeholders stand behind all placeholders, in the order in which they were
        # needed.
        self.prologue = [None, *program.graph.find_nodes(op="placeholder")][-1]

    def run(self) -> None:
        for node in list(self.program.graph.nodes):
            if node.op == "output":
                self._cast_outputs(node)
            if node.op != "call_function":
                continue
            if self.low is torch.float64:
                # The parts of complex numbers are fp64, too: matmul takes no mixture of both.
                for source in list(node.all_input_nodes):
                    if source.op == "placeholder" and dtype_of(source) is torch.complex64:
                        wide = self.cast(source, torch.complex128, node)
                        node.replace_input_with(source, wide)
                node.args, node.kwargs = torch.fx.node.map_aggregate(
                    (node.args, node.kwargs),
                    lambda a: torch.complex128 if a is torch.complex64 else a,
                )
            if is_structured(node):
                self._retype_blocks(node)
            elif is_call(node, operator.getitem):  # in whatever dtype its op gives it
                node.meta["val"] = value(first_input(node))[arguments(node)[1]]
            elif is_float_cast(node) and node not in self.rounded:
                self._drop_cast(node)
            elif node in self.read_as_bits:
                # What reads the bits of a value reads those of the dtype that the source has.
                source, dtype = first_input(node), self.read_as_bits[node]
                if dtype is not None and dtype != dtype_of(source):
                    node.update_arg(0, self.cast(source, dtype, node))
            else:
                self._retype(node)
            if node in self.rounded:
                self._round(node)

    def compute_dtype(self, node: Node) -> torch.dtype | None:
        """The dtype that a float op computes in; None where the op takes what it gets."""
        kind = self.classes.get(node)
        if kind is Class.WEIGHT:
            return self.high
        read = (self.classes.get(source) for source in node.all_input_nodes)
        kinds = {kind} if kind is not None else {each for each in read if each is not None}
        if not kinds:
            return None
        if kinds == {Class.ISLAND}:
            return torch.float32
        return self.high if kinds & KEPT_HIGH else self.low

    def _drop_cast(self, node: Node) -> None:
        """A cast's users read its source and get casts of their own where they need them."""
        source = first_input(node)
        if is_binding_cast(node) or dtype_of(source) != dtype_of(node):
            self.log.done(
                node, f"dropped {dtype_text(dtype_of(source))} -> {dtype_text(dtype_of(node))}"
            )
        raised_weight = self.classes[node] is Class.PRECISE and self.classes[source] is Class.WEIGHT
        replacement = self.cast(source, self.high, node) if raised_weight else source
        if self.classes.get(source) is Class.INPUT and {dtype_of(node), self.low} <= set(HALVES):
            replacement = self.cast(source, self.low, node)  # it is rounded before anything else
            self.classes[replacement] = self.classes[node]
        for user in list(node.users):
            user.replace_input_with(node, replacement)
        self.program.graph.erase_node(node)

    def _retype(self, node: Node) -> None:
        dtype = self.compute_dtype(node)
        if dtype is None:
            return
        for source in list(node.all_input_nodes):
            if is_float(source) and dtype_of(source) != dtype:
                node.replace_input_with(source, self.cast(source, dtype, node))
        if is_complex(node):
            node.meta["val"] = self.fakes.retyped(value(node), dtype)
        if is_float(node) and self._set_explicit_dtype(node, dtype):
            node.meta["val"] = self.fakes.retyped(value(node), dtype)

    def _set_explicit_dtype(self, node: Node, dtype: torch.dtype) -> bool:
        """Rewrite `softmax(x, -1, torch.float32)`, `full(..., dtype=torch.float32)`, `to(ids,
        torch.float32)`.

        Returns whether the op's result has that dtype now: integers divided give fp32 and cannot be
        asked for otherwise.
        """

        def replace(argument: Any) -> Any:
            if isinstance(argument, torch.dtype) and argument.is_floating_point:
                return dtype
            return argument

        node.args = torch.fx.node.map_aggregate(node.args, replace)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, replace)
        given = (*node.args, *node.kwargs.values())
        if any(is_float(n) for n in node.all_input_nodes) or any(
            isinstance(each, torch.dtype) for each in given
        ):
            return True
        schema = getattr(node.target, "_schema", None)
        if schema is None or all(a.name != "dtype" for a in schema.arguments):
            return dtype == dtype_of(node)
        node.kwargs = {**node.kwargs, "dtype": dtype}
        return True

    def _round(self, node: Node) -> None:
        """Round a value to the 16 bits that the source computes it in."""
        dtype, users = self.rounded[node], list(node.users)
        with self.program.graph.inserting_after(node):
            narrow: Node = self.program.graph.call_function(aten.to.dtype, (node, dtype))
        with self.program.graph.inserting_after(narrow):
            wide: Node = self.program.graph.call_function(aten.to.dtype, (narrow, self.low))
        for cast, held in ((narrow, dtype), (wide, self.low)):
            cast.meta["val"] = self.fakes.retyped(value(node), held)
            take_place(cast, node)
            mark_rounding(cast, dtype)
        for user in users:
            user.replace_input_with(node, wide)
        self.log.done(node, f"rounded to {dtype_text(dtype)}, as the source computes it")

    def _retype_blocks(self, node: Node) -> None:
        """Retype the graphs that a node runs: what crosses a border has one dtype there."""
        kinds = [self.classes.get(found) for found in blocks(node)[0].placeholders]
        for position, (operand, kind) in enumerate(zip(operands(node), kinds, strict=True)):
            # A weight is cast within the blocks, where it is used.
            if kind is not None and kind is not Class.WEIGHT and is_float(operand):
                set_operand(node, position, self.cast(operand, self._border_dtype(kind), node))
        results = [
            None if kind is None else self._border_dtype(kind)
            for kind in result_classes(node, self.classes)
        ]
        for block in blocks(node):
            for placeholder, operand in zip(block.placeholders, operands(node), strict=True):
                if is_float(operand):
                    kept = dtype_of(operand)
                    assert kept is not None
                    placeholder.meta["val"] = self.fakes.retyped(value(placeholder), kept)
            given = [None] if block.path == "condition" else results
            with opened(self.program, node, block) as inner:
                _Retyper(inner, self.classes, self.low, self.log, given, self.rounded).run()
        found = zip(value(node), results, strict=True)
        node.meta["val"] = tuple(v if d is None else self.fakes.retyped(v, d) for v, d in found)

    def _border_dtype(self, kind: Class) -> torch.dtype:
        return self.high if kind in KEPT_HIGH else self.low

    def _cast_outputs(self, output: Node) -> None:
        values: Any = output.args[0]
        if self.results is None:
            for source in filter(is_float, list(output.all_input_nodes)):
                if self.low is torch.float16 and is_beyond(source):
                    continue
                output.replace_input_with(source, self.cast(source, self.low, output))
        elif isinstance(values, tuple | list):  # not the condition of a loop
            found = zip(values, self.results, strict=True)
            output.args = (tuple(v if d is None else self.cast(v, d, output) for v, d in found),)

    def cast(self, source: Node, dtype: torch.dtype, user: Node) -> Node:
        """The value in another dtype: one cast for each value and dtype, right behind the value."""
        if dtype_of(source) == dtype:
            return source
        if (source, dtype) in self.casts:
            return self.casts[source, dtype]
        graph = self.program.graph
        behind = self.prologue if source.op == "placeholder" else source
        assert behind is not None
        with graph.inserting_after(behind):
            start = self._finite(source, dtype)
        with graph.inserting_after(start if start is not source else behind):
            node: Node = graph.create_node(
                "call_function",
                aten.to.dtype,
                (start, dtype),
                name=f"{source.name}_{dtype_text(dtype)}",
            )
        node.meta["val"] = value(source).to(dtype)
        if source.op == "call_function":
            take_place(node, source)
        self.casts[source, dtype] = node
        if source.op == "placeholder":
            self.prologue = node
        border = self._class_name(source)
        mark_border(node, f"{border} to {self._class_name(user)}")
        if source.name not in self.weights:
            self.log.done(node, f"border: {border} {source.name} to {dtype_text(dtype)}")
        return node

    def _class_name(self, node: Node) -> str:
        kind = self.classes.get(node)
        return kind.name.lower() if kind is not None else "value"

    def _finite(self, source: Node, dtype: torch.dtype) -> Node:
        """What may lie beyond the target's range is clamped before its cast: a lifted constant, and
        masks made of large literals, `(1 - mask) * -3.4e38`.
        """
        limit, spec, what = torch.finfo(dtype).max, self.weights.get(source.name), ""
        kind = self.classes.get(source)
        if kind is Class.EXACT and source.op == "call_function":
            if _from_large_literal(source, limit, self.classes):
                what = f"{source.name}, made of large literals,"
        elif spec is not None and kind is not Class.WEIGHT:
            tensor = weight_tensor(self.program, spec)
            finite = tensor[tensor.isfinite()].abs()
            if finite.numel() and finite.max().item() > limit:
                what = f"constant {spec.target}"
        if not what:
            return source
        node: Node = self.program.graph.create_node(
            "call_function", aten.clamp.default, (source, -limit, limit)
        )
        node.meta["val"] = value(source)
        self.log.done(node, f"{what} clamped to the finite range of {dtype_text(dtype)}")
        return node


class _Fakes:
    """Fake values in another float dtype.  No op is run, so nothing is traced again.

    Args:
        shares: make values that lie in memory alike once: equal layers have equal values, and a new
            one with symbolic sizes costs more than all else that is done to a node.  Only for a
            program that is interpreted: placeholders that share a fake value are one input to torch
            where it traces a program again.
    """

    def __init__(self, *, shares: bool) -> None:
        self._shares = shares
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def retyped(self, fake: Any, dtype: torch.dtype) -> Any:
        """With the strides that it has; `to` would give a part of a tensor strides of its own."""
        if isinstance(fake, tuple | list):
            return type(fake)(self.retyped(each, dtype) for each in fake)
        if not isinstance(fake, torch.Tensor):
            return fake
        if fake.is_complex():
            dtype = torch.complex128 if dtype is torch.float64 else torch.complex64
        elif not fake.is_floating_point():
            return fake
        if not self._shares:
            return fake.new_empty_strided(fake.shape, fake.stride(), dtype=dtype)
        sizes = (*fake.shape, *fake.stride())
        symbols = (s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes)
        key = (dtype, fake.device, fake.ndim, *symbols)
        if key not in self._made:
            made = fake.new_empty_strided(fake.shape, fake.stride(), dtype=dtype)
            self._made[key] = made
        return self._made[key]


def _from_large_literal(node: Node, limit: float, classes: Mapping[Node, Class]) -> bool:
    """Whether a finite literal beyond the limit goes into a value computed from integers."""
    seen, todo = {node}, [node]
    while todo:
        here = todo.pop()
        if has(here, Trait.BOUNDED):
            continue
        if any(isinstance(a, float) and limit < abs(a) < math.inf for a in here.args):
            return True
        sources = {s for s in here.all_input_nodes if classes.get(s) is Class.EXACT} - seen
        seen |= sources
        todo += [s for s in sources if s.op == "call_function"]
    return False
