"""Compare a program that keeps a tensor on both paths with eager, which drops it on one.

`if not mask.any(): mask = None` has no operator: the program computes with the mask on both paths.
That is correct only if an all-false mask changes nothing, whatever the other inputs are:
`x.masked_fill(mask, 0).clamp(-1e7, 1e7)` changes large values. So both paths are run with floats of
every magnitude.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from enginecast.capture.control_flow.cover.branches import by_paths
from enginecast.capture.inputs.examples import Case
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.locations import SourceLocation
from enginecast.compiler.ranges.eager import FAILS, Eager, differences, parameters_of
from enginecast.verification.eager.outputs import reference_outputs
from enginecast.verification.runs import Runs

SEED = 0
MOST_PATHS = 8
"""Most combinations of predicate values that are compared."""
MOST_TRIALS = 160
"""Most runs of the program and of eager, for a model that is quick to run."""
FEW_TRIALS = 24
WORK = 1e10
"""Elements of the inputs times parameters above which only a few runs are made."""
LIMITS = (-37.0, 37.0)
"""Smallest and largest power of ten of the floats in one tensor."""
Change = Callable[[Tensor], Tensor]


def _spread(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)
    powers = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    sizes = 10 ** (powers * (LIMITS[1] - LIMITS[0]) + LIMITS[0])
    return (tensor.sign() * sizes).to(tensor.dtype)


CHANGES: Mapping[str, Change] = {
    "1e8 times as large": lambda values: values * 1e8,
    "1e30 times as large": lambda values: values * 1e30,
    "of every size": _spread,
    "negative": lambda values: -values.abs(),
    "1e-8 times as large": lambda values: values * 1e-8,
    "1e20 times as large": lambda values: values * 1e20,
    "negative and 1e8 times as large": lambda values: values.abs() * -1e8,
    "positive and 1e8 times as large": lambda values: values.abs() * 1e8,
    "positive": torch.abs,
    "1e4 times as large": lambda values: values * 1e4,
    "1e-30 times as large": lambda values: values * 1e-30,
    "negative and 1e30 times as large": lambda values: values.abs() * -1e30,
    "positive and 1e30 times as large": lambda values: values.abs() * 1e30,
}
"""Changes to floats, the ones most likely to show a difference first."""


def dropped_failures(
    eager: Eager,
    plain: Runs,
    exact: Runs,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    places: Collection[SourceLocation],
) -> Iterator[str]:
    """Report where a program that keeps a tensor differs from eager, which drops it on one path.

    Args:
        eager: the model.
        plain: runs the program.
        exact: runs it in fp64.
        specs: the inputs.
        cases: inputs that take both paths, where such inputs were found.
        places: lines of the branches that drop a tensor.
    """
    where = ", ".join(dict.fromkeys(place.short for place in places))
    said = f"a tensor that one path of {where} drops is kept by the program"
    ordered = sorted(cases, key=lambda case: sum(t.numel() for t in case.inputs.values()))
    bases, unseen = by_paths(eager.module, ordered, places, MOST_PATHS)
    for lost in unseen:
        yield f"{said}, and only one path was seen: {lost.place}: {lost.seen}"
    if unseen:
        return
    parameters = parameters_of(plain.program)
    elements = max(sum(t.numel() for t in base.inputs.values()) for base in bases)
    most = FEW_TRIALS if elements * parameters > WORK else MOST_TRIALS
    for case in islice(_changed(specs, bases), most):
        if not eager.takes(case.inputs):
            continue
        try:
            traced = reference_outputs(plain, [case])
            found = differences(eager.outputs([case]), traced, plain, exact, [case])
        except FAILS as error:
            found = [f"case {case.name!r}: eager runs, but the program does not: {error}"]
        if found:
            yield f"{said}, which changes the results: {found[0]}"
            return


def _changed(specs: Sequence[InputSpec], bases: Sequence[Case]) -> Iterator[Case]:
    """The base cases with changed floats: in all inputs together, and in each alone."""
    names = [spec.name for spec in specs if spec.is_unbounded]
    together = [names] if names else []
    alone = [[name] for name in names] if len(names) > 1 else []
    for chosen in (*together, *alone):
        for what, change in CHANGES.items():
            for base in bases:
                inputs = {**base.inputs, **{n: _finite(change, base.inputs[n]) for n in chosen}}
                yield Case(f"{base.name}, {', '.join(chosen)} {what}", inputs)


def _finite(change: Change, tensor: Tensor) -> Tensor:
    """Changed floats, limited to the finite range of their dtype."""
    limits = torch.finfo(tensor.dtype)
    wide = tensor.to(torch.float64)
    return change(wide).clamp(limits.min, limits.max).to(tensor.dtype)
