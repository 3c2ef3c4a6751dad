"""Whether a captured program is the model: its outputs next to those of eager."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from enginecast.passes.ir.interpret import ALIGNMENT
from enginecast.verification.eager.outputs import Case, NamedInputs, as_arrays
from enginecast.verification.floor import KERNELS, LIMIT, UNIT_ROUNDOFF, least_floor
from enginecast.verification.metrics import Array, Loss, distance, measure
from enginecast.verification.reference import Reference
from enginecast.verification.runs import Runs


def capture_failures(
    captured: Runs,
    cases: Sequence[Case],
    reference: Reference,
    guards: Collection[str] = (),
    again: Callable[[Case], Mapping[str, Array]] | None = None,
    dtype: str = "fp32",
) -> Iterator[str]:
    """Report where the captured program in fp32 differs from eager fp32 by more than rounding.

    Every later comparison depends on this one: the fp64 reference is computed from the program, so
    a capture that baked in a branch would have a reference with the same defect, and every engine
    made from it would agree. The same ops on the same kernels are mostly bit-equal; a kernel with
    another order may differ by the program's own error against fp64.

    Args:
        captured: runs the program.
        guards: additional outputs of the program, which must be true.
        reference: holds eager fp32 and the program's fp64 outputs for the same cases.
        again: runs eager fp32 once more, with its weights in memory as the program's are: a product
            with one row adds up in another order where a weight lies at an odd address, as in a
            mapped file.
        dtype: whose rounding may make a difference: of a model in fp32 that computes in 16 bits by
            itself, and a program that rounds to them.
    """
    stored = {case.name: case for case in (*reference.cases, *reference.edges)}
    inputs = {case.name: case.inputs for case in cases}
    for edge in reference.edges:
        inputs[edge.name] = {name: torch.from_numpy(a) for name, a in edge.inputs.items()}
    found_in = captured.outputs(list(inputs.values()))
    for case, outputs in zip(inputs, found_in, strict=True):
        aligned: Mapping[str, Array] | None = None
        for name, found in as_arrays(outputs).items():
            if name in guards:
                if not found.all():
                    yield f"case {case!r}: the program takes another path than eager ({name})"
                continue
            plain, exact = stored[case].outputs[name], stored[case].reference[name]
            problem = _other_than(found, plain, exact, dtype)
            if problem and again is not None:
                aligned = again(NamedInputs(case, inputs[case])) if aligned is None else aligned
                other = aligned.get(name, plain)
                is_alike = not _other_than(found, other, exact, dtype)
                if distance(other, plain) <= KERNELS and is_alike:
                    continue
            if problem:
                yield (
                    f"output {name!r}, case {case!r}: the captured program is not the model: "
                    f"{problem}"
                )


@contextmanager
def aligned_weights(module: nn.Module) -> Iterator[None]:
    """Align the weights of a module as torch's allocator would: unaligned ones are replaced by
    copies within the block.
    """
    moved = [
        (weight, weight.data)
        for weight in (*module.parameters(), *module.buffers())
        if weight.layout is torch.strided and weight.numel() and weight.data_ptr() % ALIGNMENT
    ]
    try:
        for weight, data in moved:
            weight.data = data.clone()
        yield
    finally:
        for weight, data in moved:
            weight.data = data


def _other_than(found: Array, plain: Array, exact: Array, dtype: str) -> str:
    """How an output of the program differs from eager fp32 by more than rounding; "" if it does
    not.
    """
    allowed = LIMIT * max(distance(found, exact), least_floor(dtype))
    off = distance(found, plain)
    if not off <= allowed:
        return f"it differs from eager fp32 by {off:.2g}, rounding allows {allowed:.2g}"
    if found.dtype.kind in "biu" or found.shape != exact.shape:
        return ""
    with np.errstate(all="ignore"):
        lost = np.abs(found.astype(np.float64) - exact.astype(np.float64))
    lost = np.where(np.isfinite(lost), lost, 0.0)
    part = measure(found, plain, loss=Loss(lost, dtype, UNIT_ROUNDOFF[dtype])).part
    if part is None or part.excess <= 1:
        return ""
    return (
        f"{part.place} differs from eager fp32 by {part.error:.2g}, rounding allows"
        f" {part.allowed:.2g}"
    )
