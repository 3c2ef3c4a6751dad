"""`enginecast tune`: what runs fastest here, written beside the bundle and used by `load`."""

import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from exports import Exports, cast

from enginecast.bench import tune
from enginecast.bench.timing import Times
from enginecast.runtime.bundle.manifest import Verdict
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.sessions.settings import DEFAULT, Settings
from enginecast.runtime.tuned import Tuned, tuned_path
from enginecast.verification.engine import verify_engine as judged
from enginecast.verification.reference import Reference

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def bundle(exports: Exports, tmp_path: Path) -> Path:
    """A bundle of its own, since what is beside it changes."""
    return shutil.copytree(exports("plain").folder, tmp_path / "own.bundle")


def clocked(
    monkeypatch: pytest.MonkeyPatch, seconds: Callable[[Settings], tuple[float, ...]]
) -> list[list[Settings]]:
    """Let settings take the milliseconds that are said, round by round; return all heats."""
    heats: list[list[Settings]] = []

    def interleaved(
        calls: Mapping[Settings, Callable[[], object]], *, rounds: int, seconds: float
    ) -> dict[Settings, Times]:
        heats.append(list(calls))
        for call in calls.values():
            call()
        return {each: Times((took(each) * rounds)[:rounds], (1.0,) * rounds, 1) for each in calls}

    took = seconds
    monkeypatch.setattr(tune, "interleaved", interleaved)
    monkeypatch.setattr(tune, "OTHERS", [{"arena": False}, {"graph": "extended"}])
    return heats


def choice(bundle: Path) -> Settings:
    """What stands beside a bundle."""
    return msgspec.json.decode(tuned_path(bundle).read_bytes(), type=Tuned).settings


@pytest.mark.slow
def test_what_is_faster_is_found_and_used(
    bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = Settings(threads=1, arena=False, graph="extended")

    def took(each: Settings) -> tuple[float, ...]:
        same = [getattr(each, f) == getattr(fast, f) for f in ("threads", "arena", "graph")]
        return (8.0 - sum(same),)

    heats = clocked(monkeypatch, took)
    before = sorted(path.name for path in bundle.iterdir())
    ran = cast(capsys, "tune", bundle, "--json")
    assert ran.code == 0, ran.err
    assert choice(bundle) == fast
    assert ran.json["chosen"]["settings"] == msgspec.to_builtins(fast)
    assert ran.json["chosen"]["speed"] == pytest.approx(8 / 5)
    assert ran.json["file"] == str(tuned_path(bundle))
    assert all(row["relative_error"] < 1e-5 for row in ran.json["rows"])
    assert all(heat[-1] == DEFAULT for heat in heats)
    assert heats[-1] == [Settings(threads=1), fast, DEFAULT]
    assert sorted(path.name for path in bundle.iterdir()) == before
    with load(bundle) as engine:
        assert engine.settings == fast
    with load(bundle, threads=2) as engine:
        assert engine.settings == Settings(threads=2, arena=False, graph="extended")
    with load(bundle, tuned=False) as engine:
        assert engine.settings == DEFAULT
    assert cast(capsys, "verify", bundle).code == 0
    told = cast(capsys, "bench", bundle, "--rounds", 3)
    assert "the engine as tuned: 1 thread, no arena, graph extended\n" in told.out
    assert "tuned" not in cast(capsys, "bench", bundle, "--rounds", 3, "--untuned").out


def test_a_setting_that_is_wrong_is_never_chosen(
    bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:

    def verify_engine(engine: Engine, reference: Reference) -> Verdict:
        verdict = judged(engine, reference)
        if engine.settings.arena:
            return verdict
        return msgspec.structs.replace(verdict, outcome="rejected", reasons=("off by 3",))

    monkeypatch.setattr(tune, "verify_engine", verify_engine)
    clocked(monkeypatch, lambda each: (1.0,) if not each.arena else (4.0,))
    ran = cast(capsys, "tune", bundle)
    assert ran.code == 0, ran.err
    assert "never chosen: no arena: off by 3\n" in ran.out
    assert not tuned_path(bundle).exists()


def test_a_real_tuning_needs_no_torch(
    bundle: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(tune, "OTHERS", [{"parallel": True}])
    ran = cast(capsys, "tune", bundle, "--seconds", 0, "--rounds", 3, "--dry-run", "--threads", 1)
    assert ran.code == 0, ran.err
    assert "1 thread" in ran.out
    assert not tuned_path(bundle).exists()


def test_bad_input_is_refused_before_the_work(bundle: Path, capsys: Capture) -> None:
    given: dict[str, list[object]] = {
        "--threads 4096: expected at most": ["--threads", 4096],
        "give either --inputs": ["--inputs", "a", "--prompts", "b"],
        "nowhere.st: No such file": ["--inputs", "nowhere.st"],
        "expected a bundle of a text model": ["--prompts", __file__],
    }
    for message, arguments in given.items():
        ran = cast(capsys, "tune", bundle, *arguments)
        assert ran.code == 2
        assert message in ran.err
    tuned_path(bundle).mkdir()
    ran = cast(capsys, "tune", bundle)
    assert ran.code == 2
    assert f"{tuned_path(bundle)}: is not writable" in ran.err
    assert not list(bundle.parent.glob(".*"))
