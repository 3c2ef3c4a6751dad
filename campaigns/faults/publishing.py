"""Faults while bundles are published: system calls that fail, kills at any of them, and races."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import bundles

from enginecast.errors import EnginecastError
from enginecast.runtime.bundle import leftovers
from enginecast.runtime.bundle.reader import open_bundle
from faults.campaign import Campaign, Sizes, Tally, environment
from faults.publisher import CASES, PUBLISHED, REFUSED

SEED = 29
ERRORS = {
    "mkdir": ("ENOSPC", "EACCES", "EIO"),
    "openat": ("EACCES", "EIO", "ENOSPC", "EMFILE", "ESTALE"),
    "read": ("EIO", "ESTALE"),
    "write": ("ENOSPC", "EIO", "EDQUOT", "EFBIG"),
    "fsync": ("EIO", "ENOSPC"),
    "close": ("EIO",),
    "chmod": ("EPERM", "EIO"),
    "flock": ("ENOLCK",),
    "getdents64": ("EIO", "ESTALE"),
    "rename": ("EIO", "ENOSPC", "EACCES"),
    "renameat2": ("EIO", "EINVAL", "ENOSPC"),
    "unlink": ("EIO", "EACCES"),
    "unlinkat": ("EIO", "EACCES"),
    "rmdir": ("EIO",),
}
"""What Linux's manual pages name for each call, as far as a disk or a quota is the cause."""


class Publisher:
    """A process that publishes in workers; see publisher.py."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.old = bundles.make_bundle(folder / "old", bundles.manifest(notes=("old",)))
        self.new = bundles.make_bundle(folder / "new", bundles.manifest(notes=("new",)))
        self.folder = folder / "place"
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "faults.publisher", str(self.new)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)

    def prepare(self, case: str) -> None:
        """Set the folder up as it is before a case."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for said in self.root.glob("said-*"):
            said.unlink()
        if case in ("overwrite", "without exchange"):
            shutil.copytree(self.old, self.folder / "out")
        elif case == "file":
            (self.folder / "out").write_bytes(b"old")
        elif case == "reject":
            (self.folder / "out.rejected").mkdir()
            (self.folder / "out.rejected" / "report.html").write_bytes(b"old")

    def run(self, cases: Sequence[str]) -> list[int]:
        """Let cases run at once; their exit codes."""
        self.begin(cases)
        return self.go()

    def begin(self, cases: Sequence[str]) -> list[int]:
        """Start workers that wait; their process numbers."""
        request = {"folder": str(self.folder), "cases": list(cases)}
        return [int(number) for number in json.loads(self._ask(json.dumps(request)))]

    def go(self) -> list[int]:
        """Let the workers go on; their exit codes."""
        return [int(code) for code in json.loads(self._ask("go"))]

    def traced(self, case: str, *options: str) -> tuple[int, str]:
        """Run a case under strace; its exit code and the log."""
        log = self.root / "strace.log"
        (worker,) = self.begin([case])
        command = ["strace", "-o", str(log), *options, "-p", str(worker)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            line = tracer.stderr.readline()
            assert "attached" in line, line
            (code,) = self.go()
            tracer.wait(60)
        return code, log.read_text()

    def said(self, number: int = 0) -> str:
        """What a worker's error said."""
        path = self.root / f"said-{number}"
        return path.read_text() if path.exists() else ""

    def state(self, case: str) -> str:
        """What is there: "old", "new", "nothing"; anything else is harm."""
        path = self.folder / ("out.rejected" if case == "reject" else "out")
        if not os.path.lexists(path):
            return "nothing"
        if case == "file":
            return {b"old": "old", b"new" * 1000: "new"}.get(path.read_bytes(), "half a file")
        if case == "reject":
            content = {file.name: file.read_bytes() for file in path.iterdir()}
            if content.keys() != {"report.html"}:
                return f"reports {sorted(content)}"
            found = content["report.html"]
            return {b"old": "old", b"new" * 1000: "new"}.get(found, "half a report")
        try:
            return open_bundle(path).manifest.notes[0]
        except EnginecastError as error:
            return f"a damaged bundle: {error.message}"

    def cleaned(self, case: str) -> str:
        """Do what `doctor --clean` does after a minute; what it leaves that is not the result."""
        with patch.object(leftovers, "ABANDONED_SECONDS", -1):
            for leftover in leftovers.find_leftovers(self.folder):
                leftovers.clean(leftover)
        wanted = {"out.rejected"} if case == "reject" else {"out"}
        return ", ".join(sorted(set(os.listdir(self.folder)) - wanted))


@contextmanager
def publisher(folder: Path) -> Iterator[Publisher]:
    """A publisher for as long as the block."""
    one = Publisher(folder)
    try:
        yield one
    finally:
        one.close()


def harm(one: Publisher, case: str, code: int) -> str:
    """What is wrong after a case that ended with a code, if anything."""
    had_old = case != "new"
    before = one.state(case)
    allowed = {"old", "new"} if had_old else {"nothing", "new"}
    if case == "without exchange" and code < 0:
        allowed |= {"nothing"}  # killed between its two renames
    if code == PUBLISHED:
        allowed = {"new"}
    if before not in allowed:
        return f"the name holds {before}"
    if code == REFUSED and str(one.folder) not in one.said():
        return f"the error names no file: {one.said()}"
    if code > 0 and code != REFUSED:
        return f"it crashed: {one.said()}"
    left = one.cleaned(case)
    if left:
        return f"cleaning left {left}"
    if one.state(case) not in (allowed - {"nothing"} if had_old else allowed):
        return f"after cleaning the name holds {one.state(case)}"
    return ""


def calls(count: int, folder: Path) -> Tally:
    """Fail, or kill at, one system call of a publication."""
    tally, faults = Tally(), list[tuple[str, str, int, str]]()
    with publisher(folder) as one:
        for case in CASES:
            one.prepare(case)
            code, log = one.traced(case, "-e", f"trace={','.join(ERRORS)}")
            assert (code, one.state(case)) == (PUBLISHED, "new"), one.said()
            seen = Counter(re.findall(r"^(\w+)\(", log, re.MULTILINE))
            for call, errors in ERRORS.items():
                for turn in range(1, seen[call] + 1):
                    faults += [(case, call, turn, f"error={error}") for error in errors]
                    faults.append((case, call, turn, "signal=KILL"))
        random.Random(SEED).shuffle(faults)
        for number in range(count):
            case, call, turn, fault = faults[number % len(faults)]
            one.prepare(case)
            code, log = one.traced(
                case, "-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={turn}"
            )
            fired = "(INJECTED)" in log or code == -9
            wrong = harm(one, case, code)
            if wrong:
                tally.defect(f"{case}, {call} {turn}, {fault}: {wrong}")
                continue
            kind = {PUBLISHED: "published", REFUSED: "refused"}.get(code, "killed")
            tally.add(f"{kind}, {one.state(case)} there", fired=fired)
    return tally


def races(count: int, folder: Path) -> Tally:
    """Let four exporters publish under one name at once."""
    tally = Tally()
    kinds = ("new", "overwrite", "without exchange", "reject")
    with publisher(folder) as one:
        for number in range(count):
            case = kinds[number % len(kinds)]
            one.prepare(case)
            codes = one.run([case] * 4)
            won, lost = codes.count(PUBLISHED), codes.count(REFUSED)
            messages = [one.said(place) for place, code in enumerate(codes) if code == REFUSED]
            if won + lost != 4 or not won or (case == "new" and won != 1):
                tally.defect(f"race {number}, {case}: exit codes {codes}, {messages}")
            elif not all(str(one.folder) in message for message in messages):
                tally.defect(f"race {number}, {case}: an error names no folder: {messages}")
            elif wrong := harm(one, case, PUBLISHED):
                tally.defect(f"race {number}, {case}: {wrong}")
            else:
                tally.add(f"with {won} published and {lost} refused")
    return tally


def _lacks() -> str:
    missing = shutil.which("strace") is None
    return "strace, which makes system calls fail, is not installed" if missing else ""


CAMPAIGNS = (
    Campaign(
        "failing system calls",
        "Whichever system call of a publication fails, or is the last of a killed process, the name"
        " holds the old bundle or the new one, whole; `doctor --clean` leaves nothing beside it.",
        Sizes(quick=40, full=1000),
        calls,
        lacks=_lacks,
    ),
    Campaign(
        "races",
        "Of four exporters to one name one wins, and the losers say so; with --overwrite the name"
        " holds one of the bundles whole.",
        Sizes(quick=8, full=100),
        races,
    ),
)
