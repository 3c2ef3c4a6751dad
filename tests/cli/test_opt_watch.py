"""`opt --watch`: again after each change, through errors, until Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from plugin_passes import RIGHT, SOURCE, install

from enginecast.cli.opt_watch import watch


@pytest.mark.timeout(20)
def test_a_change_of_any_file_and_no_other_thing_runs_again(tmp_path: Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("1", "utf-8")
    other.write_text("1", "utf-8")
    later = tmp_path / "new"
    later.write_text("whole", "utf-8")
    rounds: list[str] = []

    def run() -> Iterable[Path]:
        rounds.append(one.read_text("utf-8") + other.read_text("utf-8"))
        if len(rounds) == 1:
            other.write_text("22", "utf-8")  # while the first round runs
            os.utime(other, ns=(1, 1))
        elif len(rounds) == 2:
            later.replace(one)  # as editors save
        else:
            raise KeyboardInterrupt
        return [one, other]

    watch(run, [one, other], poll=0.01)
    assert rounds[-1] == "whole22"


def until(ready: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


@pytest.mark.slow
def test_the_command_goes_on_through_errors_and_ctrl_c_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = install(tmp_path, monkeypatch)
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    command = ["-m", "enginecast", "opt", "double_model:make", "--pipeline", "double", "--watch"]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen([sys.executable, *command], stdout=stdout, stderr=stderr)

    def rounds() -> int:
        assert process.poll() is None, err.read_text("utf-8")
        return err.read_text("utf-8").count("Ctrl-C ends")

    def change(text: str) -> str:
        before, size = rounds(), len(err.read_text("utf-8"))
        file.write_text(text, encoding="utf-8")
        until(lambda: rounds() > before)
        return err.read_text("utf-8")[size:]

    try:
        until(lambda: rounds() == 1)
        assert "aten.mul.Tensor(%relu, 2)" in out.read_text("utf-8")
        broken = SOURCE.replace("log.done(node)", "log.done(None.node)")
        assert "AttributeError" in change(broken)
        assert "SyntaxError" in change("def (\n")
        assert "promises 'exact'" in change(SOURCE.replace(RIGHT, "(node.args[0], 3)"))
        assert "equal" in change(SOURCE)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert "no longer watching" in err.read_text("utf-8")
    finally:
        process.kill()
        process.wait()
