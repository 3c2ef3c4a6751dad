"""What a campaign is: faults of one kind, and what is counted of them."""

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Sizes(NamedTuple):
    """How many faults a campaign injects."""

    quick: int
    """With the tests: seconds; 0: not at all."""
    full: int
    """With `make faults`: what the page promises."""


@dataclass
class Tally:
    """What came of the faults of a campaign.

    A fault is counted when it is injected, as fired when it was seen to take effect, and under an
    outcome: what the product made of it.
    """

    injected: int = 0
    fired: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Such as "refused", "old bundle kept", "published whole"."""
    defects: list[str] = field(default_factory=list)
    """Half bundles, damage that was accepted, crashes, hangs, errors that do not say what is wrong:
    each with the seed or the place that shows it again."""

    def add(self, outcome: str, *, fired: bool = True) -> None:
        """Count one fault."""
        self.injected += 1
        self.fired += fired
        self.outcomes[outcome] += 1

    def defect(self, what: str) -> None:
        """Count one fault that did harm."""
        self.add("defect")
        self.defects.append(what)


@dataclass(frozen=True)
class Campaign:
    """Faults of one kind.

    Args:
        name: of the row, such as "flipped bits".
        promise: what holds whatever the fault, in a sentence.
        sizes: how many faults there are.
        run: injects as many, into things that it makes in the folder, from fixed seeds.
        fires: the share of faults at least that has to be seen to fire.
        lacks: says why it cannot run here; empty where it can.
    """

    name: str
    promise: str
    sizes: Sizes
    run: Callable[[int, Path], Tally]
    fires: float = 1.0
    lacks: Callable[[], str] = str


def environment() -> dict[str, str]:
    """That of a child process, which finds the same modules."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path}


def lacks_own_disks() -> str:
    """Why no process can have disks of its own here; empty where one can."""
    if shutil.which("unshare") is None:
        return "unshare, which gives a process disks of its own, is not installed"
    done = subprocess.run(["unshare", "-rm", "true"], capture_output=True, text=True, check=False)
    return f"unshare -rm: {done.stderr.strip()}" if done.returncode else ""


def require(campaign: Campaign, tally: Tally, wanted: int) -> None:
    """Fail where a fault did harm, or where fewer faults were injected or fired than said."""
    shown = "\n  ".join(tally.defects[:10])
    assert not tally.defects, f"{campaign.name}: {len(tally.defects)} defects:\n  {shown}"
    assert tally.injected >= wanted, f"{campaign.name}: {tally.injected} of {wanted} injected"
    fired = tally.fired / max(tally.injected, 1)
    assert fired >= campaign.fires, f"{campaign.name}: {tally.fired} of {tally.injected} fired"
