"""What the engines of a model are called in turn for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from enginecast.capture.sources.base.source import Source
from enginecast.compiler.engines.checks import Check
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.steps import Steps
from enginecast.runtime.bundle.manifest import GenerationCheck, Manifest, StepCheck
from enginecast.runtime.bundle.reader import Bundle
from enginecast.verification.floor import Floor

NOT_COMPARED = (
    "no consecutive calls were compared: this machine runs neither the engine nor its file in"
    " fp32: export it where the engine runs"
)


@dataclass(frozen=True)
class Part:
    """A part of the model that has a bundle of its own."""

    prepared: Prepared
    bundle: Bundle


class Task:
    """That of most models: each call stands by itself."""

    def describe(self, source: Source) -> dict[str, Any]:
        """What the manifest says of it, by field."""
        return {}

    def checks(
        self,
        prepared: Prepared,
        floor: Floor,
        folder: Path,
        steps: Steps,
        parts: Mapping[str, Part],
    ) -> tuple[Check, ...]:
        """Run the model in turn, as its engines have to.

        Args:
            floor: the noise floor of single calls, in the engine's dtype.
            folder: gets what a runtime needs to do the same.
            parts: of the model, by name.
        """
        return ()

    def with_result(
        self, manifest: Manifest, found: GenerationCheck | StepCheck
    ) -> tuple[Manifest, str]:
        """The manifest with what was compared, and a sentence on it."""
        raise NotImplementedError  # nothing was


def with_field(manifest: Manifest, **fields: Any) -> Manifest:
    """The manifest with other fields."""
    return msgspec.structs.replace(manifest, **fields)
