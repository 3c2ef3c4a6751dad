"""Make a plan: for each layer a form in which it is quantised, or the reason why it is kept."""

from torch.export import ExportedProgram

from enginecast.passes.architectures import CPU, architecture, require
from enginecast.passes.base import PassContext
from enginecast.passes.plan_forms import KEEP, Form, as_planned, forms, native_form
from enginecast.passes.plan_options import PlanOptions
from enginecast.passes.quantizable import Layer, find_layers
from enginecast.passes.quantization_plan import LayerPlan, QuantizationPlan
from enginecast.passes.skip_lists import skip_reasons

MAX_ERROR = {
    ("fp8", "w8a8", 8): 0.15,
    ("fp8", "storage", 8): 0.10,
    ("int8", "w8a8", 8): 0.05,
    ("int8", "storage", 8): 0.03,
    ("int8", "storage", 4): 0.25,
}
"""By format, mode and bits."""


def make_plan(
    program: ExportedProgram, context: PassContext, options: PlanOptions
) -> QuantizationPlan:
    """Decide on every layer of a program.

    Raises:
        PassError: an architecture that is not known or lacks what is asked for, or a skip that
            finds nothing.
    """
    check_arch(options)
    layers = find_layers(program)
    skips = skip_reasons(program, layers, options)
    planned = tuple(_decide(layer, skips.get(layer.node, ""), options) for layer in layers)
    return QuantizationPlan(
        format=options.format,
        arch=options.arch,
        max_error=max_error(options),
        layers=planned,
    )


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


def _decide(layer: Layer, skip: str, options: PlanOptions) -> LayerPlan:
    if skip:
        return as_planned(layer, KEEP, skip)
    found, reason = forms(layer, options)
    if not found:
        return as_planned(layer, KEEP, reason)
    paying = [form for form in found if _pays(form, options)]
    if not paying:
        best = max(form.gain or 0.0 for form in found)
        return as_planned(layer, KEEP, f"too small to pay: its gain would be {best:.2f}")
    return as_planned(layer, paying[0])


def _pays(form: Form, options: PlanOptions) -> bool:
    default = 1.0 if options.arch != CPU and options.mode == "w8a8" else 0.0
    least = default if options.min_gain is None else options.min_gain
    return form.gain is None or form.gain >= least
