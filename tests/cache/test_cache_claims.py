"""Claims and leftovers: who is alive keeps what is theirs, who is dead lets go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cache_shards import made

from enginecast.cache.store.claims import FOLDER, claim, sweep
from enginecast.cache.store.folders import STAGING_NAME, Encodings

HOLD = """
import sys
from pathlib import Path
from cache_shards import made
from enginecast.cache.store.claims import claim
from enginecast.cache.store.disk import own_folder
encodings = made(Path(sys.argv[1]))
staging = encodings.folder.parent / ".staging"
with claim(encodings, "one") as ours, own_folder(encodings.staging_folder), own_folder(staging):
    print(ours, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def encodings(tmp_path: Path) -> Encodings:
    return made(tmp_path / "cache")


def hold(encodings: Encodings) -> subprocess.Popen[str]:
    """A process with a claim and with folders of its own."""
    command = [sys.executable, "-c", HOLD, str(encodings.folder.parent)]
    holder = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    return holder


def test_a_chunk_has_one_owner_at_a_time(encodings: Encodings) -> None:
    with claim(encodings, "one") as ours, claim(encodings, "two") as other:
        with claim(encodings, "one") as again:
            assert (ours, other, again) == (True, True, False)
        with claim(encodings, "one") as again:
            assert not again
    with claim(encodings, "one") as after:
        assert after
    assert list((encodings.staging_folder / FOLDER).iterdir()) == []


def test_a_killed_owner_lets_go(encodings: Encodings) -> None:
    holder = hold(encodings)
    with claim(encodings, "one") as ours:
        assert not ours
    assert sweep(encodings) == []
    holder.kill()
    holder.communicate()
    with claim(encodings, "one") as ours:
        assert ours
    gone = sweep(encodings, dry_run=True)
    assert [path.parent.name for path in gone] == [STAGING_NAME, "staging"]
    assert all(path.exists() for path in gone)
    assert sweep(encodings) == gone
    assert not any(path.exists() for path in gone)
    assert sweep(encodings) == []


def test_the_claims_of_the_dead_are_swept(encodings: Encodings) -> None:
    holder = hold(encodings)
    holder.kill()
    holder.communicate()
    assert encodings.staging_folder / FOLDER / "one.lock" in sweep(encodings)
