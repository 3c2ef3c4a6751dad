"""What a run gives."""

from collections.abc import Mapping
from typing import Any


class Outputs(dict[str, Any]):
    """The outputs of a run by name, and what computed them; a dict in every other respect."""

    backend: str
    """As `load`'s `prefer` calls it: "onnxruntime-cpu"."""

    def __init__(self, values: Mapping[str, Any], backend: str) -> None:
        super().__init__(values)
        self.backend = backend

    def __reduce__(self) -> tuple[Any, ...]:
        return Outputs, (dict(self), self.backend)
