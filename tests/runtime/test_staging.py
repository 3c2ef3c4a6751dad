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
