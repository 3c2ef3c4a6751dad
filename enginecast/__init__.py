"""enginecast: capture, rewrite, lower and verify PyTorch models.

The public names load on first use, so that a server which only runs engines never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecast.driver import compile as compile
    from enginecast.driver import verify_bundle as verify
    from enginecast.runtime.load import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "compile", "load", "verify"]

_WHERE = {
    "compile": ("enginecast.driver", "compile"),
    "load": ("enginecast.runtime.load", "load"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'enginecast' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    return getattr(import_module(module), attribute)
