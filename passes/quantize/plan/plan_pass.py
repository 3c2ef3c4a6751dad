"""What `plan-fp8` and `plan-int8` share: make or check a plan, and leave it on the program.

Every output keeps every bit: all that changes is that products with a weight are spelled as
linears.  A site is a layer that the plan quantises.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch.export import ExportedProgram

from enginecast.passes.ir.base import Pass, PassContext, Promise, Site
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan, attach_plan
from enginecast.passes.ir.sites import SiteLog
from enginecast.passes.quantize.measure.quantizable import find_layers, products_as_linears
from enginecast.passes.quantize.plan.check import check_plan
from enginecast.passes.quantize.plan.options import PlanOptions
from enginecast.passes.quantize.plan.planning import check_arch, make_plan, measured_again


@dataclass(frozen=True)
class PlanPass(Pass):
    """Decide which layers are quantised, and how; options are those of `PlanOptions`."""

    promise: ClassVar[Promise] = "exact"
    after: ClassVar[frozenset[str]] = frozenset(
        {
            "rescale-residual",
            "unify-dtype",
            "canonicalize",
            "fuse-gelu",
            "fuse-rms-norm",
            "fuse-attention",
            "fuse-skip-norm",
            "merge-linears",
            "smooth-outliers",
        }
    )

    @property
    @abstractmethod
    def options(self) -> PlanOptions:
        """What is asked for."""

    def run(self, program: ExportedProgram, context: PassContext) -> list[Site]:
        products_as_linears(program)
        plan = self._plan(program, context)
        attach_plan(program, plan)
        log = SiteLog(context)
        decisions = plan.by_site()
        for layer in find_layers(program):
            decision = decisions.get(layer.key)
            if decision is None:
                log.refused(layer.node, "the plan does not name it")
            elif decision.choice == "keep":
                log.refused(layer.node, decision.reason or "kept")
            else:
                log.done(layer.node, in_words(decision))
        return log.sites

    def _plan(self, program: ExportedProgram, context: PassContext) -> QuantizationPlan:
        if context.plan is None:
            return make_plan(program, context, self.options)
        check_arch(self.options)
        given = check_plan(program, context.plan, self.options)
        return measured_again(program, context, given) if self.options.measure else given


def in_words(layer: LayerPlan) -> str:
    """A decision in one phrase: "w8a8-dynamic, scales by row and row; error 0.035, gain 1.4"."""
    scales = layer.weights if layer.activations is None else f"{layer.weights}/{layer.activations}"
    bits = "" if layer.choice != "storage" else f" in {layer.bits} bits"
    error = "" if layer.error is None else f", error {layer.error:.2g}"
    gain = "" if layer.gain is None else f", gain {layer.gain:.2g}"
    return f"{layer.choice}{bits}, scales by {scales}{error}{gain}"
