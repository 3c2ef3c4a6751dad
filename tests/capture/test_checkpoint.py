"""Weight files that do not fit: one sentence that names the file, exit code 2, nothing written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exports import Exports, cast
from safetensors.torch import load_file, save_file
from torch import Tensor

from enginecast.capture.sources.weights.checkpoint import INDEX, SINGLE

Damage = Callable[[Path], None]
NORM = "encoder.final_layer_norm.weight"
FIRST, SECOND, HOLDS_NORM = (f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def stored(file: str, change: Callable[[dict[str, Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    return damage


def listed(change: Callable[[dict[str, str]], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return damage


def cut(file: str, length: int) -> Damage:
    def damage(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: length % len(data)])

    return damage


def drop(count: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in sorted(tensors)[:count]:
            del tensors[name]

    return change


def add(*names: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.zeros(2) for name in names})


def both(*damages: Damage) -> Damage:
    def damage(folder: Path) -> None:
        for one in damages:
            one(folder)

    return damage


SINGLE_FILE: dict[str, tuple[Damage, str]] = {
    "a tensor is missing": (
        stored(SINGLE, lambda tensors: tensors.pop(NORM)),
        f"{SINGLE}: T5EncoderModel misses {NORM}; expected 21 tensors, got 20",
    ),
    "a tensor too many": (
        stored(SINGLE, add("adapter.w")),
        f"{SINGLE}: T5EncoderModel has no place for adapter.w; expected 21 tensors, got 22",
    ),
    "another shape": (
        stored(SINGLE, add(NORM)),
        f"{SINGLE}: {NORM} has shape [2], T5EncoderModel expects [32]",
    ),
    "cut": (cut(SINGLE, -100), f"{SINGLE} cannot be read as safetensors"),
    "empty": (cut(SINGLE, 0), f"{SINGLE} cannot be read as safetensors"),
}
SHARDS: dict[str, tuple[Damage, str]] = {
    "a shard is missing": (
        lambda folder: (folder / SECOND).unlink(),
        f"{SECOND} is missing: {INDEX} lists it for encoder.",
    ),
    "the index names a tensor that no shard has": (
        listed(lambda shards: shards.update({"encoder.nope": FIRST})),
        f"{FIRST} does not hold encoder.nope: {INDEX} says that it does",
    ),
    "a shard has lost tensors": (
        stored(FIRST, drop(1)),
        f"{FIRST} does not hold encoder.",
    ),
    "a tensor that the index does not name": (
        stored(FIRST, add("extra.x", "extra.y")),
        f"{FIRST} holds extra.x, extra.y, not named in {INDEX}",
    ),
    "one tensor in two shards": (
        stored(SECOND, add(NORM)),
        f"{HOLDS_NORM} holds {NORM}, and so does {SECOND}",
    ),
    "neither index nor shards have it": (
        both(
            stored(HOLDS_NORM, lambda tensors: tensors.pop(NORM)),
            listed(lambda shards: shards.pop(NORM)),
        ),
        f"{INDEX}: T5EncoderModel misses {NORM}; expected 19 tensors, got 18",
    ),
    "another shape in a shard": (
        stored(HOLDS_NORM, add(NORM)),
        f"{HOLDS_NORM}: {NORM} has shape [2], T5EncoderModel expects [32]",
    ),
}
CASES = [("t5", name) for name in SINGLE_FILE] + [("t5-relu-shards-fp16", name) for name in SHARDS]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_weights_that_do_not_fit(
    exports: Exports, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, name: str
) -> None:
    damage, expected = (SINGLE_FILE if model == "t5" else SHARDS)[name]
    folder = shutil.copytree(exports.model(model), tmp_path / "model")
    damage(folder)
    target = tmp_path / "out" / "bundle"
    done = cast(capsys, "export", folder, "-o", target)
    assert (done.code, done.out) == (2, ""), done.err
    message = next(line for line in done.err.splitlines() if line.startswith("error: "))
    assert message.startswith(f"error: {folder}/{expected}"), message
    assert "Traceback" not in done.err
    assert not target.parent.exists() or list(target.parent.iterdir()) == []
