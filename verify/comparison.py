"""Outputs of several cases against a reference, and the noise floor they are judged by."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from enginecast.errors import UsageError, VerificationError
from enginecast.verify.metrics import Array, Mask, Metrics, measure, pool, row_mask

Comparison = Mapping[str, Mapping[str, Metrics]]
"""Case name -> output name -> metrics."""

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding one number: half the distance between 1 and the next one (IEEE
754; bfloat16 keeps 8 significant bits)."""


def unit_roundoff(dtype: str) -> float:
    """The unit roundoff of "fp64", "fp32", "fp16" or "bf16".

    Raises:
        UsageError: any other name.
    """
    if dtype not in UNIT_ROUNDOFF:
        known = ", ".join(UNIT_ROUNDOFF)
        raise UsageError(f"no unit roundoff is known for dtype {dtype!r}; known: {known}")
    return UNIT_ROUNDOFF[dtype]


@dataclass(frozen=True)
class Floor:
    """The noise floor: what eager itself loses in the target dtype, measured against the fp64
    reference."""

    dtype: str
    """One of "fp32", "fp16" and "bf16"."""
    cases: Comparison
    wider: Comparison | None = None
    """For fp16: the same in bf16, which has fp32's range; tells lost precision from lost range."""
    culprit: str = ""
    """For fp16: where values leave its range, in words; empty when they do not."""
    estimated: bool = False
    """Whether `cases` are an eighth of `wider`, because eager fp16 itself leaves its range."""
    rounding: str = ""
    """Format of a quantised engine, such as "int8": then `cases` hold eager's error and that of its
    plan, added as squares."""
    max_error: float | None = None
    """The largest relative L2 error of an output that the plan allows; None: no such limit."""

    def __post_init__(self) -> None:
        unit_roundoff(self.dtype)

    def only(self, cases: frozenset[str]) -> "Floor":
        """The floor of some of the cases."""
        wider = None if self.wider is None else _only(self.wider, cases)
        return replace(self, cases=_only(self.cases, cases), wider=wider)

    @property
    def largest(self) -> float:
        """The relative L2 error of the output that is worst."""
        names = output_names(self.cases)
        return max((pool_output(self.cases, name).relative for name in names), default=0.0)

    @property
    def owner(self) -> str:
        """Whose error it is, to go before "has"."""
        own = "fp16 in bf16's range" if self.estimated else f"eager {self.dtype} itself"
        return f"{own} with the plan's {self.rounding} rounding" if self.rounding else own

    @property
    def label(self) -> str:
        """The arithmetic that it measures: "fp32", or "fp32+int8"."""
        return f"{self.dtype}+{self.rounding}" if self.rounding else self.dtype


def _only(comparison: Comparison, cases: frozenset[str]) -> Comparison:
    return {name: found for name, found in comparison.items() if name in cases}


def compare(
    outputs: Mapping[str, Array],
    reference: Mapping[str, Array],
    *,
    attention_mask: Array | None = None,
    masked: frozenset[str] = frozenset(),
) -> dict[str, Metrics]:
    """Measure every output that the reference has and the outputs have.

    Args:
        outputs: output name -> array, any float dtype.
        reference: output name -> float64 array of the same shape.
        attention_mask: of this case, [B, S].
        masked: outputs whose rows follow the mask (`metrics.masked_outputs`).

    Raises:
        VerificationError: a shape differs.
    """
    return {
        name: _measured(
            name,
            outputs[name],
            wanted,
            row_mask(wanted.shape, attention_mask) if name in masked else None,
        )
        for name, wanted in reference.items()
        if name in outputs
    }


def _measured(name: str, output: Array, wanted: Array, mask: Mask | None) -> Metrics:
    try:
        return measure(output, wanted, mask)
    except VerificationError as error:
        raise VerificationError(f"output {name!r}: {error.message}", hint=error.hint) from error


def pool_output(comparison: Comparison, output: str) -> Metrics:
    """One output over all the cases that have it."""
    return pool(outputs[output] for outputs in comparison.values() if output in outputs)


def output_names(comparison: Comparison) -> tuple[str, ...]:
    """The outputs of all cases, in the order they first appear."""
    return tuple(dict.fromkeys(name for outputs in comparison.values() for name in outputs))


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Builtin types only, for JSON."""
    return {
        case: {name: asdict(metrics) for name, metrics in outputs.items()}
        for case, outputs in comparison.items()
    }


def from_json(content: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Comparison:
    """What `to_json` wrote."""
    return {
        case: {name: _metrics(fields) for name, fields in outputs.items()}
        for case, outputs in content.items()
    }


def _metrics(fields: Mapping[str, Any]) -> Metrics:
    places = {
        name: None if fields.get(name) is None else tuple(fields[name])
        for name in ("first_nonfinite", "worst_at")
    }
    return Metrics(**{**fields, **places})
