"""One trace: torch.export on a module without weights, and what its result lacks."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument

from enginecast.capture.control_flow.converters.restructure import user_functions
from enginecast.capture.control_flow.operators.sites import NOTHING, PYTHON, SETTLED, Site
from enginecast.capture.inputs.specs import InputSpec, named_dims, sums
from enginecast.capture.outputs.flatten import Wanted, name_outputs
from enginecast.capture.python.autocast import autocast_off
from enginecast.capture.python.locations import SourceLocation, Spot, is_model_code
from enginecast.capture.python.preserve_caches import preserving_caches
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.python.recompile import replaced
from enginecast.capture.refusals.explain import (
    REASONS,
    Refusal,
    explain,
    guards_at_model_code,
    suggestions_left_out,
)
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.weights.empty import capture_mode, fake_weights
from enginecast.capture.tracing.attempt import Attempt, RefusedError
from enginecast.capture.tracing.patches.equivalents import replaced_in
from enginecast.capture.tracing.patches.open_sizes import open_sizes
from enginecast.capture.tracing.patches.table import forward_patched, libraries_patched
from enginecast.capture.tracing.sizes.shapes import check_shapes, dynamic_shapes
from enginecast.errors import EnginecastError
from enginecast.installation import missing_requirement
from enginecast.library_names import aten, private, private_or_none
from enginecast.passes.captured.inline_autocast import InlineAutocast, regions
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.pipeline import PassRun, run_pipeline
from enginecast.passes.ir.recurrences import whole_recurrences

_LEVELS = "torch._functorch.predispatch"
"""The module of the functions that open and close levels."""
ANCHORS = "torch.fx.proxy._STACK_TRACE_ANCHORS"
WRONG_SIZES = ("model-error", "operator")
"""Kinds of refusals by which code says that sizes do not fit."""


@dataclass(frozen=True)
class Traced:
    """A program without weights."""

    program: ExportedProgram
    inputs: tuple[InputSpec, ...]
    """With the ranges that the program has."""
    attempt: Attempt
    """With the dimensions that were narrowed."""
    notes: tuple[str, ...]
    narrowed: tuple[str, ...] = ()
    """Those of the notes that tell of dimensions that were narrowed or fixed."""
    decided: frozenset[SourceLocation] = frozenset()
    """Where the trace decided by a symbolic number."""
    had_levels: bool = False
    """Whether it called vmap or jvp, which were resolved: eager runs other operators."""
    sites: Sequence[Site] = field(default=(), repr=False)
    """Where code was rewritten, and what it became."""
    runs: Sequence[PassRun] = ()
    """Of the passes that it went through."""
    autocast: tuple[str, ...] = ()
    """The model's regions of torch.autocast that cast, with dtype and line: they were off."""

    @property
    def branches(self) -> tuple[SourceLocation, ...]:
        """Branches that became operators."""
        return tuple(_place(site) for site in self.sites if site.became not in SETTLED)

    @property
    def dropping(self) -> tuple[SourceLocation, ...]:
        """Branches that drop a tensor on one path, which the program keeps on both."""
        return tuple(_place(site) for site in self.sites if site.drops)

    @property
    def settled(self) -> frozenset[Spot]:
        """Tests that stayed Python, for what they ask is known while tracing."""
        stayed = (site for site in self.sites if site.became == PYTHON)
        return frozenset((_place(site), site.column) for site in stayed)

    @property
    def idle(self) -> frozenset[SourceLocation]:
        """Lines whose branches compute nothing, as those that warn: no path is compared."""
        lines: dict[SourceLocation, set[str]] = {}
        for site in self.sites:
            lines.setdefault(_place(site), set()).add(site.became)
        return frozenset(place for place, became in lines.items() if became == {NOTHING})


def _place(site: Site) -> SourceLocation:
    return SourceLocation(site.file, site.line).resolved


def trace(source: Source, attempt: Attempt, wanted: Wanted) -> Traced:
    """Trace as `attempt` says.

    Raises:
        RefusedError: torch.export refused it.
        FrozenDimensionError: a dimension that was to vary does not.
        CaptureError: code cannot be rewritten.
    """
    specs, inputs, is_strict = attempt.specs, attempt.inputs, attempt.is_strict
    module = source.empty()
    mode = capture_mode()
    fake_weights(module, mode)
    lines = noting_lines(module)
    renamed = name_outputs(module, tuple(inputs), wanted)
    # With fake inputs a strict export keeps no guard: a branch on a size is baked without a word.
    given = dict(inputs)
    if not is_strict:  # torch derives a number of steps only from a size that is known
        known = any(dim.step > 1 for dim in named_dims(specs).values()) or None
        given = {n: mode.from_tensor(t, static_shapes=known) for n, t in inputs.items()}
    sites: list[Site] = []
    try:
        # Without no_grad the sdpa decomposition fails on symbolic shapes.
        with (
            levels_undone(),
            lines,
            libraries_patched(module),
            attempt.entered(module) as sites,
            open_sizes() if attempt.is_open else nullcontext(),
            nullcontext() if is_strict else forward_patched(module),
            preserving_caches(module),
            torch.no_grad(),
            quiet_torch(),
            guards_at_model_code(),
            suggestions_left_out(),
            whole_recurrences(),
            noting_decisions() as decided,
            autocast_off() as autocast,
        ):
            program = torch.export.export(
                module,
                (),
                given,
                dynamic_shapes=dynamic_shapes(specs),
                strict=is_strict,
                prefer_deferred_runtime_asserts_over_guards=attempt.is_proved,
            )
        if sums(specs):  # torch takes parts of two at least, and so a sum of four
            for size in [size for size in program.range_constraints if not size.is_symbol]:
                del program.range_constraints[size]
        # Give the user's inputs the names that they have in the model's code, in place:
        # torch.export writes them in lower case.
        names = tuple(inputs)
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
        # Here, because a second trace would run what is in a region, and not show it.
        passes = [InlineAutocast()] if any(regions(program)) else []
        runs = run_pipeline(passes, program, PassContext())
        traced, program = program, without_levels(program)
    except EnginecastError:
        raise
    except Exception as error:  # torch raises many kinds, and the model's own code any
        missing = missing_requirement(error, "the model's forward")
        refusal = _with_sizes(explain(error), specs)
        raise missing or RefusedError(refusal, why=_why(refusal, attempt, sites)) from error
    program.example_inputs = ((), dict(inputs))
    kept, cut = check_shapes(program, specs)
    return Traced(
        program,
        kept,
        attempt,
        notes=(*attempt.notes, *renamed, *replaced_in(module), *cut),
        narrowed=(*attempt.notes, *cut),
        decided=frozenset(decided),
        had_levels=traced is not program,
        sites=sites,
        runs=runs,
        autocast=tuple(sorted(autocast)),
    )


def _why(refusal: Refusal, attempt: Attempt, sites: Sequence[Site]) -> str:
    """Why an attempt does not help; of rewritten code also why a line was left as it is."""
    if attempt.rewrites is None:
        return refusal.in_short
    left = (
        f"{refusal.in_short}; this {site.was} was not rewritten: {site.reason}"
        for site in sites
        if site.reason and (site.file, site.line) == (refusal.file, refusal.line)
    )
    return next(left, refusal.in_full)


def _with_sizes(refusal: Refusal, specs: Sequence[InputSpec]) -> Refusal:
    """Say in which sizes the code was run when it raised an error, where the user asked for some.

    The model may take none but equal ones: the message of its error has torch's names of them.
    """
    is_asked = any(dim.asked for spec in specs for dim in spec.dims)
    if refusal.kind not in WRONG_SIZES or not is_asked:
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


@contextmanager
def noting_lines(module: nn.Module) -> Iterator[None]:
    """Have torch note lines of the user's functions too, not of those named `forward` alone."""
    anchors = private_or_none(ANCHORS)
    anchors = set() if anchors is None else anchors
    added = names_with_lines(module) - anchors
    anchors.update(added)
    try:
        yield
    finally:
        anchors.difference_update(added)


def names_with_lines(module: nn.Module) -> set[tuple[str, str]]:
    """The functions whose lines a trace's nodes have beside those of each `forward`, as file and
    name.
    """
    if private_or_none(ANCHORS) is None:  # torch 2.11
        return set()
    forwards = (getattr(part.forward, "__code__", None) for part in module.modules())
    codes = [*forwards, *(function.__code__ for function in user_functions(module))]
    return {(code.co_filename, code.co_name) for code in codes if code is not None}


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
