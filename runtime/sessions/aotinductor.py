"""Run an AOTInductor package: machine code, with the bundle's weights next to it.

torch is imported when such an engine is opened.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from enginecast.errors import BundleError, first_line
from enginecast.library_names import private
from enginecast.runtime.bundle.manifest import EngineRecord
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.device.cuda_graphs import GraphCache, Run, recorder
from enginecast.runtime.device.fitness import require_fit
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.sessions.torch_session import (
    TorchSession,
    provider_of,
    require_device,
    require_torch,
)

NAMES = "enginecast"
"""Key of the package's metadata: JSON with the names of inputs, outputs and weights."""


class AOTInductorSession(TorchSession):
    """One package.  Runs from several threads at once share it; they go one by one."""

    name = "aotinductor"
    tunable = ("threads",)

    def __init__(
        self, call: Run, weights: Mapping[str, Any], names: Any, provider: str, threads: int | None
    ) -> None:
        super().__init__(names["inputs"], names["outputs"], provider, threads)
        self._call = call
        self._weights = weights  # the code reads them where they are
        self._stored = {tensor.data_ptr() for tensor in weights.values()}

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
        provider = provider_of(providers[0], "AOTInductor")
        torch = require_torch(record, "AOTInductor")
        require_device(torch, record, provider, "its code was compiled for that device")
        require_fit(torch, record.requires, record.file)
        device = provider.removeprefix("torch-")
        load_pt2 = private("torch.export.pt2_archive._package.load_pt2", record.file)
        alone = device == "cuda"  # without locks of its own, which no CUDA graph can hold: ours do
        try:
            content = load_pt2(str(bundle.folder / record.file), run_single_threaded=alone)
            model = content.aoti_runners.get("model")
        except Exception as error:  # torch raises RuntimeError, and others for no archive
            message = f"{record.file}: torch refuses the package: {first_line(error)}"
            raise BundleError(message) from error
        names = _names(model, bundle, record)
        weights = _weights(bundle, record, names["weights"], model.get_constant_fqns(), device)
        if weights:
            model.load_constants(weights, check_full_update=True, user_managed=True)

        def call(tensors: Sequence[Any]) -> list[Any]:
            return list(model.loader.boxed_run(list(tensors)))

        if device == "cuda" and cuda_graphs:
            return cls(GraphCache(call, recorder(torch)), weights, names, provider, threads)
        return cls(call, weights, names, provider, threads)

    @property
    def graphs(self) -> GraphCache | None:
        """The CUDA graphs of recurring runs; None if they are off, or there is no GPU."""
        return self._call if isinstance(self._call, GraphCache) else None

    def compute(self, tensors: Sequence[Any]) -> list[Any]:
        # A weight that is an output is copied: its reader may write into it.
        found = self._call(tensors)
        return [value.clone() if value.data_ptr() in self._stored else value for value in found]


def _names(model: Any, bundle: Bundle, record: EngineRecord) -> Any:
    """What the package says of its inputs, outputs and weights; must be what the manifest says."""
    if record.regions:
        raise BundleError(
            f"{record.file}: the package is in pieces (--regional), which nothing runs any more",
            hint="Export the model again.",
        )
    try:
        names = json.loads(model.get_metadata()[NAMES])
        given = {"inputs": sorted(names["inputs"]), "outputs": sorted(names["outputs"])}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BundleError(
            f"{record.file}: the package does not name its inputs and outputs",
            hint="Export the model again.",
        ) from error
    manifest = bundle.manifest
    for kind, declared in (("inputs", manifest.inputs), ("outputs", manifest.engine_outputs)):
        wanted = sorted(spec.name for spec in declared)
        if given[kind] != wanted:
            raise BundleError(
                f"{record.file}: expected the {kind} {', '.join(wanted)}, got"
                f" {', '.join(given[kind])}"
            )
    return names


def _weights(
    bundle: Bundle,
    record: EngineRecord,
    names: Mapping[str, str],
    wanted: Collection[str],
    device: str,
) -> dict[str, Any]:
    """The weights that the code asks for, by its own names; on the CPU they stay in the file."""
    if not wanted:
        return {}
    if record.weights is None:
        raise BundleError(f"{record.file}: its code reads weights, and the bundle has no such file")
    from safetensors.torch import load_file

    stored = load_file(bundle.folder / record.weights, device=device)
    lacking = [names.get(name, name) for name in wanted if names.get(name) not in stored]
    if lacking:
        raise BundleError(
            f"{record.weights}: {len(lacking)} weights are missing, such as {lacking[0]!r}",
            hint="Export the model again.",
        )
    return {name: stored[names[name]] for name in wanted}
