"""Ends what is left of a fill's own Ray, also where the fill was killed.

A driver that dies takes most of its Ray along, but not all: `ray::DashboardAgent` and
`ray::RuntimeEnvAgent` go on for minutes.  So the driver starts this file as a program before Ray,
and holds the other end of its standard input, which ends when the driver does, whatever ended it.

Ray's processes are known by a variable that they inherit, so no other Ray is touched.  The program
imports nothing of enginecast: it has to start at once, and stay small.
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

SESSION = "ENGINECAST_RAY_SESSION"
"""Environment variable of all processes of a session: its name."""

LEAVE_SECONDS = 5.0
"""How long they may go by themselves: workers finish the shard that they write."""

END_SECONDS = 3.0
"""How long they have after SIGTERM, before SIGKILL."""

_AGAIN_SECONDS = 0.1


def session_processes(name: str) -> list[Any]:
    """The live processes of a session, without the caller's: `psutil.Process`es."""
    import psutil  # which Ray brings

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(SESSION) != name or process.pid == os.getpid():
                continue
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or it has just ended
            continue
    return found


def end_session(name: str) -> None:
    """Wait for the processes of a session to go, then make them."""
    import psutil

    if _all_gone(name, LEAVE_SECONDS):
        return
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in session_processes(name):
            try:
                end(process)
            except psutil.Error:
                continue
        if _all_gone(name, END_SECONDS):
            return


def _all_gone(name: str, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while session_processes(name):
        if time.monotonic() > until:
            return False
        time.sleep(_AGAIN_SECONDS)
    return True


def main(arguments: Sequence[str]) -> None:
    """Wait for the driver's end, then clean up: the session of a name, and its folder."""
    name, folder = arguments
    sys.stdin.buffer.read()
    end_session(name)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
