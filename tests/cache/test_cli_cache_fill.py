"""`enginecast cache fill`: what it says, what it refuses, and that a dry run writes nothing."""

import os
import subprocess
import sys
from pathlib import Path

import bundles
import numpy as np
import pytest
from exports import Ran, cast
from fill_fixtures import (
    COLORS,
    colour_bundle,
    colour_captions,
    entries_of,
    stamps,
    write_captions,
)
from tokenizers import Tokenizer

from enginecast.cache.store.folders import Encodings, open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.records import read_failures, read_truncated

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(colour_bundle(tmp_path_factory.mktemp("bundle") / "colors.bundle"))


@pytest.fixture
def captions(tmp_path: Path) -> Path:
    return write_captions(tmp_path, colour_captions(60))


def fill(capsys: Capture, encoder: str, texts: Path, cache: Path, *options: object) -> Ran:
    return cast(capsys, "cache", "fill", encoder, "--prompts", texts, "-o", cache, *options)


def there(cache: Path, name: str = "text_encoder") -> Encodings:
    return open_store(cache).encodings(name)


def test_it_stores_every_text_once_and_says_how_to_read_them(
    capsys: Capture, bundle: str, captions: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    done = fill(capsys, bundle, captions, cache, "--shard-size", "2kB")
    assert done.code == 0, done.err
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0] == f"{cache}: text_encoder"
    assert lines[1] == "  texts         60; 61 unique with the empty text"
    assert lines[3].startswith("  stored        61, ")
    assert lines[-1] == (
        f"read it: enginecast.cache.open_cache('{cache}', 'text_encoder').by_text(TEXT)"
    )
    where = there(cache)
    assert len(where.shard_paths()) > 3
    before = stamps(where)
    again = fill(capsys, bundle, captions, cache)
    assert again.code == 0
    assert "  already there all of them" in again.out.splitlines()
    assert stamps(where) == before


def test_a_dry_run_writes_nothing_and_knows_the_size(
    capsys: Capture, bundle: str, captions: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "new" / "cache"
    found = fill(capsys, bundle, captions, cache, "--dry-run", "--json").json
    assert not cache.parent.exists()
    assert (found["to_encode"], found["cached_before"], found["shards"]) == (61, 0, 1)
    assert found["seconds"] > 0
    table = fill(capsys, bundle, captions, cache, "--dry-run")
    assert table.out.splitlines()[0] == f"{cache}: text_encoder; nothing was written"
    assert f"{found['bytes']:,} bytes" in table.out
    assert not cache.parent.exists()
    done = fill(capsys, bundle, captions, cache, "--json").json
    assert done["bytes"] == found["bytes"]
    before = tree(cache)
    left = fill(capsys, bundle, captions, cache, "--dry-run", "--json").json
    assert (left["to_encode"], left["bytes"], left["seconds"]) == (0, 0, 0)
    assert tree(cache) == before


def tree(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


def test_longer_texts_are_refused_or_cut_and_listed(
    capsys: Capture, bundle: str, captions: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    options = ("--max-length", 12)
    refused = fill(capsys, bundle, captions, cache, *options)
    assert refused.code == 2
    assert "texts are longer than 12 tokens: " in refused.err
    assert "captions.txt:" in refused.err
    assert not cache.exists()
    found = fill(capsys, bundle, captions, cache, *options, "--too-long", "truncate", "--json").json
    assert found["truncated"] > 3
    listed = read_truncated(there(cache))
    assert len(listed) == found["truncated"]
    assert min(one.tokens for one in listed) > 12
    index = open_index(there(cache))
    assert all(index.find(one.key) is not None for one in listed)


def test_texts_without_finite_outputs_are_reported_and_not_stored(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = bundles.table()
    weights[6] = np.nan
    monkeypatch.setattr(bundles, "table", lambda: weights)
    broken = colour_bundle(tmp_path / "broken.bundle")
    bad = str(Tokenizer.from_file(str(broken / "tokenizer.json")).id_to_token(6))
    one, other = [word for word in COLORS if word != bad][:2]
    good = f"{one} {other}"
    texts = [good, bad, *(f"{f'{other} ' * count}{bad}" for count in range(1, 7))]
    captions, cache = write_captions(tmp_path, texts), tmp_path / "cache"
    done = fill(capsys, str(broken), captions, cache)
    assert done.code == 1
    assert "  not stored    7" in done.out.splitlines()
    assert f"not stored, and listed in {cache / 'text_encoder' / 'failed.jsonl'}:" in done.out
    assert f"  {texts[-1]!r}: hidden: 3 of 24 values are not finite in float32" in done.out
    assert "  and 2 more" in done.out.splitlines()
    found = fill(capsys, str(broken), captions, cache, "--json")
    assert found.code == 1
    assert (found.json["cached_before"], found.json["stored"]) == (2, 0)
    assert sorted(one["text"] for one in found.json["failed"]) == sorted(texts[1:])
    where = there(cache)
    assert {entry.text for entry in entries_of(where)} == {good, ""}
    assert sorted(one.text for one in read_failures(where)) == sorted(texts[1:])


BAD = [
    (("--shard-size", "12"), 2, "--shard-size 12: expected a size such as 256MB"),
    (("--max-disk", "4 zB"), 2, "--max-disk 4 zB: expected a size"),
    (("--max-disk", "1kB"), 3, "of the tokenizer and records\nAbout 0 of the texts would fit."),
    (("--too-long", "skip"), 2, "--too-long skip: expected error or truncate"),
    (("--workers", "2"), 2, "--workers 2: only for --runner ray"),
    (("--for", "fluxx"), 2, "--for fluxx: no such pipeline is known"),
    (("--column", "caption"), 2, "caption"),
    (("--template", "a photo"), 2, "--template"),
    (("--batch-tokens", "0"), 2, "--batch-tokens"),
    (("--dry-rum",), 2, "`enginecast cache fill --help` lists what it takes."),
]


@pytest.mark.parametrize(("options", "code", "message"), BAD, ids=[" ".join(bad[0]) for bad in BAD])
def test_bad_options_are_refused_before_any_work(
    capsys: Capture,
    bundle: str,
    captions: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    done = fill(capsys, bundle, captions, tmp_path / "cache", *options)
    assert done.code == code, done
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "cache").exists()


def test_a_bundle_needs_no_torch(bundle: str, captions: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from enginecast.cli.app import main
try:
    main(["cache", "fill", {bundle!r}, "--prompts", {str(captions)!r}, "-o", "cache", "--quiet"])
except SystemExit as stop:
    assert not stop.code, stop.code
heavy = {{"torch", "transformers", "diffusers", "ray", "pyarrow", "datasets"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(open_index(there(tmp_path / "cache"))) == 61
