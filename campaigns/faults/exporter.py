"""Whole exports in forked workers, in a mount namespace of its own: `unshare -rm python -m ...`.

A request is a line of JSON on stdin: {"target": ..., "room": bytes or null, "kill": [when, seconds]
or null}.  The answer is a line of JSON: see `_answer`.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # a fork has no pool's threads

from enginecast.cli.app import main
from enginecast.errors import EnginecastError
from enginecast.runtime.bundle import leftovers
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.bundle.reader import open_bundle

MODEL = '''
import torch
from torch import nn


class Layers(nn.Module):
    """Rows of a table through two linears."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(9, 128)
        self.wide = nn.Linear(128, 256)
        self.narrow = nn.Linear(256, 128)

    def forward(self, rows):
        return self.narrow(torch.relu(self.wide(self.table(rows))))


def old():
    return Layers(1), {"rows": torch.tensor([[1, 2, 3], [4, 5, 6]])}


def new():
    return Layers(2), {"rows": torch.tensor([[1, 2, 3], [4, 5, 6]])}
'''
WORDS = ("--no-speed", "--quiet", "--allow-code", "--dynamic", "rows:1=2..4")
"""Options of every export: few sizes to check, and nothing that takes time without writing."""


ROOMY = shutil.disk_usage("/")._replace(free=1 << 50)
MOMENTS = {"files": 0.2, "manifest": 0.004}
"""Seconds that pass at most between a point of an export and a kill."""


def _command(model: str, target: str, folder: Path) -> list[str]:
    place = str(folder / "out")
    return ["export", f"fault_model:{model}", "-o", place, "--target", target, *WORDS]


def _work(words: list[str], said: Path) -> None:
    """Run a command in this process, which is a fork, and end it."""
    os.setsid()
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 70
    try:
        main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _fork(words: list[str], said: Path, *, blind: bool) -> int:
    worker = os.fork()
    if worker == 0:
        # The check of the free space would refuse most exports before they write anything.
        roomy = patch.object(shutil, "disk_usage", lambda path: ROOMY)
        with roomy if blind else contextlib.nullcontext():
            _work(words, said)
    return worker


def _ended(worker: int, seconds: float) -> int | None:
    """The exit code of a worker, or None where it is still at work after so long."""
    handle = os.pidfd_open(worker)
    try:
        if not select.select([handle], [], [], seconds)[0]:
            return None
    finally:
        os.close(handle)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def _until_gone(group: int) -> None:
    """Wait for the children of a worker that was killed: they hold its locks until they end."""
    until = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < until:
            os.killpg(group, 0)
            time.sleep(0.002)


def _wait_for(when: str, place: Path, worker: int) -> None:
    """Wait until an export has come to a point, or has ended."""
    pattern = {"files": ".out.tmp-*/*", "manifest": f".out.tmp-*/{MANIFEST_NAME}"}.get(when)
    handle = os.pidfd_open(worker)
    while pattern and not any(place.glob(pattern)):
        if select.select([handle], [], [], 0.0002)[0]:
            break
    os.close(handle)


def _state(bundle: Path, old: bytes) -> str:
    """What the name holds: "old", "new", "nothing", or what is wrong."""
    if not os.path.lexists(bundle):
        return "nothing"
    try:
        open_bundle(bundle, check="full")
    except EnginecastError as error:
        return f"a damaged bundle: {error.message}"
    return "old" if (bundle / MANIFEST_NAME).read_bytes() == old else "new"


@contextlib.contextmanager
def _room(place: Path, size: int | None) -> Iterator[None]:
    """An empty folder, on a disk of its own where a size is given: bytes."""
    place.mkdir()
    if size is not None:
        options = f"size={size},mode=755"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True)
    try:
        yield
    finally:
        if size is not None:
            subprocess.run(["umount", "-l", place], check=True)
        shutil.rmtree(place)


class Exporter:
    """Exports over an old bundle, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said = folder / "said"
        self._seconds: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        (folder / "fault_model.py").write_text(MODEL)
        os.chdir(folder)
        sys.path.insert(0, str(folder))

    def _old(self, target: str) -> Path:
        """The bundle that is there before; made once, by a whole export, which is timed."""
        made = self._folder / f"old-{target}"
        if not made.exists():
            made.mkdir()
            for words in ((), ("--overwrite",)):  # the first one makes caches, the second is timed
                began = time.monotonic()
                worker = _fork([*_command("old", target, made), *words], self._said, blind=False)
                code = _ended(worker, 300)
                assert code == 0, f"{code}: {self._said.read_text()}"
                self._seconds[target] = time.monotonic() - began
            self._sizes[target] = sum(file.stat().st_size for file in (made / "out").iterdir())
        return made / "out"

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Export as the request says; what came of it."""
        target, kill = request["target"], request["kill"]
        source, place = self._old(target), self._folder / "place"
        old = (source / MANIFEST_NAME).read_bytes()
        room = request["room"]
        size = None if room is None else int(self._sizes[target] * (1 + room)) + (64 << 10)
        with _room(place, size):
            shutil.copytree(source, place / "out")
            words = [*_command("new", target, place), "--overwrite"]
            worker = _fork(words, self._said, blind=True)
            seconds = 300.0
            if kill is not None:
                when, share = kill
                _wait_for(when, place, worker)
                seconds = share * {"any": self._seconds[target]}.get(when, MOMENTS.get(when, 0))
            code = _ended(worker, seconds)
            if code is None:
                os.killpg(worker, signal.SIGKILL)
                code = _ended(worker, 60)
                _until_gone(worker)
            before = _state(place / "out", old)
            left = sorted(set(os.listdir(place)) - {"out"})
            with patch.object(leftovers, "ABANDONED_SECONDS", -1):
                for leftover in leftovers.find_leftovers(place):
                    leftovers.clean(leftover)
            after = _state(place / "out", old)
            uncleaned = sorted(set(os.listdir(place)) - {"out"})
        said = self._said.read_text(errors="replace")
        return {
            "code": code,
            "before": before,
            "after": after,
            "left": left,
            "uncleaned": uncleaned,
            "said": said[-1500:],
        }


def serve(folder: Path) -> None:
    """Answer requests until stdin ends."""
    import enginecast.capture.tracing.sizes.sweep
    import enginecast.compiler.export.session
    import enginecast.exporters.aotinductor.target
    import enginecast.exporters.onnx.target
    import enginecast.exporters.torchscript.target

    vars(enginecast.capture.tracing.sizes.sweep).update(WALKED=100, MOST=4)
    exporter = Exporter(folder)
    for line in sys.stdin:
        print(json.dumps(exporter.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
