"""The findings of an emulated run: plain data for reports, filled by `emulate.record`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StoredValues:
    """The values that a module, or one of its ops, stores over all cases."""

    module: str
    """Dotted path; "" for the model itself."""
    source: str
    """file:line of the user's model code for the op with the largest value."""
    op: str
    """The op with the largest value."""
    dtype: str
    """Storage dtype: "float16", "bfloat16", "float8_e4m3fn", ..."""
    max_abs: float
    """Largest magnitude stored, or that in fp32 if values overflow or are clamped; without fill
    values of masks."""
    headroom_bits: float | None
    """log2(largest finite value of the dtype / largest magnitude), negative where values do not
    fit; None: every value is zero."""
    overflow: int
    """Values that are infinite or NaN and finite in fp32."""
    clamped: int
    """Finite values at the dtype's limit that are larger in fp32."""
    subnormal: float
    """Share of the values not zero in fp32 that are stored subnormal or as zero (sampled)."""
    energy_lost: float
    """The error of those values, as a share of the energy of all (sampled)."""
    sqnr_db: float | None
    """Worst signal to noise ratio of a value that leaves the module, against the same program in
    fp32 (sampled over the valid rows); None: nothing in the storage dtype leaves it."""


@dataclass(frozen=True)
class WeightLoss:
    """A weight that loses values when it is cast to the storage dtype."""

    name: str
    dtype: str
    max_abs: float
    """Largest magnitude in the precision on disk."""
    overflow: int
    """Values that are infinite after the cast."""
    subnormal: float
    """Share of the nonzero values that are subnormal or zero after the cast (sampled)."""
    energy_lost: float
    """The error of those values, as a share of the energy of all (sampled)."""


@dataclass(frozen=True)
class Overflow:
    """Where finite values first became infinite or NaN."""

    module: str
    source: str
    op: str
    dtype: str
    case: str
    elements: int
    largest: float
    """Largest magnitude that those values have in fp32."""
    max_finite: float


@dataclass(frozen=True)
class Emulation:
    """A program run in the arithmetic of a target."""

    profile: str
    """Name of the arithmetic: "ort-cuda", ... (`emulate.profiles`)."""
    about: str
    cases: tuple[str, ...]
    modules: tuple[StoredValues, ...]
    """In order of execution."""
    ops: tuple[StoredValues, ...]
    """Ops that overflow, clamp, or come within two bits of the limit; at most `OPS`."""
    weights: tuple[WeightLoss, ...]
    """Weights with overflow or with a loss worth naming."""
    overflow: Overflow | None
    """The first overflow."""

    @property
    def summary(self) -> str:
        """The findings in one or two sentences."""
        found = self.overflow
        clamped = [place for place in self.ops if place.clamped]
        if found is not None:
            text = f"{overflow_sentence(found)}, case {found.case!r}"
        elif clamped:
            text = (
                f"no overflow, but values are cut off at {clamped[0].module or 'the model itself'}"
            )
        else:
            text = "no value overflows"
        weights = [loss.name for loss in self.weights]
        if not weights:
            return text
        more = f" and {len(weights) - 1} more" if len(weights) > 1 else ""
        return f"{text}; cast to the dtype, {weights[0]}{more} lose values"


OPS = 40


def overflow_sentence(found: Overflow) -> str:
    """Where values leave the range, in words."""
    place = f"{found.module or 'the model itself'} {found.source}".strip()
    name = {"float16": "fp16", "bfloat16": "bf16"}.get(found.dtype, found.dtype)
    if found.largest > found.max_finite:
        limit = f"max {found.largest:.3g} > {found.max_finite:.6g}"
        return f"values leave {name}'s range at {place} ({limit})"
    return (
        f"values stop being finite in {name} at {place}"
        f" ({found.op}; in fp32 they are at most {found.largest:.3g})"
    )


def headroom_sentence(emulation: Emulation) -> str:
    """How much larger values may get than on the inputs that were run, in words; empty: no value
    is other than zero."""
    for place in tightest(emulation, 1):
        at = f"{place.module or 'the model itself'} {place.source}".strip()
        return (
            f"headroom on these inputs: {place.headroom_bits:.1f} bits, at {at}"
            f" (max {place.max_abs:.3g}); pass louder ones, if there are any (--inputs, --prompts)"
        )
    return ""


def tightest(emulation: Emulation, count: int) -> list[StoredValues]:
    """The modules with the least headroom; of those that return the same value, the innermost."""
    innermost: dict[tuple[str, str, float], StoredValues] = {}
    for place in sorted(emulation.modules, key=lambda p: p.module.count(".")):
        innermost[place.op, place.source, place.max_abs] = place
    found = [place for place in innermost.values() if place.headroom_bits is not None]
    return sorted(found, key=lambda p: p.headroom_bits or 0.0)[:count]
