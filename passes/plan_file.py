"""Read and write quantisation plans as JSON."""

from pathlib import Path

import msgspec

from enginecast.errors import InputError
from enginecast.passes.quantization_plan import QuantizationPlan


def read_plan(path: Path) -> QuantizationPlan:
    """Read what `write_plan` wrote, or what a user made of it.

    Raises:
        InputError: the file is missing or no plan; names the field.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=QuantizationPlan)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"--plan {path}: {error}") from error


def write_plan(path: Path, plan: QuantizationPlan) -> None:
    """Write a plan for people to read and change."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1) + b"\n")


def check_model(plan: QuantizationPlan, fingerprint: dict[str, str], file: Path) -> None:
    """Refuse a plan that was made for another model.

    Raises:
        InputError: names the first part of the fingerprint that differs.
    """
    for name, wanted in plan.model.items():
        if fingerprint.get(name) != wanted:
            raise InputError(
                f"--plan {file}: made for a model whose {name} is {wanted}, this one's is"
                f" {fingerprint.get(name)}"
            )
