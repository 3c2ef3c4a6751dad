"""The commands that look after a cache, as they are typed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cache_entries import byte_of, entries, fill, flip, held, spec_with, texts
from exports import cast
from pyarrow import parquet

from enginecast.cache.store.folders import open_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.records import Failure, record

TEXTS = texts(20)
MADE = entries(TEXTS)
Out = pytest.CaptureFixture[str]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    fill(tmp_path / "cache", MADE[:12], MADE[10:])
    return tmp_path / "cache"


def test_info_says_what_is_there(cache: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    record(open_store(cache).encodings(), [Failure("w1 w1", 3, "not finite", b"k" * 16)])
    outs = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        outs.append(cast(capsys, "cache", "info", cache).out)
    assert outs[0] == outs[1]
    for line in (
        r"text_encoder: T5EncoderModel from tiny-t5",
        r"  computed +fp32, eager",
        r"  texts +20 of 1 to 8 tokens, half of them up to 5",
        r"  disk +.* in 2 shards",
        r"  padding +the encoder gets a padding mask; longest text 8 tokens",
        r"  rows kept +of the tokens",
        r"  output +last_hidden_state: bfloat16, 5 values a token",
        r"  output +pooler_output: float32, 3 values a text",
        r"  failed +1 text: not finite: 1",
        r"  to prune +2 doubles",
    ):
        assert re.search(f"^{line}$", outs[0], re.MULTILINE), line
    (reported,) = cast(capsys, "cache", "info", cache, "--json").json["encoders"]
    assert (reported["texts"], reported["doubles"], reported["failed"]) == (
        20,
        2,
        {"not finite": 1},
    )
    assert reported["tokens"] == {"least": 1, "median": 5.0, "longest": 8}
    assert reported["spec"]["max_length"] == 8


def test_verify_tells_of_damage_by_its_exit_code(cache: Path, capsys: Out) -> None:
    whole = cast(capsys, "cache", "verify", cache)
    assert (whole.code, whole.err) == (0, "")
    assert "every byte is as it was written" in whole.out
    encodings = open_store(cache).encodings()
    path = encodings.shard_paths()[0]
    lost = open_index(encodings).shards[0].text(0)
    flip(path, byte_of(path, "text.pooler_output"))

    damaged = cast(capsys, "cache", "verify", cache)
    assert damaged.code == 1
    assert f"text_encoder/shards/{path.name}: outputs differ from their sum" in damaged.out
    assert f"moved to      text_encoder/quarantine/{path.name}" in damaged.out
    assert f"lost          1 text: {lost!r}" in damaged.out
    assert cast(capsys, "cache", "verify", cache).code == 0

    flip(encodings.tokenizer_file, 1)
    reported = cast(capsys, "cache", "verify", cache, "--json")
    assert (reported.code, reported.json["whole"]) == (1, False)
    assert reported.json["encoders"][0]["damages"][0]["file"] == "text_encoder/tokenizer.json"


def test_prune_joins_and_keeps_what_a_file_says(cache: Path, capsys: Out, tmp_path: Path) -> None:
    encodings = open_store(cache).encodings()
    planned = cast(capsys, "cache", "prune", cache, "--dry-run").out
    assert "nothing was removed (--dry-run)" in planned
    assert len(encodings.shard_paths()) == 2
    done = cast(capsys, "cache", "prune", cache)
    assert done.out == planned.replace("; nothing was removed (--dry-run)", "")
    assert "doubles       2" in done.out
    assert "joined        2 shards replaced by 1" in done.out
    assert held(encodings) == sorted(TEXTS)

    keep = tmp_path / "keep.csv"
    keep.write_text(f"what,n\n{TEXTS[7]},1\n{TEXTS[9]},2\n", encoding="utf-8")
    wrong = cast(capsys, "cache", "prune", cache, "--keep", keep)
    assert wrong.code == 2
    reported = cast(
        capsys, "cache", "prune", cache, "--keep", keep, "--column", "what", "--json"
    ).json
    assert (reported["encoders"][0]["unwanted"], reported["encoders"][0]["kept"]) == (17, 3)
    assert held(encodings) == sorted(["", TEXTS[7], TEXTS[9]])
    alone = cast(capsys, "cache", "prune", cache, "--column", "what")
    assert (alone.code, "only for --keep" in alone.err) == (2, True)


def test_merge_puts_caches_together(cache: Path, capsys: Out, tmp_path: Path) -> None:
    fill(tmp_path / "other", MADE[15:], entries(["w1 w80 w3"]))
    done = cast(capsys, "cache", "merge", cache, tmp_path / "other", "-o", tmp_path / "out")
    assert (done.code, done.err) == (0, "")
    assert "21 texts added, 7 already there or given twice, 21 in all" in done.out
    again = cast(capsys, "cache", "merge", cache, "-o", tmp_path / "out", "--json").json
    assert again["encoders"][0]["added"] == 0
    fill(tmp_path / "third", spec=spec_with(precision="bf16"))
    refused = cast(capsys, "cache", "merge", tmp_path / "third", "-o", tmp_path / "out")
    assert (refused.code, "precision: 'fp32', 'bf16'" in refused.err) == (2, True)


@pytest.mark.parametrize("form", ["parquet", "safetensors", "pt", "npz"])
def test_export_writes_each_format(cache: Path, capsys: Out, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    reported = cast(capsys, "cache", "export", cache, "-o", out, "--format", form, "--json").json
    assert (reported["texts"], reported["format"], reported["name"]) == (20, form, "text_encoder")
    if form == "parquet":
        assert parquet.read_metadata(out).num_rows == 20
    else:
        assert len(list(out.rglob(f"*.{form}"))) == 20
    again = cast(capsys, "cache", "export", cache, "-o", out, "--format", form)
    assert (again.code, "already exists" in again.err) == (2, True)


def test_compare_lists_the_worst_texts(cache: Path, capsys: Out, tmp_path: Path) -> None:
    spec = spec_with(precision="bf16")
    fill(tmp_path / "b", entries(TEXTS, spec, noise=0.01), spec=spec)
    done = cast(capsys, "cache", "compare", cache, tmp_path / "b", "--worst", 3)
    assert (done.code, done.err) == (0, "")
    assert "20 texts compared, joined by token ids; only in A 0, only in B 0" in done.out
    assert "differs       precision: 'fp32', 'bf16'" in done.out
    assert len(re.findall(r"^  error .* at token \d|^  error .*pooler", done.out, re.M)) == 3
    reported = cast(capsys, "cache", "compare", cache, tmp_path / "b", "--json").json
    assert len(reported["worst"]) == 10
    assert 0.99 < reported["outputs"][0]["cosine_least"] < 1


def test_looking_after_a_cache_does_not_import_torch(cache: Path, tmp_path: Path) -> None:
    code = """
import sys
from enginecast.cli.app import main
for line in sys.stdin.read().splitlines():
    try:
        main(["cache", *line.split()])
    except SystemExit as stop:
        assert not stop.code, (line, stop.code)
for name in ("torch", "transformers", "ray", "datasets", "pyarrow"):
    assert name not in sys.modules, name
"""
    fill(tmp_path / "b", MADE)
    commands = (
        f"info {cache}",
        f"verify {cache}",
        f"prune {cache}",
        f"merge {cache} -o {tmp_path / 'm'}",
        f"export {cache} -o {tmp_path / 'e'} --format npz",
        f"compare {cache} {tmp_path / 'b'} --json",
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout[done.stdout.rindex("\n{\n") :])["texts"] == 20
