"""The inputs that a model is compared on: corners of its ranges, what the user gave, and what takes
the other ways of its branches.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from enginecast.capture.branches import cover
from enginecast.capture.examples import Case, example_sizes, sample, verification_inputs
from enginecast.capture.given import tokenize
from enginecast.capture.inputs import InputSpec
from enginecast.capture.oracle import Guard
from enginecast.capture.places import Place
from enginecast.capture.recorder import record
from enginecast.capture.size_guards import OtherSizes
from enginecast.capture.source import Source
from enginecast.errors import CaptureError, UsageError
from enginecast.steps import Steps

SEED = 0
"""Of the verification inputs: equal calls give equal bundles."""


def choose_cases(
    source: Source,
    specs: Sequence[InputSpec],
    given: Mapping[str, Tensor],
    prompts: Sequence[str] | None,
    parameters: int,
    steps: Steps,
) -> tuple[Case, ...]:
    """The verification inputs, those of the user first.

    Args:
        source: the model.
        specs: its inputs, with the ranges that the program kept.
        given: tensors that the user gave; may be empty.
        prompts: texts that the user gave.
        parameters: of the model, which limits the work; 0: no limit.
        steps: is told what is left out.

    Raises:
        UsageError: what was given does not fit the inputs.
    """
    cases = verification_inputs(specs, SEED, parameters=parameters)
    if given:
        cases = [Case("given inputs", dict(given)), *cases]
    cases = [*_example_case(source, specs, steps), *cases]
    if prompts is not None:
        encoded = tokenize(prompts, source, specs)
        cases = [Case("given prompts", _filled(encoded, specs)), *cases]
    return tuple(_within(specs, cases))


def with_other_sizes(
    specs: Sequence[InputSpec], cases: Sequence[Case], others: Sequence[OtherSizes]
) -> tuple[Case, ...]:
    """The cases, and one for each of the sizes at which the code goes another way than its trace.

    Args:
        specs: the inputs.
        cases: the verification inputs.
        others: what the trace's guards exclude.
    """
    added = []
    for other in others:
        place = f" ({other.place})" if other.place else ""
        inputs = sample(specs, {**example_sizes(specs), **other.sizes}, SEED)
        told = ", ".join(f"{name} {size}" for name, size in other.sizes.items())
        added.append(Case(f"sizes that the code tells apart: {told}{place}", inputs))
    return (*cases, *added)


@dataclass(frozen=True)
class Covered:
    """Verification inputs that take both ways of each branch, as far as such were found."""

    inputs: tuple[InputSpec, ...]
    """With value ranges that hold the cases that were added."""
    cases: tuple[Case, ...]
    verified: tuple[str, ...]
    """Which branches were seen both ways, as a note; empty without any."""
    unverified: tuple[str, ...]
    """Each as "unverified branch: FILE:LINE: what was seen"."""

    @property
    def told(self) -> tuple[str, ...]:
        return (*self.verified, *self.unverified)


def cover_branches(
    source: Source,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    places: Collection[Place],
) -> Covered:
    """Search for inputs that take the ways of branches which `cases` do not take.

    Args:
        source: the model; it is run in fp32.
        specs: its inputs.
        cases: the verification inputs.
        places: file and line of the branches that decide.

    Raises:
        CaptureError: a loop that does not end.
    """
    found = cover(source.eager(), specs, cases, places, SEED)
    told = f"both ways verified: {', '.join(found.verified)}"
    return Covered(
        inputs=tuple(widened(spec, found.cases) for spec in specs),
        cases=(*cases, *found.cases),
        verified=(told,) if found.verified else (),
        unverified=tuple(f"unverified branch: {line}" for line in found.unverified),
    )


def along_guards(
    source: Source, cases: Sequence[Case], guards: Sequence[Guard], steps: Steps
) -> tuple[Case, ...]:
    """The cases in which the model goes the way that its program was specialised to.

    Args:
        source: the model; it is run in fp32.
        cases: the verification inputs.
        guards: of the program.
        steps: is told of cases that the engine will refuse.

    Raises:
        CaptureError: it goes that way in none of them, or a loop does not end.
    """
    module = source.eager()
    places = {guard.read.place for guard in guards}
    taken = [(guard.read.place, guard.read.value) for guard in guards]
    kept: list[Case] = []
    left: list[Case] = []
    for case in cases:
        ways = [
            [(read.place, read.value) for read in reads if read.place in places]
            for reads in record(module, [case.inputs])
        ]
        (kept if ways == [taken] else left).append(case)
    if not kept:
        raise CaptureError(
            "no verification input goes the way of the specialised program",
            hint="Give inputs that do: --inputs FILE.safetensors.",
        )
    if left:
        names = ", ".join(repr(case.name) for case in left)
        steps.say(f"the engine will refuse inputs that go another way, such as {names}")
    return tuple(kept)


def widened(spec: InputSpec, cases: Sequence[Case]) -> InputSpec:
    """`spec` with a range of values that holds those of `cases`: the example's was a guess."""
    if spec.low is None or spec.high is None or spec.kind != "tensor":
        return spec
    values = [case.inputs[spec.name] for case in cases if case.inputs[spec.name].numel()]
    low = min([spec.low, *(int(value.min()) for value in values)])
    high = max([spec.high, *(int(value.max()) for value in values)])
    return replace(spec, low=low, high=high)


def _example_case(source: Source, specs: Sequence[InputSpec], steps: Steps) -> list[Case]:
    """The example that came with the model, where the program takes its sizes."""
    example = {
        spec.name: source.example()[spec.name].to(spec.dtype)
        for spec in specs
        if spec.name in source.example()
    }
    if len(example) != len(specs) or not example:
        return []
    check_values(example, specs, "the example")
    case = Case("example inputs", example)
    try:
        _check_sizes(specs, case)
    except UsageError as error:
        steps.say(f"not verified on the example: {error.message}")
        return []
    return [case]


def check_values(given: Mapping[str, Tensor], specs: Sequence[InputSpec], origin: str) -> None:
    """Refuse ids that the model has no row for, before they reach a kernel, and padding alone."""
    for spec in specs:
        tensor = given[spec.name]
        if spec.kind == "attention_mask" and not tensor.any():
            raise UsageError(
                f"{origin}: {spec.name}: 0 everywhere, so that all of the input is padding",
                hint="Nothing can be compared or calibrated on it: give at least one token.",
            )
        if spec.low is None or spec.high is None or not tensor.numel():
            continue
        least, most = tensor.min().item(), tensor.max().item()
        if least < spec.low or most > spec.high:
            wrong = least if least < spec.low else most
            raise UsageError(
                f"{origin}: {spec.name}: expected values in {spec.low}..{spec.high}, got {wrong}"
            )


def _filled(tensors: dict[str, Tensor], specs: Sequence[InputSpec]) -> dict[str, Tensor]:
    lacking = [spec.name for spec in specs if spec.name not in tensors]
    if lacking:
        raise UsageError(
            f"--prompts gives no values for {', '.join(lacking)}",
            hint="Give all inputs as tensors: --inputs FILE.safetensors.",
        )
    return tensors


def _within(specs: Sequence[InputSpec], cases: Sequence[Case]) -> list[Case]:
    """Cases cut to the largest batch: a prompt file may be longer than a batch."""
    limits = {spec.name: spec.dims[0].maximum for spec in specs if spec.dims}
    cut = [
        replace(
            case,
            inputs={n: t[: limits[n]] if n in limits else t for n, t in case.inputs.items()},
        )
        for case in cases
    ]
    for case in cut:
        _check_sizes(specs, case)
    return cut


def _check_sizes(specs: Sequence[InputSpec], case: Case) -> None:
    """Refuse what was given in a size that the program, narrowed to what the model takes, does not.

    Raises:
        UsageError: names the input, its dimension, and what it may be.
    """
    for spec in specs:
        sizes = case.inputs[spec.name].shape
        for index, (size, dim) in enumerate(zip(sizes, spec.dims, strict=True)):
            if not dim.minimum <= size <= dim.maximum:
                allowed = (
                    str(dim.minimum)
                    if dim.minimum == dim.maximum
                    else f"{dim.minimum}..{dim.maximum}"
                )
                raise UsageError(
                    f"the {case.name} have {size} in dimension {index} of {spec.name}, "
                    f"the program takes {allowed}",
                    hint=f"Fix it for them: --dynamic {spec.name}:{index}={size}.",
                )
