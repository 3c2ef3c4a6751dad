"""Loading and running the engines of a bundle.

Its folders: `bundle`, `sessions`, `device`, `values`. It imports `enginecast.errors` alone, and no
torch until an engine that needs it is opened.
"""

if __name__ != "enginecast.runtime":
    raise ImportError(
        "import enginecast.runtime, not runtime: the bare name is a second copy of every class"
    )

from typing import TYPE_CHECKING

from enginecast.public import importing, listing

if TYPE_CHECKING:
    from enginecast.runtime.batcher import Batcher as Batcher
    from enginecast.runtime.engine import Engine as Engine
    from enginecast.runtime.engine import Outputs as Outputs
    from enginecast.runtime.generation import Generator as Generator
    from enginecast.runtime.generation import generate as generate
    from enginecast.runtime.stepping import Stepper as Stepper

_WHERE = {
    "Batcher": "enginecast.runtime.batcher:Batcher",
    "Engine": "enginecast.runtime.engine:Engine",
    "Generator": "enginecast.runtime.generation:Generator",
    "Outputs": "enginecast.runtime.engine:Outputs",
    "Stepper": "enginecast.runtime.stepping:Stepper",
    "generate": "enginecast.runtime.generation:generate",
}
__all__ = ["Batcher", "Engine", "Generator", "Outputs", "Stepper", "generate"]
__dir__ = listing(__all__)
if not TYPE_CHECKING:
    __getattr__ = importing(__name__, _WHERE)
