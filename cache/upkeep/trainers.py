"""Writing entries as trainers read what they cached of their text encoders: `trainers.json`.

A row of the table is an architecture of a trainer, and says what is in the files of an item: which
outputs of which encoders, padded and joined how.  Trainers name those files by the image or video
that a text belongs to, hence the items.  docs/how-to/trainers.md says where each row was read.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from enginecast.cache.encoders.request import Part, part_of
from enginecast.cache.fill.texts import DEFAULT_COLUMNS
from enginecast.cache.read.reader import EmbeddingCache, open_cache
from enginecast.cache.store.disk import bytes_in
from enginecast.cache.store.folders import Store
from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import EncoderSpec, pad_rows
from enginecast.cache.upkeep.exporting import FORMATS, Exported, Watch, publishing, write_arrays
from enginecast.errors import CacheError, CacheMissError, InputError, UsageError
from enginecast.runtime.bundle.manifest import Record
from enginecast.runtime.values.arrays import BFLOAT16, Array

FILE_COLUMNS = ("file", "file_name", "image_path", "video_path")
_SAME = (
    *("mask", "extra_rows", "skip_rows", "max_length"),
    *("template", "clean", "special_tokens", "keep_end"),
)
"""What a spec has to have as the pipeline's row has it."""


class Tensor(Record, frozen=True, kw_only=True):
    """One of a file's tensors.

    It holds the `outputs` of encoders, joined along the last axis, or their `stack`, joined along a
    new one behind the rows; or of one encoder the `mask` (1 for tokens) or `ids` of its row; or
    `positions`, which are 0, three for each of its rows; or one `false`.
    """

    name: str
    """`{dtype}` in it stands for the dtype of the values."""
    holds: Literal["outputs", "stack", "mask", "ids", "positions", "false"] = "outputs"
    of: tuple[str, ...] = ()
    """Each "PART/OUTPUT" for outputs, else "PART"."""
    rows: int | None = None
    """Filled up with zeros to so many; None: as they are stored, and all of the encoder's row."""
    dtype: str | None = None
    """None: as it is stored, but float32 for bfloat16 where numpy's format has none."""


class Format(Record, frozen=True, kw_only=True):
    """What a trainer reads for one architecture."""

    name: str
    """ "TRAINER:ARCHITECTURE"."""
    pipeline: str
    """In `pipelines.json`: what the trainer runs is what this pipeline runs."""
    file: str
    """`{stem}` is the name of the item's file without suffix, `{folder}` its folder."""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    expects: dict[str, dict[str, tuple[int, ...]]] = msgspec.field(default_factory=dict)
    """Part -> field of its spec -> values, where the pipeline's is not the only one."""
    tensors: tuple[Tensor, ...]

    def outputs(self) -> dict[str, list[str]]:
        """Part -> outputs that are read of it."""
        found: dict[str, list[str]] = {}
        for one in self.tensors:
            for of in one.of:
                part, _, output = of.partition("/")
                found.setdefault(part, []).extend([output] if output else [])
        return dict(sorted(found.items()))


class Table(Record, frozen=True, kw_only=True):
    """The file."""

    formats: tuple[Format, ...]
    refused: dict[str, str]
    """Trainers, or architectures of them, and why there is no row."""


class Item(NamedTuple):
    """An image or video, and its text."""

    text: str
    file: str
    line: int


@cache
def table() -> Table:
    """The table as it is packaged."""
    content = files("enginecast.cache.upkeep").joinpath("trainers.json").read_bytes()
    return msgspec.json.decode(content, type=Table)


def format_of(name: str) -> Format:
    """A row by its name; a UsageError says why there is none, and lists them."""
    found = next((one for one in table().formats if one.name == name), None)
    if found is not None:
        return found
    refused = table().refused
    why = refused.get(name) or refused.get(name.partition(":")[0])
    known = ", ".join((*FORMATS, *(one.name for one in table().formats)))
    if why:
        raise UsageError(f"--format {name}: {why}", hint=f"There are: {known}.")
    raise UsageError(f"--format {name}: expected {known}")


def read_items(path: Path) -> list[Item]:
    """Read the items of a `.jsonl`: an object a line, with a text and a file.

    Raises:
        InputError: a line has not one of each; names it.  Or there is no item, or no such file.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"--items {path}: {error.strerror or error}") from error
    items = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InputError(f"{path}:{number}: expected a JSON object: {error}") from error
        found: list[str] = []
        for names in (DEFAULT_COLUMNS, FILE_COLUMNS):
            values = [row[name] for name in names if isinstance(row.get(name), str)]
            if len(values) != 1:
                raise InputError(
                    f"{path}:{number}: expected one string called {', '.join(names[:-1])} or "
                    f"{names[-1]}, got {len(values)}",
                    hint='Write lines such as {"caption": "a red fox", "file": "fox.png"}.',
                )
            found += values
        items.append(Item(found[0], found[1], number))
    if not items:
        raise InputError(f"{path}: expected items, got none")
    return items


@dataclass(frozen=True)
class Plan:
    """An export that can be written: made by `plan_export`.

    Args:
        targets: a file for each item, within the output.
        caches: the entries by part.
    """

    form: Format
    items: Sequence[Item]
    targets: Sequence[str]
    caches: Mapping[str, EmbeddingCache]

    @property
    def encoders(self) -> list[str]:
        """What the encoders are called in the cache."""
        return [one.encodings.name for one in self.caches.values()]

    def write(self, output: Path, watch: Watch | None = None) -> Exported:
        """Write the files, in a folder that is not there yet.

        Raises:
            CacheError: an entry is damaged, the target is there, or the disk failed.
            MissingError: the disk is full.  Whatever is raised: nothing was written.
        """
        needed = 0
        for one in self.caches.values():
            stored = bytes_in(shard.path for shard in one.index.shards)
            needed += stored * len(self.items) // len(one)
        with publishing(output, needed) as staged:
            staged.mkdir()
            for item, target in zip(self.items, self.targets, strict=True):
                entries = {part: one.by_text(item.text) for part, one in self.caches.items()}
                said = {
                    key: item.text if value == "{text}" else value
                    for key, value in self.form.metadata.items()
                }
                path = staged / target
                path.parent.mkdir(parents=True, exist_ok=True)
                write_arrays(path, self._arrays(entries), said)
                if watch is not None:
                    watch(1)
        return Exported(len(self.items), bytes_in([output]))

    def _arrays(self, entries: Mapping[str, Entry]) -> dict[str, Array]:
        """The tensors of an item's file."""
        specs = {part: one.spec for part, one in self.caches.items()}
        made = {}
        for one in self.form.tensors:
            values = _values(one, specs, entries)
            if one.dtype is not None:
                values = values.astype(one.dtype)
            elif self.form.file.endswith(".npz") and values.dtype == BFLOAT16:
                values = values.astype(np.float32)
            made[one.name.format(dtype=values.dtype.name)] = values
        return made


def plan_export(store: Store, name: str, items: Path | None, encoders: Sequence[str] = ()) -> Plan:
    """Check that a cache has what a trainer reads, for each item.

    Args:
        name: of the format, "musubi:wan".
        items: see `read_items`.
        encoders: names in the cache, in the order of the pipeline's parts; empty: the parts' own.

    Raises:
        UsageError: no such format, no items, or not as many encoders as it has parts.
        InputError: the items cannot be read, or two of them make one file.
        CacheError: an encoder is missing, was filled otherwise than the trainer needs, or lacks a
            text.
    """
    form = format_of(name)
    if items is None:
        raise UsageError(
            f"--format {name}: expected --items FILE, for the names of the files",
            hint='It has lines such as {"caption": "a red fox", "file": "fox.png"}.',
        )
    read = read_items(items)
    targets = _targets(form, items, read)
    caches = _open_parts(store, form, encoders)
    for one in caches.values():
        _require_texts(one, items, read)
    return Plan(form, read, targets, caches)


def _targets(form: Format, items: Path, read: Sequence[Item]) -> list[str]:
    """The file of each item, within the output."""
    made: dict[str, Item] = {}
    for item in read:
        folder, file = os.path.split(item.file)
        where = f"{items}:{item.line}"
        if not file:
            raise InputError(f"{where}: expected the name of a file, got {item.file!r}")
        if "{folder}" in form.file and (os.path.isabs(folder) or ".." in Path(folder).parts):
            raise InputError(
                f"{where}: expected a path within the folder of the images, got {item.file!r}",
                hint=f"--format {form.name} makes files that lie beside the images: name these from"
                " the folder that you will copy the output to.",
            )
        stem = os.path.splitext(file)[0]
        target = form.file.format(stem=stem, folder=f"{folder}/" if folder else "")
        first = made.setdefault(os.path.normpath(target), item)
        if first is not item:
            raise InputError(
                f"{where}: {item.file} and {first.file} of line {first.line} both make {target}",
                hint="The trainer knows an item by this name: rename a file, or export each data"
                " set for itself.",
            )
    return list(made)


def _open_parts(store: Store, form: Format, encoders: Sequence[str]) -> dict[str, EmbeddingCache]:
    """The entries of each part, if they are what the trainer would have made."""
    outputs = form.outputs()
    if encoders and len(encoders) != len(outputs):
        raise UsageError(
            f"--name {','.join(encoders)}: expected a name for each of {', '.join(outputs)}"
        )
    found = {}
    there = store.names()
    for part, name in zip(outputs, encoders or outputs, strict=True):
        row = part_of(f"{form.pipeline}:{part}")
        fill = f"enginecast cache fill ENCODER --prompts FILE -o {store.root} --for {row.name}"
        needs = f"--format {form.name} needs what {row.name} gives ({row.model})"
        if name not in there:
            raise CacheError(
                f"{store.root}: {needs}, but there is no encoder {name!r}; it holds "
                f"{', '.join(there) or 'none'}",
                hint=f"`{fill}` adds it.  If it has another name here, give --name.",
            )
        found[part] = open_cache(store.root, name)
        wrong = _differences(row, found[part].spec, outputs[part], form.expects.get(part, {}))
        if wrong:
            raise CacheError(
                f"{store.root / name}: {needs}; {'; '.join(wrong)}",
                hint=f"`{fill} --name OTHER` fills it beside this one; then give --name.",
            )
    return found


def _differences(
    row: Part, spec: EncoderSpec, outputs: Sequence[str], expects: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What a cache holds otherwise than a trainer needs, each with what was expected."""
    wanted: dict[str, tuple[Any, ...]] = {field: (getattr(row, field),) for field in _SAME}
    wanted["rows"] = ("all" if row.keep_all else "real",)
    if row.padding_side:
        wanted["padding_side"] = (row.padding_side,)
    wanted.update(expects)
    wrong = [
        f"{field}: expected {' or '.join(repr(value) for value in values)}, got {got!r}"
        for field, values in wanted.items()
        if (got := getattr(spec, field)) not in values
    ]
    stored = [one.name for one in spec.outputs]
    lacking = [name for name in dict.fromkeys(outputs) if name not in stored]
    if lacking:
        wrong.append(f"outputs: expected {', '.join(lacking)}, got {', '.join(stored)}")
    return wrong


def _require_texts(entries: EmbeddingCache, items: Path, read: Sequence[Item]) -> None:
    """Refuse where the text of an item has no entry, before anything is written."""
    texts = {item.text for item in read}
    missing = set(entries.missing(list(texts)))
    for item in read:
        if item.text in missing:
            try:
                entries.by_text(item.text)
            except CacheMissError as error:
                what = f"{error.message} ({len(missing)} of {len(texts)} texts are missing)"
                raise CacheMissError(f"{items}:{item.line}: {what}", hint=error.hint) from error


def _values(one: Tensor, specs: Mapping[str, EncoderSpec], entries: Mapping[str, Entry]) -> Array:
    if one.holds == "false":
        return np.array(False)
    if one.holds in ("outputs", "stack"):
        pairs = [of.split("/") for of in one.of]
        values = [entries[part].outputs[output] for part, output in pairs]
        if len({value.dtype for value in values}) > 1:  # numpy joins no bfloat16 with others
            values = [value.astype(np.float32) for value in values]
        joined = np.stack(values, 1) if one.holds == "stack" else np.concatenate(values, -1)
        return joined if one.rows is None else _filled(joined, one.rows)
    spec, ids = specs[one.of[0]], entries[one.of[0]].ids
    length = one.rows or spec.max_length
    if one.holds == "positions":
        return np.zeros((length, 3))
    if one.holds == "mask" and spec.rows == "real":  # those rows come first
        return _filled(np.ones(len(ids) - spec.skip_rows), length)
    padded, mask = pad_rows(spec, [ids], length)
    row: Array = (mask if one.holds == "mask" else padded)[0]
    return row


def _filled(values: Array, rows: int) -> Array:
    """Values with rows of zeros behind them."""
    filled = np.zeros((rows, *values.shape[1:]), values.dtype)
    filled[: len(values)] = values
    return filled
