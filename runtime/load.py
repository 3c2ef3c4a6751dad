"""Load an engine from a bundle."""

import dataclasses
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, Literal, get_args

from msgspec.structs import replace

from enginecast.errors import (
    BundleError,
    EnginecastError,
    EnginecastWarning,
    MissingError,
    UsageError,
)
from enginecast.option_fields import takes_old_names
from enginecast.runtime.bundle.directory import changed
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, EngineRecord, Excess
from enginecast.runtime.bundle.reader import Bundle, Check, open_bundle
from enginecast.runtime.bundle.trusted import is_trusted
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import REGISTRY, session_class
from enginecast.runtime.sessions.session import PROVIDERS, Session
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.trimming import PadRows
from enginecast.runtime.tuned import find_tuned

Level = Literal["verified", "accepted", "verified-by-emulation"]

MOST_THREADS = 4096
"""Within one operator: more than any machine has cores."""


@dataclass(frozen=True)
class Backend:
    """A backend: it runs the engines of one target on one device."""

    name: str
    session: type[Session]
    device: str

    @property
    def providers(self) -> tuple[str, ...]:
        """The providers for `Session.open`, the wanted one first."""
        return PROVIDERS[self.device]


@dataclass(frozen=True)
class _Asked:
    """The user's options for opening an engine."""

    require: Level | None
    allow_code: bool
    public_key: str | os.PathLike[str] | None
    threads: int | None
    cuda_graphs: bool
    check: Check
    tuned: bool | Settings
    pad_rows: PadRows
    max_runs: int | None


@takes_old_names
def load(
    path: str | os.PathLike[str],
    *,
    prefer: Sequence[str] | None = None,
    providers: Sequence[str] | None = None,
    device: str | None = None,
    require: Level | None = None,
    allow_code: bool = False,
    public_key: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    cuda_graphs: bool = True,
    check: Check = "full",
    tuned: bool | Settings = True,
    pad_rows: PadRows = "exact",
    max_runs: int | None = None,
    download: bool = False,
) -> Engine:
    """Load a bundle's best engine for this device, or the first of those you prefer.

    Args:
        path: the bundle's folder; with `download` also OWNER/NAME, or OWNER/NAME@REVISION.
        prefer: backends in order of preference, such as ["tensorrt", "onnxruntime-cuda",
            "onnxruntime-cpu"]: the first that the bundle has and that runs here is loaded.  None:
            the one for `providers` or `device`, or another if this CPU would compute that wrong.
        providers: ONNX Runtime execution providers in order of preference; None: those of `device`.
        device: "cpu" or "cuda"; None: "cpu", or "cuda" where every engine is compiled for a GPU.
        require: the least verdict to accept.  "verified" refuses engines that were judged by
            emulation or on another provider, or that have errors accepted by `--accept`; "accepted"
            takes such errors without a warning, and "verified-by-emulation" emulation, too.
        allow_code: open engines that run code when they are loaded, whoever made them.  Otherwise,
            such engines need `public_key`, or an entry in the list of `enginecast trust`.
        public_key: a file with a public key or certificates (PEM): refuse the bundle unless the
            key's owner signed it as it is (`enginecast sign`).
        threads: threads within one operator; None: the tuned number, or all cores.
        cuda_graphs: on a GPU, record runs with repeated shapes as CUDA graphs, which take memory
            (aotinductor and tensorrt).
        check: "full" compares the digest of every file; "size" compares only the sizes of weights,
            which is faster and misses damage.  Graphs and code always get the full check.
        tuned: True: use the settings that `enginecast tune` found on this machine, if any; False:
            use the defaults; or the settings to use.
        pad_rows: how calls treat padding: see `Engine.run`.
        max_runs: how many calls may run at once; each takes memory.  None: any number.
        download: fetch a bundle from the Hugging Face Hub, if `path` is no folder: the files in its
            manifest, once per revision.  With HF_HUB_OFFLINE=1, use what was fetched before.
            False: use no network.

    Returns:
        The engine; use it as a context manager, or call `close`.

    Raises:
        BundleError: the bundle is missing or damaged, or holds no engine that may be loaded.
        MissingError: this machine cannot run the engine, or none of those you prefer; or the hub
            cannot be reached.
        UsageError: an argument is invalid.

    Warns:
        EnginecastWarning: the verdict was reached by emulation, on another provider, or with
            accepted errors; this CPU would compute an engine wrong, so another one is loaded; a
            preferred backend does not run here; or the engine was tuned on another machine or for
            another bundle, so defaults are used (once).

    Examples:
        >>> import enginecast, numpy
        >>> with enginecast.load("linear.bundle", require="verified", threads=1) as engine:
        ...     outputs = engine(numpy.ones((2, 8), "float32"))
        >>> outputs["output_0"].shape
        (2, 2)
    """
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise UsageError(f"threads: expected 1..{MOST_THREADS}, got {threads}")
    if require not in (None, *get_args(Level)):
        expected = ", ".join(get_args(Level))
        raise UsageError(f"require: expected one of {expected}, got {require!r}")
    if pad_rows not in ("exact", "zero"):
        raise UsageError(f"pad_rows: expected exact or zero, got {pad_rows!r}")
    if public_key is not None and check != "full":
        raise UsageError("public_key: a signature is for digests; leave check at full")
    path = _fetched(path) if download else path
    asked = _Asked(
        require, allow_code, public_key, threads, cuda_graphs, check, tuned, pad_rows, max_runs
    )
    if prefer is not None:
        if providers is not None or device is not None:
            raise UsageError(
                "prefer: each backend includes its device; leave device and providers out"
            )
        backends = backends_of(prefer)
        bundle = _opened(path, asked)
        engine, doubt = _first(bundle, backends, asked)
    else:
        if device not in (None, *PROVIDERS):
            raise UsageError(f"device: expected {' or '.join(PROVIDERS)}, got {device!r}")
        if isinstance(providers, str) or (providers is not None and not providers):
            raise UsageError(f"providers: expected a list of provider names, got {providers!r}")
        bundle = _opened(path, asked, beside=True)
        wanted = PROVIDERS[device or _device_of(bundle)] if providers is None else tuple(providers)
        engine, doubt = _open(bundle, _fitting(bundle, wanted[0]), wanted, asked)
    if doubt and not (require and engine.verdict.outcome == require):
        message = f"{engine.folder}: {engine.record.file}: {doubt}"
        warnings.warn(message, EnginecastWarning, stacklevel=3)
    return engine


def _fetched(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of a bundle of the hub; what is no such name stays as it is."""
    from enginecast.runtime.bundle.hub import fetch_bundle, is_hub_name

    name = os.fspath(path)
    return fetch_bundle(name) if is_hub_name(name.partition("@")[0]) else path


def _opened(path: str | os.PathLike[str], asked: _Asked, *, beside: bool = False) -> Bundle:
    try:
        bundle = open_bundle(path, check=asked.check, beside=beside)
    except BundleError as error:
        from enginecast.runtime.bundle.hub import is_hub_name

        if not is_hub_name(os.fspath(path).partition("@")[0]):
            raise
        hint = "From the Hugging Face Hub: load(..., download=True)."
        raise BundleError(error.message, hint=hint) from error
    if asked.public_key is not None:
        from enginecast.runtime.bundle.signature import require_signature

        require_signature(bundle, asked.public_key)
    return bundle


def _open(
    bundle: Bundle, record: EngineRecord, providers: Sequence[str], asked: _Asked
) -> tuple[Engine, str]:
    """The engine, and why its verdict does not cover a run here."""
    doubt = _doubt(record, providers[0])
    if asked.require in ("verified", "accepted") and doubt:
        raise BundleError(
            f"{bundle.root}: {record.file}: expected a verified engine, but {doubt}",
            hint="Run `enginecast verify DIR` on the target to complete the verdict.",
        )
    if accepted := _accepted(record):
        if asked.require == "verified":
            raise BundleError(
                f"{bundle.root}: {record.file}: expected a verified engine, but {accepted}",
                hint='If that is good enough, load it with require="accepted".',
            )
        if asked.require is None:
            doubt = "; ".join([*([doubt] if doubt else []), accepted])
    session = _session(record)
    if session is None:
        raise MissingError(
            f"{record.file}: this build opens {', '.join(REGISTRY.known())} engines, got"
            f" {record.target!r}",
            hint="Export with another --target, upgrade enginecast, or install the package that"
            " brings this one.",
        )
    trusted = asked.allow_code or asked.public_key is not None
    if session.runs_code and not trusted and not is_trusted(bundle):
        an = "an" if record.target[0] in "aeiou" else "a"
        raise BundleError(
            f"{record.file}: {an} {record.target} engine runs code when it is loaded",
            hint="If you trust who made the bundle, pass allow_code=True (--allow-code), or a key"
            " that it was signed with (--public-key), or run `enginecast trust DIR` once."
            f" The bundle is {bundle.sha256}.",
        )
    bundle = _whole(bundle, record, asked)
    settings = _settings(bundle, record, session, providers[0], asked)
    own: dict[str, Any] = {"settings": settings} if session.tunable else {}
    if not session.copies_weights:
        bundle.require_whole()
    if session.runs_code:
        bundle.require_unchanged()
    try:
        opened = session.open(
            bundle, record, providers, settings.threads, cuda_graphs=asked.cuda_graphs, **own
        )
    finally:
        bundle.require_whole()  # damage is the reason to name, whatever came of it
    bundle.require_unchanged()
    parts, doubts = {}, []
    for name, part in bundle.parts.items():
        # The bundle has the digest of the part, so that who trusts the one trusts the other.
        inner = dataclasses.replace(
            asked, allow_code=asked.allow_code or session.runs_code, pad_rows="exact"
        )
        found = (one for one in part.manifest.engines if one.target == record.target)
        alike = next((one for one in found if one.verdict.outcome != "rejected"), None)
        if alike is None:
            raise BundleError(f"{part.root}: the bundle holds no {record.target} engine")
        parts[name], why = _open(part, alike, providers, inner)
        doubts += [f"{name}: {why}"] if why else []
    engine = Engine(
        bundle,
        record,
        opened,
        settings,
        pad_rows=asked.pad_rows,
        max_runs=asked.max_runs,
        parts=parts,
    )
    return engine, "; ".join([*([doubt] if doubt else []), *doubts])


def _settings(
    bundle: Bundle, record: EngineRecord, session: type[Session], provider: str, asked: _Asked
) -> Settings:
    """The settings to open the engine with: the user's take precedence over tuned ones."""
    found = asked.tuned if isinstance(asked.tuned, Settings) else DEFAULT
    if asked.tuned is True:
        try:
            found = find_tuned(bundle, record, session, provider)
        except BundleError as error:
            _ignored(f"ignored {error.message}")
    return found if asked.threads is None else replace(found, threads=asked.threads)


@cache
def _ignored(message: str) -> None:
    """Warn once per process."""
    message += "\n`enginecast tune DIR` tunes it here"
    warnings.warn(message, EnginecastWarning, stacklevel=6)


def _whole(bundle: Bundle, record: EngineRecord, asked: _Asked) -> Bundle:
    """The bundle with all digests checked before code is run, even with `check="size"`."""
    session = _session(record)
    if session is None or not session.runs_code or asked.check == "full":
        return bundle
    checked = open_bundle(bundle.root, check="full")
    if checked.sha256 != bundle.sha256:
        raise changed(bundle.root, MANIFEST_NAME)
    return checked


def _first(bundle: Bundle, backends: Sequence[Backend], asked: _Asked) -> tuple[Engine, str]:
    """The first backend that runs an engine; every one before it is warned of at `load`'s caller.

    A file that is not what the manifest says is not a reason to try the next one.
    """
    refused: list[str] = []
    lacking = 0
    for backend, following in zip_longest(backends, backends[1:]):
        try:
            record = _record_for(bundle, backend)
        except BundleError as error:
            refused.append(f"{backend.name}: {_whole_message(error)}")
            lacking += 1
        else:
            _whole(bundle, record, asked)
            try:
                return _open(bundle, record, backend.providers, asked)
            except (MissingError, BundleError) as error:
                refused.append(f"{backend.name}: {_whole_message(error)}")
        if following is not None:
            message = f"{bundle.root}: no {refused[-1]}\ntrying {following.name} next"
            warnings.warn(message, EnginecastWarning, stacklevel=4)
    reasons = "".join(f"\n  {one}" for one in refused)
    kind = BundleError if lacking == len(refused) else MissingError
    raise kind(f"{bundle.root}: none of the preferred backends is available:{reasons}")


def _whole_message(error: EnginecastError) -> str:
    return ". ".join(part for part in (error.message, error.hint) if part)


def _record_for(bundle: Bundle, backend: Backend) -> EngineRecord:
    """The engine that a backend runs; a BundleError: none, rejected, or made for another device."""
    target = backend.session.name
    found = [one for one in bundle.manifest.engines if one.target == target]
    if not found:
        kinds = ", ".join(dict.fromkeys(one.target for one in bundle.manifest.engines)) or "none"
        raise BundleError(f"the bundle holds no {target} engine; it holds {kinds}")
    found = [one for one in found if one.verdict.outcome != "rejected"]
    if not found:
        raise BundleError(f"the {target} engine was rejected when it was verified")
    provider = backend.session.provider_for(backend.providers[0])
    if backend.session.providers:  # compiled or traced for one device
        made_for = [name for one in found for name in one.providers]
        found = [one for one in found if provider in one.providers or not one.providers]
        if not found:
            names = ", ".join(dict.fromkeys(made_for))
            raise BundleError(f"the {target} engine was made for {names}, not {provider}")
    return max(found, key=lambda one: (not _doubt(one, provider), provider in one.providers))


def _device_of(bundle: Bundle) -> str:
    """The device where nobody names one."""
    kinds = [_session(record) for record in bundle.manifest.engines]
    on_gpu = all(
        kind and kind.providers and PROVIDERS["cpu"][0] not in kind.providers for kind in kinds
    )
    return "cuda" if kinds and on_gpu else "cpu"


def _fitting(bundle: Bundle, provider: str) -> EngineRecord:
    """The engine made for and verified on this device; of several the first, which is the export's
    main target.  Where this machine would compute it wrong, another one for the same device, with a
    warning.
    """
    records = [one for one in bundle.manifest.engines if one.verdict.outcome != "rejected"]
    if not records:
        raise BundleError(
            f"{bundle.root}: holds no engine that was verified",
            hint="Export the model again; the report says why it was rejected.",
        )

    def is_for_device(record: EngineRecord) -> bool:
        return _provider(record, provider) in record.providers

    def rank(record: EngineRecord) -> tuple[bool, ...]:
        return _session(record) is not None, is_for_device(record), not _doubt(record, provider)

    first = max(records, key=rank)
    reason = _misfit(first)
    other = next((one for one in records if is_for_device(one) and not _misfit(one)), None)
    if not reason or other is None:
        return first  # which says by itself why it cannot be opened
    message = f"{bundle.root}: {first.file}: {reason}\ntaking {other.file} ({other.target})"
    warnings.warn(message, EnginecastWarning, stacklevel=4)
    return other


def _misfit(record: EngineRecord) -> str:
    """Why this machine would compute an engine wrong, as far as its record tells."""
    session = _session(record)
    return "" if session is None else session.misfit(record)


def _doubt(record: EngineRecord, provider: str) -> str:
    """Why the verdict does not cover a run on `provider`; empty if it does."""
    if record.verdict.outcome == "verified-by-emulation":
        return "it was verified by emulation and has not run on its target"
    provider = _provider(record, provider)
    if record.verdict.where.provider != provider:
        return f"it was verified on {record.verdict.where.provider}, not on {provider}"
    return ""


def _accepted(record: EngineRecord) -> str:
    """Which errors were accepted when the engine was exported; empty without any."""
    worst: dict[str, Excess] = {}
    for excess in record.verdict.accepted:
        if excess.error > worst.setdefault(excess.accepted, excess).error:
            worst[excess.accepted] = excess
    errors = [f"{name!r} {e.error:.2g} (limit {e.limit:.2g})" for name, e in worst.items()]
    return f"errors beyond the limit were accepted: {', '.join(errors)}" if errors else ""


def _session(record: EngineRecord) -> type[Session] | None:
    """The session class that opens an engine; None: nothing that is installed does."""
    return session_class(record.target) if record.target in REGISTRY.known() else None


def _provider(record: EngineRecord, provider: str) -> str:
    """What an engine's runtime calls one of ONNX Runtime's providers."""
    session = _session(record)
    return provider if session is None else session.provider_for(provider)


def backends() -> dict[str, Backend]:
    """All backends, by name."""
    sessions, _ = REGISTRY.sorted_out(Session)  # type: ignore[type-abstract]
    return {
        name: Backend(name, session, device)
        for session in sessions.values()
        for name, device in session.backends().items()
    }


def backends_of(prefer: Sequence[str]) -> tuple[Backend, ...]:
    """The backends of these names, in their order."""
    known = backends()
    hint = f"There are {', '.join(known)}."
    if isinstance(prefer, str) or not prefer:
        raise UsageError(f"prefer: expected a list of backends, got {prefer!r}", hint=hint)
    for place, name in enumerate(prefer):
        if name not in known:
            raise UsageError(f"prefer: no backend is called {name!r}", hint=hint)
        if name in prefer[:place]:
            raise UsageError(f"prefer: {name} is listed twice")
    return tuple(known[name] for name in prefer)
