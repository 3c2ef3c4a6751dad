"""The noise floor: the error that eager itself has in the target's dtype, against fp64.

Every tolerance is a multiple of it. So a floor that is implausible for its dtype is a defect of the
reference, never a wide tolerance: a tolerance that cannot fail proves nothing. In fp32 the model
itself may be discontinuous (x // 0.1) or cancel ((x + 1e8) - 1e8); there the reference is eager
instead of fp64. `verification.eager` measures the floor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from enginecast.errors import UsageError
from enginecast.verification.accepted_excess import Acceptance
from enginecast.verification.metrics import (
    BEYOND,
    Comparison,
    Metrics,
    output_names,
    pool_output,
    ratio,
    times,
)

UNIT_ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Largest relative error of rounding one number: half the distance between 1 and the next one (IEEE
754; bfloat16 keeps 8 significant bits)."""
LIMIT = 3.0
"""Largest ratio of error to floor, pooled over all cases. Two correct orders of summation differ by
less; a wrong epsilon by more."""
ROUNDING = 1.0
"""The least floor, in unit roundoffs: computing in the dtype and rounding the result to it."""
CAP = 4.0
"""How much worse than an eighth of bf16's error eager fp16 may be (its unit roundoff is an eighth
of bf16's)."""
FP16_PER_BF16 = 8.0
LARGEST_FLOOR = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 0.25, "bf16": 0.25}
"""Relative error of eager above which it is not a valid measure in its dtype: the model is not
meant for the dtype, or the reference belongs to another model."""
PLANNED = 0.25
"""The same for a quantized engine, including the plan's error."""
MOST_WRONG = 0.5
"""The same for outputs of integers and booleans: the share in which eager differs from fp64."""
FREE = {"fp64": 0.0, "fp32": 1e-4, "fp16": 0.02, "bf16": 0.05}
"""Share of integers and booleans that may differ although eager's do not: a tie, such as of two
logits, may decide them."""
KERNELS = 1e-4
"""Upper bound on the error attributed to a backend's kernels, however a program amplifies their
rounding: an error of 1e-3 in fp32 is never theirs. It is relative to the values, or to the terms
that they are sums of, where those are known to be larger."""
LOST = 0.25
"""Relative error from which on nothing is left of a value."""
ZERO = 1e3
"""Relative error of eager fp32 from which on fp64 has zero there, or its own rounding."""
SINGLE = 8
"""In low precision, one of this many integers may differ in any case."""


def least_floor(dtype: str) -> float:
    """The smallest relative floor: an eager run without any error must not make every ratio
    infinite.
    """
    return ROUNDING * UNIT_ROUNDOFF[dtype]


def most_wrong(rate: float) -> float:
    """The largest share of integers or booleans that may differ: half of those that eager has right
    must be right.
    """
    return (1 + rate) / 2


def _most(kernels: Metrics) -> float:
    """The largest relative error of an output that is attributed to kernels."""
    return KERNELS * max(kernels.terms / (kernels.reference_norm or math.inf), 1.0)


@dataclass(frozen=True)
class Floor:
    """The noise floor: eager's own error in the target dtype, against the fp64 reference."""

    dtype: str
    """One of "fp32", "fp16" and "bf16"."""
    cases: Comparison
    wider: Comparison | None = None
    """For fp16: the same in bf16, which has fp32's range; separates lost precision from lost
    range."""
    culprit: str = ""
    """For fp16: where values leave its range, in words; empty when they do not."""
    estimated: bool = False
    """Whether `cases` are an eighth of `wider`, because eager fp16 itself leaves its range."""
    rounding: str = ""
    """Format of a quantized engine, such as "int8": then `cases` hold eager's error and that of its
    plan, added as squares."""
    max_error: float | None = None
    """The largest relative L2 error of a row that the plan allows, or that was asked for; None: no
    such limit."""
    kernels: Comparison | None = None
    """For fp32: the estimated error of a backend's own kernels in some cases (`kernel_noise`)."""
    by_eager: Mapping[str, float] = field(default_factory=dict)
    """For fp32: the outputs that are compared with eager itself, and eager's distance from fp64;
    `NOT_FINITE` where it is infinite or NaN."""
    halves: str = ""
    """For fp32: "fp16" or "bf16" where the model computes in it by itself; eager's kernels round
    there more often than to their results."""
    autocast: bool = False
    """Whether eager ran under `torch.autocast`: it does not run in the dtype as a whole."""
    accept: tuple[Acceptance, ...] = ()
    """Errors that are accepted although they are larger than the floor allows."""

    def __post_init__(self) -> None:
        if self.dtype not in UNIT_ROUNDOFF:
            known = ", ".join(UNIT_ROUNDOFF)
            raise UsageError(f"no unit roundoff is known for dtype {self.dtype!r}; known: {known}")

    def only(self, cases: frozenset[str]) -> "Floor":
        """The floor of some of the cases."""

        def kept(comparison: Comparison) -> Comparison:
            return {name: found for name, found in comparison.items() if name in cases}

        wider = None if self.wider is None else kept(self.wider)
        kernels = None if self.kernels is None else kept(self.kernels)
        return replace(self, cases=kept(self.cases), wider=wider, kernels=kernels)

    def of(self, name: str, *, kernels: bool = False) -> float:
        """The floor of an output: eager's error, and at least the dtype's rounding.

        Args:
            kernels: include the error of a backend's own kernels.
        """
        pooled = pool_output(self.cases, name)
        found = self._kernels(name)
        other = found.relative if kernels else 0.0
        if pooled.wrong is not None:  # the part of integers or booleans that may differ
            rate = max(other, pooled.relative)
            if self.wider is not None:
                rate = max(rate, pool_output(self.wider, name).relative / FP16_PER_BF16)
            free = FREE[self.dtype]
            if self.dtype in ("fp16", "bf16") and pooled.rows >= SINGLE:
                free = max(free, 1 / pooled.rows)
            return min(max(LIMIT * rate, free), most_wrong(rate)) / LIMIT
        return max(pooled.relative, min(other, _most(found)), least_floor(self.dtype))

    def row_of(self, name: str, *, kernels: bool = False) -> float:
        """The same for a single row: eager's worst row in any case, for which row attention blows
        up is a matter of luck.
        """
        found = self._kernels(name)
        other = min(found.worst_row, _most(found)) if kernels else 0.0
        worst = pool_output(self.cases, name).worst_row
        return max(worst, other, self.of(name, kernels=kernels))

    def is_lost(self, name: str) -> bool:
        """Whether kernels lose an output's values altogether: they are small beside the terms that
        they are sums of.
        """
        found = self._kernels(name)
        return min(found.relative, _most(found)) >= LOST

    def _kernels(self, name: str) -> Metrics:
        return pool_output(self.kernels or {}, name)

    @property
    def most(self) -> float:
        """The error of eager above which it is not a valid measure."""
        return LIMIT * UNIT_ROUNDOFF[self.halves] if self.halves else LARGEST_FLOOR[self.dtype]

    @property
    def largest(self) -> float:
        """The relative L2 error of the worst output."""
        names = output_names(self.cases)
        found = (pool_output(self.cases, name).relative for name in names)
        return max((*found, *self.by_eager.values()), default=0.0)

    @property
    def noise(self) -> tuple[str, ...]:
        """The outputs that are zero but for rounding: nothing is right in eager's own."""
        return tuple(name for name, error in self.by_eager.items() if ZERO <= error <= BEYOND)

    @property
    def owner(self) -> str:
        """What the floor is the error of, in words."""
        own = "fp16 in bf16's range" if self.estimated else f"eager {self.dtype}"
        return f"{own} with the plan's {self.rounding} rounding" if self.rounding else own

    @property
    def label(self) -> str:
        """The arithmetic of the floor: "fp32", or "fp32+int8"."""
        return f"{self.dtype}+{self.rounding}" if self.rounding else self.dtype

    @property
    def defects(self) -> tuple[str, ...]:
        """Why the floor is not a valid measure, as sentences: each is a reason to reject."""
        found = []
        for name in output_names(self.cases):
            pooled = pool_output(self.cases, name)
            is_counted = pooled.wrong is not None
            largest = MOST_WRONG if is_counted else self.most
            largest = max(largest, PLANNED) if self.rounding else largest
            excess = 0.0
            if self.wider is not None and not self.rounding and not is_counted:
                wider = pool_output(self.wider, name).relative / FP16_PER_BF16
                excess = ratio(pooled.relative, max(wider, least_floor(self.dtype)))
            eager = f"output {name!r}: {self.owner}"
            if pooled.nonfinite:
                found.append(f"{eager} gives values that are not finite{self._cause(pooled)}")
            elif excess > CAP:
                allowed = f"{times(excess)} worse than {self.dtype}'s precision allows"
                found.append(f"{eager} is {allowed}{self._cause(pooled)}")
            elif pooled.relative > largest:
                off = "beyond measure" if pooled.relative >= BEYOND else f"{pooled.relative:.2g}"
                found.append(
                    f"{eager} is off by {off}, and past {largest:g} no tolerance derived from it"
                    " means anything"
                )
        return tuple(found)

    def _cause(self, pooled: Metrics) -> str:
        if self.culprit:
            return f": {self.culprit}"
        if self.dtype == "fp16" and pooled.reference_max < 2.0**-14:
            largest = f"{pooled.reference_max:.1g}"
            return f": its values (up to {largest}) are below fp16's normal range (6.1e-5)"
        return ""
