"""A tiny bundle: an embedding with a mask, its weights in a safetensors file, and a tokenizer."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import safetensors.numpy
from onnx import TensorProto, helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import WordLevelTrainer

from enginecast.runtime.bundle.manifest import (
    EngineRecord,
    Input,
    Manifest,
    Model,
    Output,
    Text,
    Verdict,
    Where,
)
from enginecast.runtime.bundle.staging import Staging, stage

VOCABULARY = 9
WIDTH = 3
CPU = "CPUExecutionProvider"
MASKED = ("batch", "sequence")


def table() -> np.ndarray[Any, Any]:
    """The embedding table [VOCABULARY, WIDTH] of the tiny engine."""
    return np.random.default_rng(7).standard_normal((VOCABULARY, WIDTH)).astype(np.float32)


def write_engine(folder: Path) -> Path:
    """engine.onnx, which computes table[input_ids] * attention_mask, and its weights."""
    data = safetensors.numpy.save({"table": table()})
    (folder / "weights.safetensors").write_bytes(data)
    weight = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=table().shape)
    weight.data_location = TensorProto.EXTERNAL
    where = {"location": "weights.safetensors", "offset": len(data) - table().nbytes}
    for key, value in (where | {"length": table().nbytes}).items():
        weight.external_data.add(key=key, value=str(value))
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["hidden"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [
            helper.make_tensor_value_info(name, TensorProto.INT64, MASKED)
            for name in ("input_ids", "attention_mask")
        ],
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, (*MASKED, WIDTH))],
        [weight, helper.make_tensor("last", TensorProto.INT64, [1], [-1])],
    )
    return save_model(graph, folder / "engine.onnx")


def write_unary(
    path: Path, operator: str, source: int, result: int | None = None, **attributes: Any
) -> Path:
    """A model of one operator, x [batch, 3] -> y."""
    result = result or source
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], **attributes)],
        "unary",
        [helper.make_tensor_value_info("x", source, ("batch", 3))],
        [helper.make_tensor_value_info("y", result, ("batch", 3))],
    )
    return save_model(graph, path)


def save_model(graph: onnx.GraphProto, path: Path) -> Path:
    opset = helper.make_opsetid("", 20)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=10)
    path.write_bytes(model.SerializeToString())
    return path


def verdict(outcome: Any = "verified", provider: str = CPU) -> Verdict:
    ran: Any = "ran" if outcome == "verified" else "not run on target"
    where = Where(provider=provider, device="tiny", versions={"onnxruntime": "1.31"})
    return Verdict(outcome=outcome, engine=ran, where=where)


def engine(**changes: Any) -> EngineRecord:
    record = EngineRecord(
        target="onnxruntime",
        file="engine.onnx",
        weights="weights.safetensors",
        precision="fp32",
        opset=20,
        minimum_runtime="onnxruntime>=1.28",
        providers=(CPU, "CUDAExecutionProvider"),
        verdict=verdict(),
    )
    return msgspec.structs.replace(record, **changes)


def manifest(**changes: Any) -> Manifest:
    """The manifest of the tiny engine; `files` is empty until it is published."""
    ids = Input(
        name="input_ids",
        kind="token_ids",
        dtype="int64",
        shape=MASKED,
        minimum=0,
        maximum=VOCABULARY - 1,
    )
    mask = Input(name="attention_mask", kind="attention_mask", dtype="int64", shape=MASKED)
    content = Manifest(
        enginecast="0.1.0",
        model=Model(name="tiny", fingerprint={"weights": "1"}),
        inputs=(ids, mask),
        symbols={"batch": (1, 4), "sequence": (2, 6)},
        outputs=(Output(name="hidden", dtype="float32", shape=(*MASKED, WIDTH)),),
        pipeline="",
        precision="fp32",
        text=Text(padding_id=0, max_length=5),
        engines=(engine(),),
    )
    return msgspec.structs.replace(content, **changes)


def unary_manifest(dtype: Any, result: Any = None, **changes: Any) -> Manifest:
    """The manifest of a model made by `write_unary`."""
    content = manifest(
        inputs=(Input(name="x", kind="tensor", dtype=dtype, shape=("batch", 3)),),
        symbols={"batch": (1, 4)},
        outputs=(Output(name="y", dtype=result or dtype, shape=("batch", 3)),),
        text=None,
        engines=(engine(weights=None),),
    )
    return msgspec.structs.replace(content, **changes)


def write_tokenizer(folder: Path) -> Path:
    """Words of "red green blue fox", then </s>; ids 0 <pad>, 1 </s>, 2 <unk>."""
    special = ["<pad>", "</s>", "<unk>"]
    tokenizer = Tokenizer(WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(special_tokens=special)
    tokenizer.train_from_iterator(["red green blue fox"], trainer)
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def make_bundle(target: Path, content: Manifest | None = None, *, overwrite: bool = False) -> Path:
    """Publish the tiny engine with its tokenizer."""
    with stage(target, overwrite=overwrite) as staging:
        return fill(staging, content)


def fill(staging: Staging, content: Manifest | None = None) -> Path:
    """Write the tiny engine with its tokenizer into a folder, and publish it."""
    write_engine(staging.folder)
    write_tokenizer(staging.folder)
    return staging.publish(content or manifest())


def make_unary_bundle(
    target: Path, content: Manifest, operator: str, source: int, *args: Any, **attributes: Any
) -> Path:
    """Publish a model of one operator."""
    with stage(target) as staging:
        write_unary(staging.folder / "engine.onnx", operator, source, *args, **attributes)
        return staging.publish(content)


def feeds(batch: int = 2, sequence: int = 3) -> dict[str, np.ndarray[Any, Any]]:
    """Inputs that fit the tiny engine."""
    rng = np.random.default_rng(11)
    return {
        "input_ids": rng.integers(0, VOCABULARY, (batch, sequence)),
        "attention_mask": rng.integers(0, 2, (batch, sequence)),
    }
