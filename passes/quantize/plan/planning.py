"""Make a plan: for each layer a form in which it is quantized, or the reason why it is kept.

What may be quantized at all is decided by architecture, skips and sizes; which of several forms a
layer takes, by errors measured on the calibration inputs (`sensitivity`) and by `search`.
"""

import dataclasses
import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from msgspec.structs import replace
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext, Promise, Site
from enginecast.passes.ir.edit import (
    first_input,
    value,
    weight_expressions,
    weight_specs,
)
from enginecast.passes.ir.quantization_plan import (
    LayerPlan,
    QuantizationPlan,
    Scaling,
    attach_plan,
)
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.ir.source import module_classes
from enginecast.passes.ir.text import dtype_text
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.quantize.measure.calibration import (
    BEYOND,
    check_calibration,
    masks_of,
    row_errors,
)
from enginecast.passes.quantize.measure.given_scales import given_scale
from enginecast.passes.quantize.measure.quantizable import (
    RECURRENT,
    Layer,
    feeds_convolution,
    find_layers,
    products_as_linears,
    tail_of,
    transposed_geometry_of,
)
from enginecast.passes.quantize.measure.simulate import simulate
from enginecast.passes.quantize.plan.architectures import architecture, require, tensorrt_column
from enginecast.passes.quantize.plan.check import check_plan
from enginecast.passes.quantize.plan.declared import OVERRIDE, declared_reason
from enginecast.passes.quantize.plan.forms import forms, multiplies_convs, native_scales, planned
from enginecast.passes.quantize.plan.options import BEFORE, PlanOptions, QuantizingPass
from enginecast.passes.quantize.plan.scaled_mm_rules import fp8_dtype
from enginecast.passes.quantize.plan.search import Found, Option, search
from enginecast.passes.quantize.plan.sensitivity import Reading, Sensitivity, measure, measure_alone

MAX_ERROR = {
    ("fp8", "w8a8", 8): 0.30,
    ("fp8", "storage", 8): 0.20,
    ("fp8", "storage", 4): 0.45,
    ("int8", "w8a8", 8): 0.10,
    ("int8", "storage", 8): 0.10,
    ("int8", "storage", 4): 0.45,
}
"""By format, mode and bits."""
MARGIN = 0.85
"""Part of `max_error` that a simulation may use up: an engine rounds other values up."""
LARGEST_ROW = 0.45
"""Error of a row that no plan may have, whatever was asked for: half of what verification lets
pass."""


@dataclass(frozen=True)
class PlanPass(QuantizingPass):
    """Decide which layers are quantized, and how; a site is a layer that the plan quantizes.

    Every output keeps every bit: all that changes is that products with a weight are spelled as
    linears.
    """

    promise: ClassVar[Promise] = "exact"
    after: ClassVar[frozenset[str]] = BEFORE

    min_gain: float | None = None
    skip_modules: tuple[str, ...] = ()
    include_modules: tuple[str, ...] = ()
    heads: bool = False
    sensitive: bool = False
    measure: bool = True

    def __post_init__(self) -> None:
        _ = self.options  # checks the values

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        products_as_linears(program)
        if context.plan is None:
            plan = make_plan(program, context, self.options)
        else:
            check_arch(self.options)
            plan = check_plan(program, context.plan, self.options)
            if self.measure:  # the whole again: somebody may have changed a layer
                check_calibration(program, context)
                exact = _simulated(program, context, replace(plan, layers=()))
                found = _simulated(program, context, plan)
                errors = row_errors(found, exact, masks_of(context))
                by_name = _by_name(errors, context)
                plan = replace(plan, predicted_error=max(errors), errors=by_name)
        attach_plan(program, plan)
        log = SiteLog(context)
        decisions = plan.by_site()
        for layer in find_layers(program):
            decision = decisions.get(layer.key)
            if decision is None:
                log.refused(layer.node, "the plan does not name it")
            elif decision.choice == "keep":
                log.refused(layer.node, decision.reason or "kept")
            else:  # "w8a8-dynamic, scales by row and row; error 0.035, gain 1.4"
                in_full = decision.bits == 8 and decision.choice != "storage"
                bits = "" if in_full else f" in {decision.bits} bits"
                error = "" if decision.error is None else f", error {decision.error:.2g}"
                gain = "" if decision.gain is None else f", gain {decision.gain:.2g}"
                scales = f"scales by {_scales(decision)}"
                log.done(layer.node, f"{decision.choice}{bits}, {scales}{error}{gain}")
        return log.sites


def _scales(layer: LayerPlan) -> str:
    return layer.weights if layer.activations is None else f"{layer.weights}/{layer.activations}"


def make_plan(
    program: ExportedProgram, context: PassContext, options: PlanOptions
) -> QuantizationPlan:
    """Decide on every layer of a program.

    Args:
        context: its calibration inputs are what errors are measured on.

    Raises:
        PassError: an architecture that is not known or lacks what is asked for, a skip that finds
            nothing, calibration inputs that nothing can be measured on, or no layer is left.
    """
    check_arch(options)
    if options.measure and not context.scales:
        check_calibration(program, context)
    layers = find_layers(program)
    if context.scales:
        return _as_given(program, context, options, layers)
    kept = _skip_reasons(program, layers, options)
    choices: dict[Node, list[LayerPlan]] = {}
    for layer in layers:
        if layer.node not in kept:
            found, reason = forms(layer, options)
            if found:
                choices[layer.node] = found
            else:
                kept[layer.node] = reason
    default = 1.0 if options.mode == "w8a8" else 0.0
    least = default if options.min_gain is None else options.min_gain
    for node, known in list(choices.items()):
        choices[node] = [form for form in known if form.gain is None or form.gain >= least]
        if choices[node]:
            continue
        del choices[node]
        best = max(known, key=lambda form: form.gain or 0.0)
        kept[node] = f"too small to pay: its gain would be {best.gain:.2g} by the model"
    _require_some(layers, kept.values(), options)
    plan = _searched(program, context, options, layers, kept, choices)
    declared = Counter(reason for reason in kept.values() if reason.endswith(OVERRIDE))
    notes = [
        f"{reason.removesuffix(OVERRIDE)}: {count} layer{'s' if count > 1 else ''}"
        for reason, count in declared.items()
    ]
    # What who runs the engine should know of convolutions, LSTMs and GRUs in int8.
    counts = Counter(p.kind for p in plan.layers if p.choice.startswith("w8a8"))
    of_integers = []
    linears = sum(p.kind == "linear" and p.choice == "w8a8-static" for p in plan.layers)
    static = [
        f"{count} {name}{'s' if count > 1 else ''}"
        for name, count in (
            ("convolution", counts["conv"] + counts["conv-transpose"]),
            ("linear", linears),
        )
        if count
    ]
    if static and options.format == "int8":
        names = f": {', '.join(context.names)}" if context.names else ""
        of_integers.append(
            f"static scales of {' and '.join(static)} from"
            f" {len(context.calibration)} calibration inputs{names}; what is beyond them saturates"
        )
    of_integers += [
        f"{count} {name}{'s' if count > 1 else ''} in int8: one scale for all rows of a batch,"
        " which change one another within that rounding"
        for count, name in ((counts["lstm"], "LSTM"), (counts["gru"], "GRU"))
        if count
    ]
    plan = replace(plan, notes=(*notes, *plan.notes, *of_integers))
    _require_some(layers, [p.reason for p in plan.layers if p.choice == "keep"], options)
    return plan


def _as_given(
    program: ExportedProgram, context: PassContext, options: PlanOptions, layers: list[Layer]
) -> QuantizationPlan:
    """Store the weights that were given in fp8, and no others.

    A weight is kept if its values, found anew with its scale, give it back bit for bit.
    """
    if options.format != "fp8" or options.mode != "storage" or options.bits != 8 or options.block:
        raise PassError(
            "weights that stay in fp8 as they were given need plan-fp8{mode=storage}",
            hint="Use --precision fp8-storage.",
        )
    dtype = fp8_dtype(options.arch)
    skipped = _skip_reasons(
        program, layers, dataclasses.replace(options, heads=True, sensitive=True)
    )
    decided = []
    for layer in layers:
        scale = given_scale(program, layer, context.scales, dtype)
        reason = skipped.get(layer.node, "")
        reason = "" if reason == _EMBEDDING else reason  # which has these few bits already
        if not reason and layer.name not in context.scales:
            reason = "the checkpoint does not hold it in fp8"
        elif not reason and (scale is None or layer.kind in RECURRENT):
            reason = f"{dtype_text(dtype)} does not hold it with one scale, or one for each row"
        if reason or scale is None:
            decided.append(planned(layer, "keep", gain=1.0, reason=reason))
        else:
            scaling: Scaling = "row" if scale.ndim else "tensor"
            decided.append(planned(layer, "storage", scaling, given=True, error=0.0))
    read = {str(spec.target) for spec in weight_specs(program).values()}  # not ties, nor the dead
    known = context.scales.keys() & read
    kept = {layer.weight for layer in decided if layer.given}
    _require_some(layers, [p.reason for p in decided if not p.given], options)
    notes = [
        f"{len(kept)} of {len(known)} weights in fp8 are kept bit for bit, with the scales"
        " of the checkpoint"
    ]
    reasons = {p.weight: p.reason for p in decided if p.weight in known and not p.given}
    for name in sorted(known - kept):
        why = reasons.get(name, "no layer reads it")
        notes.append(f"{name} is widened: {why}")
    return QuantizationPlan(
        format=options.format,
        arch=options.arch,
        max_error=0.0,
        predicted_error=0.0,
        notes=tuple(notes),
        layers=tuple(decided),
    )


def _by_name(errors: Sequence[float], context: PassContext) -> dict[str, float]:
    return dict(zip(context.names, errors, strict=True)) if context.names and errors else {}


def _simulated(
    program: ExportedProgram, context: PassContext, plan: QuantizationPlan
) -> list[dict[str, Tensor]]:
    return simulate(program, plan, context.calibration, mask_input=context.mask_input)


def check_arch(options: PlanOptions) -> None:
    """Refuse what the architecture cannot do, whatever the layers are.

    Raises:
        PassError: names the architecture, what it can do, and where that can be read.
    """
    if options.on_tensorrt:
        require(options.arch, tensorrt_column(options.format, options.bits, options.block))
    elif options.format == "fp8" and options.mode == "w8a8":
        native_scales(options)
    elif options.format == "fp8":
        require(options.arch, "storage")
    else:
        architecture(options.arch)


def max_error(options: PlanOptions) -> float:
    """As given, or the default of format, mode and bits."""
    if options.max_error is not None:
        return options.max_error
    return MAX_ERROR[options.format, options.mode, options.bits]


_HEAD = "a head"
_EMBEDDING = "an embedding: fp8 rounds its few bits away and saves no time; int8 stores it"


def _require_some(layers: list[Layer], kept: Iterable[str], options: PlanOptions) -> None:
    """Refuse a plan that keeps every layer, with the reasons."""
    reasons = Counter(reason.partition(":")[0] for reason in kept)
    if reasons.total() < len(layers):
        return
    counted = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    taken = [
        f"max_error is {max_error(options):g}",
        "min_gain=0 (--optimize size) takes layers that gain nothing",
    ]
    if _HEAD in reasons:
        name = f"plan-{options.format}"
        taken.append(f"heads=true takes heads: --pipeline '{name}{{heads=true}},...'")
    raise PassError(
        f"no layer is left to quantize: {counted or 'the program has none'}",
        hint=f"{'; '.join(taken)}.",
    )


def _searched(
    program: ExportedProgram,
    context: PassContext,
    options: PlanOptions,
    layers: Sequence[Layer],
    kept: Mapping[Node, str],
    choices: Mapping[Node, list[LayerPlan]],
) -> QuantizationPlan:
    """What is left to decide, once skips and sizes have been looked at."""
    forms_of = dict(choices)
    readings: Mapping[Node, Reading] = {}
    simulated: dict[frozenset[tuple[Node, int]], list[float]] = {}
    limit = min(MARGIN * max_error(options), LARGEST_ROW)

    def decided(layer: Layer, chosen: Mapping[Node, int]) -> LayerPlan:
        known = forms_of.get(layer.node)
        if known is None:
            return planned(layer, "keep", gain=1.0, reason=kept[layer.node])
        place = chosen.get(layer.node, len(known))
        reason = _reason_of(known[:place], readings.get(layer.node))
        if place == len(known):
            return planned(layer, "keep", gain=1.0, reason=reason)
        return replace(known[place], reason=reason or known[place].reason)

    def plan_of(chosen: Mapping[Node, int]) -> QuantizationPlan:
        return QuantizationPlan(
            format=options.format,
            arch=options.arch,
            max_error=max_error(options),
            layers=tuple(decided(layer, chosen) for layer in layers),
        )

    fastest = dict.fromkeys(choices, 0)
    if not options.measure:
        return plan_of(fastest)
    subject = (program, context, plan_of({}))
    measured = measure(*subject, {node: known[:1] for node, known in choices.items()})

    def error_of(chosen: Mapping[Node, int]) -> float:
        outputs = _simulated(program, context, plan_of(chosen))
        errors = row_errors(outputs, measured.outputs, masks_of(context))
        simulated[frozenset(chosen.items())] = errors
        return max(errors)

    first = error_of(fastest)
    if first > limit:  # else there is nothing to choose and to order
        others = {node: known[1:] for node, known in choices.items() if known[1:]}
        for node, more in measure(*subject, others).errors.items():
            measured.errors[node] += more
        measure_alone(*subject, choices, measured)
    options_of: dict[Node, list[Option]] = {}
    start = {}  # the fastest form that does not spend the whole limit by itself
    for node, known in choices.items():
        # Every form that was measured says what it loses: at the outputs in the measure in which it
        # loses more or less than the fastest one by itself.
        errors, reached = measured.errors[node], measured.end_to_end.get(node)
        noted = [
            replace(form, error=error, end_to_end=reached and reached * error / (errors[0] or 1))
            for form, error in zip(known, errors, strict=False)
        ]
        forms_of[node] = known = [*noted, *known[len(noted) :]]
        fits = (place for place, form in enumerate(known) if (form.end_to_end or 0) <= limit)
        start[node] = next(fits, len(known))
        whole = time = float(prod(known[0].shape))
        if (kind := known[0].kind).startswith("conv"):
            # Its weight is used at every place of one of a batch, by the sizes of the example.
            walked = value(first_input(node) if kind == "conv-transpose" else node).shape[2:]
            sizes = (size if isinstance(size, int) else size.node.hint for size in walked)
            time = whole * prod(size or 1 for size in sizes)
        as_it_is = Option(0.0, time, 4 * whole)
        options_of[node] = [
            Option(
                error=(form.error or 0.0) if form.end_to_end is None else form.end_to_end,
                time=time / (form.gain or 1.0),
                size=whole * form.value_bytes,
            )
            for form in known
        ] + [as_it_is]
    searched = search(options_of, error_of, limit, first, start)
    readings = measured.readings
    by_name = _by_name(simulated.get(frozenset(searched.chosen.items()), ()), context)
    notes = _found_in_words(searched, measured, len(context.calibration))
    if by_name:
        shown = (f"{name} {error:.2g}" for name, error in by_name.items())
        notes = (*notes, f"worst row by calibration inputs: {', '.join(shown)}")
    plan = plan_of(searched.chosen)
    return replace(plan, predicted_error=searched.error, errors=by_name, notes=notes)


LOUD = 30.0
"""Peak over mean magnitude that a reader should know of; of normal values it is about 5."""


def _reason_of(refused: Sequence[LayerPlan], reading: Reading | None) -> str:
    """Why a layer got the form after these, or is kept where they are all."""
    if not refused:
        return ""
    lost = []  # "storage block loses 0.084 (0.03 of the outputs)"
    for form in refused:
        alone = "" if form.end_to_end is None else f" ({form.end_to_end:.2g} of the outputs)"
        error = "" if form.error is None else f" loses {form.error:.2g}{alone}"
        lost.append(f"{form_in_words(form)}{error}")
    peak = ""
    if reading is not None and reading.peak >= LOUD:
        peak = f"; it reads values up to {reading.largest:.3g}, {reading.peak:.0f} times their mean"
    return f"not within max_error: {'; '.join(lost)}{peak}"


def form_in_words(form: LayerPlan) -> str:
    """A form in short: "w8a8-dynamic row/tensor", "storage block of 4 bits"."""
    of = f" of {form.bits} bits" if form.choice == "storage" and form.bits != 8 else ""
    if form.activations == "block":
        of = f" of {form.block}"
    return f"{form.choice} {_scales(form)}{of}"


def _found_in_words(search: Found[Any], sensitivity: Sensitivity, cases: int) -> tuple[str, ...]:
    """How a plan was found, in sentences."""
    by = (
        f"their effect on the outputs (tried in {sensitivity.variants} variants)"
        if sensitivity.end_to_end
        else "the error of their own output"
    )
    first = "every layer in its fastest form: " + (
        f"error {search.first:.3g}" if search.first < BEYOND else "a row of an output is lost"
    )
    if not search.moves:
        return (f"{first}, measured on {cases} calibration inputs",)
    return (
        f"{first}, which is not within max_error",
        f"{search.moves} steps to more exact forms, ordered by {by} over the time they cost: error"
        f" {search.error:.3g}, found in {search.runs} simulations of the whole on {cases}"
        " calibration inputs",
    )


def _skip_reasons(
    program: ExportedProgram, layers: Sequence[Layer], options: PlanOptions
) -> dict[Node, str]:
    """Layer -> why it is kept; layers that may be quantized are not among them.

    Raises:
        PassError: a name, pattern or class that no layer has, named; or a pattern that is not a
            regular expression.
    """
    modules = {layer.module for layer in layers}
    for field in ("skip_modules", "include_modules"):
        for name in getattr(options, field):
            if name not in modules:
                raise _nothing(f"{field}={name!r}", "no layer has this name", name, modules)
    patterns = []
    for text in options.skip_modules_pattern:
        try:
            pattern = re.compile(text)
        except re.error as error:
            message = f"skip_modules_pattern={text!r} is not a regular expression: {error}"
            raise PassError(message) from error
        if not any(map(pattern.search, modules)):
            raise _nothing(f"skip_modules_pattern={text!r}", "it matches no layer", "", modules)
        patterns.append(pattern)
    classes = {name for layer in layers for name in module_classes(layer.node)}
    for name in options.skip_modules_classes:
        if name not in classes:
            fault = "it is around no layer"
            raise _nothing(f"skip_modules_classes={name!r}", fault, name, classes)
    weights = weight_expressions(program)
    reasons = {}
    for layer in layers:
        reason = next(_reasons(layer, options, patterns, weights), "")
        if reason and layer.module not in options.include_modules:
            reasons[layer.node] = reason
    # Embeddings whose weight a kept layer reads as well: two copies are larger than one.
    whole = {layer.weight: layer for layer in reversed(layers) if layer.node in reasons}
    for layer in layers:
        if layer.kind == "embedding" and layer.node not in reasons and layer.weight in whole:
            kept = whole[layer.weight].module
            reasons[layer.node] = f"shares its weight with {kept!r}, which is kept"
    return reasons


def _reasons(
    layer: Layer, options: PlanOptions, patterns: Sequence[re.Pattern[str]], weights: set[Node]
) -> Iterator[str]:
    """Why a layer is kept, whatever it would lose."""
    if layer.module in options.skip_modules:
        yield f"skip_modules={layer.module!r}"
    yield from (f"skip_modules_pattern={p.pattern!r}" for p in patterns if p.search(layer.module))
    around = module_classes(layer.node)
    yield from (f"skip_modules_classes={n!r}" for n in options.skip_modules_classes if n in around)
    if not options.sensitive and (declared := declared_reason(layer)):
        yield declared
    if layer.kind == "embedding" and options.on_tensorrt:
        yield "an embedding: TensorRT dequantizes all of it for each lookup"
    if layer.kind == "embedding" and options.format == "fp8":
        yield _EMBEDDING
    is_head = layer.kind not in {"embedding", *RECURRENT}
    if is_head and not options.heads and _reaches_output(layer.node):
        yield f"{_HEAD}: its error is the output's error (heads=true quantizes it)"
    if _is_small_stem(layer, options) and _reads_input(layer.node, weights):
        yield "the first convolution: it reads the input itself, and is small"


STEM = 64
"""Products for each element that the first convolution must have to gain from int8 where floats
read it: with 27, three channels under a kernel of 3 x 3, it took 1.8 times as long; with 147, under
one of 7 x 7, 0.66."""


def _is_small_stem(layer: Layer, options: PlanOptions) -> bool:
    if layer.kind not in ("conv", "conv-transpose"):
        return False
    if not multiplies_convs(options):
        return True
    products = prod(layer.shape[1:])
    if layer.kind == "conv-transpose":  # of each element that it gives
        geometry = transposed_geometry_of(layer.node)
        products = layer.shape[0] // geometry.groups * prod(geometry.taps)
    return products < STEM and not feeds_convolution(tail_of(layer.node).node)


def _reaches_output(node: Node) -> bool:
    """Whether the value, moved about at most, is an output of the program."""
    return any(
        user.op == "output" or (has(user, Trait.MOVES, Trait.CASTS) and _reaches_output(user))
        for user in node.users
    )


def _reads_input(node: Node, weights: set[Node]) -> bool:
    """Whether the first argument is an input of the program, cast or normalized at most."""
    source = node.args[0]
    while has(source, Trait.MOVES, Trait.CASTS, Trait.ARITHMETIC):
        others = [each for each in source.all_input_nodes if each not in weights]
        if len(others) != 1:
            return False
        source = others[0]
    return isinstance(source, Node) and source.op == "placeholder"


def _nothing(what: str, fault: str, name: str, known: set[str]) -> PassError:
    close = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
    shown = ", ".join(map(repr, close)) or "the program has none"
    return PassError(f"{what}: {fault}", hint=f"There are {len(known)}, such as {shown}.")
