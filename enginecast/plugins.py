"""Things that are known by name: ours in a table, those of other packages by entry point.

Classes are loaded on use, so that listing the names imports nothing.  A package whose entry point
is broken breaks what uses it by name and nothing else.
"""

import difflib
import linecache
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, invalidate_caches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TypeVar

from enginecast.errors import DefectError, EnginecastError, EnginecastWarning
from enginecast.version import __version__

T = TypeVar("T")
OURS = "enginecast"
GROUPS = ("enginecast.passes", "enginecast.targets", "enginecast.sessions")
"""The entry-point groups that there are."""


@dataclass(frozen=True)
class Broken:
    """An entry point that is left out, and why."""

    name: str
    where: str
    """ "module:Class"."""
    package: str
    """Distribution and version."""
    reason: str

    def __str__(self) -> str:
        return f"'{self.name}' of {self.package} is left out: {self.reason}"


@dataclass(frozen=True)
class Registry:
    """The classes of one kind, by name."""

    kind: str
    """In messages: "pass"."""
    group: str
    """Entry-point group by which other packages add classes."""
    own: Mapping[str, str]
    """Name -> "module:Class"."""
    error: type[EnginecastError]
    """What is raised for a name that is unknown."""

    def known(self) -> dict[str, str]:
        """Name -> "module:Class" of every class, ours first; imports none of them.

        A name of ours stays ours, and one that two packages claim is nobody's: see `clashes`.
        """
        claimed = {one.name for one in self.clashes()}
        known = dict(self.own)
        for entry in self._entries():
            if entry.name not in claimed:
                known[entry.name] = entry.value
        return known

    def clashes(self) -> tuple[Broken, ...]:
        """The entry points that claim a name of ours, or one that another package claims too."""
        entries = self._entries()
        claims: dict[str, list[str]] = {name: [where] for name, where in self.own.items()}
        for entry in entries:
            claims.setdefault(entry.name, []).append(entry.value)
        return tuple(
            Broken(
                entry.name,
                entry.value,
                _package(entry),
                f"two {_plural(self.kind)} are called '{entry.name}':"
                f" {' and '.join(claims[entry.name])}",
            )
            for entry in entries
            if len(claims[entry.name]) > 1
        )

    def sorted_out(self, base: type[T]) -> tuple[dict[str, type[T]], tuple[Broken, ...]]:
        """Every class by name, ours first, and the entry points that are not usable; imports all
        that other packages bring.
        """
        found, broken = {}, list(self.clashes())
        packages = {entry.name: _package(entry) for entry in self._entries()}
        for name, where in self.known().items():
            try:
                found[name] = self._loaded(name, where, base)
            except DefectError as error:
                broken.append(Broken(name, where, packages[name], error.message))
        return found, tuple(sorted(broken, key=lambda one: (one.name, one.where)))

    def load(self, name: str, base: type[T]) -> type[T]:
        """The class of this name.

        Args:
            base: what it must be derived from.

        Raises:
            EnginecastError: there is no such name.
            DefectError: its class cannot be loaded or used, or two packages claim the name.
        """
        clash = self.require(name)
        if clash is not None:
            warnings.warn(EnginecastWarning(f"{self.kind} {clash}"), stacklevel=2)
        return self._loaded(name, self.known()[name], base)

    def require(self, name: str) -> Broken | None:
        """Refuse a name that there is none of; imports nothing.

        Returns:
            The entry point that claims a name of ours, and is left out; None: none does.

        Raises:
            EnginecastError: there is no such name.
            DefectError: two packages claim it.
        """
        known = self.known()
        clash = next((one for one in self.clashes() if one.name == name), None)
        if clash is not None and name not in known:
            raise DefectError(clash.reason, hint="Uninstall one of the two packages.")
        if name not in known:
            close = difflib.get_close_matches(name, known)
            meant = f"Did you mean {' or '.join(map(repr, close))}?  " if close else ""
            raise self.error(
                f"unknown {self.kind} '{name}'", hint=f"{meant}Known: {', '.join(known)}."
            )
        return clash

    def _loaded(self, name: str, where: str, base: type[T]) -> type[T]:
        module, _, attribute = where.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except BaseException as error:  # what a package runs on import may raise anything
            if name in self.own or not is_foreign(error):
                raise  # of ours, an extra is missing, or we have a defect
            what = f"{self.kind} '{name}' cannot be loaded from {where}"
            raise defect_of(module, what, error) from error
        if not (isinstance(found, type) and issubclass(found, base)):
            raise DefectError(
                f"{self.kind} '{name}': {where} is not a subclass of"
                f" {base.__module__}.{base.__name__}",
                hint=_blamed(module),
            )
        own_name = getattr(found, "name", None)  # base classes and unfinished ones have none
        if own_name != name:
            raise DefectError(
                f"{self.kind} '{name}': {where} calls itself {own_name!r}", hint=_blamed(module)
            )
        return found

    def _entries(self) -> tuple[EntryPoint, ...]:
        return _installed(entry_points, self.group, tuple(sys.path))


def is_foreign(error: BaseException) -> bool:
    """Whether the code of others may have meant to raise it: sys.exit and all else but Ctrl-C."""
    return not isinstance(error, (KeyboardInterrupt, GeneratorExit))


def text_of(error: BaseException) -> str:
    """Type and message of an exception, whose own code may fail at giving it."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception:  # `__str__` is code of a plugin
        return f"{name}, whose message cannot be printed"


def defect_of(
    module: str, what: str, error: BaseException, kind: type[DefectError] = DefectError
) -> DefectError:
    """An exception that nobody expected, as a defect of the package that has `module`.

    The message gives the innermost line in that package's own files.

    Args:
        what: what was done, such as "pass 'fuse-silu'".
        kind: of the error that is made.
    """
    frames = list(_own_frames(module, error))
    place = f" at {_short(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    made = kind(f"{what}: {text_of(error)}{place}", hint=_blamed(module))
    made.trace = "".join(traceback.format_list(frames))
    made.details = {"package": package_of(module)}
    if frames:
        made.details |= {"file": frames[-1].filename, "line": frames[-1].lineno}
    return made


def plugin_defect(error: BaseException) -> DefectError | None:
    """An exception that a target or session of another package led to; None: none did."""
    tops = {
        _top(entry.value.partition(":")[0])
        for group in GROUPS
        for entry in _installed(entry_points, group, tuple(sys.path))
    }
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if _top(module) in tops - {OURS}:
            return defect_of(module, f"{package_of(module)} failed", error)
    return None


def package_of(module: str) -> str:
    """The distribution and version that a module comes from: "enginecast-silu 0.1.0"."""
    top = _top(module)
    if top == OURS:
        return f"{OURS} {__version__}"
    for group in GROUPS:
        for entry in _installed(entry_points, group, tuple(sys.path)):
            if _top(entry.value.partition(":")[0]) == top:
                return _package(entry)
    return f"the module '{top}'"


def own_files(module: str) -> tuple[Path, ...]:
    """The source files that were loaded of the package of `module`; of ours that module alone."""
    top = _top(module)
    names = [
        name
        for name in sorted(sys.modules)
        if (name == module if top == OURS else _top(name) == top)
    ]
    found = (getattr(sys.modules[name], "__file__", None) for name in names)
    return tuple(Path(file) for file in found if file and file.endswith(".py"))


def forget(module: str) -> None:
    """Have the package of `module`, or of ours that module alone, imported anew on its next use."""
    top = _top(module)
    for name in list(sys.modules):
        if name == module if top == OURS else _top(name) == top:
            del sys.modules[name]
    invalidate_caches()
    linecache.checkcache()


def _own_frames(module: str, error: BaseException) -> Iterator[traceback.FrameSummary]:
    """The frames of a traceback that stand in the files of a package, outermost first."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        yield traceback.FrameSummary(error.filename, error.lineno, "<module>")
        return
    top = _top(module)
    for frame, line in traceback.walk_tb(error.__traceback__):
        if _top(str(frame.f_globals.get("__name__", ""))) == top:
            code = frame.f_code
            yield traceback.FrameSummary(code.co_filename, line, code.co_name)


def _short(file: str) -> str:
    """A file as one types it: relative to here where it is below."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _blamed(module: str) -> str:
    if _top(module) == OURS:
        return "This is a defect of enginecast; please report it."
    return f"This is a defect of {package_of(module)}, not of enginecast."


def _top(module: str) -> str:
    return module.partition(".")[0]


def _package(entry: EntryPoint) -> str:
    if entry.dist is None:
        return "a package without a name"
    return f"{entry.dist.name} {entry.dist.version}"


@cache
def _installed(
    find: Callable[..., Iterable[EntryPoint]], group: str, path: tuple[str, ...]
) -> tuple[EntryPoint, ...]:
    """The entry points of a group: finding them reads a file of every package on the path."""
    return tuple(sorted(find(group=group), key=lambda one: (one.name, one.value)))


def _plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"
