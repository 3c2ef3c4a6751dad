"""Judge sizes at which a model's code takes another path than its trace, by comparing the results.

A different path with the same values needs no action. Where the values differ, a default range is
narrowed, and one that the user asked for is refused. A condition that no range can express, such as
a product of two sizes that must not be a multiple of seven, is checked at run time.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor, nn

from enginecast.capture.inputs.examples import (
    EDGE_WORK,
    Case,
    Style,
    example_sizes,
    sample,
    sizes_with,
    without_data,
)
from enginecast.capture.inputs.specs import (
    DimSpec,
    InputSpec,
    named_dims,
    ranges_of,
    with_sums,
)
from enginecast.capture.outputs.flatten import Wanted, run_named
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.source import Source
from enginecast.capture.tracing.captured import Captured
from enginecast.capture.tracing.sizes.shapes import (
    FrozenDimensionError,
    OtherSizes,
    Range,
    SizeCheck,
)
from enginecast.errors import CaptureError, EnginecastError
from enginecast.passes.analyses.work import work_of
from enginecast.runtime.size_checks import holds
from enginecast.verification.eager import (
    as_arrays,
    capture_failures,
    eager_outputs,
    reference_outputs,
    reference_program,
)
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import Array
from enginecast.verification.reference import Reference, ReferenceCase
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


def judge_sizes(source: Source, captured: Captured, wanted: Wanted) -> Captured:
    """Remove from the ranges the sizes at which the program differs from the model.

    Returns:
        The capture with ranges that may be narrower, a note on each, and those other sizes at which
        eager and program agree.

    Raises:
        CaptureError: the user asked for sizes at which the program differs from the model.
    """
    traced = example_sizes(captured.inputs)
    readable = tuple(c for c in captured.size_checks if holds(c.condition, traced))
    captured = replace(captured, size_checks=readable)
    if not captured.other_sizes:
        return captured
    module = source.eager()
    dims = named_dims(captured.inputs)
    ranges = ranges_of(captured.inputs)
    kept, notes, checks = [], [], list(captured.size_checks)
    compare = partial(_difference, module, captured, wanted)
    tried = partial(_difference_on_any, compare, captured)
    for other in captured.other_sizes:
        sizes = sizes_with(captured.inputs, other.sizes)
        if any(not ranges[n][0] <= size <= ranges[n][1] for n, size in other.sizes.items()):
            continue  # narrowed away already
        if not all(holds(check.condition, sizes) for check in checks):
            continue  # refused by an engine already
        why = compare(sizes) if other.is_seen else tried(sizes)
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
            _refuse_asked(captured, other, changed, why)
            [name] = changed
            before, size = ranges[name], other.sizes[name]
            ranges[name] = _without(before, size, dims[name])
            notes.append(
                f"{name} takes {_shown(ranges[name])}, not {_shown(before)}: at {size} {code} "
                f"{does}"
            )
        else:
            _refuse_without_example(other, dims, why)
            checks.append(SizeCheck(other.condition, other.place))
            notes.append(
                f"the engine takes only sizes with {other.condition}: at others {code} {does}"
            )
    return replace(
        captured,
        inputs=with_sums([_narrowed(spec, ranges) for spec in captured.inputs]),
        other_sizes=tuple(kept),
        size_checks=tuple(checks),
        notes=(*captured.notes, *notes),
    )


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
    if not free or _elements(captured.inputs, smallest) * _parameters(captured) > REFUSED_WORK:
        return captured
    takes = partial(_takes, source.eager(), captured, wanted)
    if takes(smallest) or not takes(example_sizes(captured.inputs)):
        return captured
    for name in sorted(free, key=lambda name: -len(dims[name].sizes)):
        dim = dims[name]
        refused, taken = dim.minimum, dim.size
        if not takes({**smallest, name: taken}):
            continue
        while taken - refused > dim.step:
            middle = refused + (taken - refused) // (2 * dim.step) * dim.step
            if takes({**smallest, name: middle}):
                taken = middle
            else:
                refused = middle
        ranges = {**ranges_of(captured.inputs), name: (taken, dim.maximum)}
        note = (
            f"{name} takes {_shown(ranges[name])}, not {_shown((dim.minimum, dim.maximum))}: the "
            "model's code refuses the smallest sizes"
        )
        inputs = tuple(_narrowed(spec, ranges) for spec in captured.inputs)
        return replace(captured, inputs=inputs, notes=(*captured.notes, note))
    return captured


def _takes(module: nn.Module, captured: Captured, wanted: Wanted, sizes: Mapping[str, int]) -> bool:
    """Whether eager runs on inputs of these sizes."""
    inputs = sample(captured.inputs, sizes, SEED)
    try:
        with torch.no_grad(), quiet_torch():
            run_named(module, inputs, wanted)
    except EnginecastError:
        raise
    except Exception:  # the model's own code
        return False
    return True


def _difference_on_any(
    compare: Callable[..., str], captured: Captured, sizes: Mapping[str, int]
) -> str:
    """How the program differs if no other path was seen in the code.

    It is compared on values of either sign, if the code accepts these in the sizes of the trace.
    """
    specs = captured.inputs
    if _elements(specs, sizes) * max(_parameters(captured), 1) > TRIED_WORK:
        return ""
    for style in TRIED_STYLES:
        for sign in (1, -1):
            found = compare(sizes, (style,), sign)
            if found and not compare(example_sizes(specs), (style,), sign):
                return found
    return ""


def _difference(
    module: nn.Module,
    captured: Captured,
    wanted: Wanted,
    sizes: Mapping[str, int],
    styles: Sequence[Style] = STYLES,
    sign: int = 1,
) -> str:
    """How the program differs from eager at these sizes; empty if it does not."""
    program, specs = captured.program, captured.inputs
    names = [spec.name for spec in captured.outputs]
    if _is_too_large(captured, sizes):
        return TOO_LARGE
    guards = {guard.output for guard in captured.guards}
    has_floats = any(spec.dtype.is_floating_point for spec in specs)
    styles = styles if has_floats else styles[:1]
    drawn = [sample(specs, sizes, SEED, style=style) for style in styles]
    cases = [Case(s, _signed(specs, each, sign)) for s, each in zip(styles, drawn, strict=True)]
    forward = partial(run_named, wanted=wanted)
    runs = Runs(lambda: program, names)
    try:
        with quiet_torch():
            traced = reference_outputs(runs, cases)
            cases = [c for c in cases if all(traced[c.name][guard].all() for guard in guards)]
            if not cases:
                return ""  # an engine refuses them
            plain = eager_outputs(lambda dtype: module, cases, dtype="fp32", forward=forward)
            other_shapes = _other_shapes(captured, plain[cases[0].name], sizes)
            if all(_equal(traced[case.name], plain[case.name]) for case in cases):
                return next(other_shapes, "")  # fp64 takes eight times as long for convolutions
            exact = reference_outputs(Runs(partial(reference_program, program), names), cases)
            found = (
                ReferenceCase(c.name, as_arrays(c.inputs), plain[c.name], exact[c.name])
                for c in cases
            )
            reference = Reference(tuple(found), Floor("fp32", {}))
            failures = capture_failures(runs, cases, reference, guards)
            return next(chain(failures, other_shapes), "")
    except EnginecastError as error:
        return error.message


def _is_too_large(captured: Captured, sizes: Mapping[str, int]) -> bool:
    """Whether a run in these sizes takes too much time or memory for a comparison."""
    elements = _elements(captured.inputs, sizes)
    if elements <= LARGER * _elements(captured.inputs, {}):
        return False
    work = work_of(captured.program, without_data(captured.inputs, sizes))
    if work is None:
        return elements * _parameters(captured) > EDGE_WORK
    dims = named_dims(captured.inputs)
    asked = any(dims[name].asked for name in sizes)
    most = EDGE_WORK if asked else MOST_PRODUCTS
    return work.products > most or work.elements > MOST_ELEMENTS


def _elements(specs: Sequence[InputSpec], sizes: Mapping[str, int]) -> int:
    return sum(math.prod(dim.size_in(sizes) for dim in spec.dims) for spec in specs)


def _parameters(captured: Captured) -> int:
    return sum(tensor.numel() for tensor in captured.program.state_dict.values())


def _signed(
    specs: Sequence[InputSpec], inputs: Mapping[str, Tensor], sign: int
) -> dict[str, Tensor]:
    floats = {spec.name for spec in specs if spec.dtype.is_floating_point and spec.is_free}
    return {n: t * sign if n in floats else t for n, t in inputs.items()}


def _equal(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> bool:
    """Whether all outputs are bit-equal and of the same dtype."""
    return all(
        found[name].dtype.kind == array.dtype.kind
        and np.array_equal(found[name], array, equal_nan=True)
        for name, array in wanted.items()
    )


def _other_shapes(
    captured: Captured, outputs: Mapping[str, Array], sizes: Mapping[str, int]
) -> Iterator[str]:
    """Outputs of eager with other shapes than the program declares."""
    guards = {guard.output for guard in captured.guards}
    for spec in (spec for spec in captured.outputs if spec.name not in guards):
        shape = outputs[spec.name].shape
        declared = tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims)
        pairs = zip(shape, declared, strict=False)
        if len(shape) != len(declared) or any(n != m for n, m in pairs if isinstance(m, int)):
            yield f"output {spec.name!r} has the shape {list(shape)}, not {list(declared)}"


def _is_range(other: OtherSizes, dims: Mapping[str, DimSpec]) -> bool:
    """Whether a range of one dimension excludes exactly the sizes that break a condition."""
    if len(other.sizes) > 1:
        return False
    [name] = other.sizes
    tried = dims[name].sizes[:MOST_LOOKED_AT]
    runs = groupby(tried, lambda size: holds(other.condition, {name: size}))
    return sum(taken for taken, _ in runs) == 1


def _refuse_asked(captured: Captured, other: OtherSizes, changed: list[str], why: str) -> None:
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
