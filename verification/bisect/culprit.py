"""The result of a bisection, as data and in words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enginecast.passes.ir.base import Promise, Site, SiteKey
from enginecast.verification.floor import LIMIT
from enginecast.verification.metrics import BEYOND, times

Leave = tuple[frozenset[SiteKey], ...]
"""For each pass of a pipeline, the sites that it leaves alone."""


@dataclass(frozen=True)
class ModuleError:
    """The error of a module's outputs, in units of the noise floor there."""

    module: str
    source: str
    accumulated: float
    """Error as the program computes it."""
    isolated: float | None
    """Error if the module is fed the values from before the pass; None: it cannot be compared
    so."""
    bits: tuple[bool, bool] | None = None
    """For a pass that promises *exact*: whether the bits changed, and whether they change if the
    module is fed the values from before; None: changed bits are allowed."""

    @property
    def off(self) -> bool:
        """Whether the error exceeds what the promise allows."""
        return self.bits[0] if self.bits is not None else self.accumulated > LIMIT

    @property
    def arises(self) -> bool:
        """Whether the error arises in this module, rather than in its inputs."""
        if self.bits is not None:
            return self.bits[1]
        return self.isolated is not None and self.isolated > LIMIT

    @property
    def lost(self) -> bool:
        """Whether finite values became infinite or NaN."""
        return self.accumulated >= BEYOND

    def words(self) -> str:
        """The errors in words: "error 41x the noise floor; isolated error 0.9x (accumulated)"."""
        error = _floors(self.accumulated, " the noise floor")
        if self.bits is not None:
            error = f"{error}{', other bits than before' if self.bits[0] else ''}"
        if self.isolated is None:
            return error
        place = "arises here" if self.arises else "accumulated"
        return f"{error}; isolated {_floors(self.isolated, '')} ({place})"


@dataclass(frozen=True)
class GuiltySite:
    """A rewrite that causes the error."""

    site: Site
    error: ModuleError | None
    """The error at the innermost module boundary around it; None: no comparable value leaves a
    module."""


@dataclass(frozen=True)
class Culprit:
    """A pass that causes an error, and its guilty sites."""

    name: str
    position: int
    """Index in the pipeline."""
    promise: Promise
    failure: str
    """The failure that the comparison after it found."""
    rewritten: int
    """Number of rewritten sites before any was left out."""
    sites: tuple[GuiltySite, ...] = ()
    undecided: tuple[Site, ...] = ()
    """Sites left out with the guilty ones: separating them would take too many runs."""
    module: ModuleError | None = None
    """The module where the error arises, or is largest."""
    reason: str = ""
    """Why no site is named; empty: sites are named."""
    keep: str = ""
    """Pattern of the module that should stay in fp32."""
    keep_helps: bool = False
    """Whether a run showed that to be enough."""

    @property
    def left_out(self) -> frozenset[SiteKey]:
        """Sites without which the pass causes no error."""
        return frozenset(s.key for s in (*(guilty.site for guilty in self.sites), *self.undecided))

    def joined(self, more: "Culprit") -> "Culprit":
        """This culprit joined with one found after its sites had been left out."""
        return replace(
            self, sites=(*self.sites, *more.sites), undecided=(*self.undecided, *more.undecided)
        )

    def lines(self) -> Iterator[str]:
        """In words."""
        for guilty in self.sites:
            site, error = guilty.site, guilty.error
            found = f", {error.words()}" if error is not None else ""
            yield f"pass {self.name}, site {_place(site)}{found}"
        if self.undecided:
            yield (
                f"pass {self.name}: {len(self.undecided)} more sites, from"
                f" {_place(self.undecided[0])} on, could not be separated"
            )
        if not self.sites:
            where = self.module
            text = f"pass {self.name}"
            if where is not None:
                place = ", ".join(part for part in (where.module, where.source) if part)
                text = f"{text}, module {place}, {where.words()}"
            text = f"{text}; {self.reason}" if self.reason else text
            if self.keep:
                enough = "was found to be enough" if self.keep_helps else "is not enough alone"
                text = (
                    f"{text}; --skip-modules-pattern '{self.keep}' keeps it in fp32, which {enough}"
                )
            yield text

    def to_json(self) -> dict[str, Any]:
        """Builtin types only."""
        return {
            "pass": self.name,
            "position": self.position,
            "promise": self.promise,
            "failure": self.failure,
            "rewritten": self.rewritten,
            "sites": [_site(g.site) | {"error": _error(g.error)} for g in self.sites],
            "undecided": [_site(site) for site in self.undecided],
            "module": _error(self.module),
            "reason": self.reason,
            "skip_modules_pattern": self.keep,
            "skip_modules_pattern_helps": self.keep_helps,
        }


@dataclass(frozen=True)
class Bisection:
    """The result of a bisection."""

    culprits: tuple[Culprit, ...]
    leave: Leave
    """All sites to leave out, including those given at the start."""
    helps: bool
    """Whether the pipeline is correct without them."""
    trials: int
    """Number of program runs on one or a few cases."""
    modules: tuple[ModuleError, ...] = ()
    """Every module boundary after the first culprit, in order of execution."""

    @property
    def left_out(self) -> int:
        return sum(len(culprit.left_out) for culprit in self.culprits)

    @property
    def rewritten(self) -> int:
        """Sites of the culprits."""
        return sum(culprit.rewritten for culprit in self.culprits)

    def lines(self) -> tuple[str, ...]:
        """In words."""
        return tuple(line for culprit in self.culprits for line in culprit.lines())

    def hint(self) -> str:
        """What to do; empty if skipping sites did not help."""
        if not (self.helps and self.left_out):
            return ""
        return f"--drop-guilty would leave {self.left_out} of {self.rewritten} sites out"

    def to_json(self) -> dict[str, Any]:
        """Builtin types only."""
        return {
            "culprits": [culprit.to_json() for culprit in self.culprits],
            "drop_guilty_helps": self.helps and self.left_out > 0,
            "left_out": self.left_out,
            "trials": self.trials,
            "modules": [_error(module) for module in self.modules],
        }


def why_dropped(culprits: Sequence[Culprit]) -> dict[tuple[int, SiteKey], str]:
    """The report's reason for each site that was left out, by pass position and site key."""
    found = {}
    for culprit in culprits:
        for site in culprit.undecided:
            found[culprit.position, site.key] = (
                "dropped beside guilty sites: could not be separated"
            )
        for guilty in culprit.sites:
            words = guilty.error.words() if guilty.error is not None else culprit.failure
            found[culprit.position, guilty.site.key] = f"dropped as guilty: {words}"
    return found


def _place(site: Site) -> str:
    ordinal = f"#{site.ordinal}" if site.ordinal else ""
    return ", ".join(part for part in (site.module or "<root>", site.source, ordinal) if part)


def _floors(value: float, unit: str) -> str:
    return "error not finite" if value >= BEYOND else f"error {times(value)}{unit}"


def _site(site: Site) -> dict[str, Any]:
    return {"module": site.module, "source": site.source, "ordinal": site.ordinal}


def _error(error: ModuleError | None) -> dict[str, Any] | None:
    if error is None:
        return None
    return {
        "module": error.module,
        "source": error.source,
        "error": error.accumulated,
        "isolated": error.isolated,
        "off": error.off,
        "arises_here": error.arises,
    }
