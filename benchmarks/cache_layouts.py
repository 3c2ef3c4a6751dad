"""The ways to store texts that `cache_reading.py` compares."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from enginecast.cache.read.reader import EmbeddingCache, open_cache
from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import About, EncoderSpec, Keys, OutputSpec
from enginecast.cache.store.store import create_store
from enginecast.runtime.values.arrays import BFLOAT16, Array

WIDTH, LONGEST, BATCH = 4096, 512, 16
SHARD_BYTES = 256_000_000
HIDDEN = "last_hidden_state"
OURS, PT, NPZ, MEMORY = "enginecast cache", "pt", "npz fp32 padded", "memory"
Load = Callable[[Path], torch.Tensor]
Read = Callable[[Sequence[int]], Iterable[Array]]
"""Gives the bits of the rows of some texts: int16 [rows or more, WIDTH] each."""


class Texts:
    """Texts and their rows, made anew whenever they are asked for.

    Args:
        lengths: rows of each.
        masked: whether these are the real rows, or all of them.
    """

    def __init__(self, lengths: Array, *, masked: bool) -> None:
        self.lengths = lengths
        self.masked = masked
        self.spec = EncoderSpec(
            model={"weights": "0"},
            precision="bf16",
            tokenizer="0",
            max_length=LONGEST,
            padding_id=0,
            mask=masked,
            rows="real" if masked else "all",
            outputs=(OutputSpec(name=HIDDEN, per="token", width=WIDTH, dtype="bfloat16"),),
        )
        keys = Keys(self.spec)
        self.ids = [np.array([number + 1, 1], np.int32) for number in range(len(lengths))]
        self.keys = [keys.of_tokens(ids) for ids in self.ids]

    def rows(self, number: int) -> Array:
        """bf16 [rows, WIDTH]: any bits of a finite number."""
        random = np.random.default_rng([number, 1])
        bits = random.integers(0, 1 << 16, (self.lengths[number], WIDTH), np.uint16, endpoint=False)
        return (bits & 0xBFFF).view(BFLOAT16)


@dataclass(frozen=True)
class Layout:
    """A way to store texts.

    Args:
        texts: how many are stored so.
        write: store these texts; returns CPU time and time on the clock of that alone.
        open: what is to be done at the start of a pass, and part of it.
    """

    folder: Path
    texts: int
    write: Callable[[range], tuple[float, float]]
    open: Callable[[], Read]


def make_layouts(folder: Path, texts: Texts) -> dict[str, Layout]:
    count = len(texts.lengths)
    few = max(BATCH, count // 20) if texts.masked else max(BATCH, count // 4)
    layouts = {
        OURS: cache_layout(folder / "cache", texts),
        PT: files_layout(folder / "pt", texts, count, save_pt, load_pt),
        "safetensors": files_layout(folder / "st", texts, count, save_st, load_st),
        NPZ: files_layout(folder / "npz", texts, few, save_npz, load_npz),
        MEMORY: memory_layout(folder / "memory", texts, count),
    }
    if texts.masked:
        layouts["pt padded"] = files_layout(folder / "padded", texts, few, save_padded, load_pt)
    return layouts


def cache_layout(folder: Path, texts: Texts) -> Layout:
    def write(numbers: range) -> tuple[float, float]:
        about = About(encoder="T5EncoderModel", source="random")
        encodings = create_store(folder).add("t5", texts.spec, about, b"{}")
        spent = []
        for part in parts(texts, numbers):
            entries = [entry_of(texts, number) for number in part]
            spent.append(timed(partial(encodings.commit, entries)))
        return total(spent)

    return Layout(folder, len(texts.lengths), write, lambda: cache_read(open_cache(folder), texts))


def parts(texts: Texts, numbers: range) -> Iterable[range]:
    """Texts that go into one shard."""
    begin, size = numbers.start, 0
    for number in numbers:
        size += int(texts.lengths[number]) * WIDTH * 2
        if size > SHARD_BYTES or number == numbers[-1]:
            yield range(begin, number + 1)
            begin, size = number + 1, 0


def entry_of(texts: Texts, number: int) -> Entry:
    rows = {HIDDEN: texts.rows(number)}
    return Entry(texts.keys[number], f"text {number}", texts.ids[number], rows)


def cache_read(cache: EmbeddingCache, texts: Texts) -> Read:
    def read(numbers: Sequence[int]) -> Iterable[Array]:
        found = cache.get_many([texts.keys[number] for number in numbers])
        return [entry.outputs[HIDDEN].view(np.int16) for entry in found]

    return read


def files_layout(
    folder: Path,
    texts: Texts,
    count: int,
    save: Callable[[Path, torch.Tensor], None],
    load: Load,
) -> Layout:
    """One file per text; the folder is flushed once."""

    def write(numbers: range) -> tuple[float, float]:
        folder.mkdir()
        spent = []
        for number in numbers:
            tensor = torch.from_numpy(texts.rows(number).view(np.int16)).view(torch.bfloat16)
            path = folder / str(number)
            spent.append(timed(partial(save, path, tensor), partial(flush, path)))
        return total([*spent, timed(partial(flush, folder))])

    def read(numbers: Sequence[int]) -> Iterable[Array]:
        return (bits_of(load(folder / str(number))) for number in numbers)

    return Layout(folder, count, write, lambda: read)


def memory_layout(folder: Path, texts: Texts, count: int) -> Layout:
    """No files at all: the work that all layouts have in common."""
    held = [texts.rows(number).view(np.int16) for number in range(count)]

    def read(numbers: Sequence[int]) -> Iterable[Array]:
        return [held[number] for number in numbers]

    return Layout(folder, count, lambda numbers: (0.0, 0.0), lambda: read)


def bits_of(tensor: torch.Tensor) -> Array:
    bits: Array = tensor.to(torch.bfloat16).view(torch.int16).numpy()
    return bits


def save_pt(path: Path, tensor: torch.Tensor) -> None:
    torch.save(tensor.clone(), path)


def load_pt(path: Path) -> torch.Tensor:
    loaded: torch.Tensor = torch.load(path, weights_only=True)
    return loaded


def save_st(path: Path, tensor: torch.Tensor) -> None:
    safetensors.torch.save_file({HIDDEN: tensor}, path)


def load_st(path: Path) -> torch.Tensor:
    return safetensors.torch.load_file(path)[HIDDEN]


def padded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, 0, 0, LONGEST - len(tensor)))


def save_padded(path: Path, tensor: torch.Tensor) -> None:
    torch.save(padded(tensor), path)


def save_npz(path: Path, tensor: torch.Tensor) -> None:
    """As kohya's sd-scripts: numpy has no bf16."""
    with path.open("wb") as file:
        mask = np.arange(LONGEST) < len(tensor)
        np.savez(file, t5_out=padded(tensor).float().numpy(), t5_attn_mask=mask)


def load_npz(path: Path) -> torch.Tensor:
    with np.load(path) as file:
        return torch.from_numpy(file["t5_out"])


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def timed(*calls: Callable[[], Any]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    for call in calls:
        call()
    return time.process_time() - cpu, time.perf_counter() - wall


def total(spent: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(cpu for cpu, _ in spent), sum(wall for _, wall in spent)
