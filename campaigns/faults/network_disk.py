"""A layer between Python and the disk, which behaves as network disks sometimes do."""

import builtins
import errno
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from enginecast.cache.store import mapping

ERRORS = {
    "open": ("ESTALE", "EIO", "EACCES", "ENOENT"),
    "io.open": ("ESTALE", "EIO", "ENOSPC"),
    "stat": ("ESTALE", "EIO"),
    "listdir": ("ESTALE", "EIO"),
    "scandir": ("ESTALE", "EIO"),
    "mkdir": ("ESTALE", "EIO", "ENOSPC", "EDQUOT"),
    "fsync": ("EIO", "ENOSPC", "EDQUOT"),
    "rename": ("ESTALE", "EIO"),
    "replace": ("ESTALE", "EIO", "ENOSPC"),
    "link": ("ESTALE", "EIO", "EMLINK"),
    "unlink": ("ESTALE", "EIO"),
    "rmdir": ("EIO", "ENOTEMPTY"),
}
"""What NFS gives for a handle that went stale, a server that restarts, or a quota."""
LOST_REPLIES = {
    "mkdir": ("EEXIST",),
    "rename": ("ENOENT", "EIO"),
    "replace": ("ENOENT", "EIO"),
    "link": ("EEXIST", "EIO"),
    "unlink": ("ENOENT",),
}
"""What is done, and then said to have failed: the reply was lost, and the call was sent again."""
ALWAYS = ("no locks", "no links", "no mapping", "short writes")
"""What a file system lacks altogether."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        call: of `ERRORS`, or one of `ALWAYS`.
        turn: which call of that kind, from 1.
        how: an error before the call; "after ..." the call; "hides" or "shows", of a listing.
    """

    call: str
    turn: int = 0
    how: str = ""

    def __str__(self) -> str:
        return f"{self.call} {self.turn} {self.how}".strip()


class NetworkDisk:
    """Injects one fault into the calls that concern a folder.

    Args:
        fault: None: nothing goes wrong; the calls are counted.
    """

    def __init__(self, root: Path, fault: Fault | None = None) -> None:
        self._root, self._fault = str(root), fault
        self.calls: Counter[str] = Counter()
        self.fired = False

    @contextmanager
    def mounted(self) -> Iterator[None]:
        """Go through this layer."""
        with ExitStack() as stack:
            for name in ERRORS:
                module: Any = io if name == "io.open" else os
                attribute = name.rpartition(".")[2]
                wrapper = self._wrapped(name, getattr(module, attribute))
                stack.enter_context(patch.object(module, attribute, wrapper))
            self._lacks(stack)
            yield

    def _lacks(self, stack: ExitStack) -> None:
        call = self._fault.call if self._fault else ""
        if call == "no locks":
            stack.enter_context(patch("fcntl.flock", self._refuse(errno.ENOLCK)))
        elif call == "no links":
            stack.enter_context(patch.object(os, "link", self._refuse(errno.EOPNOTSUPP)))
        elif call == "no mapping":
            refuse = self._refuse(errno.ENODEV)
            stack.enter_context(patch.object(mapping, "map_file", refuse))
        elif call == "short writes":
            stack.enter_context(patch.object(io, "open", self._short))

    def _refuse(self, number: int) -> Callable[..., Any]:
        def refuse(*arguments: Any, **options: Any) -> Any:
            self.fired = True
            raise OSError(number, os.strerror(number))

        return refuse

    def _short(self, path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if mode != "wb" or not str(path).startswith(self._root):
            return builtins.open(path, mode, *arguments, **options)
        disk = self

        class Short(io.FileIO):
            def write(self, data: Any) -> int:
                disk.fired = True
                return super().write(memoryview(data)[: max(1, len(data) // 3)])

        return io.BufferedWriter(Short(path, "w"), 16)

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if not (arguments and str(arguments[0]).startswith(self._root)) and name != "fsync":
                return real(*arguments, **options)
            self.calls[name] += 1
            fault = self._fault
            if fault is None or (fault.call, fault.turn) != (name, self.calls[name]):
                return real(*arguments, **options)
            self.fired = True
            if fault.how in ("hides", "shows"):
                return self._stale(real(*arguments, **options), arguments[0], fault.how)
            number = getattr(errno, fault.how.removeprefix("after "))
            if fault.how.startswith("after "):
                real(*arguments, **options)
            raise OSError(number, os.strerror(number), str(arguments[0]))

        return call

    @staticmethod
    def _stale(names: list[str], folder: Any, how: str) -> list[str]:
        """A listing as a client's cache still has it."""
        if how == "hides":
            newest = max(
                names, key=lambda name: os.lstat(Path(folder, name)).st_mtime_ns, default=""
            )
            return [name for name in names if name != newest]
        return [*names, "0" * 32 + ".safetensors"]


def faults_of(calls: Counter[str]) -> list[Fault]:
    """Every fault of what was called so often."""
    found = [Fault(call) for call in ALWAYS]
    for call, count in calls.items():
        for turn in range(1, count + 1):
            found += [Fault(call, turn, how) for how in ERRORS[call]]
            found += [Fault(call, turn, f"after {how}") for how in LOST_REPLIES.get(call, ())]
            if call == "listdir":
                found += [Fault(call, turn, how) for how in ("hides", "shows")]
    return found
