"""What killed exports leave behind, and what becomes of it; signals; the permissions of files."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import bundles
import pytest

from enginecast.cli.app import main
from enginecast.errors import MissingError
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.bundle.staging import stage, write_file

KILLED = """
import os, signal, sys
from enginecast.runtime.bundle.staging import stage
with stage(sys.argv[1], overwrite=True) as staging:
    (staging.folder / "engine.onnx").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(target: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL


def doctor(capsys: pytest.CaptureFixture[str], *words: Any) -> Any:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *map(str, words), "--json"])
    assert not caught.value.code
    return json.loads(capsys.readouterr().out)["leftovers"]


def test_what_a_kill_left_is_said_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = bundles.make_bundle(tmp_path / "out")
    killed(root)
    (tmp_path / ".out.tmp-mine").mkdir()  # not one of ours
    (said,) = doctor(capsys, tmp_path)
    assert (said["kind"], said["action"], said["done"]) == ("unfinished", "remove", False)
    assert (said["target"], said["bytes"], said["in_use"]) == (str(root), 4, False)
    (said,) = doctor(capsys, tmp_path, "--clean")
    assert said["done"]
    assert doctor(capsys, tmp_path) == []
    assert sorted(os.listdir(tmp_path)) == [".out.tmp-mine", "out"]
    open_bundle(root)


def test_an_exporter_that_lives_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stage(tmp_path / "out") as staging:
        (staging.folder / "build.log").write_text("")
        (said,) = doctor(capsys, tmp_path, "--clean")
        assert (said["in_use"], said["action"], said["done"]) == (True, "none", False)
        assert staging.folder.is_dir()


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o002])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        root = bundles.make_bundle(tmp_path / "out")
        write_file(tmp_path / "one", b"")
        write_file(tmp_path / "own", b"", mode=0o600)
    finally:
        os.umask(before)
    assert root.stat().st_mode & 0o777 == 0o777 & ~mask
    for path in (*root.iterdir(), tmp_path / "one"):
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask, path
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError(122, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_one_error_and_leaves_the_old(tmp_path: Path, error: Exception) -> None:
    root = bundles.make_bundle(tmp_path / "out")
    with pytest.raises(MissingError, match=r"No space left|quota") as caught:  # noqa: SIM117
        with stage(root, overwrite=True):
            raise error
    assert "as it was" in caught.value.hint
    assert os.listdir(tmp_path) == ["out"]
    open_bundle(root)


EXPORT = """
import signal
import sys
from pathlib import Path
from unittest.mock import patch
import enginecast.runtime.bundle.staging as staging
from enginecast.cli.app import main
import time
original = staging.Staging.publish
def publish(self, manifest):
    print("publishing", file=sys.stderr, flush=True)
    time.sleep(60)
    return original(self, manifest)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job may ignore them
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
with patch.object(staging.Staging, "publish", publish):
    main(["export", sys.argv[1], "-o", sys.argv[2], "--no-speed", "-q", "--overwrite"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_signals_clean_up(number: int, code: int, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(3, 3), {'input': torch.ones(2, 3)}\n"
    )
    root = bundles.make_bundle(tmp_path / "bundles" / "out")
    command = [sys.executable, "-c", EXPORT, "tiny:make", str(root)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "publishing\n"
        assert len(os.listdir(root.parent)) == 2
        child.send_signal(number)
        if number != signal.SIGINT:
            child.send_signal(number)  # a second one does not cut the first short
        said = child.communicate(timeout=60)[1]
    assert child.returncode == code, said
    assert "interrupted" in said
    assert os.listdir(root.parent) == ["out"]
    open_bundle(root)


PARTS = """
import os, signal, sys
import bundles
from enginecast.runtime.bundle.staging import stage
if sys.argv[3] == "TERM":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as the command line ends
def stop(moment):
    if moment == sys.argv[2]:
        os.kill(os.getpid(), getattr(signal, f"SIG{sys.argv[3]}"))
with stage(sys.argv[1], overwrite=True) as staging:
    with stage(staging.folder / "encoder") as inner:
        (inner.folder / "engine.onnx").write_bytes(b"half")
        stop("in the part")
        bundles.fill(inner)
    stop("between")
    bundles.fill(staging, bundles.manifest(notes=("new",)))
    stop("published")
"""


@pytest.mark.parametrize("moment", ["in the part", "between", "published"])
@pytest.mark.parametrize("name", ["TERM", "KILL"])
def test_a_bundle_with_a_part_is_the_old_or_the_new_one(
    name: str, moment: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = bundles.make_bundle(tmp_path / "out")
    command = [sys.executable, "-c", PARTS, str(root), moment, name]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
    done = subprocess.run(command, env=environment, check=False)
    assert done.returncode == (143 if name == "TERM" else -signal.SIGKILL)
    found = open_bundle(root)
    is_new = moment == "published"
    assert (found.manifest.notes, list(found.parts)) == (
        (("new",), ["encoder"]) if is_new else ((), [])
    )
    if name == "KILL":
        (said,) = doctor(capsys, tmp_path, "--clean")
        assert said["done"]
    assert os.listdir(tmp_path) == ["out"]
