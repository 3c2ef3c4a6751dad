"""Loading an engine of a bundle."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from typing import Literal

from enginecast.errors import BundleError, MissingError, UsageError
from enginecast.runtime.backends import PROVIDERS, Backend, Refused, backends_of
from enginecast.runtime.bundle import Bundle, Check, open_bundle
from enginecast.runtime.manifest import EngineRecord
from enginecast.runtime.session import Engine, Session
from enginecast.runtime.torch_values import PROVIDERS as TORCH_PROVIDERS

Opener = Callable[..., Session]
"""Takes a bundle, the record, providers and threads."""
Level = Literal["verified", "verified-by-emulation"]

_OPENERS = {
    "onnxruntime": "enginecast.runtime.ort_session:open_session",
    "torchscript": "enginecast.runtime.torchscript_session:open_session",
    "aotinductor": "enginecast.runtime.aotinductor_session:open_session",
    "tensorrt": "enginecast.runtime.tensorrt_session:open_session",
}
_CODE_TARGETS = frozenset({"torchscript", "aotinductor", "tensorrt"})
_REPLAYS = frozenset({"aotinductor", "tensorrt"})
"""Targets that record runs as CUDA graphs."""
_PROVIDER_NAMES: dict[str, Mapping[str, str]] = {
    "torchscript": TORCH_PROVIDERS,
    "aotinductor": TORCH_PROVIDERS,
    "tensorrt": {"CUDAExecutionProvider": "tensorrt"},
}
"""Target -> what runs it where one of ONNX Runtime's providers was asked for."""


class EnginecastWarning(UserWarning):
    """Something about an engine that its user should know."""


@dataclass(frozen=True)
class _Asked:
    """What a user wants of the engine, whichever it is."""

    require: Level | None
    allow_code: bool
    threads: int | None
    cuda_graphs: bool
    check: Check


def load(
    path: str | os.PathLike[str],
    *,
    prefer: Sequence[str] | None = None,
    providers: Sequence[str] | None = None,
    device: str | None = None,
    require: Level | None = None,
    allow_code: bool = False,
    threads: int | None = None,
    cuda_graphs: bool = True,
    check: Check = "full",
) -> Engine:
    """Load the engine of a bundle that suits this device best, or the first one preferred.

    Args:
        path: the bundle's folder.
        prefer: backends, such as ["tensorrt", "onnxruntime-cuda", "onnxruntime-cpu"]: the first of
            them that the bundle has an engine for, and that runs here; None: no other than the one
            that suits `providers` or `device` is tried.  See `runtime.backends.BACKENDS`.
        providers: ONNX Runtime execution providers, the wanted one first; None: those of `device`.
        device: "cpu" or "cuda"; None: "cpu".
        require: the least a verdict must say.  "verified" refuses an engine that was judged by
            emulation, or on another provider than this one; "verified-by-emulation" accepts
            emulation without a warning.
        allow_code: open engine kinds that run code when they are loaded.
        threads: threads within one operator; None: as many as there are cores.
        cuda_graphs: on a GPU, aotinductor and tensorrt engines record runs whose shapes repeat as
            CUDA graphs, which take memory; False: they do not.
        check: "full" compares the digest of every file; "size" only the sizes.

    Raises:
        BundleError: the bundle is damaged, or holds no engine that may be loaded.
        MissingError: this machine cannot run the engine, or any of those preferred.
        UsageError: an argument does not fit.

    Warns:
        EnginecastWarning: the verdict was reached by emulation, or on another provider; or a
            preferred backend cannot be had: why, and what is tried instead.
    """
    if threads is not None and threads < 1:
        raise UsageError(f"threads: expected at least 1, got {threads}")
    if require not in (None, "verified", "verified-by-emulation"):
        raise UsageError(f"require: expected verified or verified-by-emulation, got {require!r}")
    asked = _Asked(require, allow_code, threads, cuda_graphs, check)
    if prefer is not None:
        if providers is not None or device is not None:
            raise UsageError("prefer: its backends name the device; leave device and providers out")
        backends = backends_of(prefer)
        engine, doubt = _first(open_bundle(path, check=check), backends, asked)
    else:
        wanted = _providers(providers, device or "cpu")
        bundle = open_bundle(path, check=check)
        engine, doubt = _open(bundle, _choose(bundle, wanted[0]), wanted, asked)
    if doubt and not (require and engine.verdict.outcome == require):
        message = f"{engine.folder}: {engine.record.file}: {doubt}"
        warnings.warn(message, EnginecastWarning, stacklevel=2)
    return engine


def _open(
    bundle: Bundle, record: EngineRecord, providers: Sequence[str], asked: _Asked
) -> tuple[Engine, str]:
    """The engine, and why its verdict does not cover a run here."""
    doubt = _doubt(record, providers[0])
    if asked.require == "verified" and doubt:
        raise BundleError(
            f"{bundle.root}: {record.file}: expected a verified engine, but {doubt}",
            hint="Run `enginecast verify DIR` on the target to complete the verdict.",
        )
    opener = _opener(record, allow_code=asked.allow_code)
    options = {} if asked.cuda_graphs or record.target not in _REPLAYS else {"cuda_graphs": False}
    bundle = _whole(bundle, record, asked)
    return Engine(
        bundle, record, opener(bundle, record, providers, asked.threads, **options)
    ), doubt


def _whole(bundle: Bundle, record: EngineRecord, asked: _Asked) -> Bundle:
    """What is code is never run unchecked."""
    if record.target in _CODE_TARGETS and asked.allow_code and asked.check != "full":
        return open_bundle(bundle.root, check="full")
    return bundle


def _first(bundle: Bundle, backends: Sequence[Backend], asked: _Asked) -> tuple[Engine, str]:
    """The first backend that can be had; every one before it is warned of at the caller of `load`.

    A file that is not what the manifest says is no reason to try the next one.
    """
    refused: list[Refused] = []
    lacking = 0
    for backend, following in zip_longest(backends, backends[1:]):
        try:
            record = _record_for(bundle, backend)
        except BundleError as error:
            refused.append(Refused(backend, error))
            lacking += 1
        else:
            _whole(bundle, record, asked)
            try:
                return _open(bundle, record, backend.providers, asked)
            except (MissingError, BundleError) as error:
                refused.append(Refused(backend, error))
        if following is not None:
            message = f"{bundle.root}: no {backend.name}: {refused[-1].reason}"
            message = f"{message}\ntrying {following.name} next"
            warnings.warn(message, EnginecastWarning, stacklevel=3)
    reasons = "".join(f"\n  {one.backend.name}: {one.reason}" for one in refused)
    kind = BundleError if lacking == len(refused) else MissingError
    raise kind(f"{bundle.root}: none of the preferred backends can be had:{reasons}")


def _record_for(bundle: Bundle, backend: Backend) -> EngineRecord:
    """The engine of a bundle that a backend runs.

    Raises:
        BundleError: there is none, it was rejected, or it was made for another device.
    """
    found = [one for one in bundle.manifest.engines if one.target == backend.target]
    if not found:
        kinds = ", ".join(dict.fromkeys(one.target for one in bundle.manifest.engines)) or "none"
        raise BundleError(f"the bundle holds no {backend.target} engine; it holds {kinds}")
    found = [one for one in found if one.verdict.outcome != "rejected"]
    if not found:
        raise BundleError(f"the {backend.target} engine was rejected when it was verified")
    provider = _provider(backend.target, backend.providers[0])
    if backend.target in _PROVIDER_NAMES:  # compiled or traced for one device
        made_for = [name for one in found for name in one.providers]
        found = [one for one in found if provider in one.providers or not one.providers]
        if not found:
            names = ", ".join(dict.fromkeys(made_for))
            raise BundleError(f"the {backend.target} engine was made for {names}, not {provider}")
    return max(found, key=lambda one: (not _doubt(one, provider), provider in one.providers))


def _providers(providers: Sequence[str] | None, device: str) -> tuple[str, ...]:
    if device not in PROVIDERS:
        raise UsageError(f"device: expected {' or '.join(PROVIDERS)}, got {device!r}")
    if providers is None:
        return PROVIDERS[device]
    if isinstance(providers, str) or not providers:
        raise UsageError(f"providers: expected a list of provider names, got {providers!r}")
    return tuple(providers)


def _choose(bundle: Bundle, provider: str) -> EngineRecord:
    """The engine that is meant for there and was verified there; of several the first, which is the
    one that the export was asked for.
    """

    def rank(record: EngineRecord) -> tuple[bool, ...]:
        return (
            record.target in _OPENERS,
            _provider(record.target, provider) in record.providers,
            not _doubt(record, provider),
        )

    records = [one for one in bundle.manifest.engines if one.verdict.outcome != "rejected"]
    if not records:
        raise BundleError(
            f"{bundle.root}: holds no engine that was verified",
            hint="Export the model again; the report says why it was rejected.",
        )
    return max(records, key=rank)


def _doubt(record: EngineRecord, provider: str) -> str:
    """Why the verdict does not cover a run on `provider`; empty when it does."""
    if record.verdict.outcome == "verified-by-emulation":
        return "it was verified by emulation and has not run on its target"
    provider = _provider(record.target, provider)
    if record.verdict.where.provider != provider:
        return f"it was verified on {record.verdict.where.provider}, not on {provider}"
    return ""


def _provider(target: str, provider: str) -> str:
    """What an engine of a target calls one of ONNX Runtime's providers."""
    return _PROVIDER_NAMES.get(target, {}).get(provider, provider)


def _opener(record: EngineRecord, *, allow_code: bool) -> Opener:
    if record.target in _CODE_TARGETS and not allow_code:
        raise BundleError(
            f"{record.file}: {_an(record.target)} engine runs code when it is loaded",
            hint="If you trust who made the bundle, pass allow_code=True (--allow-code).",
        )
    if record.target not in _OPENERS:
        raise MissingError(
            f"{record.file}: this build opens {', '.join(_OPENERS)} engines, got {record.target!r}",
            hint="Export with --target onnxruntime, or upgrade enginecast.",
        )
    return opener_of(record.target)


def _an(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def opener_of(target: str) -> Opener:
    """What opens engines of a target: `open_session` of its module."""
    module, function = _OPENERS[target].split(":")
    opener: Opener = getattr(import_module(module), function)
    return opener
