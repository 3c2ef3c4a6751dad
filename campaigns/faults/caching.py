"""Caches on disks that behave badly: network disks, full disks, and several processes at once."""

import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cache_shards import NAME, SPEC, WIDE, entries, made
from cache_writer import CHUNK

from enginecast.cache.encoders.tokenizing import digest_of
from enginecast.cache.store.claims import sweep
from enginecast.cache.store.folders import open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.upkeep.census import census_of
from enginecast.cache.upkeep.checking import check_store
from enginecast.cache.upkeep.exporting import export
from enginecast.cache.upkeep.merging import merge
from enginecast.cache.upkeep.pruning import prune_store
from enginecast.errors import CacheError, EnginecastError, MissingError
from faults.cache_kills import require_right, start
from faults.campaign import Campaign, Sizes, Tally, environment, lacks_own_disks
from faults.network_disk import Fault, NetworkDisk, faults_of

SEED = 47
CHUNKS = 5
WRITERS = 2
OWN = SPEC.__replace__(tokenizer=digest_of(b"{}"))
"""Of the tokenizer that `made` writes."""


def _write(root: Path) -> None:
    encodings = made(root, OWN)
    for number in range(CHUNKS):
        encodings.commit(entries(range(number * CHUNK, (number + 1) * CHUNK), OWN))


def _read(root: Path) -> None:
    index = open_index(open_store(root).encodings(NAME)).require_whole()
    require_right(index, CHUNKS * CHUNK, OWN)


def _prune(root: Path) -> None:
    prune_store(open_store(root), shard_bytes=10**6)


def _check(root: Path) -> None:
    (checked,) = check_store(open_store(root))
    if checked.damages:
        raise CacheError(f"{root}: {checked.damages}")


def _merge(root: Path) -> None:
    merge([root], root.with_name("merged"))
    merged = open_index(open_store(root.with_name("merged")).encodings(NAME)).require_whole()
    if require_right(merged, CHUNKS * CHUNK, OWN) != CHUNKS * CHUNK:
        raise AssertionError("entries were not merged")


def _export(root: Path) -> None:
    output = root.with_name("exported")
    shutil.rmtree(output, ignore_errors=True)
    export(open_store(root).encodings(NAME), output, "safetensors")


def _count(root: Path) -> None:
    found = census_of(open_store(root))
    assert len(found) == 1
    census = found[0]
    if not census.damaged:
        assert census.texts == CHUNKS * CHUNK


WORK: dict[str, Callable[[Path], None]] = {
    "write": _write,
    "read": _read,
    "prune": _prune,
    "verify": _check,
    "merge": _merge,
    "export": _export,
    "info": _count,
}


def _harm(work: str, root: Path, reported: set[str]) -> str:
    """What is wrong once the disk behaves again; the work is done again."""
    try:
        if work != "read":
            WORK[work](root)
        encodings = open_store(root).encodings(NAME)
        index = open_index(encodings)
        there = require_right(index, CHUNKS * CHUNK, OWN)
    except (AssertionError, EnginecastError) as error:
        return f"afterwards: {error}"
    if there != CHUNKS * CHUNK:
        return f"{there} of {CHUNKS * CHUNK} entries are left"
    missing = reported - {path.name for path in encodings.shard_paths()}
    if work == "write" and missing:
        return f"shards that were reported are gone: {sorted(missing)}"
    sweep(encodings)
    left = {path.name for path in encodings.staging_folder.glob("*")} - {"claims"}
    return f"sweeping left {sorted(left)}" if left else ""


def network_disks(count: int, folder: Path) -> Tally:
    """Let one call of a cache's work go wrong as on a network disk."""
    tally, whole = Tally(), folder / "whole"
    _write(whole)
    wanted = {path.name for path in open_store(whole).encodings(NAME).shard_paths()}
    cases: list[tuple[str, Fault]] = []
    for work, run in WORK.items():
        with _prepared(work, whole, folder) as root:
            disk = NetworkDisk(root.parent)
            with disk.mounted():
                run(root)
            cases += [(work, fault) for fault in faults_of(disk.calls)]
    random.Random(SEED).shuffle(cases)
    for number in range(count):
        work, fault = cases[number % len(cases)]
        with _prepared(work, whole, folder) as root:
            disk = NetworkDisk(root.parent, fault)
            what, said = f"{work}, {fault}", ""
            try:
                with disk.mounted():
                    WORK[work](root)
            except EnginecastError as error:
                said = error.message
            except Exception as error:  # not ours: harm, which the campaign counts
                if not (isinstance(error, AssertionError) and fault.how == "hides"):
                    tally.defect(f"{what}: {type(error).__name__}: {error}")
                    continue
            if said and str(root.parent) not in said:
                tally.defect(f"{what}: the error names no file: {said}")
            elif wrong := _harm(work, root, set() if said else wanted):
                tally.defect(f"{what}: {wrong} (it said: {said or 'nothing'})")
            else:
                tally.add("refused by name" if said else "done, and right", fired=disk.fired)
    return tally


@contextmanager
def _prepared(work: str, whole: Path, folder: Path) -> Iterator[Path]:
    """A cache to work on, in a folder of its own."""
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        root = Path(place, "cache")
        if work != "write":
            shutil.copytree(whole, root)
        yield root


PRUNER = """
import sys
from pathlib import Path
from enginecast.cache.store.folders import open_store
from enginecast.cache.upkeep.pruning import prune_store
done = 0
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    prune_store(open_store(sys.argv[1]), shard_bytes=100_000)
    done += 1
print(done)
"""


def fills_and_prunes(count: int, folder: Path) -> Tally:
    """Let two fills write the same entries, and a third process prune, all at once."""
    tally = Tally()
    for number in range(count):
        root, stop = folder / f"cache-{number}", folder / f"stop-{number}"
        made(root, WIDE)
        pruner = subprocess.Popen(
            [sys.executable, "-c", PRUNER, str(root), str(stop)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert pruner.stdout is not None
        assert pruner.stdout.readline() == "ready\n"
        writers = [start(root, CHUNK * 10) for _ in range(WRITERS)]
        for writer in writers:
            writer.communicate()
        stop.touch()
        out, err = pruner.communicate()
        codes = [pruner.returncode, *(writer.returncode for writer in writers)]
        what = f"race {number}"
        try:
            index = open_index(open_store(root).encodings(NAME))
            there = require_right(index, CHUNK * CHUNK * 10, WIDE, doubles=True)
        except (AssertionError, EnginecastError) as error:
            tally.defect(f"{what}: {error}")
            continue
        if any(codes):
            tally.defect(f"{what}: exit codes {codes}: {err[-500:]}")
        elif there != CHUNK * CHUNK * 10:
            tally.defect(f"{what}: {there} entries of {CHUNK * CHUNK * 10}")
        else:
            tally.add("all entries there, once", fired=int(out) > 1)
        shutil.rmtree(root)
    return tally


def fill_disk(place: Path, pages: int) -> dict[str, object]:
    """Commit to a disk of so many pages until it is full, then make room, and go on."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={pages * 4096}", "none", str(place)]
    subprocess.run(mount, check=True)
    try:
        root, done, error = place / "cache", 0, ""
        try:
            encodings = made(root, WIDE)
            for number in range(CHUNKS):
                encodings.commit(entries(range(number * CHUNK, (number + 1) * CHUNK), WIDE))
                done += 1
        except MissingError as full:
            error = full.message
        there = -1
        if done:
            index = open_index(open_store(root).encodings(NAME))
            there = require_right(index, CHUNKS * CHUNK, WIDE)
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)
        encodings = made(root, WIDE)
        for number in range(done, CHUNKS):
            encodings.commit(entries(range(number * CHUNK, (number + 1) * CHUNK), WIDE))
        sweep(encodings)
        left = {path.name for path in encodings.staging_folder.glob("*")} - {"claims"}
        whole = require_right(open_index(encodings), CHUNKS * CHUNK, WIDE)
        return {"done": done, "error": error, "there": there, "whole": whole, "left": sorted(left)}
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


FILLER = """
import json, sys
from pathlib import Path
from faults.caching import fill_disk
for line in sys.stdin:
    place, pages = json.loads(line)
    print(json.dumps(fill_disk(Path(place), pages)), flush=True)
"""


def full_disks(count: int, folder: Path) -> Tally:
    """Write a cache to disks of growing sizes."""
    tally, place = Tally(), folder / "disk"
    place.mkdir()
    needed = (
        sum(path.stat().st_size for path in _whole(folder).rglob("*") if path.is_file()) // 4096
    )
    sizes = [4 + number * (needed + 40) // max(count - 1, 1) for number in range(count)]
    asked = "".join(json.dumps([str(place), pages]) + "\n" for pages in sizes)
    done = subprocess.run(
        ["unshare", "-rm", sys.executable, "-W", "ignore", "-c", FILLER],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for pages, one in zip(sizes, found, strict=False):
        right = one["whole"] == CHUNKS * CHUNK and not one["left"]
        kept = one["there"] in (-1, one["done"] * CHUNK)
        named = str(place) in one["error"] or one["done"] == CHUNKS
        if right and kept and named:
            fits = one["done"] == CHUNKS
            what = "the cache fit" if fits else "refused, what was committed was kept"
            tally.add(what, fired=not fits)
        else:
            tally.defect(f"{pages} pages: {one}")
    if done.returncode:
        tally.defect(f"{sizes[len(found)]} pages: {done.stderr[-600:]}")
    return tally


def _whole(folder: Path) -> Path:
    encodings = made(folder / "measured", WIDE)
    for number in range(CHUNKS):
        encodings.commit(entries(range(number * CHUNK, (number + 1) * CHUNK), WIDE))
    return folder / "measured"


CAMPAIGNS = (
    Campaign(
        "caches on network disks",
        "Whatever call of a cache's work fails, or lies, as on network disks, no entry is lost or"
        " wrong, and the next run does the work.",
        Sizes(quick=60, full=1000),
        network_disks,
        fires=0.95,
    ),
    Campaign(
        "caches on full disks",
        "A cache whose disk fills up at any point keeps what was committed, says so in one error,"
        " and goes on when there is room.",
        Sizes(quick=5, full=65),
        full_disks,
        fires=0.6,
        lacks=lacks_own_disks,
    ),
    Campaign(
        "fills and prunes at once",
        "Two fills and a prune at once lose no entry and damage none.",
        Sizes(quick=1, full=50),
        fills_and_prunes,
        fires=0.9,
    ),
)
