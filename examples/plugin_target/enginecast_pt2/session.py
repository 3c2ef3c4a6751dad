"""The half that runs: a .pt2 file, with torch, which is imported when an engine is opened."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from enginecast.errors import BundleError
from enginecast.runtime.bundle.manifest import EngineRecord
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.sessions.torch_session import TorchSession, provider_of, require_torch

OUTPUTS = "enginecast_outputs"


class Pt2Session(TorchSession):
    """One program, run as a module."""

    name = "pt2"
    providers: ClassVar = {"CPUExecutionProvider": "torch-cpu"}

    def __init__(self, module: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__(inputs, outputs, "torch-cpu", None)
        self._module = module

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        record: EngineRecord,
        providers: Sequence[str],
        threads: int | None,
        *,
        cuda_graphs: bool = True,
        counts_ops: bool = False,
    ) -> Self:
        provider_of(providers[0], "pt2")
        torch = require_torch(record, "pt2")
        import enginecast.ops  # noqa: F401 - registers the ops that fusions leave in a program

        extra = {OUTPUTS: ""}
        try:
            program = torch.export.load(bundle.path(record.file), extra_files=extra)
            inputs = [spec.name for spec in bundle.manifest.inputs]
            return cls(program.module(), inputs, json.loads(extra[OUTPUTS]))
        except Exception as error:  # torch raises many kinds
            raise BundleError(f"{record.file}: torch.export.load refuses it: {error}") from error

    def compute(self, tensors: Sequence[Any]) -> list[Any]:
        from torch.utils._pytree import tree_leaves

        return tree_leaves(self._module(**dict(zip(self._inputs, tensors, strict=True))))
