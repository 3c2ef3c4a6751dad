"""Loading and running the engines of a bundle.

Its folders: `bundle`, `sessions`, `device`, `values`. It imports `enginecast.errors` alone, and no
torch until an engine that needs it is opened.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecast.runtime.batcher import Batcher as Batcher
    from enginecast.runtime.generation import Generator as Generator
    from enginecast.runtime.generation import generate as generate
    from enginecast.runtime.stepping import Stepper as Stepper

if __name__ != "enginecast.runtime":
    raise ImportError(
        "import enginecast.runtime, not runtime: the bare name is a second copy of every class"
    )


_WHERE = {
    "Batcher": "batcher",
    "Generator": "generation",
    "Stepper": "stepping",
    "generate": "generation",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"enginecast.runtime.{_WHERE[name]}"), name)
