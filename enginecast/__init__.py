"""enginecast: capture, rewrite, lower and verify PyTorch models.

The public names load on first use, so that a server which only runs engines never imports torch.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from enginecast.version import __version__ as __version__

if TYPE_CHECKING:
    from enginecast.api import compile as compile
    from enginecast.api import record as record
    from enginecast.compiler.verify_bundle import verify_bundle as verify
    from enginecast.pipelines.attach import attach as attach
    from enginecast.runtime.load import load as load

__all__ = ["__version__", "attach", "compile", "load", "record", "verify"]

_WHERE = {
    "attach": "enginecast.pipelines.attach",
    "compile": "enginecast.api",
    "load": "enginecast.runtime.load",
    "record": "enginecast.api",
}


class CallableFolder(ModuleType):
    """The class of `enginecast.verify`: a package, and the verb of the API by the same name."""

    def __call__(self, path: Any, **options: Any) -> Any:
        """Compare a bundle with eager again; see `compiler.verify_bundle`."""
        with _extras("verify"):
            return import_module("enginecast.compiler.verify_bundle").verify_bundle(path, **options)


class Face(ModuleType):
    """The class of this package, which notices when its folder `verify` is imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "verify" and isinstance(value, ModuleType):
            value.__class__ = CallableFolder
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = Face


def __getattr__(name: str) -> Any:
    if name == "verify":
        return import_module("enginecast.verify")
    if name not in _WHERE:
        raise AttributeError(f"module 'enginecast' has no attribute {name!r}")
    with _extras(name):
        return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


@contextmanager
def _extras(name: str) -> Iterator[None]:
    """Raise a MissingError where a library that a public name needs is missing or broken."""
    try:
        yield
    except Exception as error:
        from enginecast.installation import unavailable

        lacking = unavailable(error, f"enginecast.{name}")
        if lacking is None:
            raise
        raise lacking from error
