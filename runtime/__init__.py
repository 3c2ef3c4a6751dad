"""Loading and running the engines of a bundle.

Its folders: `bundle`, `sessions`, `device`, `values`. It imports `enginecast.errors` alone, and no
torch until an engine that needs it is opened.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginecast.runtime.batcher import Batcher as Batcher

if __name__ != "enginecast.runtime":
    raise ImportError(
        "import enginecast.runtime, not runtime: the bare name is a second copy of every class"
    )


def __getattr__(name: str) -> Any:
    if name != "Batcher":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from enginecast.runtime.batcher import Batcher

    return Batcher
