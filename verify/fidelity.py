"""Whether a captured program is the model: the one comparison that every later one stands on.

The fp64 reference is computed from the program.  A capture that baked a branch would take its
reference along, and every engine made from it would agree; so the program in fp32 is compared with
the eager module itself.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.export import ExportedProgram

from enginecast.passes.interpret import interpret_cases
from enginecast.runtime.arrays import to_array
from enginecast.verify.floor import Case
from enginecast.verify.metrics import Array
from enginecast.verify.reference import Reference
from enginecast.verify.verdict import LIMIT, least_floor


def capture_failures(
    program: ExportedProgram,
    cases: Sequence[Case],
    names: Sequence[str],
    reference: Reference,
    guards: Collection[str] = (),
) -> Iterator[str]:
    """Say where the captured program in fp32 differs from eager fp32 by more than rounding.

    Same ops on the same kernels are mostly bit-equal; a kernel that picks another order may differ
    by what the program itself loses against its own fp64 reference.

    Args:
        program: as captured, before any pass.
        cases: the verification inputs.
        names: of the outputs.
        guards: outputs that the program has besides the model's, and that have to be true.
        reference: holds eager fp32 and the program's fp64 outputs for the same cases.
    """
    stored = {case.name: case for case in reference.cases}
    found_in = interpret_cases(program, [case.inputs for case in cases], names=names)
    for case, outputs in zip(cases, found_in, strict=True):
        for name, tensor in outputs.items():
            found = to_array(tensor.detach().contiguous())
            if name in guards:
                if not found.all():
                    yield f"case {case.name!r}: the program goes another way than eager ({name})"
                continue
            eager = stored[case.name].outputs[name]
            lost = _distance(found, stored[case.name].reference[name])
            allowed = LIMIT * max(lost, least_floor("fp32"))
            off = _distance(found, eager)
            if not off <= allowed:
                yield (
                    f"output {name!r}, case {case.name!r}: the captured program is not the model: "
                    f"it differs from eager fp32 by {off:.2g}, rounding allows {allowed:.2g}"
                )


def _distance(found: Array, wanted: Array) -> float:
    """Relative L2; infinite where shapes differ or one has values that the other has not."""
    if found.shape != wanted.shape:
        return float("inf")
    left, right = found.astype(np.float64), wanted.astype(np.float64)
    if not np.array_equal(np.isfinite(left), np.isfinite(right)):
        return float("inf")
    keep = np.isfinite(right)
    scale = _norm(right[keep])
    difference = _norm(left[keep] - right[keep])
    return difference / scale if scale else difference


def _norm(values: NDArray[np.float64]) -> float:
    return float(np.linalg.norm(values.ravel()))
