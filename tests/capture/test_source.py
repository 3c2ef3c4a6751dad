"""Sources: what they open, what they refuse, and the weights they give."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import t5_config, tiny_t5
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from enginecast.capture.sources.open_source import open_source
from enginecast.errors import SourceError, UsageError


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture
def folder(t5: Path, tmp_path: Path) -> Path:
    """A copy of the T5 folder that a test may damage."""
    return shutil.copytree(t5, tmp_path / "model")


def edit_config(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_the_dtypes_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = load_file(tiny_t5(tmp_path, dtype=dtype) / "model.safetensors")
    weights = open_source(str(tmp_path)).weights()
    for name, tensor in stored.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)
    kinds = {tensor.dtype for tensor in weights.values()}
    assert kinds == ({dtype, torch.float32} if dtype == torch.float16 else {dtype})


@pytest.mark.parametrize(
    ("dtype", "wo"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_eager_is_what_from_pretrained_gives(t5: Path, dtype: torch.dtype, wo: torch.dtype) -> None:
    model = open_source(str(t5)).eager(dtype)
    state = model.state_dict()
    assert state["encoder.block.0.layer.1.DenseReluDense.wo.weight"].dtype == wo
    assert state["shared.weight"].dtype == dtype
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("config_class", "whole_class", "encoder"),
    [
        (T5Config, T5ForConditionalGeneration, "T5EncoderModel"),
        (UMT5Config, UMT5ForConditionalGeneration, "UMT5EncoderModel"),
    ],
)
def test_text_encoder_of_a_whole_t5(
    tmp_path: Path, config_class: Any, whole_class: Any, encoder: str
) -> None:
    whole_class(config_class(**t5_config().to_diff_dict())).save_pretrained(tmp_path)
    source = open_source(str(tmp_path))
    assert type(source.eager()).__name__ == encoder
    assert not any("decoder" in name for name in source.weights())


def test_shards_are_read_through_their_index(folder: Path) -> None:
    whole = open_source(str(folder)).weights()
    model = open_source(str(folder)).eager()
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(folder, max_shard_size="8KB")
    (folder / "model.safetensors").unlink()
    weights = open_source(str(folder)).weights()
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole.items())
    first = sorted(folder.glob("model-*.safetensors"))[0]
    first.unlink()
    with pytest.raises(SourceError, match=f"{first.name} is missing"):
        open_source(str(folder))


def test_random_weights_depend_on_the_seed_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="no weights") as refused:
        open_source(str(folder))
    assert "--random-weights SEED" in refused.value.hint
    first = open_source(str(folder), random_weights=1).weights()
    torch.rand(5)
    again = open_source(str(folder), random_weights=1)
    other = open_source(str(folder), random_weights=2).weights()
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    assert torch.equal(first[name], again.weights()[name])
    assert torch.equal(first[name], again.eager().state_dict()[name])
    assert not torch.equal(first[name], other[name])


def damage_truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def damage_garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def damage_missing_tensor(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    del stored["encoder.final_layer_norm.weight"]
    save_file(stored, folder / "model.safetensors")


def damage_extra_tensor(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "adapter.weight": torch.zeros(2)}, folder / "model.safetensors")


def damage_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damage_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def damage_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"model\.safetensors cannot be read as safetensors"),
        (damage_garbage, r"model\.safetensors cannot be read as safetensors"),
        (damage_missing_tensor, r"misses encoder\.final_layer_norm\.weight"),
        (damage_extra_tensor, r"has no place for adapter\.weight"),
        (damage_pickle, r"pytorch_model\.bin is a pickle"),
        (damage_no_config, r"config\.json is missing"),
        (damage_json, r"config\.json cannot be read as JSON"),
        (lambda f: edit_config(f, auto_map={"AutoModel": "x.Y"}), r"config\.json: auto_map"),
        (lambda f: edit_config(f, quantization_config={}), r"config\.json: quantization_config"),
        (lambda f: edit_config(f, model_type="martian"), r"config\.json: .*martian"),
        (lambda f: edit_config(f, d_model=16), r"has shape .* T5EncoderModel expects"),
    ],
)
@pytest.mark.parametrize("use", ["weights", "eager"])
def test_damaged_folders_are_refused_by_name(
    folder: Path, damage: Callable[[Path], object], message: str, use: str
) -> None:
    damage(folder)
    with pytest.raises(SourceError, match=message):
        getattr(open_source(str(folder)), use)()


def test_unknown_kinds_of_model(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file or folder"):
        open_source(str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="--random-weights 1 does not fit"):
        open_source("package:factory", random_weights=1)


FACTORY = """
import torch
def module():
    return torch.nn.Linear(4, 6)
def with_example():
    return torch.nn.Linear(4, 6).bfloat16(), {"input": torch.ones(2, 4)}
def wrong():
    return 3
def wrong_example():
    return torch.nn.Linear(4, 6), {"input": [1]}
def broken():
    raise KeyError("checkpoint")
number = 5
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "user_factories"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("wrong", "returned a int, expected a module"),
        ("wrong_example", "the example's input is a list"),
        ("broken", "raised KeyError: 'checkpoint'"),
        ("absent", "user_factories has no attribute 'absent'"),
        ("number", "number is a int, expected a function"),
    ],
)
def test_factories_that_fail_are_named(user_module: str, attribute: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_source(f"{user_module}:{attribute}")


def test_a_program_file_needs_consent(tmp_path: Path) -> None:
    file = tmp_path / "linear.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 6), (torch.ones(2, 4),)), file)
    with pytest.raises(UsageError, match="is an exported program: loading it can run code"):
        open_source(str(file))
    source = open_source(str(file), allow_code=True)
    assert source.given_program() is not None
    assert source.eager()(torch.ones(2, 4)).shape == (2, 6)
