"""Sources: what they open, what they refuse, and the weights they give."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from models import bert_config, llama_config, perturb, t5_config, tiny_bert, tiny_llama, tiny_t5
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    BertForMaskedLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from enginecast.capture.sources.huggingface.transformers_folder import refuse_apex
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.place import kind_of
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


def test_a_config_that_says_it_is_not_quantized_is_read(folder: Path) -> None:
    edit_config(folder, quantization_config=None)
    assert open_source(str(folder)).config is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_keep_the_dtypes_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    stored = load_file(tiny_t5(tmp_path, dtype=dtype) / "model.safetensors")
    weights = open_source(str(tmp_path)).weights()
    for name, tensor in stored.items():
        assert weights[name].dtype == tensor.dtype
        assert torch.equal(weights[name], tensor)
    kinds = {tensor.dtype for tensor in weights.values()}
    assert kinds == ({dtype, torch.float32} if dtype == torch.float16 else {dtype})


def test_a_dtype_in_the_config_does_not_convert_the_weights(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    halves = {name: tensor.half().contiguous() for name, tensor in stored.items()}
    save_file(halves, folder / "model.safetensors")
    edit_config(folder, dtype="bfloat16")
    weights = open_source(str(folder)).weights()
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}  # wo, too


def test_tied_weights_share_one_tensor_and_all_names_are_there(t5: Path) -> None:
    source = open_source(str(t5))
    weights = source.weights()
    assert list(weights) == list(source.empty().state_dict())
    shared = weights["shared.weight"]
    assert weights["encoder.embed_tokens.weight"].data_ptr() == shared.data_ptr()


def test_empty_holds_only_what_no_file_stores(tmp_path: Path) -> None:
    empty = open_source(str(tiny_llama(tmp_path))).empty()
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert dict(empty.named_buffers())["rotary_emb.inv_freq"].device.type == "cpu"


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


def test_old_names_and_a_prefix_are_mapped(tmp_path: Path) -> None:
    model = BertForMaskedLM(bert_config())
    perturb(model)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    norm = "bert.embeddings.LayerNorm."
    stored[norm + "gamma"] = stored.pop(norm + "weight")
    stored[norm + "beta"] = stored.pop(norm + "bias")
    save_file(stored, file, metadata={"format": "pt"})
    edit_config(tmp_path, architectures=["BertModel"])
    with pytest.raises(SourceError, match=r"misses pooler\.dense\.bias"):
        open_source(str(tmp_path)).weights()  # a masked LM has no pooler
    edit_config(tmp_path, architectures=["BertForMaskedLM"])
    weights = open_source(str(tmp_path)).weights()
    assert torch.equal(weights[norm + "weight"], stored[norm + "gamma"])


def test_a_head_that_the_class_lacks_is_left_out(tmp_path: Path) -> None:
    tiny_bert(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {f"bert.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**stored, "cls.seq_relationship.bias": torch.zeros(2)}, file)
    assert "embeddings.word_embeddings.weight" in open_source(str(tmp_path)).weights()


@pytest.mark.parametrize(
    ("model", "changes", "left_out"),
    [
        ("LlamaForCausalLM", {}, {"the KV cache": "--kv-cache"}),
        ("LlamaForCausalLM", {"use_cache": False}, {}),
        ("LlamaModel", {}, {}),
    ],
)
def test_a_cache_that_is_no_output_is_named(
    tmp_path: Path, model: str, changes: dict[str, bool], left_out: dict[str, str]
) -> None:
    config = {**llama_config().to_dict(), "architectures": [model], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert open_source(str(tmp_path), random_weights=0).left_out == left_out


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


def test_loading_prints_nothing(t5: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = open_source(str(t5))
    source.weights()
    source.eager(torch.bfloat16)
    assert capfd.readouterr() == ("", "")


def test_fingerprint_follows_config_and_weights(folder: Path) -> None:
    before = open_source(str(folder)).fingerprint()
    assert open_source(str(folder)).fingerprint() == before
    edit_config(folder, layer_norm_epsilon=1e-5)
    changed = open_source(str(folder)).fingerprint()
    assert changed["config"] != before["config"]
    assert changed["weights"] == before["weights"]
    file = folder / "model.safetensors"
    stored = load_file(file)
    stored["shared.weight"][0, 0] += 1
    save_file(stored, file)
    assert open_source(str(folder)).fingerprint()["weights"] != before["weights"]


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


def test_random_weights_do_not_replace_a_file(t5: Path) -> None:
    with pytest.raises(UsageError, match=r"--random-weights 1 .* it has model\.safetensors"):
        open_source(str(t5), random_weights=1)


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


def test_factories_give_modules_with_and_without_example(user_module: str) -> None:
    assert open_source(f"{user_module}:module").example() == {}
    source = open_source(f"{user_module}:with_example")
    assert list(source.example()) == ["input"]
    assert source.forward_arguments == ("input",)
    assert source.weights()["weight"].dtype == torch.bfloat16
    assert source.eager().state_dict()["weight"].dtype == torch.float32
    assert source.weights()["weight"].dtype == torch.bfloat16  # eager was a copy
    empty = source.empty()
    assert isinstance(empty, nn.Linear)
    assert empty.weight.is_meta
    assert empty.weight.dtype == torch.float32


def test_a_module_s_example_holds_tensors_or_nothing() -> None:
    given = {"input": torch.ones(2, 4), "mask": None}
    assert list(open_source(nn.Linear(4, 6), example=given).example()) == ["input"]
    with pytest.raises(SourceError, match="Linear: the example's scale is a float, expected a"):
        open_source(nn.Linear(4, 6), example={"scale": 2.0})
    with pytest.raises(SourceError, match="Linear: the example's by is a slice, expected tensors"):
        open_source(nn.Linear(4, 6), example={"input": torch.ones(2, 4), "by": slice(2)})


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


def test_an_import_that_fails_is_named() -> None:
    with pytest.raises(SourceError, match=r"importing 'no\.such' failed: ModuleNotFoundError"):
        open_source("no.such:factory")


def test_a_program_file_needs_consent(tmp_path: Path) -> None:
    file = tmp_path / "linear.pt2"
    torch.export.save(torch.export.export(nn.Linear(4, 6), (torch.ones(2, 4),)), file)
    with pytest.raises(UsageError, match="is an exported program: loading it can run code"):
        open_source(str(file))
    source = open_source(str(file), allow_code=True)
    assert source.given_program() is not None
    assert source.eager()(torch.ones(2, 4)).shape == (2, 6)


def test_other_zip_files_are_not_programs(tmp_path: Path) -> None:
    import zipfile

    file = tmp_path / "engine.pt2"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("engine/data/aotinductor/model/wrapper.so", b"")
    with pytest.raises(UsageError, match="is an AOTInductor package"):
        open_source(str(file))
    with pytest.raises(SourceError, match="is an AOTInductor package: machine code"):
        open_source(str(file), allow_code=True)
    file.write_bytes(b"no zip")
    with pytest.raises(SourceError, match=r"engine\.pt2 is not a \.pt2 file"):
        open_source(str(file), allow_code=True)


APEX = """
import torch
class FusedRMSNorm(torch.nn.Module):
    def __init__(self, size, eps=1e-6, **kwargs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
    def forward(self, x):
        raise RuntimeError("needs a GPU")
"""
MODELING = """
try:
    from apex.normalization import FusedRMSNorm as Norm
except ImportError:
    from torch.nn import RMSNorm as Norm
"""
OPEN_T5 = """
import sys
from enginecast.capture.sources.huggingface.transformers_folder import without_apex
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.place import kind_of
model = open_source(sys.argv[1]).empty()
with without_apex():
    import modeling
import apex.normalization
print(type(model.encoder.final_layer_norm).__module__, modeling.Norm.__module__)
"""


@pytest.mark.slow
def test_apex_does_not_reach_the_model(t5: Path, tmp_path: Path) -> None:
    package = tmp_path / "apex" / "normalization"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text(APEX)
    (tmp_path / "modeling.py").write_text(MODELING)  # as T5 had it until transformers#45723
    run = subprocess.run(
        [sys.executable, "-c", OPEN_T5, str(t5)],
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [
        "transformers.models.t5.modeling_t5",
        "torch.nn.modules.normalization",
    ]


def test_a_model_built_with_apex_is_refused() -> None:
    fused = type("FusedRMSNorm", (nn.Module,), {"__module__": "apex.normalization"})
    model = nn.ModuleDict({"final_layer_norm": fused()})
    with pytest.raises(SourceError, match="t5: final_layer_norm is apex' FusedRMSNorm"):
        refuse_apex(model, "t5")


def test_modules_below_a_package_that_changes_itself_are_left_to_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in (("grown", ""), ("shared", "declare_namespace(__name__)"), ("still", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import_module("grown").__path__ = [str(tmp_path / "elsewhere")]
    assert kind_of("grown.late:make") == kind_of("shared.late:make") == "factory"
    with pytest.raises(SourceError, match=r"No module named 'still\.late'"):
        kind_of("still.late:make")
    del sys.modules["grown"]
