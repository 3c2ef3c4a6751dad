"""An engine does no work on padding, and gives for valid tokens what it gives with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from exports import Exports, cast
from numpy.typing import NDArray

from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import (
    Input,
    Manifest,
    Model,
    Output,
    Padding,
)
from enginecast.runtime.bundle.tensor_files import read_tensors, write_tensors
from enginecast.runtime.load import load
from enginecast.runtime.trimming import Trimming

PADDING = Padding(mask="mask", side="any", outputs=("hidden", "total"))
MANIFEST = Manifest(
    enginecast="0",
    model=Model(name="m", fingerprint={}),
    inputs=(
        Input(name="ids", kind="token_ids", dtype="int64", shape=("b", "t")),
        Input(name="mask", kind="attention_mask", dtype="int64", shape=("b", "t")),
        Input(name="image", kind="tensor", dtype="float32", shape=("b", 2)),
    ),
    symbols={"b": (1, 64), "t": (1, 1024)},
    outputs=(
        Output(name="hidden", dtype="float32", shape=("b", "t", 2)),
        Output(name="total", dtype="float32", shape=("b", 1)),
    ),
    pipeline="",
    precision="fp32",
    engines=(),
)
Feeds = Mapping[str, Any]


class Fake:
    """Rows alone, and their sum under the mask; remembers the sizes of its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def __call__(self, feeds: Feeds) -> dict[str, NDArray[np.float32]]:
        ids, mask, image = feeds["ids"], feeds["mask"], feeds["image"]
        assert all(array.flags.c_contiguous for array in feeds.values())
        self.calls.append(ids.shape)
        hidden = (ids[..., None] + image[:, None, :]).astype(np.float32)
        return {"hidden": hidden, "total": (ids * mask).sum(1, keepdims=True).astype(np.float32)}


def ragged(lengths: list[int], width: int, left: bool = False) -> dict[str, Any]:
    random = np.random.default_rng(0)
    mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
    mask = mask[:, ::-1].copy() if left else mask
    ids = random.integers(1, 99, mask.shape)
    return {"ids": ids, "mask": mask, "image": random.random((len(lengths), 2), np.float32)}


def trimming(call: float = 4.0, **changes: Any) -> Trimming:
    padding = msgspec.structs.replace(PADDING, side=changes.pop("side", "any"))
    group = changes.pop("group_tokens", 0)
    found = Trimming(
        msgspec.structs.replace(MANIFEST, **changes), padding, on_gpu=False, group_tokens=group
    )
    found._call = call
    return found


def check(found: Trimming, feeds: dict[str, Any]) -> list[tuple[int, ...]]:
    """Run, compare with all of it computed, and return the sizes of the calls."""
    expected, fake = Fake()(feeds), Fake()
    expected["hidden"][feeds["mask"] == 0] = 0
    got = found.run(fake, feeds)
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array)
        assert got[name].dtype == array.dtype
    return fake.calls


def test_many_rows_run_in_groups() -> None:
    found = trimming(group_tokens=64)
    assert check(found, ragged([16] * 9, 16)) == [(5, 16), (4, 16)]
    assert check(found, ragged([16] * 5, 16)) == [(5, 16)]
    assert check(found, ragged([200, 200], 200)) == [(1, 200), (1, 200)]
    assert check(found, ragged([3] * 64 + [200], 512)) == [(22, 3), (21, 3), (21, 3), (1, 200)]
    together = trimming(group_tokens=64, symbols={"b": (2, 64), "t": (1, 1024)})
    assert check(together, ragged([16] * 9, 16)) == [(9, 16)]


@pytest.fixture
def bert(exports: Exports) -> Path:
    return exports("bert").folder


def text(folder: Path, lengths: list[int], width: int) -> dict[str, Any]:
    with load(folder) as engine:
        mask = (np.arange(width) < np.array(lengths)[:, None]).astype(np.int64)
        ids = np.random.default_rng(0).integers(3, 40, mask.shape)
        kinds = {"token_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
        return {spec.name: kinds[spec.kind] for spec in engine.inputs}


def test_an_engine_gives_zeros_for_padding(bert: Path) -> None:
    feeds = text(bert, [4, 9, 1], 30)
    valid = feeds["attention_mask"] != 0
    with load(bert, pad_rows="zero") as engine:
        assert engine.manifest.padding is not None
        assert engine.manifest.padding.side == "right"
        cut, exact = engine.run(feeds), engine.run(feeds, pad_rows="exact")
    hidden, wanted = cut["last_hidden_state"], exact["last_hidden_state"]
    np.testing.assert_allclose(hidden[valid], wanted[valid], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cut["pooler_output"], exact["pooler_output"], rtol=1e-4, atol=1e-5)
    assert not hidden[~valid].any()
    assert wanted[~valid].any()
    with load(bert, pad_rows="zero") as engine:
        with pytest.raises(UsageError, match="expected no as_dlpack"):
            engine.run(feeds, as_dlpack=True, pad_rows="zero")
        with pytest.raises(UsageError, match="expected exact or zero, got 'none'"):
            engine.run(feeds, pad_rows="none")  # type: ignore[arg-type]
    with load(bert) as engine:
        assert engine.run(feeds)["last_hidden_state"][~valid].any()
        assert not engine.run(feeds, pad_rows="zero")["last_hidden_state"][~valid].any()


def test_zeros_are_refused_where_padding_shows(exports: Exports) -> None:
    folder = exports("words-clip").folder
    feeds = text(folder, [4, 6], 8)
    with load(folder) as engine:
        with pytest.raises(UsageError, match="'pooler_output': argmax takes padding along"):
            engine.run(feeds, pad_rows="zero")
        wanted = ["last_hidden_state"]
        assert engine.run(feeds)["last_hidden_state"][0, 7].any()
        hidden = engine.run(feeds, outputs=wanted, pad_rows="zero")["last_hidden_state"]
        assert not hidden[0, 4:].any()


def test_the_command_line(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    feeds = text(bert, [4, 9], 30)
    write_tensors(tmp_path / "in.safetensors", feeds)
    ends = {}
    for rows in ("exact", "zero"):
        out = tmp_path / f"{rows}.safetensors"
        inputs = ("--inputs", tmp_path / "in.safetensors")
        ran = cast(capsys, "run", bert, *inputs, "-o", out, "--pad-rows", rows, "--json")
        assert ran.code == 0
        ends[rows] = read_tensors(out)["last_hidden_state"][0, 29]
    assert ends["exact"].any()
    assert not ends["zero"].any()
    wrong = cast(capsys, "run", bert, *inputs, "-o", out, "--pad-rows", "none")
    assert wrong.code == 2
    assert "--pad-rows: expected exact or zero, got 'none'" in wrong.err
    shown = cast(capsys, "inspect", bert).out
    assert "is left out at the end of a row: last_hidden_state" in " ".join(shown.split())
