"""Compare programs and engines with eager, and judge them.

`metrics` measure arrays; the noise `floor` is eager's own error by them; a `reference` holds the
cases with eager's outputs and the floor; `verdict` judges by it, and `engine` runs an engine for
it. None of these needs torch. `boundaries` watch what leaves each module of a program.

Its folders: `eager` makes a reference, `program` observes passes, `emulate` runs a program in a
target's arithmetic, `bisect` names the culprit of what went wrong, `report` shows it all. It takes
from `passes` the rewrite to fp64 and the simulation of plans; it imports no exporter, and publishes
nothing.
"""

if __name__ != "enginecast.verification":
    raise ImportError(
        "import enginecast.verification, not verification: "
        "the bare name is a second copy of every class"
    )

from enginecast.public import listing

__all__: list[str] = []  # `enginecast.verify` is public, and what it is made of is not
__dir__ = listing(__all__)
