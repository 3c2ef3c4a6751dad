"""Write and read plans as JSON, and tell whether one was made for this model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from enginecast.errors import InputError
from enginecast.passes.ir.quantization_plan import SCHEMA_VERSION, QuantizationPlan

LARGEST = 64 << 20
"""Bytes of a plan."""


def encode_plan(plan: QuantizationPlan) -> bytes:
    """As JSON: the fields in their order, indented, equal bytes for equal plans.

    Raises:
        InputError: a number in it is not finite.
    """
    content = msgspec.to_builtins(plan)
    try:
        return f"{json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)}\n".encode()
    except ValueError as error:
        raise InputError(f"plan: expected finite numbers: {error}") from error


def write_plan(path: Path, plan: QuantizationPlan) -> None:
    """Write a plan for people to read and change.

    Raises:
        InputError: see `encode_plan`.
    """
    path.write_bytes(encode_plan(plan))


def read_plan(path: Path) -> QuantizationPlan:
    """Read a plan strictly.

    Raises:
        InputError: names the file, the JSON path and what was expected there.
    """
    try:
        size = path.stat().st_size
        data = path.read_bytes() if size <= LARGEST else b""
    except OSError as error:
        raise InputError(f"--plan {path}: cannot be read: {error.strerror or error}") from error
    if size > LARGEST:
        raise InputError(f"--plan {path}: expected at most {LARGEST} bytes, got {size}")
    return decode_plan(data, f"--plan {path}")


def decode_plan(data: bytes, file: str = "plan") -> QuantizationPlan:
    """Read the content of a plan's file.

    Args:
        file: what errors call it.

    Raises:
        InputError: see `read_plan`.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            twice = next(key for place, (key, _) in enumerate(pairs) if key in dict(pairs[:place]))
            raise InputError(f"{file}: key {twice!r} is there twice in one object")
        return content

    try:
        content = json.loads(data.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: no JSON: {error}") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if type(version) is int and version != SCHEMA_VERSION:
        raise InputError(
            f"{file}: $.schema_version: expected {SCHEMA_VERSION}, got {version}",
            hint="Make the plan again with this version of enginecast.",
        )
    try:
        return msgspec.json.decode(data, type=QuantizationPlan)
    except msgspec.ValidationError as error:
        fault, _, path = str(error).partition(" - at ")
        fault = fault[:1].lower() + fault[1:]
        raise InputError(f"{file}: {path.strip('`') or '$'}: {fault}") from error


def check_model(plan: QuantizationPlan, fingerprint: Mapping[str, str], file: Path) -> None:
    """Refuse a plan that was made for another model.

    Args:
        plan: one without fingerprint fits every model.

    Raises:
        InputError: names the first field that differs, with both values.
    """
    for field, made_for in plan.model.items():
        here = fingerprint.get(field, "")
        if made_for != here:
            raise InputError(
                f"--plan {file}: $.model.{field}: the plan was made for {made_for or 'none'}, and"
                f" the model has {here or 'none'}",
                hint='"model": {} in the plan says that it is meant for another one as well.',
            )
