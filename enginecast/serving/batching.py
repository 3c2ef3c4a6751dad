"""Whether Triton may join the requests of an engine, and how many rows make a batch."""

import re
from dataclasses import dataclass

from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import EngineRecord, Manifest


@dataclass(frozen=True)
class Batching:
    """How the rows of requests become batches.

    Args:
        most: rows of a batch at most (`max_batch_size`); 0: requests have every dimension, as the
            engine takes them, and run alone.
        preferred: sizes at which a batch does not wait for more rows; none: no requests are joined.
        why: the reason why requests are not joined; empty: they are, or nobody wants it.
        notes: what those who send requests should know.
    """

    most: int
    preferred: tuple[int, ...] = ()
    why: str = ""
    notes: tuple[str, ...] = ()


def batching(
    manifest: Manifest, record: EngineRecord, most: int | None, *, reason: str = ""
) -> Batching:
    """How requests are joined.

    Args:
        most: as the user asked: 0 for no batches; None: as many rows as the engine takes.
        reason: why the backend takes no batches; empty: it does.

    Raises:
        UsageError: more rows than the engine takes, or batches where there can be none.
    """
    reason = reason or _unbatchable(manifest)
    if reason:
        if most:
            raise UsageError(
                f"--max-batch: expected 0, got {most}: {reason}", hint="Leave --max-batch out."
            )
        return Batching(0, why=reason)
    batch = str(manifest.inputs[0].shape[0])
    least, greatest = manifest.symbols[batch]
    if most is not None and most != 0 and not least <= most <= greatest:
        raise UsageError(f"--max-batch: expected 0 or {least}..{greatest}, got {most}")
    if most == 0:
        return Batching(0)
    notes = []
    step = manifest.steps.get(batch, 1)
    if least > 1:
        notes.append(f"A request needs at least {least} rows; Triton does not check it.")
    if step > 1:
        notes.append(f"The rows of a request are a multiple of {step}; Triton does not check it.")
    greatest = (most or greatest) // step * step
    asked = [one.condition for one in manifest.size_checks if _names(one.condition, batch)]
    if asked:
        why = f"the number of rows has to hold {asked[0]}, which a joined batch may break"
        return Batching(greatest, (), why, tuple(notes))
    return Batching(greatest, _preferred(record, greatest), "", tuple(notes))


def _unbatchable(manifest: Manifest) -> str:
    """Why inputs and outputs have no batch that Triton could join."""
    if manifest.guards:
        return "the engine was specialised, and its guards are about a whole request"
    batch = manifest.inputs[0].shape[:1] if manifest.inputs else ()
    if not batch or not isinstance(batch[0], str):
        return "the first dimension of the inputs does not vary"
    for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            if spec.shape[:1] != batch:
                return f"dimension 0 of {kind} {spec.name!r} is not {batch[0]!r}"
            if batch[0] in spec.shape[1:]:
                return f"{kind} {spec.name!r} has {batch[0]!r} twice"
    return ""


def _preferred(record: EngineRecord, most: int) -> tuple[int, ...]:
    """The full batch, and for a TensorRT engine the size that it was tuned for."""
    tuned = {one.optimal[0] for one in record.profile if one.optimal}
    return tuple(sorted({one for one in tuned if 1 < one <= most} | {most}))


def _names(condition: str, symbol: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", condition) is not None
