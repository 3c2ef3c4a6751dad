"""`enginecast tune`: how an engine runs fastest on this machine, found by measurement.

Successive halving: all settings are timed in few rounds, the faster half of them in twice as many,
and so on. Every heat has the default in it, and what counts is the ratio to it, sample by sample.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from enginecast.bench.bundle import ROUNDS, SECONDS, Accuracy, require_threads, resident
from enginecast.bench.contenders import of_engine, on_cpu
from enginecast.bench.inputs import Given, given_inputs, one_kind
from enginecast.bench.timing import Times, interleaved
from enginecast.errors import BundleError, EnginecastError, UsageError, VerificationError
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.device.machine import available, cores
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.registry import REGISTRY, session_class
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.tuned import (
    Tuned,
    bundle_digest,
    forget_tuned,
    machine_of,
    tuned_path,
    write_tuned,
)
from enginecast.verification.engine import verify_engine
from enginecast.verification.reference import REFERENCE_NAME

FIRST = 5
"""Rounds of the first heat."""
BETTER = 1.02
"""How many times faster than the default three of four rounds have to be."""
ROOM = 0.5
"""Part of the memory that is free which opened engines may take."""
OTHERS: Sequence[Mapping[str, Any]] = (
    {"arena": False},
    {"memory_pattern": False},
    {"graph": "extended"},
    {"graph": "basic"},
    {"prepack": False},
    {"parallel": True},
    {"fixed_sizes": True},
)
"""What may be tried besides threads, one at a time."""


@dataclass
class Row:
    """A setting that was tried."""

    settings: Settings
    times: Times | None = None
    """In the last heat that it was in; None: it was not timed."""
    speeds: Times | None = None
    """How many times faster than the default it was in each round of that heat."""
    accuracy: Accuracy | None = None
    """Over the bundle's cases, against fp64."""
    rejected: str = ""
    """Why it is never chosen."""
    backend: str = ""
    """Of another engine of the bundle, as it is by default; empty: the engine itself."""

    @property
    def label(self) -> str:
        return self.backend or str(self.settings)

    @property
    def speed(self) -> float:
        return 0.0 if self.speeds is None or self.rejected else self.speeds.median

    @property
    def is_better(self) -> bool:
        """Whether it is faster by more than the speeds scatter."""
        return self.speed > 0 and self.speeds is not None and self.speeds.spread[0] > BETTER


@dataclass(frozen=True)
class Tuning:
    """What was measured, and chosen."""

    rows: tuple[Row, ...]
    """The default, then the others, the fastest first."""
    others: tuple[Row, ...]
    """Other engines of the bundle that run here, beside the default of this one."""
    chosen: Row
    """The default where nothing is better by more than its spread."""
    file: Path | None
    """Where the choice was written; None: nowhere."""
    backend: str
    inputs: str
    shapes: tuple[dict[str, tuple[int, ...]], ...]
    notes: tuple[str, ...]
    machine: Any


def tune_bundle(
    path: str | os.PathLike[str],
    *,
    inputs: Path | None = None,
    prompts: Path | None = None,
    rounds: int = ROUNDS,
    seconds: float = SECONDS,
    threads: int | None = None,
    write: bool = True,
    say: Callable[[str], None] = lambda text: None,
    **how: Any,
) -> Tuning:
    """Find the settings with which an engine runs fastest here, and write them beside the bundle.

    Args:
        inputs: safetensors; None: the largest verification inputs that the bundle holds.
        prompts: a text file, one prompt a line, instead.
        rounds: samples in the last heat, at most.
        seconds: that all samples may take, about.
        threads: most that are tried; None: as many as there are cores.
        write: False: measure alone.
        say: gets a sentence before each heat.
        how: of `load`.

    Raises:
        UsageError: the engine has nothing to tune, or the options do not fit together.
        BundleError: the bundle is damaged or holds no reference, or the choice cannot be written.
        MissingError: this machine cannot run the engine.
    """
    one_kind(inputs, prompts)
    require_threads(threads)
    place = tuned_path(Path(path).resolve())
    if write and (place.is_dir() or not os.access(place.parent, os.W_OK)):
        raise BundleError(
            f"{place}: is not writable",
            hint="Copy the bundle to a folder of your own, or measure alone: --dry-run.",
        )

    # The digests of files are compared once, but those that a signature is of every time.
    again = {**how, "check": "size" if how.get("trust") is None else "full"}

    def open_engine(settings: Settings) -> Engine:
        chosen = how if settings == DEFAULT else again
        return load(path, require="verified-by-emulation", tuned=settings, **chosen)

    def open_other(backend: str) -> Engine:
        other = again | {"prefer": [backend], "device": None, "providers": None, "tuned": False}
        return load(path, require="verified-by-emulation", **other)

    say("loading the engine")
    before = resident()
    with open_engine(DEFAULT) as engine:
        session = session_class(engine.record.target)
        tunable = session.tunable
        if not tunable or not on_cpu(engine):
            raise UsageError(
                f"{engine.record.file}: {engine.backend} has nothing to tune: `tune` measures how"
                " an engine runs on a CPU"
            )
        given = given_inputs(engine, inputs, prompts)
        if given.reference is None:
            raise BundleError(
                f"{engine.folder} has no {REFERENCE_NAME}, so no setting's accuracy can be judged",
                hint="Export the model again.",
            )
        others = [each for each in OTHERS if set(each) <= set(tunable)]
        search = _Search(engine, open_engine, given, say, others)
        taken = max(resident() - before, 1)
        search.room = max(int(ROOM * (available() or 0) // taken), 1)
        last = [search.best(_threads(threads, "spinning" in tunable), seconds * 0.3)]
        if len(tunable) > 1:
            last.append(search.refine(last[0], seconds * 0.3))
        search.heat(list(dict.fromkeys(last)), rounds, seconds * 0.4)
        better = [search.rows[each] for each in last if search.rows[each].is_better]
        row = max(better, key=lambda row: row.speed, default=search.rows[DEFAULT])
        beside = [
            search.beside(name, open_other, rounds, seconds * 0.2) for name in _others(engine)
        ]
        machine = machine_of(session)
        tuned = Tuned(
            bundle=bundle_digest(open_bundle(path, check="size")),
            engine=engine.record.file,
            provider=engine.provider,
            machine=machine,
            settings=row.settings,
            speed=1.0 if row.settings == DEFAULT else row.speed,
            inputs=given.origin,
        )
        file = None
        if write and row.settings != DEFAULT:
            file = write_tuned(engine.folder, tuned)
        elif write:  # an older choice goes away
            forget_tuned(engine.folder)
        fastest = sorted(search.rows.values(), key=lambda one: -one.speed)
        return Tuning(
            rows=(search.rows[DEFAULT], *(one for one in fastest if one.settings != DEFAULT)),
            others=tuple(beside),
            chosen=row,
            file=file,
            backend=engine.backend,
            inputs=given.origin,
            shapes=given.shapes,
            notes=given.notes,
            machine=machine,
        )


def _others(engine: Engine) -> list[str]:
    """What runs the other engines of a bundle on a CPU, in the words of `load`'s `prefer`."""
    targets = dict.fromkeys(record.target for record in engine.manifest.engines)
    sessions = [session_class(name) for name in targets if name in REGISTRY.known()]
    found = (session.backends() for session in sessions if session.name != engine.record.target)
    return [name for backends in found for name, device in backends.items() if device == "cpu"]


def _threads(most: int | None, spins: bool) -> list[Settings]:
    """Numbers of threads up to all cores, with spinning and without."""
    most = most or cores()
    counts = {most, max(most // 2, 1), *(1 << n for n in range(most.bit_length()))}
    found = [Settings(threads=count) for count in sorted(counts)]
    if spins:  # one thread waits for nobody
        found += [replace(each, spinning=False) for each in found if each.threads != 1]
    return found


@dataclass
class _Search:
    """Times and judges settings beside the default."""

    engine: Engine
    """As it is by default."""
    open_engine: Callable[[Settings], Engine]
    given: Given
    say: Callable[[str], None]
    others: Sequence[Mapping[str, Any]]
    """What is tried besides threads, one at a time."""
    rows: dict[Settings, Row] = field(default_factory=dict)
    room: int = 1
    """Engines besides the default that may be open at once."""

    def best(self, settings: Sequence[Settings], seconds: float) -> Settings:
        """The fastest of some settings, by successive halving; the default where none is faster."""
        rounds, left = FIRST, list(dict.fromkeys(settings))
        heats = len(left).bit_length()
        while True:
            self.heat(left, rounds, seconds / heats)
            left.sort(key=lambda each: -self.rows[each].speed)
            if len(left) < 2:
                return left[0] if self.rows[left[0]].speed > 1 else DEFAULT
            left, rounds = left[: len(left) // 2], 2 * rounds

    def refine(self, settings: Settings, seconds: float) -> Settings:
        """Change one thing at a time, and then all that helped."""
        changed = {replace(settings, **each): each for each in self.others}
        best = self.best([settings, *changed], seconds * 0.6)
        least = self.rows[settings].speed * BETTER
        helped = [each for each in changed if self.rows[each].speed > least]
        together = settings
        for each in sorted(helped, key=lambda each: self.rows[each].speed):
            together = replace(together, **changed[each])
        return self.best([best, together], seconds * 0.4) if len(helped) > 1 else best

    def heat(self, settings: Sequence[Settings], rounds: int, seconds: float) -> None:
        """Time settings beside the default, as many at once as there is memory for."""
        others = [each for each in settings if each != DEFAULT]
        groups = [others[n : n + self.room] for n in range(0, len(others), self.room)]
        for group in groups:
            self.say("timing " + "; ".join(map(str, group)))
            with ExitStack() as stack:
                engines = {}
                for each in group:
                    try:
                        engines[each] = stack.enter_context(self.open_engine(each))
                    except EnginecastError as error:  # the default could be opened
                        self.rows[each] = Row(each, rejected=error.message)
                engines[DEFAULT] = self.engine
                for each, engine in engines.items():
                    if each not in self.rows:
                        self.rows[each] = self._judged(engine, each)
                if refused := self.rows[DEFAULT].rejected:
                    raise VerificationError(
                        f"{self.engine.folder}: the engine does not agree with its reference:"
                        f" {refused}",
                        hint="`enginecast verify DIR` shows more.",
                    )
                calls = {
                    each: of_engine(engine, self.given.feeds).call
                    for each, engine in engines.items()
                    if not self.rows[each].rejected
                }
                if len(calls) < 2:
                    continue
                found = interleaved(calls, rounds=rounds, seconds=seconds / len(groups))
            for each, times in found.items():
                self.rows[each].times = times
                self.rows[each].speeds = times.over(found[DEFAULT])

    def beside(
        self, backend: str, open_other: Callable[[str], Engine], rounds: int, seconds: float
    ) -> Row:
        """Time and judge another engine of the bundle beside the default of this one."""
        self.say(f"timing {backend}")
        try:
            with open_other(backend) as engine:
                row = self._judged(engine, DEFAULT, backend)
                if row.rejected:
                    return row
                engines = {"": self.engine, backend: engine}
                calls = {n: of_engine(e, self.given.feeds).call for n, e in engines.items()}
                found = interleaved(calls, rounds=rounds, seconds=seconds)
        except EnginecastError as error:
            return Row(DEFAULT, rejected=error.message, backend=backend)
        row.times, row.speeds = found[backend], found[backend].over(found[""])
        return row

    def _judged(self, engine: Engine, settings: Settings, backend: str = "") -> Row:
        """Compare an engine with the bundle's reference; the worst of all outputs counts."""
        assert self.given.reference is not None
        verdict = verify_engine(engine, self.given.reference)
        # What is not defined counts as equal.
        cosines = [output.cosine for output in verdict.outputs if output.cosine is not None]
        errors = [output.error for output in verdict.outputs if output.error is not None]
        accuracy = Accuracy(min(cosines, default=1.0), max(errors, default=0.0))
        refused = verdict.reasons[0] if verdict.outcome == "rejected" else ""
        return Row(settings, accuracy=accuracy, rejected=refused, backend=backend)
