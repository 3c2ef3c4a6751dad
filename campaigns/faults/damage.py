"""Damaged bundles: whatever happened to a file, it is refused by name before a library sees it."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import bundles

from enginecast.errors import BundleError
from enginecast.runtime.load import load
from faults.campaign import Campaign, Sizes, Tally

SEED = 19


def _flip(data: bytearray, chooser: random.Random) -> None:
    data[chooser.randrange(len(data))] ^= 1 << chooser.randrange(8)


def _replace(data: bytearray, chooser: random.Random) -> None:
    place = chooser.randrange(len(data))
    data[place] = (data[place] + chooser.randrange(1, 256)) % 256


def _zero(data: bytearray, chooser: random.Random) -> None:
    begin = chooser.randrange(len(data))
    data[begin : begin + 16] = bytes(len(data[begin : begin + 16]))


def _splice(data: bytearray, chooser: random.Random) -> None:
    one, other = chooser.randrange(len(data)), chooser.randrange(len(data))
    data[one : one + 8] = data[other : other + 8]


def _truncate(data: bytearray, chooser: random.Random) -> None:
    del data[chooser.randrange(len(data)) :]


def _extend(data: bytearray, chooser: random.Random) -> None:
    data += chooser.randbytes(chooser.randrange(1, 64))


def _delete(data: bytearray, chooser: random.Random) -> None:
    begin = chooser.randrange(len(data))
    del data[begin : begin + chooser.randrange(1, 9)]


def _insert(data: bytearray, chooser: random.Random) -> None:
    begin = chooser.randrange(len(data))
    data[begin:begin] = chooser.randbytes(chooser.randrange(1, 9))


def _double(data: bytearray, chooser: random.Random) -> None:
    data += bytes(data)


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip,
    _replace,
    _zero,
    _splice,
    _truncate,
    _extend,
    _delete,
    _insert,
    _double,
)


def files(count: int, folder: Path) -> Tally:
    """Change one file of a bundle in one way, and load it."""
    chooser, tally = random.Random(SEED), Tally()
    root = bundles.make_bundle(folder / "bundle")
    names = sorted(path.name for path in root.iterdir())
    whole = {name: (root / name).read_bytes() for name in names}
    while tally.injected < count:
        name = names[tally.injected % len(names)]
        mutation = MUTATIONS[chooser.randrange(len(MUTATIONS))]
        data = bytearray(whole[name])
        mutation(data, chooser)
        if data == whole[name]:  # zeros over zeros: nothing was damaged
            continue
        (root / name).write_bytes(data)
        where = f"seed {SEED}, fault {tally.injected}: {mutation.__name__} of {name}"
        try:
            load(root).close()
            tally.defect(f"{where}: it was loaded")
        except BundleError as error:
            named = name in error.message
            tally.add("refused by name") if named else tally.defect(f"{where}: {error.message}")
        (root / name).write_bytes(whole[name])
    load(root).close()  # the same bundle, undamaged
    shutil.rmtree(root)
    return tally


CAMPAIGNS = (
    Campaign(
        "damaged files",
        "A bundle with a changed byte in any file, its manifest included, is refused by name.",
        Sizes(quick=300, full=10_000),
        files,
    ),
)
