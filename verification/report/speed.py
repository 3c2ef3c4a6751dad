"""How fast an engine was on the machine of its export, beside eager and beside the fp32 engine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ALIKE = 0.95
"""A ratio below is one of an engine that is slower, and not of chance."""


@dataclass(frozen=True)
class SpeedAt:
    """How many times faster than others an engine is at some sizes: medians over rounds."""

    eager: float
    """Than eager fp32."""
    quartiles: tuple[float, float]
    rounds: int
    shapes: Mapping[str, tuple[int, ...]]
    """Of the inputs."""
    milliseconds: Mapping[str, float]
    """Of a run of the "engine", of "eager" and, where it was timed, of the "fp32" engine."""
    fp32: float | None = None
    """Than the engine that an export in fp32 makes; None: it is that one, or was not timed beside
    it."""
    fp32_quartiles: tuple[float, float] | None = None

    @property
    def sizes(self) -> str:
        """Of the first input: "32x24"."""
        return "x".join(map(str, next(filter(None, self.shapes.values()), (1,))))

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the fp32 engine, in three rounds of four."""
        gain, quartiles = self.fp32, self.fp32_quartiles
        return gain is not None and gain < ALIKE and (quartiles is None or quartiles[1] < 1)


@dataclass(frozen=True)
class Speed:
    """The same at one row and, where the time allows, at many; as a string, one line."""

    cases: tuple[SpeedAt, ...]
    precision: str
    threads: int
    busy: bool = False
    """Whether the machine did much else."""
    cpu: str = ""
    """Its vector instructions: "AVX512-VNNI"; empty: unknown."""
    advice: str = ""
    """What to do where it is slower than the fp32 engine."""
    without_fp32: str = ""
    """Why it was not timed beside the fp32 engine; empty: it was, or is that one."""

    def __str__(self) -> str:
        said = self._beside("eager")
        if beside := self._beside("fp32"):
            said = f"{said}; {beside}"
        elif self.without_fp32:
            said = f"{said}; not timed beside the fp32 engine: {self.without_fp32}"
        what = "fp32" if self.precision == "fp32" else f"{self.precision} against eager fp32,"
        return f"{said} ({what} on {self._threads} of this CPU{', which was busy' * self.busy})"

    @property
    def slower(self) -> str:
        """By how much it is slower than the fp32 engine; empty: nowhere."""
        return self._beside("fp32") if any(case.is_slower for case in self.cases) else ""

    def slower_than_fp32(self, machine: str) -> str:
        """ "slower than fp32 on this machine (0.53x the fp32 engine at 1x10)"; empty: it is not."""
        how = "" if all(case.is_slower for case in self.cases) else "partly "
        return f"{how}slower than fp32 on {machine} ({self.slower})" if self.slower else ""

    @property
    def machine(self) -> str:
        """ "2 threads of a CPU with AVX512-VNNI"."""
        kind = f" with {self.cpu}" if self.cpu else ""
        return f"{self._threads} of a CPU{kind}{', which was busy' * self.busy}"

    @property
    def _threads(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads != 1)}"

    def _beside(self, other: str) -> str:
        """ "3.2x eager at 1x10, 0.84x at 32x12 (slower)"."""
        said: list[str] = []
        for case in self.cases:
            gain = case.eager if other == "eager" else case.fp32
            if gain is None:
                continue
            name = "" if said else " eager" if other == "eager" else " the fp32 engine"
            number = f"{gain:.{1 if gain >= ALIKE else 2}f}x"
            marked = other == "eager" and gain < ALIKE
            said.append(f"{number}{name} at {case.sizes}{' (slower)' * marked}")
        return ", ".join(said)

    def to_json(self) -> dict[str, Any]:
        """What `export --json` has of it; the first case by itself, for who reads one number."""
        whole = asdict(self)
        first = {name: value for name, value in whole["cases"][0].items() if name != "milliseconds"}
        return {**first, **whole, "slower_than_fp32": self.slower}
