"""More calibration inputs, and fresh inputs that no scale was made from, for static scales.

A scale that was made from an input fits that input; a larger value in the next one saturates.  So
more inputs are drawn to make scales from, and others to compare the engine on.
"""

from dataclasses import dataclass, replace

from enginecast.capture.inputs.examples import Case, sample
from enginecast.capture.inputs.specs import sizes_of
from enginecast.compiler.engines.checks import Check, Examined, Running
from enginecast.compiler.prepare.cases import SEED
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.ranges.eager import FAILS
from enginecast.compiler.ranges.fit_values import in_example_values
from enginecast.errors import VerificationError
from enginecast.passes.ir.quantization_plan import QuantizationPlan
from enginecast.passes.quantize.measure.quantizable import find_layers, is_static_conv
from enginecast.verification.eager.outputs import as_arrays
from enginecast.verification.engine import EXACT, as_declared
from enginecast.verification.metrics import compare

MORE = 24
"""Inputs that scales are made from besides the verification inputs."""
FRESH = 24
"""Inputs that an engine is compared on and no scale is made from."""
_FIRST, _FIRST_FRESH = SEED + 50_000, SEED + 60_000


def with_more_calibration(prepared: Prepared) -> Prepared:
    """With more inputs to make scales from, where a convolution may get a static one.

    Slow models have none, nor has a program that is one path of its model.
    """
    if not any(layer.kind.startswith("conv") for layer in find_layers(prepared.captured.program)):
        return prepared
    return replace(prepared, calibration=_drawn(prepared, _FIRST, MORE))


@dataclass(frozen=True)
class FreshInputs(Check):
    """An engine with static scales loses no more than its plan allows on inputs that no scale was
    made from.
    """

    prepared: Prepared
    plan: QuantizationPlan | None

    def examine(self, running: Running) -> Examined:
        prepared, plan = self.prepared, self.plan
        if running.is_twin or plan is None:
            return Examined()
        if not any(is_static_conv(layer) for layer in plan.layers):
            return Examined()
        worst: dict[str, float] = {}
        for case in _drawn(prepared, _FIRST_FRESH, FRESH):
            arrays = as_arrays(case.inputs)
            [wanted] = prepared.plain.outputs([case.inputs])
            fed = as_declared(running.engine, arrays)
            found = running.engine.run(fed, check_finite=False, pad_rows=EXACT)
            mask = None if prepared.mask_input is None else arrays[prepared.mask_input]
            masked = running.criteria.reference.masked
            try:
                errors = compare(found, as_arrays(wanted), attention_mask=mask, masked=masked)
            except VerificationError as error:
                return Examined((f"on inputs that no scale was made from: {error.message}",))
            for name, one in errors.items():
                if one.nonfinite:  # no part of its error
                    wrong = (
                        f"output {name!r} has {one.nonfinite} values that are not finite where the"
                        " model's are, or the other way round, on inputs that no scale was made"
                        " from: give more of them (--inputs), or keep layers"
                        " (--skip-modules-pattern)"
                    )
                    return Examined((wrong,))
                if one.wrong is None:
                    worst[name] = max(worst.get(name, 0.0), one.worst_row)
        return Examined(
            tuple(
                f"output {name!r} has a row with a relative L2 error of {error:.2g} on inputs that"
                f" no scale was made from, but the plan allows {plan.max_error:.2g} (--max-error):"
                " what is beyond the calibration inputs saturates; give more of them (--inputs),"
                " or keep layers (--skip-modules-pattern)"
                for name, error in worst.items()
                if error > plan.max_error
            )
        )


def _drawn(prepared: Prepared, first: int, count: int) -> tuple[Case, ...]:
    """Inputs like the example, in the sizes of the first case: those that the model takes."""
    if prepared.captured.guards or any(case.singles for case in prepared.cases):
        return ()
    sizes = sizes_of(prepared.inputs, prepared.cases[0].inputs)
    drawn = tuple(
        Case(f"draw {place + 1}", sample(prepared.inputs, sizes, first + place))
        for place in range(count)
    )
    example = prepared.source.example()
    most: tuple[Case, ...] = ()
    for cases in (drawn, in_example_values(drawn, example)):
        # Each is run alone, for all at once may not fit into memory.
        taken = tuple(case for case in cases if _takes(prepared, case))
        if len(taken) == count:
            return taken
        most = max(most, taken, key=len)
    return most


def _takes(prepared: Prepared, case: Case) -> bool:
    """Whether the program takes the values of a case."""
    try:
        prepared.plain.outputs([case.inputs])
    except FAILS:
        return False
    return True
