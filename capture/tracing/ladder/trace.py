"""Trace a model: torch.export on a module without weights, with dimensions that may be narrowed."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from enginecast.capture.control_flow.detect import endless
from enginecast.capture.control_flow.detect.endless import Bounded
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.narrowing import Narrowed, equal, fewer, fix, in_steps, narrow, tie
from enginecast.capture.inputs.specs import InputSpec, named_dims, sums
from enginecast.capture.outputs.flatten import Wanted, name_outputs
from enginecast.capture.python.locations import SourceLocation, is_model_code
from enginecast.capture.python.preserve_caches import preserving_caches
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.python.recompile import replaced
from enginecast.capture.refusals.refusal import (
    REASONS,
    Refusal,
    explain,
    guards_at_model_code,
    missing_requirement,
    suggestions_left_out,
)
from enginecast.capture.sources.empty import capture_mode, fake_weights
from enginecast.capture.sources.source import Source
from enginecast.capture.tracing.ladder.look_alikes import FakeRuns
from enginecast.capture.tracing.ladder.shapes import (
    FrozenDimensionError,
    check_shapes,
    dynamic_shapes,
)
from enginecast.capture.tracing.ladder.strategy import RefusedError, TracingStrategy
from enginecast.capture.tracing.patches.data_attribute import data_detached
from enginecast.capture.tracing.patches.equivalents import replaced_in
from enginecast.capture.tracing.patches.failed_calls import failed_calls_left
from enginecast.capture.tracing.patches.grad_modes import grad_modes_unrecorded
from enginecast.capture.tracing.patches.module_casts import idle_casts
from enginecast.capture.tracing.patches.open_sizes import open_sizes
from enginecast.capture.tracing.patches.size_quotients import whole_quotients
from enginecast.capture.tracing.program.autocast import inline_autocast
from enginecast.errors import CaptureError, EnginecastError
from enginecast.library_names import aten, private, private_or_none
from enginecast.passes.ir.recurrences import whole_recurrences

MOST_NARROWINGS = 6
"""How often a trace is tried again with narrower dimensions; each costs as much as the first."""
SEED = 0
"""Of the example of a trace that is tried again."""


_LEVELS = "torch._functorch.predispatch"
"""The module of the functions that open and close levels."""
WRONG_SIZES = ("model-error", "operator")
"""Kinds of refusals by which code says that sizes do not fit."""


@dataclass(frozen=True)
class Traced:
    """A program without weights."""

    program: ExportedProgram
    inputs: tuple[InputSpec, ...]
    """With the ranges that the program has."""
    specs: tuple[InputSpec, ...]
    """As traced: with the dimensions that were narrowed."""
    notes: tuple[str, ...]
    narrowed: tuple[str, ...] = ()
    """Those of the notes that tell of dimensions that were narrowed or fixed."""
    decided: frozenset[SourceLocation] = frozenset()
    """Where the trace decided by a symbolic number."""
    had_levels: bool = False
    """Whether it called vmap or jvp, which were resolved: eager runs other operators."""


def trace(
    source: Source,
    specs: tuple[InputSpec, ...],
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    strategy: TracingStrategy,
) -> Traced:
    """Trace by one strategy, narrowing what nobody asked for as long as that helps.

    Raises:
        RefusedError: torch.export refused it.
        FrozenDimensionError: a dimension that the user asked for cannot vary.
    """
    notes: tuple[str, ...] = ()
    is_proved = False
    tried = 0
    if strategy.name == "rewrite" and named_dims(specs):
        # torch knows that `n > 1`, and would leave out the path of 1.
        opened = _opened(source, specs, inputs, wanted, strategy, notes)
        if opened is not None:
            return opened
    while True:
        try:
            return _once(source, specs, inputs, wanted, strategy, notes, is_proved)
        except CaptureError as error:
            if not strategy.is_strict and _is_of_sizes(error, specs):
                opened = _opened(source, specs, inputs, wanted, strategy, notes)
                if opened is not None:
                    return opened
            fitted = _fitted(source, specs, error)
            if fitted is None and isinstance(error, RefusedError):
                raise _advised(source, specs, error) from error.__cause__
            if fitted is None or tried == MOST_NARROWINGS:
                raise
            if fitted.notes and not strategy.narrows:
                raise
        tried += 1
        specs, notes = fitted.specs, (*notes, *fitted.notes)
        is_proved = is_proved or fitted.is_proved
        inputs = sample(specs, example_sizes(specs), SEED)


def _fitted(source: Source, specs: tuple[InputSpec, ...], error: CaptureError) -> Narrowed | None:
    """The inputs with dimensions that the refusal allows."""
    if isinstance(error, FrozenDimensionError):
        return tie(specs, error.names) or fix(specs, error.names)
    if isinstance(error, RefusedError) and error.refusal.kind in WRONG_SIZES:
        takes = partial(_takes, source, specs)
        found = equal(specs, takes) or in_steps(specs, takes, error.refusal.place)
        return found or fewer(specs, f"with a size that varies, {error.refusal.in_short}")
    place = error.refusal.place if isinstance(error, RefusedError) else ""
    return narrow(specs, str(error.__cause__), place)


def _takes(source: Source, specs: Sequence[InputSpec], sizes: Mapping[str, int]) -> bool:
    """Whether the model's code runs on inputs of these sizes, which have no values."""
    return FakeRuns(source).shapes(sample(specs, sizes, SEED)) is not None


def _advised(source: Source, specs: tuple[InputSpec, ...], error: RefusedError) -> RefusedError:
    """The refusal of sizes that the user asked for, with those that the code takes."""
    dims = named_dims(specs)
    if not any(dim.asked for dim in dims.values()):
        return error
    free = (replace(s, dims=tuple(replace(d, asked=False) for d in s.dims)) for s in specs)
    fitted = _fitted(source, tuple(free), error)
    found = [
        (f"{spec.name}:{index}", dim, new)
        for spec, fit in ([] if fitted is None else zip(specs, fitted.specs, strict=True))
        for index, (dim, new) in enumerate(zip(spec.dims, fit.dims, strict=True))
        if new.name is not None
    ]
    tied = {new.name for _, dim, new in found if new.name != dim.name}
    if tied:
        advice = [f"{place}={new.name}:{new.shown}" for place, _, new in found if new.name in tied]
        what = "Give sizes that must be equal one name"
    else:
        changed = (
            (place, new) for place, dim, new in found if dim.asked and new.sizes != dim.sizes
        )
        advice = [f"{place}={new.shown}" for place, new in changed]
        what = "Ask for sizes that it takes"
    if not advice:
        return error
    hint = f"{what}: --dynamic {','.join(advice)}."
    return RefusedError(replace(error.refusal, hint=hint))


def _is_of_sizes(error: CaptureError, specs: Sequence[InputSpec]) -> bool:
    """Whether a trace may have failed because torch tells sizes of 1 from others."""
    kinds = {"specialized-dimension", *WRONG_SIZES}
    is_refused = isinstance(error, RefusedError) and error.refusal.kind in kinds
    return is_refused and bool(named_dims(specs))


def _opened(
    source: Source,
    specs: tuple[InputSpec, ...],
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    strategy: TracingStrategy,
    notes: tuple[str, ...],
) -> Traced | None:
    """Trace without asking whether sizes are 1; None where that does not help."""
    opened = replace(strategy, around=(*strategy.around, open_sizes))
    for is_proved in (False, True):
        try:
            return _once(source, specs, inputs, wanted, opened, notes, is_proved)
        except CaptureError as error:
            left = narrow(specs, str(error.__cause__)) if isinstance(error, RefusedError) else None
            if left is None or not left.is_proved:
                return None
    return None


def _once(
    source: Source,
    specs: tuple[InputSpec, ...],
    inputs: Mapping[str, Tensor],
    wanted: Wanted,
    strategy: TracingStrategy,
    notes: tuple[str, ...],
    is_proved: bool,
) -> Traced:
    """Trace with these specs.

    Where the guards are proved, torch puts those it cannot prove itself into the program, where
    every case that is verified checks them again.
    """
    module = source.empty()
    mode = capture_mode()
    fake_weights(module, mode)
    forwards = noting_other_forwards(module)
    renamed = name_outputs(module, tuple(inputs), wanted)
    # With fake inputs a strict export keeps no guard: a branch on a size is baked without a word.
    given = inputs if strategy.is_strict else _fake(inputs, specs, mode)
    try:
        # Without no_grad the sdpa decomposition fails on symbolic shapes.
        with (
            Bounded(endless.LONGEST_TRACE),
            levels_undone(),
            forwards,
            strategy.entered(module),
            nullcontext() if strategy.is_strict else data_detached(module),
            nullcontext() if strategy.is_strict else grad_modes_unrecorded(module),
            preserving_caches(module),
            idle_casts(),
            failed_calls_left(),
            torch.no_grad(),
            quiet_torch(),
            guards_at_model_code(),
            suggestions_left_out(),
            whole_recurrences(),
            whole_quotients(),
            noting_decisions() as decided,
        ):
            program = torch.export.export(
                module,
                (),
                dict(given),
                dynamic_shapes=dynamic_shapes(specs),
                strict=strategy.is_strict,
                prefer_deferred_runtime_asserts_over_guards=is_proved,
            )
        if sums(specs):  # torch takes parts of two at least, and so a sum of four
            for size in [size for size in program.range_constraints if not size.is_symbol]:
                del program.range_constraints[size]
        _keep_names(program, tuple(inputs))
        inline_autocast(program)
        traced, program = program, without_levels(program)
    except EnginecastError:
        raise
    except Exception as error:  # torch raises many kinds, and the model's own code any
        missing = missing_requirement(error, "the model's forward")
        raise missing or RefusedError(_with_sizes(explain(error), specs)) from error
    has_levels = traced is not program
    program.example_inputs = ((), dict(inputs))
    kept, cut = check_shapes(program, specs)
    narrowed = (*notes, *cut)
    said = (*notes, *renamed, *replaced_in(module), *cut)
    return Traced(program, kept, specs, said, narrowed, frozenset(decided), has_levels)


def _keep_names(program: ExportedProgram, names: Sequence[str]) -> None:
    """Give the user's inputs the names that they have in the model's code, in place: torch.export
    writes them in lower case.
    """
    signature = program.graph_signature
    called = dict(zip(signature.user_inputs, names, strict=True))
    for node in program.graph.find_nodes(op="placeholder"):
        node.name = node.target = called.get(node.name, node.name)
    for spec in (*signature.input_specs, *signature.output_specs):
        is_users = spec.kind in (InputKind.USER_INPUT, OutputKind.USER_INPUT_MUTATION)
        if isinstance(spec.arg, TensorArgument):
            spec.arg.name = called.get(spec.arg.name, spec.arg.name)
        if is_users and spec.target in called:
            spec.target = called[spec.target]
    program.graph_module.recompile()


def _fake(
    inputs: Mapping[str, Tensor], specs: Sequence[InputSpec], mode: FakeTensorMode
) -> dict[str, Tensor]:
    """The inputs without values; torch derives a number of steps only from a size that is known."""
    has_steps = any(dim.step > 1 for dim in named_dims(specs).values())
    return {n: mode.from_tensor(t, static_shapes=has_steps or None) for n, t in inputs.items()}


def _with_sizes(refusal: Refusal, specs: Sequence[InputSpec]) -> Refusal:
    """Say in which sizes the code was run when it raised an error, where the user asked for some.

    The model may take none but equal ones: the message of its error has torch's names of them.
    """
    is_asked = any(dim.asked for spec in specs for dim in spec.dims)
    if refusal.kind not in ("model-error", "operator") or not is_asked:
        return refusal
    named = {
        spec.name: ", ".join(f"{d.name}={d.size}" if d.name else str(d.size) for d in spec.dims)
        for spec in specs
    }
    sizes = "; ".join(f"{name} [{dims}]" for name, dims in named.items())
    return replace(
        refusal,
        reason=f"{refusal.reason}, in sizes that it may not take: {sizes}",
        hint=REASONS["specialized-dimension"][1],
    )


@contextmanager
def noting_decisions() -> Iterator[set[SourceLocation]]:
    """Within the block, note the lines of model code that ask for the truth of a symbolic number.

    torch answers from the sizes of the trace, with a guard, or from what `torch._check` stated, or
    raises an error; so such a line has one path in the sizes that the program takes.
    """
    decided: set[SourceLocation] = set()
    plain: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def noted(self: torch.SymBool) -> bool:
        answer = plain(self)
        frame = sys._getframe(1)
        if is_model_code(frame.f_code.co_filename):
            decided.add(SourceLocation.of_frame(frame))
        return answer

    with replaced(torch.SymBool, "__bool__", noted):
        yield decided


def noting_other_forwards(module: nn.Module) -> AbstractContextManager[None]:
    """Note lines in forwards that have another name, such as lambdas, which torch passes over."""
    codes = (getattr(part.forward, "__code__", None) for part in module.modules())
    names = {(code.co_filename, code.co_name) for code in codes if code is not None}
    anchors = private_or_none("torch.fx.proxy._STACK_TRACE_ANCHORS")
    if anchors is None:  # torch 2.11 notes no lines in these
        return nullcontext()
    added = names - anchors

    @contextmanager
    def noting() -> Iterator[None]:
        anchors.update(added)
        try:
            yield
        finally:
            anchors.difference_update(added)

    return noting()


@contextmanager
def levels_undone() -> Iterator[None]:
    """Close the levels of torch.func that a trace which fails leaves open: whatever the caller runs
    afterwards would be differentiated.
    """
    depth_now = private_or_none("torch._C._functorch.get_dynamic_layer_stack_depth")
    undo_to = private_or_none("torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth")
    transforms = private_or_none("torch._functorch.eager_transforms")
    if None in (depth_now, undo_to, transforms):  # another torch has to close them itself
        yield
        return
    depth, nesting = depth_now(), transforms.JVP_NESTING
    try:
        yield
    finally:
        transforms.JVP_NESTING = nesting
        if forward_ad._current_level < 0:  # torch has one level at most, and may keep it open
            with suppress(RuntimeError):
                private("torch._C._enter_dual_level", "tracing")()
            private("torch._C._exit_dual_level", "tracing")(level=0)
        if depth_now() > depth:
            undo_to(depth)


def without_levels(program: ExportedProgram) -> ExportedProgram:
    """Return `program` itself when it has no vmap or jvp, else one without, with no op decomposed.

    A non-strict export of a model that calls vmap, as transformers does for some attention masks,
    holds calls that open and close levels of batching. They only work in the order of one whole
    run, and say nothing of the shapes between them. Tracing again resolves them into plain ops.

    The second loses the casts to a dtype that a value has already, which tell `unify-dtype` where
    the source wants fp32.
    """
    targets = {getattr(node.target, "__module__", "") for node in program.graph.nodes}
    if _LEVELS not in targets:
        return program
    with torch.no_grad(), quiet_torch():
        plain: ExportedProgram = program.run_decompositions({})
    for node in plain.graph.nodes:
        if node.target is aten.view.default:
            # It was a reshape, and holds for today's strides alone.  No op writes any more, so
            # that a copy is as good.
            node.target = aten.reshape.default
        if node.target is aten._to_copy.default and isinstance(node.args[0], int | float):
            node.target = aten.scalar_tensor.default  # vmap casts numbers
    plain.graph_module.recompile()
    return plain
