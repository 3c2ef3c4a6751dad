"""Text encoders that start at once, in numpy and as a bundle, and texts for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bundles
import ml_dtypes
import numpy as np

from enginecast.cache.encoders.open_encoder import Encoder
from enginecast.cache.encoders.request import TooLong
from enginecast.cache.encoders.tokenizing import Tokenizing, Tokens
from enginecast.cache.fill.local import Filled, fill_local
from enginecast.cache.fill.schedule import FillSchedule, schedule_fill
from enginecast.cache.fill.texts import Texts
from enginecast.cache.store.folders import Encodings, create_store
from enginecast.cache.store.index import open_index
from enginecast.cache.store.shard import Entry, open_shard
from enginecast.cache.store.spec import About, EncoderSpec, Keys, OutputSpec
from enginecast.errors import InputError
from enginecast.runtime.bundle.manifest import Text

VOCABULARY = 97
WIDTH = 4
END = 1


def spec(**changes: Any) -> EncoderSpec:
    fields: dict[str, Any] = {
        "model": {"weights": "ab"},
        "precision": "fp32",
        "tokenizer": "cd",
        "max_length": 12,
        "padding_id": 0,
        "mask": True,
        "rows": "real",
        "outputs": (
            OutputSpec(name="last_hidden_state", per="token", width=WIDTH, dtype="bfloat16"),
            OutputSpec(name="pooler_output", per="text", width=3, dtype="float32"),
        ),
    }
    return EncoderSpec(**{**fields, **changes})


@dataclass
class TableEncoder(Encoder):
    """Each row is that of its token in a table, times a factor of its position.

    Args:
        broken: a token whose rows are `breaks_to`.
        refused: a token that the encoder does not take.
    """

    spec: EncoderSpec = field(default_factory=spec)
    about: About = field(default_factory=lambda: About(encoder="Table", source="table"))
    tokenizer: bytes = b"{}"
    broken: int | None = None
    breaks_to: float = float("nan")
    refused: int | None = None
    batches: list[tuple[int, int]] = field(default_factory=list)
    """Shapes of the batches that were run."""

    def encode(self, ids: np.ndarray[Any, Any], mask: np.ndarray[Any, Any]) -> dict[str, Any]:
        self.batches.append(ids.shape)
        if self.refused is not None and (ids == self.refused).any():
            raise InputError(f"input_ids: token {self.refused} is out of range")
        rows = table()[ids]
        if not self.spec.mask:
            assert mask.all()
            rows = rows + rows.mean(axis=1, keepdims=True)  # padding changes every row
        if self.broken is not None:
            rows[ids == self.broken] = self.breaks_to
        pooled = np.where(mask[:, :, None] > 0, rows, 0).sum(axis=1)[:, :3]
        return {
            "last_hidden_state": rows.astype(ml_dtypes.bfloat16),
            "pooler_output": pooled.astype(np.float32),
        }

    def close(self) -> None:
        pass


def table() -> np.ndarray[Any, Any]:
    made = np.random.default_rng(5).normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
    return made


@dataclass
class WordTokenizer(Tokenizing):
    """A word is its number ("w7" is 7); an end token follows."""

    max_length: int = 12

    def tokens(self, texts: Sequence[str]) -> list[Tokens]:
        found = []
        for text in texts:
            ids = [int(word[1:]) for word in text.split()]
            kept = [*ids[: self.max_length - 1], END]
            found.append(Tokens(np.array(kept, np.int32), len(ids) + 1))
        return found


class Lines(Texts):
    """Texts of a file that nobody wrote."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        super().__init__()
        self.extend(texts)

    def where(self, index: int) -> str:
        return f"captions.txt:{index + 1}"


def captions(count: int, seed: int = 0, longest: int = 11) -> Lines:
    """Different texts of 1 to `longest` words."""
    random, made = np.random.default_rng(seed), Lines()
    seen: set[str] = set()
    while len(made) < count:
        words = random.integers(2, VOCABULARY, random.integers(1, longest + 1))
        text = " ".join(f"w{word}" for word in words)
        if text not in seen:
            seen.add(text)
            made.append(text)
    return made


def encodings(folder: Path, encoder: TableEncoder, name: str = "text_encoder") -> Encodings:
    store = create_store(folder)
    return store.add(name, encoder.spec, encoder.about, encoder.tokenizer)


def planned(
    where: Encodings, texts: Lines, shard_bytes: int = 2000, too_long: TooLong = "error"
) -> FillSchedule:
    """The plan of a fill of what is missing now."""
    return schedule_fill(
        where.spec,
        WordTokenizer(where.spec.max_length),
        texts,
        open_index(where),
        shard_bytes,
        too_long=too_long,
    )


def fill(where: Encodings, encoder: TableEncoder, texts: Lines, **options: Any) -> Filled:
    """Plan and fill in this process, with small shards and batches."""
    given: dict[str, Any] = {"batch_tokens": 64, **options}
    return fill_local(where, encoder, planned(where, texts), **given)


def stamps(where: Encodings) -> dict[str, tuple[int, int]]:
    """What changes when a shard is written again."""
    found = {path.name: path.stat() for path in where.shard_paths()}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def entries_of(where: Encodings) -> list[Entry]:
    """Every entry there is, each looked at; of a key that is there twice both."""
    shards = [open_shard(path, where.spec) for path in where.shard_paths()]
    assert all(shard.is_whole(text) for shard in shards for text in range(len(shard)))
    return [shard.entry(text) for shard in shards for text in range(len(shard))]


def require_all(where: Encodings, texts: Lines) -> None:
    """Each text is there once, and the empty one, and nothing else."""
    keys, tokenizer = Keys(where.spec), WordTokenizer(where.spec.max_length)
    wanted = sorted({keys.of_tokens(one.ids) for one in tokenizer.tokens([*texts, ""])})
    assert sorted(entry.key for entry in entries_of(where)) == wanted


COLORS = ("red", "green", "blue", "fox")
"""The words of the tiny bundle's tokenizer."""


def colour_bundle(folder: Path, longest: int = 32) -> Path:
    """The tiny bundle, for batches and texts of useful sizes: output "hidden", 3 wide."""
    content = bundles.manifest(
        symbols={"batch": (1, 64), "sequence": (1, longest)},
        text=Text(padding_id=0, max_length=longest),
    )
    return bundles.make_bundle(folder, content)


def colour_captions(count: int, seed: int = 0, longest: int = 15) -> list[str]:
    """Different texts of 6 to `longest` colors."""
    random = np.random.default_rng(seed)
    made: dict[str, None] = {}
    while len(made) < count:
        words = random.integers(0, len(COLORS), random.integers(6, longest + 1))
        made[" ".join(COLORS[word] for word in words)] = None
    return list(made)


def write_captions(folder: Path, texts: Sequence[str]) -> Path:
    path = folder / "captions.txt"
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path
