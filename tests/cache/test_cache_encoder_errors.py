"""Encoders that cannot fill a cache, and options that do not fit them."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bundles import (
    MASKED,
    engine,
    make_bundle,
    manifest,
    save_model,
    verdict,
    write_tokenizer,
)
from cache_fixtures import words_t5
from onnx import helper, numpy_helper

from enginecast.cache.encoders.open_encoder import Encoder, open_encoder
from enginecast.cache.encoders.request import EncoderRequest
from enginecast.errors import (
    BundleError,
    EnginecastError,
    InputError,
    SourceError,
    UsageError,
)
from enginecast.runtime.bundle.manifest import Input, Output
from enginecast.runtime.bundle.staging import stage


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(words_t5(tmp_path_factory.mktemp("model") / "t5"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Looks words up; takes 1 to 4 texts of 2 to 6 tokens."""
    return str(make_bundle(tmp_path_factory.mktemp("bundle") / "tiny"))


def open_tiny(folder: Path, **changes: Any) -> Encoder:
    return open_encoder(EncoderRequest(str(make_bundle(folder / "bundle", manifest(**changes)))))


def test_a_rejected_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no engine that was verified"):
        open_tiny(tmp_path, engines=(engine(verdict=verdict("rejected")),))


def declared(folder: Path, **changes: Any) -> str:
    """A bundle whose engine declares what its manifest says, and is never run."""
    content = manifest(**changes)
    described: tuple[Input | Output, ...] = (*content.inputs, *content.outputs)
    values = [(one.name, one.dtype, one.shape) for one in described]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape)
        for name, kind, shape in values
    ]
    inputs, outputs = infos[: len(content.inputs)], infos[len(content.inputs) :]
    kinds = {one.name: np.dtype(one.dtype) for one in content.outputs}
    held = [numpy_helper.from_array(np.zeros(1, kind), f"{name}_0") for name, kind in kinds.items()]
    nodes = [
        helper.make_node("Expand", [f"{one.name}_0", f"{one.name}_shape"], [one.name])
        for one in outputs
    ]
    held += [
        numpy_helper.from_array(np.ones(len(one.shape), np.int64), f"{one.name}_shape")
        for one in content.outputs
    ]
    with stage(folder / "bundle") as staging:
        graph = helper.make_graph(nodes, "declared", inputs, outputs, held)
        save_model(graph, staging.folder / "engine.onnx")
        write_tokenizer(staging.folder)
        record = engine(weights=None)
        return str(staging.publish(msgspec.structs.replace(content, engines=(record,))))


def other(**changes: Any) -> dict[str, Any]:
    """A manifest with one more input."""
    made = Input(**{"name": "x", "kind": "tensor", "dtype": "int64", "shape": MASKED, **changes})
    return {"inputs": (*manifest().inputs, made)}


def gives(dtype: Any, *shape: int | str) -> dict[str, Any]:
    return {"outputs": (Output(name="scores", dtype=dtype, shape=shape),)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (other(), InputError, "input 'x': expected token ids, mask or types"),
        (other(kind="token_ids"), InputError, "one input of token ids, got 2"),
        (other(kind="token_type_ids", shape=("batch", 7)), InputError, "input 'x': expected"),
        ({"inputs": manifest().inputs[1:]}, InputError, "one input of token ids, got 0"),
        (gives("float32", "batch", "sequence"), UsageError, "--outputs scores: expected floats"),
        (gives("float32", "batch", 4, "sequence", 3), UsageError, "--outputs scores: expected"),
        (gives("int64", "batch", "sequence", 3), UsageError, "--outputs scores: .* int64"),
    ],
)
def test_engines_that_are_not_text_encoders(
    tmp_path: Path, changes: dict[str, Any], error: type[EnginecastError], message: str
) -> None:
    request = EncoderRequest(declared(tmp_path, **changes))
    with pytest.raises(error, match=message):
        open_encoder(request)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_length": 7}, r"--max-length 7: expected 1..6, which is what tiny takes"),
        ({"max_length": 0}, r"--max-length 0: expected 1..6"),
        ({"outputs": ("hidden", "pooled")}, "--outputs pooled: the engine has no output"),
        ({"precision": "bf16"}, "--precision bf16: .* is a bundle"),
        ({"random_weights": 3}, "--random-weights 3: .* is a bundle"),
        ({"template": "a photo"}, r"--template 'a photo': expected one \{\}, got 0"),
        ({"clean": "lower"}, "--clean lower: expected one of none, strip, lower-strip, white"),
        ({"skip_rows": 5}, "--skip-rows 5: expected fewer than --max-length 5"),
        ({"skip_rows": -1}, "--extra-rows, --skip-rows: expected at least 0"),
        ({"tokenizer": "gone"}, "--tokenizer gone: no such file or folder"),
        ({"pipeline": "flux"}, "--for flux"),
    ],
)
def test_options_that_do_not_fit_an_engine(tiny: str, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_encoder(EncoderRequest(tiny, **asked))


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"precision": "int8"}, UsageError, "--precision int8: expected fp32, bf16, fp16"),
        ({"providers": ("CPUExecutionProvider",)}, UsageError, "--provider CPUExecutionProvider"),
        ({"device": "tpu"}, UsageError, "--device tpu: expected cpu or cuda"),
        ({"outputs": ("pooler_output",)}, UsageError, "the model gives no output 'pooler_output'"),
        ({"outputs": ("hidden_states.9",)}, UsageError, "gives 3 hidden states"),
        ({"random_weights": 3}, UsageError, "--random-weights 3 does not fit"),
        ({"max_length": 0}, UsageError, "--max-length 0: expected at least 1"),
    ],
)
def test_options_that_do_not_fit_a_model(
    t5: str, asked: dict[str, Any], error: type[EnginecastError], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_encoder(EncoderRequest(t5, **asked))


def test_a_model_without_tokenizer(tmp_path: Path, t5: str) -> None:
    shutil.copytree(t5, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(SourceError, match="bare: expected a tokenizer"):
        open_encoder(EncoderRequest(str(tmp_path / "bare")))
    made = open_encoder(EncoderRequest(str(tmp_path / "bare"), tokenizer=t5))
    assert made.spec == open_encoder(EncoderRequest(t5)).spec


def test_a_mask_that_the_engine_does_not_take(tmp_path: Path) -> None:
    bundle = declared(tmp_path, inputs=manifest().inputs[:1])
    spec = open_encoder(EncoderRequest(bundle)).spec
    assert (spec.mask, spec.rows) == (False, "all")
    with pytest.raises(UsageError, match="--mask: bundle takes no attention mask"):
        open_encoder(EncoderRequest(bundle, mask=True))
