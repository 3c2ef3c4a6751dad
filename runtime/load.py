"""Loading an engine of a bundle."""

import os
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Literal

from enginecast.errors import BundleError, MissingError, UsageError
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
}
_CODE_TARGETS = frozenset({"torchscript", "aotinductor", "tensorrt"})
_REPLAYS = frozenset({"aotinductor"})
"""Targets that record runs as CUDA graphs."""
PROVIDERS = {
    "cpu": ("CPUExecutionProvider",),
    "cuda": ("CUDAExecutionProvider", "CPUExecutionProvider"),
}
"""ONNX Runtime's execution providers by device, the wanted one first."""
_PROVIDER_NAMES = {"torchscript": TORCH_PROVIDERS, "aotinductor": TORCH_PROVIDERS}
"""Target -> what runs it where one of ONNX Runtime's providers was asked for."""


class EnginecastWarning(UserWarning):
    """Something about an engine that its user should know."""


def load(
    path: str | os.PathLike[str],
    *,
    providers: Sequence[str] | None = None,
    device: str = "cpu",
    require: Level | None = None,
    allow_code: bool = False,
    threads: int | None = None,
    cuda_graphs: bool = True,
    check: Check = "full",
) -> Engine:
    """Load the engine of a bundle that suits this device best.

    Args:
        path: the bundle's folder.
        providers: ONNX Runtime execution providers, the wanted one first; None: those of `device`.
        device: "cpu" or "cuda".
        require: the least a verdict must say.  "verified" refuses an engine that was judged by
            emulation, or on another provider than this one; "verified-by-emulation" accepts
            emulation without a warning.
        allow_code: open engine kinds that run code when they are loaded.
        threads: threads within one operator; None: as many as there are cores.
        cuda_graphs: on a GPU, an aotinductor engine records runs whose shapes repeat as CUDA
            graphs, which take memory; False: it does not.
        check: "full" compares the digest of every file; "size" only the sizes.

    Raises:
        BundleError: the bundle is damaged, or holds no engine that may be loaded.
        MissingError: this machine cannot run the engine.
        UsageError: an argument does not fit.

    Warns:
        EnginecastWarning: the verdict was reached by emulation, or on another provider.
    """
    wanted = _providers(providers, device)
    if threads is not None and threads < 1:
        raise UsageError(f"threads: expected at least 1, got {threads}")
    if require not in (None, "verified", "verified-by-emulation"):
        raise UsageError(f"require: expected verified or verified-by-emulation, got {require!r}")
    bundle = open_bundle(path, check=check)
    record = _choose(bundle, wanted[0])
    doubt = _doubt(record, wanted[0])
    if require == "verified" and doubt:
        raise BundleError(
            f"{bundle.root}: {record.file}: expected a verified engine, but {doubt}",
            hint="Run `enginecast verify DIR` on the target to complete the verdict.",
        )
    opener = _opener(record, allow_code=allow_code)
    options = {} if cuda_graphs or record.target not in _REPLAYS else {"cuda_graphs": False}
    if record.target in _CODE_TARGETS and check != "full":
        bundle = open_bundle(path, check="full")  # what is code is never run unchecked
    session = opener(bundle, record, wanted, threads, **options)
    if doubt and not (require and record.verdict.outcome == require):
        warnings.warn(f"{bundle.root}: {record.file}: {doubt}", EnginecastWarning, stacklevel=2)
    return Engine(bundle, record, session)


def _providers(providers: Sequence[str] | None, device: str) -> tuple[str, ...]:
    if device not in PROVIDERS:
        raise UsageError(f"device: expected {' or '.join(PROVIDERS)}, got {device!r}")
    if providers is None:
        return PROVIDERS[device]
    if isinstance(providers, str) or not providers:
        raise UsageError(f"providers: expected a list of provider names, got {providers!r}")
    return tuple(providers)


def _choose(bundle: Bundle, provider: str) -> EngineRecord:
    """The engine that was verified where it will run, else the one meant for there, else any."""

    def rank(record: EngineRecord) -> tuple[bool, ...]:
        return (
            record.target in _OPENERS,
            record.target not in _CODE_TARGETS,
            not _doubt(record, provider),
            provider in record.providers,
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
    if record.target in _PROVIDER_NAMES:
        provider = _PROVIDER_NAMES[record.target].get(provider, provider)
    if record.verdict.where.provider != provider:
        return f"it was verified on {record.verdict.where.provider}, not on {provider}"
    return ""


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
