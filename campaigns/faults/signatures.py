"""Edits of signed bundles, digests made right again: nobody's but the signer's are loaded."""

import base64
import copy
import json
import os
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import bundles
from signing_keys import keys

from enginecast.errors import BundleError, EnginecastWarning
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, SIGNATURE_NAME
from enginecast.runtime.bundle.manifest_json import seal
from enginecast.runtime.bundle.reader import digest
from enginecast.runtime.bundle.signature import Signer, sign
from enginecast.runtime.load import load
from faults.campaign import Campaign, Sizes, Tally
from faults.damage import MUTATIONS
from faults.manifests import mutate

SEED = 41


class Stage(NamedTuple):
    """What an edit has at hand."""

    root: Path
    """The signed bundle, to be edited."""
    other: Path
    """One that the same key signed."""
    foreign: Path
    """One of the same files that another key signed."""
    chooser: random.Random


def _reseal(root: Path, change: Callable[[Any], object] = lambda content: None) -> None:
    """Edit the manifest, and make every size and digest right."""
    path = root / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    content.pop("digest", None)
    for file in content["files"]:
        file["size"] = (root / file["name"]).stat().st_size
        file["sha256"] = digest(root / file["name"])
    change(content)
    path.write_bytes(seal(content))


def _verdict(stage: Stage) -> None:
    """A verdict that nobody reached."""

    def change(content: Any) -> None:
        verdict = content["engines"][0]["verdict"]
        verdict["reasons"] = [f"edit {stage.chooser.random()}"]
        verdict["cases"] = [*verdict["cases"], "longest"]

    _reseal(stage.root, change)


def _fields(stage: Stage) -> None:
    """Any value of the manifest."""

    def change(content: Any) -> None:
        before = copy.deepcopy(content)
        while content == before:
            mutate(content, stage.chooser)

    _reseal(stage.root, change)


def _weights(stage: Stage) -> None:
    """Other weights, of the same size."""
    path = stage.root / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1 - stage.chooser.randrange(32)] ^= 1 << stage.chooser.randrange(8)
    path.write_bytes(data)
    _reseal(stage.root)


def _files(stage: Stage) -> None:
    """Bytes of any file, the signature among them, with digests that fit."""
    path = stage.chooser.choice(sorted(stage.root.iterdir()))
    before = path.read_bytes()
    data = bytearray(before)
    while bytes(data) == before:
        stage.chooser.choice(MUTATIONS)(data, stage.chooser)
    path.write_bytes(data)
    if path.name not in (MANIFEST_NAME, SIGNATURE_NAME):
        _reseal(stage.root)


def _added(stage: Stage) -> None:
    """A file more, which the manifest lists."""
    name = f"added-{stage.chooser.randrange(1 << 30)}.txt"
    (stage.root / name).write_bytes(stage.chooser.randbytes(9))
    record = {"name": name, "size": 9, "sha256": digest(stage.root / name)}
    _reseal(stage.root, lambda content: content["files"].append(record))


def _removed(stage: Stage) -> None:
    """A file less, of which the manifest says nothing."""
    name = stage.chooser.choice(("tokenizer.json", "weights.safetensors", "engine.onnx"))
    path = stage.root / MANIFEST_NAME
    content = json.loads(path.read_bytes())
    content.pop("digest", None)
    content["files"] = [file for file in content["files"] if file["name"] != name]
    path.write_bytes(seal(content))
    (stage.root / name).unlink()


def _signature_of_another(stage: Stage) -> None:
    """Edited, and signed for another bundle by the right key."""
    _verdict(stage)
    shutil.copy(stage.other / SIGNATURE_NAME, stage.root)


def _signed_by_another(stage: Stage) -> None:
    """As it was, signed by another key."""
    shutil.copy(stage.foreign / SIGNATURE_NAME, stage.root)


def _statement(stage: Stage) -> None:
    """A statement for what the files are now, under the old signature."""
    _verdict(stage)
    path = stage.root / SIGNATURE_NAME
    content = json.loads(path.read_bytes())
    payload = json.loads(base64.b64decode(content["dsseEnvelope"]["payload"]))
    for one in payload["predicate"]["resources"]:
        one["digest"] = digest(stage.root / one["name"])
    content["dsseEnvelope"]["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    path.write_text(json.dumps(content))


def _envelope(stage: Stage) -> None:
    """Any value of the signature's own file, after an edit."""
    _verdict(stage)
    path = stage.root / SIGNATURE_NAME
    content = json.loads(path.read_bytes())
    mutate(content, stage.chooser)
    path.write_text(json.dumps(content))


def _unsigned(stage: Stage) -> None:
    (stage.root / SIGNATURE_NAME).unlink()


EDITS = (
    _verdict,
    _fields,
    _weights,
    _files,
    _added,
    _removed,
    _signature_of_another,
    _signed_by_another,
    _statement,
    _envelope,
    _unsigned,
)


def _content(root: Path) -> dict[str, bytes]:
    """All files but the signature."""
    paths = [path for path in root.iterdir() if path.name != SIGNATURE_NAME]
    return {path.name: path.read_bytes() for path in paths}


def signatures(count: int, folder: Path) -> Tally:
    """Edit a signed bundle, and load it where the signature is asked for."""
    tally = Tally()
    private, public = keys(folder)
    signed = bundles.make_bundle(folder / "signed")
    other = bundles.make_bundle(folder / "other", bundles.manifest(notes=("other",)))
    foreign = bundles.make_bundle(folder / "foreign")
    sign(signed, Signer(private))
    sign(other, Signer(private))
    sign(foreign, Signer(keys(folder, "stranger")[0]))
    load(signed, public_key=public).close()
    whole, root = _content(signed), folder / "bundle"
    for number in range(count):
        shutil.copytree(signed, root)
        edit = EDITS[number % len(EDITS)]
        edit(Stage(root, other, foreign, random.Random(f"{SEED} {number}")))
        what = f"seed {SEED}, edit {number}: {str(edit.__doc__ or edit.__name__).strip()}"
        same = _content(root) == whole
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EnginecastWarning)
                load(root, public_key=public).close()
        except BundleError as error:
            named = str(root) in error.message or any(
                name in error.message for name in (SIGNATURE_NAME, *os.listdir(signed))
            )
            tally.add("refused by name") if named else tally.defect(f"{what}: {error.message}")
        else:
            if same:  # such as a space more in the signature's JSON
                tally.add("the signature still held for the files, which nobody edited")
            else:
                tally.defect(f"{what}: it was loaded")
        shutil.rmtree(root)
    load(signed, public_key=public).close()
    return tally


CAMPAIGNS = (
    Campaign(
        "edits under a signature",
        "Where a signature is asked for, no edit of a bundle goes unnoticed, though all digests"
        " were made right.",
        Sizes(quick=88, full=2_000),
        signatures,
    ),
)
