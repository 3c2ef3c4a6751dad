"""Running a TorchScript engine: the one kind of engine that needs torch.

torch is imported when such an engine is opened, and nowhere else in this folder.
"""

import warnings
from collections.abc import Sequence
from typing import Any, Self

from enginecast.errors import BundleError, MissingError, first_line
from enginecast.library_names import private, tested
from enginecast.runtime.bundle.manifest import EngineRecord
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.versions import numbers
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.sessions.torch_session import (
    TorchSession,
    provider_of,
    require_device,
    require_torch,
)


class TorchScriptSession(TorchSession):
    """One TorchScript module.  Runs from several threads at once share it; it keeps no state."""

    name = "torchscript"
    tunable = ("threads",)

    def __init__(self, module: Any, bundle: Bundle, provider: str, threads: int | None) -> None:
        inputs = [spec.name for spec in bundle.manifest.inputs]
        outputs = [spec.name for spec in bundle.manifest.outputs]
        super().__init__(inputs, outputs, provider, threads)
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
        settings: Settings = DEFAULT,
    ) -> Self:
        provider = provider_of(providers[0], "TorchScript")
        torch = require_torch(record, "TorchScript")
        if not callable(getattr(torch.jit, "load", None)):
            raise MissingError(
                f"{record.file}: torch {torch.__version__} has no torch.jit.load: PyTorch has"
                " dropped TorchScript",
                hint=tested("torch"),
            )
        minimum = record.minimum_runtime.partition(">=")[2]
        if minimum and numbers(torch.__version__) < numbers(minimum):
            raise MissingError(
                f"{record.file}: needs {record.minimum_runtime}, found torch {torch.__version__}",
                hint=f"pip install '{record.minimum_runtime}'",
            )
        require_device(
            torch, record, provider, "TorchScript keeps the device that it was traced on"
        )
        with warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning):  # the latter since torch 2.14
                warnings.simplefilter("ignore", category)
            try:
                with bundle.opened(record.file) as path:
                    module = torch.jit.load(str(path), map_location=provider.removeprefix("torch-"))
            except Exception as error:  # RuntimeError, and others for what is not an archive
                raise BundleError(
                    f"{record.file}: torch.jit.load refuses it: {first_line(error)}"
                ) from error
            module.eval()
        return cls(module, bundle, provider, threads)

    def compute(self, tensors: Sequence[Any]) -> Sequence[Any]:
        optimized_execution = private("torch.jit._fuser.optimized_execution", "TorchScript")
        # Without the optimizing executor, which compiles anew by what the first runs were like.
        with optimized_execution(False):
            found: Sequence[Any] = self._module(*tensors)
        return found
