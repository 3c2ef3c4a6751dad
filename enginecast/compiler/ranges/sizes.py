"""Which sizes hold: those at which the program computes what the model does.

Where a model's code takes another path than its trace, the results are compared. A different path
with the same values needs no action. Where the values differ, a default range is narrowed, and one
that the user asked for is refused. A condition that no range can express, such as a product of two
sizes that must not be a multiple of seven, is checked at run time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from torch import Tensor, nn

from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.capture.inputs.examples import (
    EDGE_WORK,
    Case,
    Style,
    example_sizes,
    sample,
    sizes_with,
    without_data,
)
from enginecast.capture.inputs.narrowing import fix
from enginecast.capture.inputs.specs import (
    DimSpec,
    InputSpec,
    count_elements,
    dim_place,
    named_dims,
    ranges_of,
    with_sums,
)
from enginecast.capture.outputs.flatten import Wanted
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.base.source import Source
from enginecast.capture.tracing.captured import Captured
from enginecast.capture.tracing.sizes.shapes import (
    FrozenDimensionError,
    OtherSizes,
    Range,
    SizeCheck,
)
from enginecast.capture.tracing.sizes.sweep import telling_sizes
from enginecast.compiler.ranges.eager import Eager, differences, parameters_of
from enginecast.errors import CaptureError, EnginecastError
from enginecast.passes.analyses.work import work_of
from enginecast.runtime.size_checks import holds
from enginecast.verification.eager.outputs import reference_outputs, reference_program
from enginecast.verification.metrics import Array
from enginecast.verification.runs import Runs

SEED = 0
STYLES: tuple[Style, ...] = ("normal", "shifted")
"""Styles of float inputs when two paths are compared."""
MOST_LOOKED_AT = 4096
"""Most sizes of one dimension for which a condition is evaluated."""
TRIED_STYLES: tuple[Style, ...] = ("normal", "shifted", "tiny")
"""The same if no path was seen; includes styles of either sign, for branches on the sign."""
TRIED_WORK = 1e9
"""Elements of the inputs times parameters up to which sizes are tried although no other path was
seen."""
REFUSED_WORK = 1e12
"""The same for the smallest inputs: up to this, eager is run on them before the capture is
accepted."""
LARGER = 4
"""A size may be too large to run if its inputs have this many times the elements of the trace's."""
MOST_PRODUCTS = 1e11
"""Most multiplications in one run that compares paths, a few seconds; for sizes that the user asked
for, `EDGE_WORK`."""
MOST_ELEMENTS = 2**28
"""Most elements that such a run may hold at once: 2 GB in fp64."""
TOO_LARGE = "too large to be compared"


def furthest(takes: Callable[[int], bool], start: int, end: int) -> int:
    """The last number from `start` towards `end` up to which all are accepted."""
    good, bad, step = start, None, 1 if end > start else -1
    while bad is None and good != end:
        tried = start + 2 * (good - start) + step
        tried = min(tried, end) if step > 0 else max(tried, end)
        good, bad = (tried, None) if takes(tried) else (good, tried)
    while bad is not None and abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if takes(middle) else (good, middle)
    return good


def judge_sizes(source: Source, captured: Captured, wanted: Wanted) -> Captured:
    """Remove from the ranges the sizes at which the program differs from the model.

    Returns:
        The capture with ranges that may be narrower, a note on each, and those other sizes at which
        eager and program agree.

    Raises:
        CaptureError: the user asked for sizes at which the program differs from the model.
    """
    traced = example_sizes(captured.inputs)
    checks = [check for check in captured.size_checks if holds(check.condition, traced)]
    if not captured.other_sizes:
        return replace(captured, size_checks=tuple(checks))
    compared = _Compared(Eager(source.eager(), wanted), captured)
    dims, ranges = named_dims(captured.inputs), ranges_of(captured.inputs)
    kept, notes = [], []
    for other in captured.other_sizes:
        sizes = sizes_with(captured.inputs, other.sizes)
        if any(not ranges[n][0] <= size <= ranges[n][1] for n, size in other.sizes.items()):
            continue  # narrowed away already
        if not all(holds(check.condition, sizes) for check in checks):
            continue  # refused by an engine already
        why = compared.difference(sizes) if other.is_seen else compared.difference_on_any(sizes)
        if not why:
            # Inputs of other sizes need not take the path of a specialised program.
            kept += [other] if other.is_seen and not captured.guards else []
            continue
        changed = [name for name, size in other.sizes.items() if size != traced[name]]
        code = f"this model's code ({other.place})" if other.place else "this model's code"
        does = "does something else"
        if why == TOO_LARGE:
            does = "takes another path, which is too large to be compared"
        if not holds(other.condition, traced) or _is_range(other, dims):
            refuse_asked(captured, other, changed, why)
            [name] = changed
            before, size = ranges[name], other.sizes[name]
            ranges[name] = _without(before, size, dims[name])
            new = _shown(ranges[name])
            text = f"{name} takes {new}, not {_shown(before)}: at {size} {code} {does}"
            option = f"--dynamic {dim_place(captured.inputs, name)}={new}"
            notes.append(Downgraded(text, "sizes", option))
        else:
            _refuse_without_example(other, dims, why)
            checks.append(SizeCheck(other.condition, other.place))
            text = f"the engine takes only sizes with {other.condition}: at others {code} {does}"
            notes.append(Downgraded(text, "sizes"))
    return replace(
        captured,
        inputs=with_sums([_narrowed(spec, ranges) for spec in captured.inputs]),
        other_sizes=tuple(kept),
        size_checks=tuple(checks),
        notes=(*captured.notes, *notes),
    )


class _Compared:
    """A program beside the model that it was captured from, in other sizes."""

    def __init__(self, eager: Eager, captured: Captured) -> None:
        self._eager, self._captured, self._specs = eager, captured, captured.inputs
        self._parameters = parameters_of(captured.as_written)
        self._guards = {guard.output for guard in captured.guards}

    def difference_on_any(self, sizes: Mapping[str, int]) -> str:
        """How the program differs if no other path was seen in the code.

        It is compared on values of either sign, if the code accepts these in the sizes of the
        trace.
        """
        if count_elements(self._specs, sizes) * max(self._parameters, 1) > TRIED_WORK:
            return ""
        traced = example_sizes(self._specs)
        for style in TRIED_STYLES:
            for sign in (1, -1):
                found = self.difference(sizes, (style,), sign)
                if found and not self.difference(traced, (style,), sign):
                    return found
        return ""

    def difference(
        self, sizes: Mapping[str, int], styles: Sequence[Style] = STYLES, sign: int = 1
    ) -> str:
        """How the program differs from eager at these sizes; empty if it does not."""
        if self._is_too_large(sizes):
            return TOO_LARGE
        program, names = self._captured.as_written, [spec.name for spec in self._captured.outputs]
        floats = {s.name for s in self._specs if s.dtype.is_floating_point and s.is_free}
        has_floats = any(spec.dtype.is_floating_point for spec in self._specs)

        def signed(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {n: t * sign if n in floats else t for n, t in inputs.items()}

        cases = [
            Case(style, signed(sample(self._specs, sizes, SEED, style=style)))
            for style in (styles if has_floats else styles[:1])
        ]
        plain = Runs(lambda: program, names)
        try:
            with quiet_torch():
                traced = reference_outputs(plain, cases)
                cases = [c for c in cases if all(traced[c.name][g].all() for g in self._guards)]
                if not cases:
                    return ""  # an engine refuses them
                outputs = self._eager.outputs(cases)
                exact = Runs(partial(reference_program, program), names)
                found = differences(outputs, traced, plain, exact, cases, self._guards)
                return next(iter([*found, *self._other_shapes(outputs[cases[0].name], sizes)]), "")
        except EnginecastError as error:
            return error.message

    def _is_too_large(self, sizes: Mapping[str, int]) -> bool:
        """Whether a run in these sizes takes too much time or memory for a comparison."""
        count = count_elements(self._specs, sizes)
        if count <= LARGER * count_elements(self._specs, {}):
            return False
        work = work_of(self._captured.as_written, without_data(self._specs, sizes))
        if work is None:
            return count * self._parameters > EDGE_WORK
        dims = named_dims(self._specs)
        most = EDGE_WORK if any(dims[name].asked for name in sizes) else MOST_PRODUCTS
        return bool(work.products > most or work.elements > MOST_ELEMENTS)

    def _other_shapes(
        self, outputs: Mapping[str, Array], sizes: Mapping[str, int]
    ) -> Iterator[str]:
        """Outputs of eager with other shapes than the program declares."""
        for spec in (spec for spec in self._captured.outputs if spec.name not in self._guards):
            shape = outputs[spec.name].shape
            declared = tuple(sizes.get(d, d) if isinstance(d, str) else d for d in spec.dims)
            pairs = zip(shape, declared, strict=False)
            if len(shape) != len(declared) or any(n != m for n, m in pairs if isinstance(m, int)):
                yield f"output {spec.name!r} has the shape {list(shape)}, not {list(declared)}"


def leave_out_refused(source: Source, captured: Captured, wanted: Wanted) -> Captured:
    """Remove from the ranges small sizes that eager itself refuses.

    This is done if eager refuses the combination of the smallest sizes: a norm may need more than
    one value in each channel.

    Returns:
        The capture; the default range with the most sizes gets a larger minimum.
    """
    dims = named_dims(captured.inputs)
    smallest = {name: dim.minimum for name, dim in dims.items()}
    free = [name for name, dim in dims.items() if not dim.asked and dim.minimum < dim.size]
    work = count_elements(captured.inputs, smallest) * parameters_of(captured.as_written)
    if not free or work > REFUSED_WORK:
        return captured
    eager = Eager(source.eager(), wanted)

    def takes(sizes: Mapping[str, int]) -> bool:
        return eager.takes(sample(captured.inputs, sizes, SEED))

    if takes(smallest) or not takes(example_sizes(captured.inputs)):
        return captured
    free.sort(key=lambda name: -len(dims[name].sizes))
    name = next((each for each in free if takes({**smallest, each: dims[each].size})), None)
    if name is None:
        return captured
    dim, sizes = dims[name], dims[name].sizes
    place = furthest(lambda at: takes({**smallest, name: sizes[at]}), sizes.index(dim.size), 0)
    ranges = {**ranges_of(captured.inputs), name: (sizes[place], dim.maximum)}
    note = (
        f"{name} takes {_shown(ranges[name])}, not {_shown((dim.minimum, dim.maximum))}: the "
        "model's code refuses the smallest sizes"
    )
    inputs = tuple(_narrowed(spec, ranges) for spec in captured.inputs)
    return replace(captured, inputs=inputs, notes=(*captured.notes, note))


def fix_refused(
    eager: Eager, specs: tuple[InputSpec, ...]
) -> tuple[tuple[InputSpec, ...], list[str]]:
    """Fix the dimensions that the model accepts in one size only, unless the user gave a range;
    with a note on each.
    """
    notes: list[str] = []
    for name, dim in named_dims(specs).items():
        sizes = [size for size in (dim.minimum, dim.size + dim.step) if size <= dim.maximum]
        others = ({**example_sizes(specs), name: size} for size in sizes)
        if dim.asked or all(eager.takes(sample(specs, each, SEED)) for each in others):
            continue
        fitted = fix(specs, (name,))
        assert fitted is not None  # nobody asked for this dimension
        specs = fitted.specs
        notes += fitted.notes
    return specs, notes


def telling_cases(
    module: nn.Module, specs: Sequence[InputSpec], parameters: int, styles: Sequence[Style]
) -> list[Case]:
    """Small inputs of both value styles, in sizes at which a trace may silently differ from the
    code.

    Args:
        module: whose Python code mentions sizes.
        parameters: of the model, which limits the work.
    """
    traced, cases = example_sizes(specs), []
    for sizes in telling_sizes(module, specs, traced):
        if count_elements(specs, sizes) * max(parameters, 1) > TRIED_WORK:
            continue
        changed = [f"{name} {size}" for name, size in sizes.items() if size != traced[name]]
        for style in styles:
            inputs = sample(specs, sizes, SEED, style=style)
            cases.append(Case(f"{', '.join(changed)}, {style}", inputs))
    return cases


def _is_range(other: OtherSizes, dims: Mapping[str, DimSpec]) -> bool:
    """Whether a range of one dimension excludes exactly the sizes that break a condition."""
    if len(other.sizes) > 1:
        return False
    [name] = other.sizes
    tried = dims[name].sizes[:MOST_LOOKED_AT]
    runs = groupby(tried, lambda size: holds(other.condition, {name: size}))
    return sum(taken for taken, _ in runs) == 1


def refuse_asked(captured: Captured, other: OtherSizes, changed: list[str], why: str) -> None:
    """Refuse sizes that the user asked for, and those that no range of one dimension can exclude.

    Raises:
        CaptureError: the user asked for them.
        FrozenDimensionError: the user did not; the export is repeated in the example's sizes.
    """
    dims = named_dims(captured.inputs)
    if len(changed) == 1 and not dims[changed[0]].asked:
        guess = dims[changed[0]]
        left = _without((guess.minimum, guess.maximum), other.sizes[changed[0]], guess)
        if guess.given is None or left[0] <= guess.given <= left[1]:
            return
    sizes = ", ".join(f"{name} = {size}" for name, size in other.sizes.items())
    at = f" at {other.place}" if other.place else ""
    place, dim = next(
        (f"{spec.name}:{index}", dim)
        for spec in captured.inputs
        for index, dim in enumerate(spec.dims)
        if dim.name == changed[0]
    )
    rest = _without((dim.minimum, dim.maximum), other.sizes[changed[0]], dim)
    least = replace(dim, minimum=rest[0], maximum=rest[1])
    message = (
        f"with {sizes} the model's code{at} does something else than the program, which was traced "
        f"with {', '.join(f'{name} = {dims[name].size}' for name in other.sizes)}: {why}"
    )
    hint = f"Leave such sizes out: --dynamic {place}={least.shown}."
    if any(dims[name].asked for name in changed):
        raise CaptureError(message, hint=hint)
    raise FrozenDimensionError(message, tuple(changed), hint=hint)


def _refuse_without_example(other: OtherSizes, dims: Mapping[str, DimSpec], why: str) -> None:
    """Refuse a condition that the sizes of the example break, such as that two batches differ.

    Raises:
        FrozenDimensionError: the export is repeated in the example's sizes.
    """
    given = {name: dims[name].given for name in other.sizes}
    guesses = all(size is not None and not dims[name].asked for name, size in given.items())
    if guesses and not holds(other.condition, {n: s for n, s in given.items() if s is not None}):
        code = f"the model's code ({other.place})" if other.place else "the model's code"
        raise FrozenDimensionError(
            f"in the sizes of the example {code} does something else than where "
            f"{other.condition}: {why}",
            tuple(given),
        )


def _without(bounds: Range, size: int, dim: DimSpec) -> Range:
    """A range up to a size, on the side of the traced one."""
    return (bounds[0], size - dim.step) if size > dim.size else (size + dim.step, bounds[1])


def _shown(bounds: Range) -> str:
    return "..".join(map(str, dict.fromkeys(bounds)))


def _narrowed(spec: InputSpec, ranges: Mapping[str, Range]) -> InputSpec:
    dims = (
        dim
        if dim.name is None or dim.parts
        else replace(dim, minimum=ranges[dim.name][0], maximum=ranges[dim.name][1])
        for dim in spec.dims
    )
    return replace(spec, dims=tuple(dims))
