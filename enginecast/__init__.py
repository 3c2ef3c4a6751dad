"""enginecast: capture, rewrite, lower and verify PyTorch models.

The public names load on first use, so that a server which only runs engines never imports torch.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecast.check import verify_bundle as verify
    from enginecast.driver import compile as compile
    from enginecast.runtime.load import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "load", "verify"]

_WHERE = {
    "compile": ("enginecast.driver", "compile"),
    "load": ("enginecast.runtime.load", "load"),
}


class CallableFolder(ModuleType):
    """The class of `enginecast.verify`: a package, and the verb of the API by the same name."""

    def __call__(self, path: Any, **options: Any) -> Any:
        """Compare a bundle with eager again; see `enginecast.check.verify_bundle`."""
        return import_module("enginecast.check").verify_bundle(path, **options)


def __getattr__(name: str) -> Any:
    if name == "verify":
        return import_module("enginecast.verify")
    if name not in _WHERE:
        raise AttributeError(f"module 'enginecast' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(import_module(module), attribute)
