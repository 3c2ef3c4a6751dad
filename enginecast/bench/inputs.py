"""The inputs that an engine is timed on: a user's own, or those of its bundle."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from enginecast.bench.contenders import Feeds
from enginecast.errors import BundleError, UsageError
from enginecast.runtime.bundle.tensor_files import read_tensors
from enginecast.runtime.engine import Engine
from enginecast.runtime.prompts import encode_prompts, read_prompts
from enginecast.runtime.values.arrays import Array
from enginecast.verification.engine import feeds_of
from enginecast.verification.reference import REFERENCE_NAME, Reference, read_reference


@dataclass(frozen=True)
class Given:
    """The inputs that are timed."""

    feeds: Feeds
    origin: str
    """Where they come from, in words."""
    reference: Reference | None
    """What the bundle holds."""
    exact: list[Mapping[str, Array]] | None = None
    """What fp64 gives for them, where the bundle has that."""
    notes: tuple[str, ...] = ()

    @property
    def shapes(self) -> tuple[dict[str, tuple[int, ...]], ...]:
        """Of the inputs of each call."""
        return tuple({name: array.shape for name, array in each.items()} for each in self.feeds)


def one_kind(inputs: Path | None, prompts: Path | None) -> None:
    """Refuse tensors and prompts at once."""
    if inputs is not None and prompts is not None:
        raise UsageError("give either --inputs FILE.safetensors or --prompts FILE.txt")


def given_inputs(engine: Engine, inputs: Path | None, prompts: Path | None) -> Given:
    """Read them; by default they are the largest verification inputs that the bundle holds.

    Raises:
        InputError: a file cannot be read, or the engine takes no prompts.
        BundleError: nothing was given, and the bundle holds nothing.
    """
    stored = engine.folder / REFERENCE_NAME
    reference = read_reference(stored) if stored.is_file() else None
    if inputs is not None:
        return Given([read_tensors(inputs)], str(inputs), reference)
    if prompts is not None:
        encoded = encode_prompts(engine.folder, engine.manifest, read_prompts(prompts))
        cut = f"prompts truncated to the longest the model takes: {encoded.truncated}"
        notes = (cut,) if encoded.truncated else ()
        return Given(encoded.batches, str(prompts), reference, notes=notes)
    if reference is None or not reference.cases:
        raise BundleError(
            f"{engine.folder} has no {REFERENCE_NAME}",
            hint="Give inputs: --inputs FILE.safetensors.",
        )
    case = max(reference.cases, key=lambda case: sum(a.size for a in case.inputs.values()))
    origin = f"the bundle's case {case.name!r}"
    return Given([feeds_of(engine, case)], origin, reference, [case.reference])
