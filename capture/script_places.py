"""Which submodule runs a line of code: the one to script when that line branches on data."""

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn

from enginecast.capture.places import Place, real_path


def owners(
    module: nn.Module, places: Collection[Place], run: Callable[[], object]
) -> dict[Place, tuple[str, ...]]:
    """Run the model once and note whose forward was running when a function with a place began.

    Args:
        module: the model.
        places: files as tracebacks name them, and lines.
        run: runs the model.

    Returns:
        For each place the paths of the innermost modules, sorted; where the run came by none, the
        modules whose forward stands around the line; empty where there is none either.
    """
    paths = {id(found): path for path, found in module.named_modules()}
    wanted = {(real_path(file), line): (file, line) for file, line in places}
    files = {file for file, _ in wanted}
    found: dict[Place, set[str]] = {place: set() for place in places}

    def on_event(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        file = real_path(frame.f_code.co_filename)
        if file not in files:
            return
        for (wanted_file, line), place in wanted.items():
            if wanted_file == file and _holds(frame.f_code, line):
                path = _innermost(frame, paths)
                if path is not None:
                    found[place].add(path)

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(before)
    return {place: tuple(sorted(met or _around(module, place))) for place, met in found.items()}


def _holds(code: CodeType, line: int) -> bool:
    lines = [number for _, _, number in code.co_lines() if number is not None]
    return bool(lines) and min(lines) <= line <= max(lines)


def _innermost(frame: FrameType | None, paths: dict[int, str]) -> str | None:
    """The path of the module whose forward this frame is, or was called from."""
    while frame is not None:
        module = frame.f_locals.get("self")
        if (
            isinstance(module, nn.Module)
            and id(module) in paths
            and frame.f_code in _codes(type(module))
        ):
            return paths[id(module)]
        frame = frame.f_back
    return None


def _codes(module_class: type[nn.Module]) -> Iterator[CodeType]:
    """The code of a class's forward, and of what its decorators wrap."""
    function: Any = module_class.forward
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None:
            yield code
        function = getattr(function, "__wrapped__", None)


def _around(module: nn.Module, place: Place) -> set[str]:
    """Modules whose forward holds a line that the run did not come by."""
    file, line = real_path(place[0]), place[1]
    return {
        path
        for path, found in module.named_modules()
        for code in _codes(type(found))
        if real_path(code.co_filename) == file and _spans(code, line)
    }


def _spans(code: CodeType, line: int) -> bool:
    try:
        lines, first = inspect.getsourcelines(code)
    except OSError:
        return _holds(code, line)
    return first <= line < first + len(lines)
