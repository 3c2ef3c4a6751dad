"""Publishing: a whole bundle or none, whatever goes wrong on the way."""

import os
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, Literal, NoReturn

import bundles
import pytest
from exports import cast
from faults.campaign import environment, lacks_own_disks
from msgspec.structs import replace

from enginecast.errors import BundleError, MissingError
from enginecast.runtime.bundle import staging as staging_module
from enginecast.runtime.bundle.manifest import Downgrade
from enginecast.runtime.bundle.reader import digest, open_bundle
from enginecast.runtime.bundle.staging import require_space, stage, write_file

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


def test_published_files_are_readable_by_all(tmp_path: Path) -> None:
    with stage(tmp_path / "out") as staging:
        private = staging.folder / "build.log"
        private.touch(mode=0o600)
        staging.publish(bundles.manifest(engines=()))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o644}


def test_parent_folders_are_made(tmp_path: Path) -> None:
    assert bundles.make_bundle(tmp_path / "a" / "b").is_dir()


def test_same_content_publishes_the_same_bytes(tmp_path: Path) -> None:
    roots = [bundles.make_bundle(tmp_path / name) for name in ("one", "two")]
    for name in ("manifest.json", "engine.onnx", "weights.safetensors"):
        assert (roots[0] / name).read_bytes() == (roots[1] / name).read_bytes()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), stage(tmp_path / "out") as staging:  # noqa: PT012 - the block fails at its end
        bundles.write_engine(staging.folder)
        raise error
    assert names(tmp_path) == []


def test_leaving_without_publishing_leaves_nothing(tmp_path: Path) -> None:
    with stage(tmp_path / "out") as staging:
        bundles.write_engine(staging.folder)
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


def test_overwrite_swaps_only_when_publishing(tmp_path: Path) -> None:
    target = tmp_path / "out"
    publish_log(target, "old")
    with stage(target, overwrite=True) as staging:
        (staging.folder / "build.log").write_text("new")
        assert (target / "build.log").read_text() == "old"
        staging.publish(bundles.manifest(engines=()))
        assert (target / "build.log").read_text() == "new"
    assert names(tmp_path) == ["out"]
    open_bundle(target)


def test_overwrite_looks_again_before_it_swaps(tmp_path: Path) -> None:
    target = tmp_path / "out"

    def attempt() -> None:
        with stage(target, overwrite=True) as staging:
            target.mkdir()
            (target / "mine.txt").write_text("mine")
            staging.publish(bundles.manifest(engines=()))

    with pytest.raises(BundleError, match="is not a bundle"):
        attempt()
    assert names(tmp_path) == ["out"]
    assert names(target) == ["mine.txt"]


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


def test_a_linked_target_stays_a_link(tmp_path: Path) -> None:
    publish_log(tmp_path / "real", "old")
    (tmp_path / "out").symlink_to("real")
    publish_log(tmp_path / "out", "new", overwrite=True)
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "real" / "build.log").read_text() == "new"


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


def test_reject_replaces_nothing_but_reports(tmp_path: Path) -> None:
    (tmp_path / "out.rejected").mkdir()
    (tmp_path / "out.rejected" / "thesis.tex").touch()
    with (
        pytest.raises(BundleError, match=r"holds thesis\.tex"),
        stage(tmp_path / "out") as staging,
    ):
        staging.reject(REPORTS)
    assert names(tmp_path) == ["out.rejected"]
    assert names(tmp_path / "out.rejected") == ["thesis.tex"]


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


def test_require_space_gives_the_figures(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "yet", 1)
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(MissingError, match=r"expected .* MB free .*, got .* MB"):
        require_space(tmp_path, free * 2)


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


def test_what_another_puts_aside_is_not_replaced_by_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle was published, and another process puts it aside for its own: 8 of 480 races."""
    monkeypatch.setattr(staging_module, "_exchange", lambda one, other: False)
    target, rename = tmp_path / "out", Path.rename

    def overtaken(path: Path, to: Path) -> Path:
        made = rename(path, to)
        return made if to != target else rename(target, tmp_path / "elsewhere")

    publish_log(target, "old")
    monkeypatch.setattr(Path, "rename", overtaken)
    publish_log(target, "new", overwrite=True)
    assert names(tmp_path) == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "build.log").read_text() == "new"


def test_a_folder_that_is_replaced_while_it_is_looked_at_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, stat_of = tmp_path / "out", os.stat
    turns: list[Any] = []

    def late(path: Any, **options: Any) -> os.stat_result:
        if "dir_fd" in options and not turns:
            turns.append(path)  # another process moved it away, and deleted it
            shutil.rmtree(target)
            publish_log(target, "other")
        return stat_of(path, **options)

    publish_log(target, "old")
    monkeypatch.setattr(os, "stat", late)
    with pytest.raises(BundleError, match="a bundle already exists"):
        publish_log(target, "new")
    assert turns


def test_a_loser_between_the_look_and_the_rename_is_told_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    required, target = staging_module.require_free, tmp_path / "out"
    looks = []

    def late(path: Path, **options: Any) -> None:
        required(path, **options)
        looks.append(path)
        if len(looks) == 2:  # when the bundle begins and when it is published
            with monkeypatch.context() as patched:
                patched.setattr(staging_module, "require_free", required)
                publish_log(target, "other")

    monkeypatch.setattr(staging_module, "require_free", late)
    with pytest.raises(BundleError, match="a bundle already exists"):
        publish_log(target, "new")
    assert (target / "build.log").read_text() == "other"


def test_of_several_bundles_that_were_put_aside_the_newest_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "ABANDONED_SECONDS", -1)
    for number in range(4):  # any order of the names is likely to be wrong once
        asides = [tmp_path / f".out.old-{(number * 7 + one * 5) % 16:032x}" for one in range(3)]
        for one, aside in enumerate(asides):
            publish_log(tmp_path / "made", str(one))
            (tmp_path / "made").rename(aside)
            time.sleep(0.02)
        with stage(tmp_path / "out", overwrite=True):
            assert (tmp_path / "out" / "build.log").read_text() == "2"
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)


@pytest.mark.parametrize("path", ["loop", "loop/out", "\0out", "x" * 300, "x" * 240])
def test_paths_that_no_folder_can_have(path: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(BundleError), stage(f"{tmp_path}/{path}"):
        pass
    with pytest.raises(BundleError):
        open_bundle(f"{tmp_path}/{path}")


LAYERED = """
import subprocess, sys
from pathlib import Path
from enginecast.errors import BundleError
from enginecast.runtime.bundle.staging import stage
import bundles
folder = Path(sys.argv[1])
upper = folder / "upper"
subprocess.run(["mount", "-t", "tmpfs", "none", upper], check=True)
for name in ("files", "work"):
    (upper / name).mkdir()
layers = f"lowerdir={folder}/lower,upperdir={upper}/files,workdir={upper}/work"
subprocess.run(["mount", "-t", "overlay", "none", "-o", layers, folder / "merged"], check=True)
try:
    bundles.make_bundle(folder / "merged" / "out", overwrite=True)
except BundleError as error:
    print(error)
print(sorted(path.name for path in (folder / "merged").iterdir()))
"""


@pytest.mark.skipif(bool(lacks_own_disks()), reason="no process can have disks of its own here")
def test_a_bundle_of_a_lower_layer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for name in ("lower", "upper", "merged"):
        (tmp_path / name).mkdir()
    bundles.make_bundle(tmp_path / "lower" / "out")
    command = ["unshare", "-rm", sys.executable, "-c", LAYERED, str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, check=False, timeout=60
    )
    if "unknown filesystem type" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("no overlays here")
    assert "delete it first, or write to a volume" in done.stdout, done.stderr
    assert done.stdout.endswith("['out']\n")


def test_nothing_is_staged_inside_a_bundle(tmp_path: Path) -> None:
    """It would be a file that the manifest does not list: the bundle could not be loaded again."""
    made = bundles.make_bundle(tmp_path / "one.bundle")
    before = sorted(made.rglob("*"))
    (tmp_path / "link").symlink_to(made)
    for target in (made / "sub", made / "a" / "b", tmp_path / "link" / "sub"):
        sealed = pytest.raises(BundleError, match="is a bundle, whose files are sealed")
        with sealed, stage(target):
            pass
    assert sorted(made.rglob("*")) == before
    (tmp_path / "manifest.json").write_text('{"name": "a web page"}')
    with stage(tmp_path / "two.bundle"):
        pass


def test_no_command_writes_a_file_into_a_bundle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = bundles.make_bundle(tmp_path / "one.bundle")
    link = tmp_path / "page.html"
    link.symlink_to(made / "page.html")
    for output in (link, made / "x.html"):
        done = cast(capsys, "report", made, "-o", output)
        assert (done.code, output.exists()) == (2, False)
        assert "is a bundle, whose files are sealed" in done.err
