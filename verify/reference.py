"""The stored reference of a bundle: inputs, eager's outputs and the noise floor, so that a machine
without the model and without torch can judge an engine.

`reference.safetensors` holds, per case, `NAME/in/<input>`, `NAME/out/<output>` (eager fp32,
float32) and `NAME/ref/<output>` (fp64 reference, float64); everything else is JSON under one key of
the file's metadata (one key, because safetensors does not keep the order of several and a bundle
must come out the same, byte for byte).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
from safetensors.numpy import save_file

from enginecast.errors import BundleError, InputError
from enginecast.runtime.files import read_tensors
from enginecast.verify.comparison import Floor, from_json, to_json
from enginecast.verify.metrics import Array

REFERENCE_NAME = "reference.safetensors"
BUDGET = 32 << 20
_KEY = "enginecast"
_DAMAGE = (safetensors.SafetensorError, InputError, KeyError, TypeError, ValueError, OSError)
"""What reading a file that is no reference may raise."""


@dataclass(frozen=True)
class ReferenceCase:
    """One set of inputs with what eager makes of it."""

    name: str
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    """Eager fp32."""
    reference: Mapping[str, Array]
    """The same in fp64."""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        parts = (self.inputs, self.outputs, self.reference)
        return sum(array.nbytes for part in parts for array in part.values())


@dataclass(frozen=True)
class Reference:
    """All cases of a model."""

    cases: tuple[ReferenceCase, ...]
    floor: Floor
    mask_input: str | None = None
    """Input that marks valid rows; None: every row counts."""
    masked: frozenset[str] = frozenset()
    """Outputs whose rows follow the mask."""
    guarded: frozenset[str] = frozenset()
    """Those of them whose rows that count do not depend on what stands in padded positions."""
    left_out: tuple[str, ...] = ()
    """Cases that were verified at export but did not fit into the file."""

    def mask_of(self, case: ReferenceCase) -> Array | None:
        """The attention mask of a case."""
        return None if self.mask_input is None else case.inputs[self.mask_input]


def fit(reference: Reference, budget: int = BUDGET) -> Reference:
    """Leave out whole cases, largest first, until the rest fits; at least one stays.

    Args:
        budget: bytes of tensor data.
    """
    kept = list(reference.cases)
    left_out: list[str] = []
    while len(kept) > 1 and sum(case.size for case in kept) > budget:
        largest = max(kept, key=lambda case: case.size)
        kept.remove(largest)
        left_out.append(largest.name)
    return replace(
        reference,
        cases=tuple(kept),
        floor=reference.floor.only(frozenset(case.name for case in kept)),
        left_out=(*reference.left_out, *left_out),
    )


def write_reference(path: Path, reference: Reference, *, budget: int = BUDGET) -> tuple[str, ...]:
    """Write what fits.

    Args:
        path: the file to write.
        budget: bytes of tensor data that may be stored.

    Returns:
        Names of the cases that were left out.
    """
    stored = fit(reference, budget)
    tensors: dict[str, Array] = {}
    for case in stored.cases:
        for kind, arrays in (("in", case.inputs), ("out", case.outputs), ("ref", case.reference)):
            for name, array in arrays.items():
                tensors[f"{case.name}/{kind}/{name}"] = np.array(array, order="C", copy=None)
    text = json.dumps(_metadata(stored), sort_keys=True, allow_nan=False)
    save_file(tensors, path, metadata={_KEY: text})
    return stored.left_out


def _metadata(reference: Reference) -> dict[str, Any]:
    floor = reference.floor
    return {
        "cases": [
            {
                "name": case.name,
                "in": list(case.inputs),
                "out": list(case.outputs),
                "ref": list(case.reference),
            }
            for case in reference.cases
        ],
        "floor": {
            "dtype": floor.dtype,
            "cases": to_json(floor.cases),
            "wider": None if floor.wider is None else to_json(floor.wider),
            "culprit": floor.culprit,
            "estimated": floor.estimated,
            "rounding": floor.rounding,
            "max_error": floor.max_error,
        },
        "mask_input": reference.mask_input,
        "masked": sorted(reference.masked),
        "guarded": sorted(reference.guarded),
        "left_out": list(reference.left_out),
    }


def read_reference(path: Path) -> Reference:
    """Read what `write_reference` wrote.

    Raises:
        BundleError: the file is missing, damaged, or no reference.
    """
    hint = "Export the model again, or verify with `--model`."
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = json.loads((file.metadata() or {})[_KEY])
        return _assemble(metadata, read_tensors(path))
    except FileNotFoundError as error:
        raise BundleError(f"{path}: the stored reference is missing", hint=hint) from error
    except _DAMAGE as error:
        raise BundleError(f"{path}: not a stored reference: {error!r}", hint=hint) from error


def _assemble(metadata: Mapping[str, Any], tensors: Mapping[str, Array]) -> Reference:
    def part(case: Mapping[str, Any], kind: str) -> dict[str, Array]:
        return {name: tensors[f"{case['name']}/{kind}/{name}"] for name in case[kind]}

    floor = metadata["floor"]
    wider = floor["wider"]
    return Reference(
        cases=tuple(
            ReferenceCase(case["name"], part(case, "in"), part(case, "out"), part(case, "ref"))
            for case in metadata["cases"]
        ),
        floor=Floor(
            floor["dtype"],
            from_json(floor["cases"]),
            None if wider is None else from_json(wider),
            floor["culprit"],
            floor["estimated"],
            floor.get("rounding", ""),
            floor.get("max_error"),
        ),
        mask_input=metadata["mask_input"],
        masked=frozenset(metadata["masked"]),
        guarded=frozenset(metadata["guarded"]),
        left_out=tuple(metadata["left_out"]),
    )
