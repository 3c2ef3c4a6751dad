"""Entries that no encoder made, each as its number says, and a cache to put them in."""

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

from enginecast.cache.store.folders import Encodings, create_store
from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import About, EncoderSpec, Keys, OutputSpec

SPEC = EncoderSpec(
    model={"weights": "a"},
    precision="fp32",
    tokenizer="ab",
    max_length=8,
    padding_id=0,
    mask=True,
    rows="real",
    outputs=(
        OutputSpec(name="last_hidden_state", per="token", width=5, dtype="bfloat16"),
        OutputSpec(name="pooler_output", per="text", width=3, dtype="float32"),
    ),
)
WIDE = SPEC.__replace__(outputs=(SPEC.outputs[0].__replace__(width=8192), SPEC.outputs[1]))
ABOUT = About(encoder="T5EncoderModel", source="tiny")
NAME = "text_encoder"


def entry(number: int, spec: EncoderSpec = SPEC) -> Entry:
    """The entry of a number: the same in every process, and no two alike."""
    random = np.random.default_rng(number)
    ids = random.integers(1, 90, number % 7).astype(np.int32)
    ids = np.append(ids, np.int32(100 + number))
    values = random.normal(size=64)
    outputs = {
        "last_hidden_state": np.resize(values, (len(ids), spec.outputs[0].width)),
        "pooler_output": values[:3],
    }
    stored = {
        one.name: outputs[one.name].astype(
            ml_dtypes.bfloat16 if one.dtype == "bfloat16" else one.dtype
        )
        for one in spec.outputs
    }
    return Entry(Keys(spec).of_tokens(ids), f"text {number} é", ids, stored)


def entries(numbers: Iterable[int], spec: EncoderSpec = SPEC) -> list[Entry]:
    return [entry(number, spec) for number in numbers]


def keyed(keys: Sequence[bytes]) -> list[Entry]:
    """Entries with keys that no ids have."""
    return [
        Entry(key, one.text, one.ids, one.outputs)
        for key, one in zip(keys, entries(range(len(keys))), strict=True)
    ]


def made(root: Path, spec: EncoderSpec = SPEC) -> Encodings:
    """The entries of `spec` in a cache, which is made where there is none."""
    return create_store(root).add(NAME, spec, ABOUT, b"{}")


def flip(path: Path, bit: int) -> None:
    """Flip a bit in place: file systems flush whole files that are written anew."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@contextmanager
def open_folder() -> Iterator[Path]:
    """A new folder that other users may look into, unlike those of pytest."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody may write there, root neither."""
    places = [folder, *folder.rglob("*")]
    modes = [place.stat().st_mode for place in places]
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for place, mode in zip(places, modes, strict=True):
            place.chmod(mode)
