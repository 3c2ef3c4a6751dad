"""Running a package of AOTInductor: machine code, with the weights of the bundle beside it.

torch is imported when such an engine is opened.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from enginecast.errors import BundleError, InputError, MissingError
from enginecast.runtime.arrays import Array
from enginecast.runtime.bundle import Bundle
from enginecast.runtime.cuda_graphs import GraphCache, Run, recorder
from enginecast.runtime.device_tensor import Feed
from enginecast.runtime.fitness import require_fit
from enginecast.runtime.manifest import EngineRecord
from enginecast.runtime.torch_values import (
    Threads,
    device_of,
    provider_of,
    require_device,
    require_torch,
    to_host,
    to_tensor,
)

NAMES = "enginecast"
"""Key of the package's metadata: JSON with the names of inputs, outputs and weights."""


class AOTInductorSession:
    """One package.  Runs from several threads at once share it; they go one by one."""

    def __init__(
        self, model: Any, weights: Mapping[str, Any], names: Any, provider: str, threads: int | None
    ) -> None:
        self._model = model
        self._weights = weights  # the code reads them where they are
        self._inputs: list[str] = names["inputs"]
        self._outputs: list[str] = names["outputs"]
        self._provider = provider
        self._own_threads = Threads(threads)
        self._call: Run = self._plain
        self._stored = {tensor.data_ptr() for tensor in weights.values()}

    @property
    def provider(self) -> str:
        return self._provider

    @property
    def graphs(self) -> GraphCache | None:
        """The CUDA graphs of runs that repeat; None: they are off, or there is no GPU."""
        return self._call if isinstance(self._call, GraphCache) else None

    def use_graphs(self, record: Any) -> None:
        """Replay runs whose shapes repeat.

        Args:
            record: see `GraphCache`.
        """
        self._call = GraphCache(self._plain, record)

    def run(self, feeds: Mapping[str, Feed], outputs: Sequence[str]) -> dict[str, Any]:
        """Run once; the values are tensors, where they were computed."""
        import torch

        device = device_of(self._provider)
        tensors = [to_tensor(name, feeds[name], device) for name in self._inputs]
        try:
            with self._own_threads(), torch.no_grad():
                found = self._call(tensors)
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(feed.shape)}" for name, feed in feeds.items())
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"the compiled engine failed on {shapes}: {reason}") from error
        named = dict(zip(self._outputs, found, strict=True))
        return {name: self._own(named[name]) for name in outputs}

    def to_host(self, value: Any) -> Array:
        return to_host(value)

    def _plain(self, tensors: Sequence[Any]) -> list[Any]:
        found: list[Any] = self._model.loader.boxed_run(list(tensors))
        return found

    def _own(self, value: Any) -> Any:
        """A weight that is an output is copied: its reader may write into it."""
        return value.clone() if value.data_ptr() in self._stored else value


def open_session(
    bundle: Bundle,
    record: EngineRecord,
    providers: Sequence[str],
    threads: int | None,
    *,
    cuda_graphs: bool = True,
) -> AOTInductorSession:
    """Open an engine of a bundle.

    Args:
        bundle: a bundle whose digests were checked: the package is code.
        record: the engine, of target "aotinductor".
        providers: ONNX Runtime's names; the first says whether the CPU or a GPU is wanted.
        threads: threads within one operator; None: as many as torch takes.
        cuda_graphs: on a GPU, record runs whose shapes repeat, and replay them.

    Raises:
        MissingError: there is no torch, another than the code was made for, or no such CPU or GPU.
        UsageError: the engine was made for another device.
        BundleError: torch refuses the package, or weights of it are missing.
    """
    provider = provider_of(providers[0], "AOTInductor")
    torch = require_torch(record, "AOTInductor")
    require_device(torch, record, provider, "its code was compiled for that device")
    require_fit(torch, record.requires, record.file)
    if not callable(getattr(torch._inductor, "aoti_load_package", None)):
        raise MissingError(
            f"{record.file}: torch {torch.__version__} loads no packages of AOTInductor",
            hint="Use torch 2.11 to 2.13 for this engine.",
        )
    device = device_of(provider)
    model = _load(torch, bundle, record, device)
    names = _names(model, bundle, record)
    weights = _weights(bundle, record, names["weights"], model.get_constant_fqns(), device)
    if weights:
        model.load_constants(weights, check_full_update=True, user_managed=True)
    session = AOTInductorSession(model, weights, names, provider, threads)
    if device == "cuda" and cuda_graphs:
        session.use_graphs(recorder(torch))
    return session


def _load(torch: Any, bundle: Bundle, record: EngineRecord, device: str) -> Any:
    """On a GPU without the locks of its own, which no CUDA graph can hold; ours stand for them."""
    try:
        return torch._inductor.aoti_load_package(
            str(bundle.path(record.file)), run_single_threaded=device == "cuda"
        )
    except Exception as error:  # torch raises RuntimeError, and others for what is no archive
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise BundleError(f"{record.file}: torch refuses the package: {first}") from error


def _names(model: Any, bundle: Bundle, record: EngineRecord) -> Any:
    """What the package says of its inputs, outputs and weights; must be what the manifest says."""
    try:
        names = json.loads(model.get_metadata()[NAMES])
        given = {"inputs": sorted(names["inputs"]), "outputs": sorted(names["outputs"])}
    except (KeyError, TypeError, ValueError) as error:
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
    wanted: Sequence[str],
    device: str,
) -> dict[str, Any]:
    """The weights that the code asks for, by its own names; on the CPU they stay in the file."""
    if not wanted:
        return {}
    if record.weights is None:
        raise BundleError(f"{record.file}: its code reads weights, and the bundle has no such file")
    from safetensors.torch import load_file

    stored = load_file(bundle.path(record.weights), device=device)
    lacking = [names.get(name, name) for name in wanted if names.get(name) not in stored]
    if lacking:
        raise BundleError(
            f"{record.weights}: {len(lacking)} weights are missing, such as {lacking[0]!r}",
            hint="Export the model again.",
        )
    return {name: stored[names[name]] for name in wanted}
