"""From a rewritten program to the files of an engine: one folder per target.

Holds: targets. It imports `passes` and `runtime`, whose reader owns the bundle format; it must not
run an engine, nor import `capture` or `verify`.
"""

if __name__ != "enginecast.exporters":
    raise ImportError(
        "import enginecast.exporters, not exporters: the bare name is a second copy of every class"
    )

from typing import TYPE_CHECKING

from enginecast.public import importing, listing

if TYPE_CHECKING:
    from enginecast.exporters.target import Artifact as Artifact
    from enginecast.exporters.target import LoweringRequest as LoweringRequest
    from enginecast.exporters.target import Target as Target

_TARGET = "enginecast.exporters.target"
__all__ = ["Artifact", "LoweringRequest", "Target"]
__dir__ = listing(__all__)
if not TYPE_CHECKING:
    __getattr__ = importing(__name__, {name: f"{_TARGET}:{name}" for name in __all__})
