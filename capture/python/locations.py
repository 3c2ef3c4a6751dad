"""Source locations, and whether the code there belongs to the user or to a library.

Whose a line is, is decided by the module that its file was imported as, and by the folder of
`sys.path` that this module was found in. Paths alone cannot say it: environments and packages may
be reached through symbolic links, and a user's folder may have any name. This is the only place
that resolves paths.
"""

import ast
import functools
import json
import linecache
import os
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from traceback import FrameSummary
from types import CodeType, FrameType, ModuleType
from typing import Literal, NamedTuple

Origin = Literal[
    "python",  # and its standard library
    "torch",  # and what torch computes sizes with
    "enginecast",
    "library",  # of models that many people use, wherever it is: see LIBRARIES
    "installed",  # any other installed package
    "user",
    "exec",  # no file: a model's author gave it to exec
    "generated",  # no file: torch or Python made it
]
OF_TORCH = frozenset({"torch", "sympy", "mpmath", "numpy"})
EXAMPLES = "torch._export.db.examples"
"""Models that torch ships as examples: they count as installed models, not as torch."""
LIBRARIES = frozenset({"transformers"})
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OF_EXEC = re.compile(r"<(?!frozen|eval_with_key|__)")


class SourceLocation(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def short(self) -> str:
        """Without the folder."""
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def resolved(self) -> "SourceLocation":
        """With a file that has one name only."""
        return SourceLocation(real_path(self.file), self.line)

    @classmethod
    def of_frame(cls, frame: FrameType) -> "SourceLocation":
        """Where a frame stands, resolved."""
        return cls(real_path(frame.f_code.co_filename), frame.f_lineno or 0)

    @classmethod
    def of_summary(cls, frame: FrameSummary) -> "SourceLocation":
        """Where a frame of a traceback stood, as Python names the file."""
        return cls(frame.filename, frame.lineno or 0)

    @classmethod
    def in_text(cls, text: str) -> list["SourceLocation"]:
        """The lines that a traceback names, as Python prints it."""
        return [cls(match["file"], int(match["line"])) for match in FRAME.finditer(text)]


Spot = tuple[SourceLocation, int]
"""A line, and the column at which a statement or expression begins in it."""


@functools.lru_cache(maxsize=4096)
def real_path(file: str) -> str:
    """A file without links, so that its names become equal; code without a file keeps its name."""
    return file if file.startswith("<") else os.path.realpath(file)


def is_model_code(file: str) -> bool:
    """Whether a file may hold a model: it is neither torch's, nor Python's, nor this package's."""
    return origin_of(file) in ("library", "installed", "user")


def is_user_code(file: str) -> bool:
    """Whether code is the user's and no installed package's; what was given to exec is, too."""
    return origin_of(file) in ("user", "exec")


def is_library_code(file: str) -> bool:
    """Whether a file belongs to torch, transformers or Python: its branches reject no model."""
    return origin_of(file) in ("python", "torch", "enginecast", "library", "generated")


@functools.lru_cache(maxsize=4096)
def origin_of(file: str) -> Origin:
    """Whose code a file holds, such as the `co_filename` of a code object."""
    if file.startswith("<"):
        return "exec" if _OF_EXEC.match(file) else "generated"
    module = _module_of(file)
    if module is None:
        # Of a file that no module was imported from, by the innermost folder that is known.
        for folder in map(str, Path(real_path(file)).parents):
            if folder in _site_packages():
                return "installed"
            if folder in _roots("stdlib", "platstdlib"):
                return "python"
        return "user"
    name, top = _name(module), _name(module).partition(".")[0]
    if name.startswith(f"{EXAMPLES}."):
        return "installed"
    if top in OF_TORCH:
        return "torch"
    if top == "enginecast":
        return "enginecast"
    if top in LIBRARIES:
        return "library"
    # The folder of `sys.path` that holds the outermost package of a module, links and all.
    path = Path(os.path.abspath(_file(module)))
    depth = _name(module).count(".") + (path.stem == "__init__")
    root = str(path.parents[min(depth, len(path.parents) - 1)])
    if real_path(root) in _roots("stdlib", "platstdlib"):
        return "python"
    return "installed" if _is_installed(root, top) else "user"


_MODULES: dict[str, list[str]] = {}
"""Names in `sys.modules` by the last part of their file's path, which links seldom change: to
resolve the files of some thousand modules takes long."""


def _module_of(file: str) -> ModuleType | None:
    """The module that a file was imported as; None for a script, or a module that is gone."""
    found = _listed(file)
    if found is None:  # imported since, or not at all
        _MODULES.clear()
        for name, module in list(sys.modules.items()):
            if known := _file(module):
                _MODULES.setdefault(os.path.basename(known), []).append(name)
        found = _listed(file)
    return found


def _listed(file: str) -> ModuleType | None:
    real = real_path(file)
    for name in _MODULES.get(os.path.basename(file), ()):
        module = sys.modules.get(name)
        if module is not None and (known := _file(module)) and real_path(known) == real:
            return module
    return None


def _file(module: ModuleType) -> str:
    """As Python found it, links and all."""
    file = getattr(module, "__dict__", {}).get("__file__")  # lazy modules import when asked
    return file if isinstance(file, str) else ""


def _name(module: ModuleType) -> str:
    spec = getattr(module, "__dict__", {}).get("__spec__")
    return str(getattr(spec, "name", None) or module.__name__)


@functools.cache
def _roots(*schemes: str) -> frozenset[str]:
    paths = sysconfig.get_paths()
    return frozenset(real_path(paths[scheme]) for scheme in schemes)


@functools.cache
def _site_packages() -> frozenset[str]:
    """The folders that installers write to."""
    listed = (*site.getsitepackages(), site.getusersitepackages())
    return _roots("purelib", "platlib") | {real_path(folder) for folder in listed}


@functools.cache
def _is_installed(root: str, top: str) -> bool:
    """Whether an installer put the package `top` into the folder `root`."""
    if real_path(root) not in _site_packages():  # another environment's, or pip install --target
        return any(Path(root).glob("*.dist-info/RECORD")) and top in _distributions()
    if not (Path(root, top).is_symlink() or Path(root, f"{top}.py").is_symlink()):
        return True
    return not any(_is_editable(name) for name in _distributions().get(top, ()))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _is_editable(distribution: str) -> bool:
    """Source: https://packaging.python.org/specifications/direct-url-data-structure/"""
    try:
        text = metadata.distribution(distribution).read_text("direct_url.json")
        return bool(json.loads(text or "{}").get("dir_info", {}).get("editable"))
    except (metadata.PackageNotFoundError, ValueError):
        return False


@functools.lru_cache(maxsize=256)
def tree_of(file: str) -> ast.Module:
    """The parsed source of a file; an empty module if it is not available."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def line_numbers(code: CodeType) -> Iterator[int]:
    """The lines of a code object, and of the functions within it."""
    yield from (line for _, _, line in code.co_lines() if line is not None)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from line_numbers(constant)


def holds(code: CodeType, line: int) -> bool:
    """Whether a line stands in a code object, or in a function within it."""
    return code.co_firstlineno <= line <= max(line_numbers(code), default=0)


def calling_frames() -> Iterator[FrameType]:
    """The frames of the model's own code that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_model_code(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def calling_place() -> SourceLocation | None:
    """The line of the model's own code that is running; None: there is none."""
    frame = next(calling_frames(), None)
    return None if frame is None else SourceLocation(frame.f_code.co_filename, frame.f_lineno)


@contextmanager
def noting_calls(note: Callable[[FrameType], object]) -> Iterator[None]:
    """Within the block, call `note` with the frame of each Python function that is entered."""
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: note(frame) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(before)
