"""Publishing: a whole bundle or none, whatever goes wrong on the way."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Literal, NoReturn

import bundles
import pytest
from msgspec.structs import replace

from enginecast.errors import BundleError, MissingError
from enginecast.runtime.bundle import staging as staging_module
from enginecast.runtime.bundle.manifest import Downgrade
from enginecast.runtime.bundle.reader import digest, open_bundle
from enginecast.runtime.bundle.staging import stage, write_file

REPORTS = ("report.html", "report.json", "build.log")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def publish_log(target: Path, text: str, *, overwrite: bool = False) -> None:
    """Publish a bundle of one file that says who wrote it."""
    with stage(target, overwrite=overwrite) as staging:
        (staging.folder / "build.log").write_text(text)
        staging.publish(bundles.manifest(engines=()))


def test_publish_lists_every_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    root = bundles.make_bundle(tmp_path / "out")
    assert names(tmp_path) == ["out"]
    records = {file.name: file for file in open_bundle(root).manifest.files}
    assert sorted([*records, "manifest.json"]) == names(root)
    weights = root / "weights.safetensors"
    assert records["weights.safetensors"].size == weights.stat().st_size
    assert records["weights.safetensors"].sha256 == digest(weights)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), stage(tmp_path / "out") as staging:  # noqa: PT012 - the block fails at its end
        bundles.write_engine(staging.folder)
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("kind", ["folder", "link", "hidden"])
def test_what_a_bundle_cannot_hold_is_not_published(tmp_path: Path, kind: str) -> None:
    def attempt() -> None:
        with stage(tmp_path / "out") as staging:
            if kind == "folder":
                (staging.folder / "sub").mkdir()
            elif kind == "link":
                (staging.folder / "link").symlink_to("/etc/hostname")
            else:
                (staging.folder / ".hidden").touch()
            staging.publish(bundles.manifest(engines=()))

    with pytest.raises(BundleError, match="plain files"):
        attempt()
    assert names(tmp_path) == []


def test_existing_bundle_is_refused_before_any_work(tmp_path: Path) -> None:
    publish_log(tmp_path / "out", "old")
    with (
        pytest.raises(BundleError, match="a bundle already exists") as caught,
        stage(tmp_path / "out"),
    ):
        pytest.fail("the work began")
    assert "--overwrite" in caught.value.hint
    assert (tmp_path / "out" / "build.log").read_text() == "old"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["folder", "empty", "file", "link"])
def test_what_is_not_a_bundle_is_never_replaced(tmp_path: Path, kind: str, overwrite: bool) -> None:
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "link":
        (tmp_path / "real").write_text("mine")
        target.symlink_to("real")
    else:
        target.mkdir()
        if kind == "folder":
            (target / "mine.txt").write_text("mine")
    before = names(tmp_path)
    with (
        pytest.raises(BundleError, match="is not a bundle"),
        stage(target, overwrite=overwrite),
    ):
        pytest.fail("the work began")
    assert names(tmp_path) == before


@pytest.mark.parametrize("failing", ["_flush_file", "flush_folder", "encode"])
def test_a_failing_overwrite_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    publish_log(tmp_path / "out", "old")
    monkeypatch.setattr(staging_module, failing, fail)
    with pytest.raises(MissingError, match="No space left on device"):
        publish_log(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (open_bundle(tmp_path / "out").root / "build.log").read_text() == "old"


def test_overwriting_leaves_no_moment_without_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a rename nor a removal of what has the final name: the two are exchanged."""
    publish_log(tmp_path / "out", "old")

    def never(self: Path, target: Path) -> Path:
        raise AssertionError(f"{self} was renamed to {target}")

    monkeypatch.setattr(Path, "rename", never)
    publish_log(tmp_path / "out", "new", overwrite=True)
    assert names(tmp_path) == ["out"]
    assert (open_bundle(tmp_path / "out").root / "build.log").read_text() == "new"


def test_a_bundle_that_a_kill_left_aside_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_log(tmp_path / "out", "old")
    (tmp_path / ".out.old-mine").mkdir()  # of somebody else
    (tmp_path / "out").rename(tmp_path / f".out.old-{'0' * 32}")
    monkeypatch.setattr(staging_module, "ABANDONED_SECONDS", -1)
    with pytest.raises(BundleError, match="a bundle already exists"):
        publish_log(tmp_path / "out", "new")
    assert names(tmp_path) == [".out.old-mine", "out"]
    assert (open_bundle(tmp_path / "out").root / "build.log").read_text() == "old"


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_rename_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    """Where the system cannot exchange two names."""
    monkeypatch.setattr(staging_module, "_exchange", lambda one, other: False)
    publish_log(tmp_path / "out", "old")
    rename, calls = Path.rename, []

    def fail_once(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == failing:
            raise error
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_once)
    with pytest.raises((BundleError, KeyboardInterrupt)):
        publish_log(tmp_path / "out", "new", overwrite=True)
    assert len(calls) >= failing
    assert names(tmp_path) == ["out"]
    assert (open_bundle(tmp_path / "out").root / "build.log").read_text() == "old"


def test_an_unconfirmed_publish_says_that_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = staging_module.flush_folder

    def fail_for_the_parent(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(5, "Input/output error")
        flush(folder)

    monkeypatch.setattr(staging_module, "flush_folder", fail_for_the_parent)
    with pytest.raises(BundleError, match="is published, but the disk did not confirm"):
        publish_log(tmp_path / "out", "new")
    open_bundle(tmp_path / "out")


def test_racing_publishers_have_one_winner(tmp_path: Path) -> None:
    for turn in range(5):
        target, barrier = tmp_path / f"out{turn}", Barrier(4)

        def publish(writer: int, target: Path = target, barrier: Barrier = barrier) -> bool:
            try:
                with stage(target) as staging:
                    (staging.folder / f"writer{writer}").touch()
                    barrier.wait()
                    staging.publish(bundles.manifest(engines=()))
            except BundleError:
                return False
            return True

        with ThreadPoolExecutor(4) as pool:
            won = list(pool.map(publish, range(4)))
        assert won.count(True) == 1
        assert names(target) == ["manifest.json", f"writer{won.index(True)}"]
    assert len(names(tmp_path)) == 5


def test_what_a_killed_process_left_is_swept_by_the_next(tmp_path: Path) -> None:
    orphan, fresh, foreign = (
        tmp_path / name for name in (".out.tmp-1", ".out.tmp-2", ".other.tmp-1")
    )
    for folder in (orphan, fresh, foreign):
        folder.mkdir()
    for folder in (orphan, foreign):
        os.utime(folder, (0, 0))
    with stage(tmp_path / "out") as living:
        os.utime(living.folder, (0, 0))
        with stage(tmp_path / "out"):
            assert living.folder.is_dir()
    assert names(tmp_path) == [".other.tmp-1", ".out.tmp-2"]


def test_reject_keeps_the_reports_alone(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with stage(tmp_path / "out") as staging:
            bundles.write_engine(staging.folder)
            (staging.folder / "report.html").write_text(text)
            (staging.folder / "build.log").write_text(text)
            rejected = staging.reject(REPORTS)
    assert rejected == tmp_path / "out.rejected"
    assert names(tmp_path) == ["out.rejected"]
    assert names(rejected) == ["build.log", "report.html"]
    assert (rejected / "build.log").read_text() == "second"


def test_a_withheld_bundle_is_whole_and_is_replaced_like_reports(tmp_path: Path) -> None:
    def withheld(text: str, consent: Literal["given", "missing"]) -> Path:
        lacking = Downgrade(kind="engine", text=text, consent=consent)
        with stage(tmp_path / "out") as staging:
            bundles.write_engine(staging.folder)
            manifest = replace(bundles.manifest(), downgrades=(lacking,))
            return staging.withhold(manifest, REPORTS)

    rejected = withheld("first", "missing")
    assert withheld("second", "missing") == rejected == tmp_path / "out.rejected"
    assert open_bundle(rejected).manifest.downgrades[0].text == "second"
    withheld("accepted", "given")  # such as one that a user has moved there
    with pytest.raises(BundleError, match="expected the reports of an earlier rejection"):
        withheld("third", "missing")
    assert open_bundle(rejected).manifest.downgrades[0].text == "accepted"


def test_write_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.bin"
    write_file(path, b"old")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644

    def fail(_: int) -> NoReturn:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(MissingError, match=r"out\.bin: No space left on device"):
        write_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["out.bin"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_of_racing_replacements_the_last_stays_and_none_is_refused(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(staging_module, "_exchange", lambda one, other: False)
    for turn in range(8):
        target, barrier = tmp_path / f"out{turn}", Barrier(4)
        publish_log(target, "old")

        def publish(writer: int, target: Path = target, barrier: Barrier = barrier) -> None:
            with stage(target, overwrite=True) as staging:
                (staging.folder / "build.log").write_text(f"writer {writer}")
                barrier.wait()
                staging.publish(bundles.manifest(engines=()))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(publish, range(4)))
        open_bundle(target)
        assert (target / "build.log").read_text().startswith("writer")
    assert names(tmp_path) == [f"out{turn}" for turn in range(8)]
