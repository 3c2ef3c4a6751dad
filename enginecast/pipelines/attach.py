"""`enginecast.attach`: engines in the place of a pipeline's components.

A component stays an object of its class: what pipelines read of it (config, attributes of its
parts, `cache_context`) is there.  Its weights are not, and its methods run engines.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn

from enginecast.capture.sources.huggingface.transformers_folder import CONFIG_FILE
from enginecast.capture.sources.weights.checkpoint import read_json
from enginecast.capture.sources.weights.sketch import unlike
from enginecast.errors import EnginecastWarning, UsageError
from enginecast.pipelines.changing import guard, unguard
from enginecast.pipelines.check import engine_outcome, whole_outcome, with_noise
from enginecast.pipelines.components import differences
from enginecast.pipelines.engine_component import (
    LoadOptions,
    close_engines,
    engine_component,
    require_plain,
)
from enginecast.pipelines.generate import Wish, generate
from enginecast.pipelines.record import RECORD, CheckOutcome, usable_record
from enginecast.public import some
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, Manifest
from enginecast.runtime.bundle.reader import Bundle, Check, open_bundle
from enginecast.runtime.device.versions import library_of

OFFLOAD = "_exclude_from_cpu_offload"
AGAIN = "Export the component again from this pipeline."
StrPath = str | os.PathLike[str]


class Replaced(dict[str, nn.Module]):
    """The components that engines replaced, by name.  Made by `attach`.

    As a context manager, it puts them back at the end.  Their memory is freed once nothing refers
    to them, including this object.
    """

    def __init__(
        self, pipe: Any, components: Mapping[str, nn.Module], manifests: Sequence[Manifest] = ()
    ) -> None:
        super().__init__(components)
        self._pipe = pipe
        self._manifests = manifests

    def __repr__(self) -> str:
        """Names and classes of the components."""
        named = some(f"{name}: {type(each).__name__}" for name, each in self.items())
        return f"Replaced({named})"

    def check(self, **asked: Any) -> CheckOutcome:
        """Compare latents and images of the pipeline with engines and in eager.

        Args:
            asked: the fields of `Wish`: prompts, steps, height, width, seed, ...

        Raises:
            UsageError: the pipeline does not accept these.
        """
        wish = Wish(**asked)
        found = generate(self._pipe, wish)
        engines = {name: getattr(self._pipe, name) for name in self}
        dtype = next(next(iter(self.values())).parameters()).dtype
        try:
            for name, component in self.items():
                setattr(self._pipe, name, component)
            eager = generate(self._pipe, wish)
            with with_noise(self._pipe):
                noisy = generate(self._pipe, wish)
        finally:
            for name, engine in engines.items():
                setattr(self._pipe, name, engine)
        outcomes = [engine_outcome(m.engines[0].verdict, m.quantization) for m in self._manifests]
        return whole_outcome(eager, noisy, found, outcomes, dtype)

    def put_back(self) -> None:
        """Put the pipeline's own components back, and free the engines."""
        for name, component in self.items():
            close_engines(getattr(self._pipe, name))
            setattr(self._pipe, name, component)
        kept = [name for name in getattr(self._pipe, OFFLOAD, ()) if name not in self]
        setattr(self._pipe, OFFLOAD, kept)
        unguard(self._pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.put_back()


def attach(
    pipe: Any,
    engines: StrPath | Mapping[str, StrPath],
    *,
    prefer: list[str] | None = None,
    allow_code: bool = False,
    threads: int | None = None,
    check: Check = "full",
) -> Replaced:
    """Replace a pipeline's components by engines.

    Args:
        pipe: a diffusers pipeline.
        engines: a folder with one folder per component, as `diffusers export` writes it; or
            bundles by component, and by method if it has several:
            {"unet": "unet.bundle", "vae.decode": "decoder.bundle"}.
        prefer: backends in order of preference, as in `enginecast.load`; None: the one for the
            pipeline's device.
        allow_code: open engines that run code when they are loaded, whoever made them.
        threads: threads within one operator; None: the tuned number, or all cores.
        check: "full" compares the digest of every file, "size" only the sizes.

    Returns:
        The components that were replaced; `put_back()` puts them back.

    Raises:
        BundleError: a bundle is damaged, or holds no engine that runs here.
        UsageError: a bundle is for another component: class, config or weights differ.
        MissingError: this machine cannot run an engine.

    Warns:
        EnginecastWarning: engines were made with another version of diffusers or transformers.

    Examples:
        >>> import enginecast, torch
        >>> from types import SimpleNamespace
        >>> head = torch.nn.Linear(8, 2)
        >>> pipe = SimpleNamespace(head=head, components={"head": head})  # or one of diffusers
        >>> with enginecast.record(pipe) as calls:
        ...     _ = pipe.head(torch.randn(3, 8))
        >>> bundle = enginecast.export(head, "part.bundle", example=calls["head"])
        >>> replaced = enginecast.attach(pipe, {"head": bundle.root})
        >>> replaced
        Replaced(head: Linear)
        >>> pipe.head(torch.randn(3, 8)).shape  # of the engine
        torch.Size([3, 2])
        >>> replaced.put_back()
    """
    components: Mapping[str, Any] | None = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        raise UsageError(f"a {type(pipe).__name__} has no components: expected a pipeline")
    found = _bundles(components, engines, check)
    options = LoadOptions(None if prefer is None else tuple(prefer), allow_code, threads)
    made = {}
    for name, bundles in found.items():
        component = components[name]
        require_plain(name, component)
        for bundle in bundles:
            _require_same(name, component, bundle)
        made[name] = engine_component(name, component, bundles, options)
    if isinstance(engines, Mapping) or not (Path(engines) / RECORD).is_file():
        others: dict[str, list[str]] = {}  # each other version that engines were made with
        for name, bundles in found.items():
            here = library_of(type(components[name]))
            for bundle in bundles:
                made_with = bundle.manifest.call.library if bundle.manifest.call else ""
                if made_with and here and made_with != here:
                    said = f"made with {made_with}; here is {here}"
                    others.setdefault(said, []).append(str(bundle.root))
        for said, roots in others.items():
            warnings.warn(f"{', '.join(roots)}: {said}", EnginecastWarning, stacklevel=2)
    for name, module in made.items():
        setattr(pipe, name, module)
    # Its parts hold nothing that could be moved one by one.
    setattr(pipe, OFFLOAD, [*dict.fromkeys((*getattr(pipe, OFFLOAD, ()), *made))])
    guard(pipe)
    manifests = [bundle.manifest for bundles in found.values() for bundle in bundles]
    return Replaced(pipe, {name: components[name] for name in made}, manifests)


def _bundles(
    components: Mapping[str, Any], engines: StrPath | Mapping[str, StrPath], check: Check
) -> dict[str, list[Bundle]]:
    """Each component with its bundles."""
    models = [name for name, each in components.items() if isinstance(each, nn.Module)]
    if isinstance(engines, Mapping):
        folders = {key: Path(path) for key, path in engines.items()}
    else:
        root = Path(engines)
        if (root / RECORD).is_file():
            usable_record(root)
        folders = {name: root / name for name in sorted(models) if _within(root / name)}
        if not folders:
            raise UsageError(
                f"{root}: holds no engines of {', '.join(models)}",
                hint="Expected COMPONENT/METHOD/ with a bundle each, such as vae/decode; or give"
                ' them by name: {"unet": "unet.bundle"}.',
            )
    found: dict[str, list[Bundle]] = {}
    for key, path in folders.items():
        name, _, method = key.partition(".")
        if name not in models:
            raise UsageError(f"the pipeline has no model {name!r}; it has {', '.join(models)}")
        held = [open_bundle(each, check=check) for each in _within(path)]
        if not held:
            raise UsageError(f"{key}: there is no bundle in {path}")
        entries = [each.manifest.call.entry if each.manifest.call else method for each in held]
        if method and method not in entries:
            raise UsageError(f"{key}: {path} holds an engine of {' and '.join(entries)}")
        pairs = zip(held, entries, strict=True)
        found.setdefault(name, []).extend(each for each, e in pairs if method in ("", e))
    return found


def _within(folder: Path) -> list[Path]:
    """The bundle that a folder is, or those that it holds."""
    if (folder / MANIFEST_NAME).is_file():
        return [folder]
    return sorted(file.parent for file in folder.glob(f"*/{MANIFEST_NAME}"))


def _require_same(name: str, component: nn.Module, bundle: Bundle) -> None:
    """Refuse the engine of another class, of another config, or of other weights.

    Raises:
        UsageError: with the fields that differ.
    """
    manifest: Manifest = bundle.manifest
    kind = type(component).__name__
    if manifest.call is None:
        raise UsageError(
            f"{bundle.root}: does not say how {name} is called: it was made of a program, or by an"
            " older enginecast",
            hint=AGAIN,
        )
    if manifest.call.model_class != kind:
        raise UsageError(
            f"{bundle.root}: an engine of {manifest.call.model_class}, and {name} is a {kind}"
        )
    stored = bundle.root / CONFIG_FILE
    if found := differences(component, read_json(stored)) if stored.is_file() else []:
        raise UsageError(
            f"{bundle.root}: the engine's {name} differs from the pipeline's: {'; '.join(found)}",
            hint=AGAIN,
        )
    if weight := unlike(component.state_dict(), manifest.call.weights):
        raise UsageError(
            f"{bundle.root}: the engine's {name} has different weights from the pipeline's:"
            f" {weight}",
            hint=AGAIN,
        )
