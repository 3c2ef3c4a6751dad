"""enginecast: capture, rewrite, lower and verify PyTorch models.

The public names load on first use, so that a server which only runs engines never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from enginecast.installation import needing
from enginecast.version import __version__ as __version__

if TYPE_CHECKING:
    from enginecast.api import compile as compile
    from enginecast.api import record as record
    from enginecast.compiler.verify.bundle import verify_bundle as verify
    from enginecast.pipelines.attach import attach as attach
    from enginecast.runtime.load import load as load

__all__ = ["__version__", "attach", "compile", "load", "record", "verify"]

_WHERE = {
    "attach": ("enginecast.pipelines.attach", "attach"),
    "compile": ("enginecast.api", "compile"),
    "load": ("enginecast.runtime.load", "load"),
    "record": ("enginecast.api", "record"),
    "verify": ("enginecast.compiler.verify.bundle", "verify_bundle"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'enginecast' has no attribute {name!r}")
    module, attribute = _WHERE[name]
    with needing(f"enginecast.{name}"):
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
