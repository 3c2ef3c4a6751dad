"""Malformed manifests with right digests: refused, or as good as they were."""

import copy
import json
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bundles

from enginecast.errors import BundleError, EnginecastError, EnginecastWarning
from enginecast.runtime.bundle.manifest_json import seal
from enginecast.runtime.load import load
from faults.campaign import Campaign, Sizes, Tally

SEED = 31
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    1 << 31,
    1 << 53,
    (1 << 63) - 1,
    1 << 64,
    10**40,
    0.5,
    -0.0,
    1e308,
    "",
    " ",
    "0",
    "batch",
    "..",
    "/etc/passwd",
    "engine.onnx",
    "manifest.json",
    "int64",
    "float32",
    "verified",
    "rejected",
    "CPUExecutionProvider",
    "a\0b",
    "é" * 300,
    "\u202e",
    "__proto__",
    "x" * 100_000,
    [],
    [None],
    [[]],
    ["batch", "batch"],
    [1, 2],
    [-1],
    {},
    {"": ""},
    {"a": {"b": []}},
    DEEP,
)


def _places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value within a manifest."""
    if path:
        yield path
    inside = (
        content.items()
        if isinstance(content, dict)
        else enumerate(content)
        if isinstance(content, list)
        else ()
    )
    for key, value in inside:
        yield from _places(value, (*path, key))


def mutate(content: Any, chooser: random.Random) -> str:
    """Change a value in place; what was changed."""
    path = chooser.choice([*_places(content)])
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    key, kind = path[-1], chooser.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == 1:
        holder[f"{key}_"] = holder[key]
    elif kind == 2 and isinstance(holder, dict):
        holder[chooser.choice(("new", "", "digest2", key.upper()))] = holder.pop(key)
    elif kind == 3 and isinstance(holder[key], int | float):
        holder[key] = chooser.choice((-holder[key], holder[key] + 1, holder[key] * 10**6))
    else:
        holder[key] = copy.deepcopy(chooser.choice(VALUES))
    return f"{'.'.join(map(str, path))} by {kind}"


def manifests(count: int, folder: Path) -> Tally:
    """Change one to three values of a manifest, make its digest right, and load and run it."""
    chooser, tally = random.Random(SEED), Tally()
    root = bundles.make_bundle(folder / "bundle")
    path, feeds = root / "manifest.json", bundles.feeds()
    whole = json.loads(path.read_bytes())
    whole.pop("digest")
    with load(root) as engine:
        right = engine.run(feeds)["hidden"].tobytes()
    while tally.injected < count:
        content = copy.deepcopy(whole)
        changes = [mutate(content, chooser) for _ in range(chooser.choice((1, 1, 1, 2, 3)))]
        if content == whole:
            continue
        what = f"seed {SEED}, fault {tally.injected}: {'; '.join(changes)}"
        path.write_bytes(seal(content))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EnginecastWarning)  # of a verdict of another device
                with load(root) as engine:
                    found = engine.run(feeds)
        except BundleError as error:
            places = ("manifest.json", "engine.onnx", str(root))
            named = any(place in error.message for place in places)
            tally.add("refused by name") if named else tally.defect(f"{what}: {error.message}")
        except EnginecastError:
            tally.add("loaded, the run refused")
        except Exception as error:  # not ours: harm, which the campaign counts
            tally.defect(f"{what}: {type(error).__name__}: {str(error)[:150]}")
        else:
            if next(iter(found.values())).tobytes() == right:
                tally.add("ran, and right")
            else:
                tally.defect(f"{what}: it ran, and gave something else")
    return tally


CAMPAIGNS = (
    Campaign(
        "malformed manifests",
        "A manifest with other values and a right digest is refused, or the engine runs as before.",
        Sizes(quick=300, full=100_000),
        manifests,
    ),
)
