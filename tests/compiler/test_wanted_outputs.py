"""--outputs and --hidden-state on the command line, for every kind of model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from exports import Exports, cast
from models import add_tokenizer
from msgspec.structs import replace
from safetensors import safe_open
from transformers import DynamicCache

import enginecast
from enginecast.capture.outputs.flatten import name_result
from enginecast.errors import CaptureError
from enginecast.runtime.bundle.manifest import FileRecord, Manifest, Text
from enginecast.runtime.bundle.manifest_json import decode, encode
from enginecast.runtime.bundle.reader import digest

Capture = pytest.CaptureFixture[str]

FACTORIES = """
import torch
from models import llama_config
from torch import nn
from transformers import LlamaModel


def plain():
    return nn.Linear(6, 4), {"input": torch.randn(3, 6)}


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaModel(llama_config(layers=1))

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=True)


def cached():
    return Cached(), {"input_ids": torch.randint(0, 90, (3, 7))}
"""


@pytest.fixture(scope="module")
def root(exports: Exports) -> Path:
    root = exports.root
    for name in ("bert", "t5"):
        exports.model(name)
    (root / "wanted_factories.py").write_text(FACTORIES, encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def _where_the_models_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


def manifest(bundle: Path) -> Manifest:
    return decode((bundle / "manifest.json").read_bytes())


def stored(bundle: Path) -> set[str]:
    with safe_open(bundle / "weights.safetensors", "np") as file:
        return set(file.keys())


def export(capsys: Capture, bundle: Path, *arguments: object) -> tuple[str, ...]:
    """Export; the names of the outputs."""
    done = cast(capsys, "export", *arguments, "-o", bundle, "--threads", 1)
    assert done.code == 0, done.err
    return tuple(output.name for output in manifest(bundle).outputs)


def refused(capsys: Capture, tmp_path: Path, *arguments: object) -> str:
    done = cast(capsys, "export", *arguments, "-o", tmp_path / "refused")
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.count("error: ") == 1
    assert list(tmp_path.glob("*refused*")) == []
    return " ".join(done.err.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("bert", "--outputs", "logits"),
            "--outputs logits: the model gives no output 'logits'"
            " It gives last_hidden_state, pooler_output.",
        ),
        (("bert", "--hidden-state", "two"), "--hidden-state two: expected an integer"),
        (("bert", "--hidden-state", "-4"), "the model gives 3 hidden states Expected -3..2."),
        (
            ("wanted_factories:plain", "--hidden-state", "-1"),
            "--hidden-state -1: the model gives no hidden states",
        ),
    ],
)
def test_what_a_model_does_not_give(
    tmp_path: Path, capsys: Capture, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(capsys, tmp_path, *arguments)


def test_a_cache_gives_its_keys_and_values() -> None:
    cache, key = DynamicCache(), torch.randn(1, 2, 3, 4)
    for layer in range(2):
        cache.update(key, key + layer, layer)
    found = name_result({"state": key, "past": cache}).tensors
    names = ("key", "value")
    assert [*found] == ["state", *(f"past.{n}.{name}" for n in range(2) for name in names)]
    assert torch.equal(found["past.1.value"], key + 1)


def test_a_cache_that_keeps_other_tensors_is_refused() -> None:
    cache, key = DynamicCache(), torch.randn(1, 2, 3, 4)
    cache.update(key, key, 0)
    cache.layers[0].states = key  # as of a convolution
    with pytest.raises(CaptureError, match="returns a DynamicCache as past, expected tensors"):
        name_result({"past": cache})


@pytest.mark.slow
def test_outputs_of_a_program(root: Path, tmp_path: Path, capsys: Capture) -> None:
    saved = tmp_path / "bert.pt2"
    done = cast(capsys, "opt", "bert", "--pipeline", "", "--hidden-state", "1", "-o", saved)
    assert done.code == 0, done.err
    program = (saved, "--allow-code", "--outputs")
    names = export(capsys, tmp_path / "b", *program, "hidden_states.1,last_hidden_state")
    assert names == ("hidden_states.1", "last_hidden_state")
    assert not any("pooler" in name for name in stored(tmp_path / "b"))
    done = cast(capsys, "verify", tmp_path / "b", "--model", saved, "--allow-code")
    assert done.code == 0, done.err
    done = cast(capsys, "verify", tmp_path / "b", "--model", "bert")
    assert done.code == 0, done.err
    assert "is not the model that the bundle was made from" in done.out + done.err
    reported = refused(capsys, tmp_path, *program, "logits")
    assert "It gives last_hidden_state, pooler_output, hidden_states.1." in reported
    reported = refused(capsys, tmp_path, saved, "--allow-code", "--hidden-state", "-1")
    assert "--hidden-state -1: the model gives no hidden states" in reported
    smaller = tmp_path / "smaller.pt2"
    options = ("--pipeline", "", "--outputs", "pooler_output", "-o", smaller, "--allow-code")
    done = cast(capsys, "opt", saved, *options)
    assert done.code == 0, done.err
    module = torch.export.load(smaller).module()
    ids = torch.ones(2, 3, dtype=torch.int64)
    assert list(module(input_ids=ids, attention_mask=ids)) == ["pooler_output"]


PROMPTS = """
import torch
from torch import nn
from transformers import T5Config


class Counts(nn.Module):
    config = T5Config(vocab_size=96)

    def forward(self, input_ids):
        return {"ids": input_ids + 0, "count": (input_ids > 0).sum()}


def counts():
    return Counts(), {"input_ids": torch.randint(0, 90, (3, 7))}
"""


def test_prompts_of_several_batches_want_outputs_with_a_batch(
    root: Path, tmp_path: Path, capsys: Capture
) -> None:
    (root / "prompt_factories.py").write_text(PROMPTS, encoding="utf-8")
    bundle = tmp_path / "b"
    export(capsys, bundle, "prompt_factories:counts", "--dynamic", "input_ids:0=1..2")
    path = bundle / "manifest.json"
    content = replace(decode(path.read_bytes()), text=Text(padding_id=0, max_length=7))
    path.write_bytes(encode(content))
    tokenizer = (add_tokenizer(tmp_path) / "tokenizer.json").read_bytes()
    (bundle / "tokenizer.json").write_bytes(tokenizer)
    names = [*(file.name for file in content.files), "tokenizer.json"]
    content = replace(content, files=tuple(record(bundle / name) for name in names))
    path.write_bytes(encode(content))
    prompts = tmp_path / "p.txt"
    prompts.write_text("a b\nc\nd\n")
    done = cast(capsys, "run", bundle, "--prompts", prompts, "-o", tmp_path / "o")
    assert done.code == 2
    assert "output 'count': expected the batch as its first dimension, got []" in done.err
    prompts.write_text("a b\nc\n")
    done = cast(capsys, "run", bundle, "--prompts", prompts, "-o", tmp_path / "o")
    assert done.code == 0, done.err


def record(path: Path) -> FileRecord:
    return FileRecord(name=path.name, size=path.stat().st_size, sha256=digest(path))


class Numbers(torch.nn.Module):
    """Returns more than tensors, and states of its own."""

    def forward(self, x: torch.Tensor) -> object:
        states = (x, x + 1, x + 2)
        return {"y": x * 2, "n": 3, "hidden_states": states, "again": states[1]}


def test_a_program_with_numbers_and_hidden_states(tmp_path: Path, capsys: Capture) -> None:
    saved = tmp_path / "numbers.pt2"
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=8)}}
    program = torch.export.export(Numbers(), (torch.ones(3, 4),), dynamic_shapes=batch)
    torch.export.save(program, saved)
    reported = refused(capsys, tmp_path, saved, "--allow-code")
    assert "a plain number as n, expected" in reported
    assert "--outputs y,hidden_states.0,hidden_states.1,hidden_states.2,again." in reported
    arguments = ("--allow-code", "--outputs", "again,y", "--hidden-state", "-1")
    names = export(capsys, tmp_path / "b", saved, *arguments)
    assert names == ("again", "y", "hidden_states.-1")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    with enginecast.load(tmp_path / "b") as engine:
        found = engine.run({"x": x})
    for name, expected in (("again", x + 1), ("y", x * 2), ("hidden_states.-1", x + 2)):
        np.testing.assert_array_equal(found[name], expected)
