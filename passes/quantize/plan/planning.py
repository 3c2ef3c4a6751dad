"""Make a plan: for each layer a form in which it is quantised, or the reason why it is kept.

What may be quantised at all is decided by architecture, skips and sizes; which of several forms a
layer takes, by errors measured on the calibration inputs (`sensitivity`) and by `search`.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import weight_expressions
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.passes.ir.source import module_classes
from enginecast.passes.ir.traits import Trait, has
from enginecast.passes.quantize.measure.calibration import (
    BEYOND,
    check_calibration,
    largest_output_error,
    largest_row_error,
    masks_of,
)
from enginecast.passes.quantize.measure.quantizable import Layer, find_layers
from enginecast.passes.quantize.measure.simulate import simulate
from enginecast.passes.quantize.plan.architectures import CPU, architecture, require
from enginecast.passes.quantize.plan.forms import KEEP, Form, as_planned, forms, native_form
from enginecast.passes.quantize.plan.layer_timing import Timing, timing_on, with_measured_gains
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.search import Found, Option, search
from enginecast.passes.quantize.plan.sensitivity import Reading, Sensitivity, measure

MAX_ERROR = {
    ("fp8", "w8a8", 8): 0.15,
    ("fp8", "storage", 8): 0.10,
    ("int8", "w8a8", 8): 0.05,
    ("int8", "storage", 8): 0.05,
    ("int8", "storage", 4): 0.25,
}
"""By format, mode and bits."""
LARGEST_ROW = 0.45
"""Error of a single row that no plan may have, whatever the mean is: half of what verification
lets pass, since an engine rounds other values up than a simulation."""


def make_plan(
    program: ExportedProgram,
    context: PassContext,
    options: PlanOptions,
    timing: Timing | None = None,
) -> QuantizationPlan:
    """Decide on every layer of a program.

    Args:
        context: its calibration inputs are what errors are measured on.
        timing: measures products; None: on the GPU at hand, where the plan is for that one.

    Raises:
        PassError: an architecture that is not known or lacks what is asked for, a skip that finds
            nothing, calibration inputs that nothing can be measured on, or no layer is left.
    """
    check_arch(options)
    if options.measure:
        check_calibration(program, context)
    layers = find_layers(program)
    skips = skip_reasons(program, layers, options)
    kept, candidates = _candidates(layers, skips, options)
    timing = timing or timing_on(options.arch)
    if timing is not None and options.format == "fp8":
        candidates = with_measured_gains(program, context, candidates, layers, timing, options.arch)
    open_ = {node: _paying(some, options) for node, some in candidates.items()}
    kept |= {node: _too_slow(candidates[node]) for node, some in open_.items() if not some}
    _require_some(layers, kept, options)
    plan = _Planner(program, context, options, layers, kept, open_).plan()
    _require_some(layers, {x.node: y.reason for x, y in _kept(layers, plan)}, options)
    return plan


def measured_again(
    program: ExportedProgram, context: PassContext, plan: QuantizationPlan
) -> QuantizationPlan:
    """A plan with the error that it has as a whole: somebody may have changed a layer.

    Raises:
        PassError: nothing can be measured on the calibration inputs.
    """
    check_calibration(program, context)
    exact = _simulated(program, context, replace(plan, layers=()))
    found = _simulated(program, context, plan)
    error = largest_output_error(found, exact, masks_of(context))
    return replace(plan, predicted_error=error)


def _simulated(
    program: ExportedProgram, context: PassContext, plan: QuantizationPlan
) -> list[dict[str, Tensor]]:
    return simulate(program, plan, context.calibration, mask_input=context.mask_input)


def _kept(layers: list[Layer], plan: QuantizationPlan) -> list[tuple[Layer, LayerPlan]]:
    pairs = zip(layers, plan.layers, strict=True)
    return [(layer, decision) for layer, decision in pairs if decision.choice == "keep"]


def check_arch(options: PlanOptions) -> None:
    """Refuse what the architecture cannot do, whatever the layers are.

    Raises:
        PassError: names the architecture, what it can do, and where that can be read.
    """
    if options.format == "fp8" and options.mode == "w8a8":
        native_form(options)
    elif options.format == "fp8":
        require(options.arch, "storage")
    else:
        architecture(options.arch)


def max_error(options: PlanOptions) -> float:
    """As given, or the default of format, mode and bits."""
    if options.max_error is not None:
        return options.max_error
    return MAX_ERROR[options.format, options.mode, options.bits]


def _candidates(
    layers: list[Layer], skips: Mapping[Node, str], options: PlanOptions
) -> tuple[dict[Node, str], dict[Node, list[Form]]]:
    """Why layers are kept, and the forms of the others."""
    kept, candidates = {}, {}
    for layer in layers:
        found, reason = ([], skips[layer.node]) if layer.node in skips else forms(layer, options)
        if found:
            candidates[layer.node] = found
        else:
            kept[layer.node] = reason
    return kept, candidates


def _paying(some: list[Form], options: PlanOptions) -> list[Form]:
    default = 1.0 if options.arch != CPU and options.mode == "w8a8" else 0.0
    least = default if options.min_gain is None else options.min_gain
    return [form for form in some if form.gain is None or form.gain >= least]


def _too_slow(some: list[Form]) -> str:
    best = max(some, key=lambda form: form.gain or 0.0)
    if best.measured:
        return f"does not pay: its gain was measured as {best.gain:.2g}"
    return f"too small to pay: its gain would be {best.gain:.2g} by the model"


def _require_some(layers: list[Layer], kept: Mapping[Node, str], options: PlanOptions) -> None:
    if len(kept) < len(layers):
        return
    reasons = Counter(reason.partition(":")[0] for reason in kept.values())
    counted = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
    raise PassError(
        f"no layer is left to quantise: {counted or 'the program has none'}",
        hint=f"max_error is {max_error(options):g}; min_gain=0 takes layers that gain nothing.",
    )


class _Planner:
    """What is left to decide, once skips and sizes have been looked at."""

    def __init__(
        self,
        program: ExportedProgram,
        context: PassContext,
        options: PlanOptions,
        layers: list[Layer],
        kept: Mapping[Node, str],
        forms_of: Mapping[Node, list[Form]],
    ) -> None:
        self._program = program
        self._context = context
        self._options = options
        self._layers = layers
        self._kept = kept
        self._choices = {
            layer.node: [as_planned(layer, form) for form in forms_of[layer.node]]
            for layer in layers
            if forms_of.get(layer.node)
        }

    def plan(self) -> QuantizationPlan:
        if not self._options.measure:
            return self._with(dict.fromkeys(self._choices, 0))
        found = measure(self._program, self._context, self._with({}), self._choices)
        self._note_errors(found)
        searched = search(
            {node: self._options_of(node, found) for node in self._choices},
            lambda chosen: self._error(chosen, found),
            max_error(self._options),
        )
        plan = self._with(searched.chosen, found)
        return replace(
            plan,
            predicted_error=searched.error,
            notes=found_in_words(searched, found, len(self._context.calibration)),
        )

    def _note_errors(self, found: Sensitivity) -> None:
        """Write into every form what it loses."""
        for node, known in self._choices.items():
            alone = found.end_to_end.get(node, [None] * len(known))
            self._choices[node] = [
                replace(form, error=error, end_to_end=reached)
                for form, error, reached in zip(known, found.errors[node], alone, strict=True)
            ]

    def _options_of(self, node: Node, found: Sensitivity) -> list[Option]:
        """The forms of a layer, and the layer as it is."""
        known = self._choices[node]
        whole = float(_numel(known[0]))
        last = Option(0.0, whole, 4 * whole)
        return [
            *(
                Option(
                    error=(form.error or 0.0) if form.end_to_end is None else form.end_to_end,
                    time=whole / (form.gain or 1.0),
                    size=whole * form.bits / 8,
                )
                for form in known
            ),
            last,
        ]

    def _error(self, chosen: Mapping[Node, int], found: Sensitivity) -> float:
        outputs = _simulated(self._program, self._context, self._with(chosen))
        masks = masks_of(self._context)
        if largest_row_error(outputs, found.outputs, masks) > LARGEST_ROW:
            return BEYOND
        return largest_output_error(outputs, found.outputs, masks)

    def _with(
        self, chosen: Mapping[Node, int], found: Sensitivity | None = None
    ) -> QuantizationPlan:
        return QuantizationPlan(
            format=self._options.format,
            arch=self._options.arch,
            max_error=max_error(self._options),
            layers=tuple(self._decided(layer, chosen, found) for layer in self._layers),
        )

    def _decided(
        self, layer: Layer, chosen: Mapping[Node, int], found: Sensitivity | None
    ) -> LayerPlan:
        known = self._choices.get(layer.node)
        if known is None:
            return as_planned(layer, KEEP, self._kept[layer.node])
        place = chosen.get(layer.node, len(known))
        reading = found.readings.get(layer.node) if found is not None else None
        reason = reason_of(known, place, reading)
        if place == len(known):
            return as_planned(layer, KEEP, reason)
        return replace(known[place], reason=reason)


def _numel(layer: LayerPlan) -> int:
    count = 1
    for size in layer.shape:
        count *= size
    return count


LOUD = 30.0
"""Peak over mean magnitude that a reader should know of; of normal values it is about 5."""


def reason_of(forms: Sequence[LayerPlan], place: int, reading: Reading | None) -> str:
    """Why a layer got the form at a place; past the last one, why it is kept.

    Args:
        forms: that it could take, fastest first, with their errors.
    """
    refused = forms[:place]
    if not refused:
        return ""
    left = "; ".join(_lost(form) for form in refused)
    peak = ""
    if reading is not None and reading.peak >= LOUD:
        peak = f"; it reads values up to {reading.largest:.3g}, {reading.peak:.0f} times their mean"
    return f"not within max_error: {left}{peak}"


def _lost(form: LayerPlan) -> str:
    """What a form would lose: "by tensor 0.084, alone 0.03 of the outputs"."""
    alone = "" if form.end_to_end is None else f" ({form.end_to_end:.2g} of the outputs)"
    error = "" if form.error is None else f" loses {form.error:.2g}{alone}"
    return f"{form_in_words(form)}{error}"


def form_in_words(form: LayerPlan) -> str:
    """A form in short: "w8a8-dynamic row/tensor", "storage block of 4 bits"."""
    scales = form.weights if form.activations is None else f"{form.weights}/{form.activations}"
    bits = f" of {form.bits} bits" if form.choice == "storage" and form.bits != 8 else ""
    return f"{form.choice} {scales}{bits}"


def found_in_words(search: Found[Any], found: Sensitivity, cases: int) -> tuple[str, ...]:
    """How a plan was found, in sentences."""
    by = "their effect on the outputs" if found.end_to_end else "the error of their own output"
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


def skip_reasons(
    program: ExportedProgram, layers: Sequence[Layer], options: PlanOptions
) -> dict[Node, str]:
    """Layer -> why it is kept; layers that may be quantised are not among them.

    Raises:
        PassError: a name, pattern or class that no layer has, named; or a pattern that is no
            regular expression.
    """
    _check_names(layers, options)
    patterns = _patterns(layers, options.skip_modules_pattern)
    _check_classes(layers, options.skip_modules_classes)
    weights = weight_expressions(program)
    found = {}
    for layer in layers:
        if layer.module in options.include_modules:
            continue
        reasons = (
            *_by_name(layer, options),
            *(f"skip_modules_pattern={p.pattern!r}" for p in patterns if p.search(layer.module)),
            *_by_class(layer, options),
            *_by_default(layer, options, weights),
        )
        if reasons:
            found[layer.node] = reasons[0]
    return found | _tied(layers, found)


def _by_name(layer: Layer, options: PlanOptions) -> Iterator[str]:
    if layer.module in options.skip_modules:
        yield f"skip_modules={layer.module!r}"


def _by_class(layer: Layer, options: PlanOptions) -> Iterator[str]:
    around = module_classes(layer.node)
    yield from (f"skip_modules_classes={n!r}" for n in options.skip_modules_classes if n in around)


def _by_default(layer: Layer, options: PlanOptions, weights: set[Node]) -> Iterator[str]:
    if layer.kind == "embedding" and options.format == "fp8":
        yield "an embedding: fp8 rounds its few bits away and saves no time; int8 stores it"
    if layer.kind != "embedding" and not options.heads and _reaches_output(layer.node):
        yield "a head: its error is the output's error (heads=true quantises it)"
    if layer.kind == "conv" and _reads_input(layer.node, weights):
        yield "the first convolution: it reads the input itself, and is small"


def _reaches_output(node: Node) -> bool:
    """Whether the value, moved about at most, is an output of the program."""
    return any(
        user.op == "output" or (has(user, Trait.MOVES, Trait.CASTS) and _reaches_output(user))
        for user in node.users
    )


def _reads_input(node: Node, weights: set[Node]) -> bool:
    """Whether the first argument is an input of the program, cast or normalised at most."""
    source = node.args[0]
    while has(source, Trait.MOVES, Trait.CASTS, Trait.ARITHMETIC):
        others = [found for found in source.all_input_nodes if found not in weights]
        if len(others) != 1:
            return False
        source = others[0]
    return isinstance(source, Node) and source.op == "placeholder"


def _tied(layers: Sequence[Layer], kept: dict[Node, str]) -> dict[Node, str]:
    """Embeddings whose weight a kept layer reads as well: two copies are larger than one."""
    whole = {layer.weight: layer for layer in reversed(layers) if layer.node in kept}
    return {
        layer.node: f"shares its weight with {whole[layer.weight].module!r}, which is kept"
        for layer in layers
        if layer.kind == "embedding" and layer.node not in kept and layer.weight in whole
    }


def _check_names(layers: Sequence[Layer], options: PlanOptions) -> None:
    known = {layer.module for layer in layers}
    for field in ("skip_modules", "include_modules"):
        for name in getattr(options, field):
            if name not in known:
                raise _nothing(f"{field}={name!r}", "no layer has this name", name, known)


def _patterns(layers: Sequence[Layer], texts: Sequence[str]) -> list[re.Pattern[str]]:
    found = []
    for text in texts:
        try:
            pattern = re.compile(text)
        except re.error as error:
            message = f"skip_modules_pattern={text!r} is not a regular expression: {error}"
            raise PassError(message) from error
        _require_match(layers, f"skip_modules_pattern={text!r}", _searches(pattern))
        found.append(pattern)
    return found


def _searches(pattern: re.Pattern[str]) -> Callable[[Layer], bool]:
    return lambda layer: pattern.search(layer.module) is not None


def _require_match(layers: Sequence[Layer], what: str, fits: Callable[[Layer], bool]) -> None:
    if not any(map(fits, layers)):
        raise _nothing(what, "it matches no layer", "", {layer.module for layer in layers})


def _check_classes(layers: Sequence[Layer], names: Sequence[str]) -> None:
    known = {name for layer in layers for name in module_classes(layer.node)}
    for name in names:
        if name not in known:
            raise _nothing(f"skip_modules_classes={name!r}", "it is around no layer", name, known)


def _nothing(what: str, fault: str, name: str, known: set[str]) -> PassError:
    close = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
    shown = ", ".join(map(repr, close)) or "the program has none"
    return PassError(f"{what}: {fault}", hint=f"There are {len(known)}, such as {shown}.")
