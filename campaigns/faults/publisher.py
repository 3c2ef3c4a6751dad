"""Publishes in forked workers, which wait until they are traced.

A request is a line of JSON on stdin, {"folder": ..., "cases": [...]}.  The answers are the workers'
process numbers, and, after a line "go", their exit codes (negative: of a signal).
"""

import json
import os
import select
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from enginecast.errors import EnginecastError
from enginecast.runtime.bundle import staging
from enginecast.runtime.bundle.manifest_json import decode

PUBLISHED, REFUSED, CRASHED = 0, 10, 70


SOURCE: dict[str, bytes] = {}
"""The bundle to publish, read before anything can fail."""


def _publish(folder: Path, *, overwrite: bool) -> None:
    with staging.stage(folder / "out", overwrite=overwrite) as stage:
        for name, data in SOURCE.items():
            if name != "manifest.json":
                (stage.folder / name).write_bytes(data)
        stage.publish(decode(SOURCE["manifest.json"]))


def _without_exchange(folder: Path) -> None:
    with patch.object(staging, "_exchange", lambda one, other: False):
        _publish(folder, overwrite=True)


def _reject(folder: Path) -> None:
    with staging.stage(folder / "out") as stage:
        (stage.folder / "engine.onnx").write_bytes(bytes(1000))
        (stage.folder / "report.html").write_bytes(b"new" * 1000)
        stage.reject(["report.html"])


CASES: dict[str, Callable[[Path], object]] = {
    "new": lambda folder: _publish(folder, overwrite=False),
    "overwrite": lambda folder: _publish(folder, overwrite=True),
    "without exchange": _without_exchange,
    "reject": _reject,
    "file": lambda folder: staging.write_file(folder / "out", b"new" * 1000),
}


def _work(case: str, folder: Path, said: Path) -> int:
    try:
        CASES[case](folder)
    except EnginecastError as error:
        said.write_text(error.message)
        return REFUSED
    except BaseException as error:  # a crash, which is what the campaign looks for
        said.write_text(f"{type(error).__name__}: {error}")
        return CRASHED
    return PUBLISHED


def _warm(source: Path) -> None:
    """Import what is imported late, which no fault is to hit."""
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        for case in CASES:
            place = Path(folder, "place")
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            if case in ("overwrite", "without exchange"):
                shutil.copytree(source, place / "out")
            assert _work(case, place, Path(folder, "said")) == PUBLISHED


def serve(source: Path) -> None:
    """Answer requests until stdin ends."""
    SOURCE.update((path.name, path.read_bytes()) for path in sorted(source.iterdir()))
    _warm(source)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        folder, gate = Path(request["folder"]), os.pipe()
        workers = []
        for number, case in enumerate(request["cases"]):
            worker = os.fork()
            if worker == 0:
                select.select([gate[0]], [], [])
                os._exit(_work(case, folder, folder.parent / f"said-{number}"))
            workers.append(worker)
        print(json.dumps(workers), flush=True)
        sys.stdin.readline()
        os.write(gate[1], b"go")
        codes = [os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) for worker in workers]
        os.close(gate[0])
        os.close(gate[1])
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
