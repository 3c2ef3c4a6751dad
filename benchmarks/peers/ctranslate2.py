"""CTranslate2, in an environment of its own: run an encoder over valid tokens once for each line.

    python ctranslate2.py FOLDER fp32|int8

FOLDER has `model/` as transformers saves it (T5 v1.1, or BERT), `inputs.safetensors`, and gets the
output.  Prints the version when it is ready, and then the CPU seconds of each run.  CTranslate2's
converter takes T5 with its decoder only; this one writes the encoder's specification itself.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.pop(0)  # this file has the name of the package

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec
from safetensors.numpy import load_file, save_file


def fused(names: list[str]) -> np.ndarray:
    return np.concatenate([weights[name] for name in names])


def linear(spec: common_spec.LinearSpec, *names: str) -> None:
    spec.weight = fused([f"{name}.weight" for name in names])
    if f"{names[0]}.bias" in weights:
        spec.bias = fused([f"{name}.bias" for name in names])


def norm(spec: common_spec.LayerNormSpec, name: str) -> None:
    spec.gamma = weights[f"{name}.weight"]
    if f"{name}.bias" in weights:
        spec.beta = weights[f"{name}.bias"]


def t5() -> transformer_spec.TransformerEncoderModelSpec:
    assert config["feed_forward_proj"] == "gated-gelu"
    encoder = transformer_spec.TransformerEncoderSpec(
        config["num_layers"],
        config["num_heads"],
        activation=common_spec.Activation.GELUTanh,
        ffn_glu=True,
        relative_attention_bias=True,
        rms_norm=True,
    )
    encoder.scale_embeddings = False
    encoder.embeddings[0].weight = weights["shared.weight"]
    norm(encoder.layer_norm, "encoder.final_layer_norm")
    first = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    for index, layer in enumerate(encoder.layer):
        block = f"encoder.block.{index}.layer"
        attention, own = layer.self_attention, f"{block}.0.SelfAttention"
        attention.queries_scale = 1.0
        linear(attention.linear[0], f"{own}.q", f"{own}.k", f"{own}.v")
        linear(attention.linear[1], f"{own}.o")
        norm(attention.layer_norm, f"{block}.0.layer_norm")
        attention.relative_attention_bias = weights[first]
        attention.relative_attention_max_distance = np.dtype("int32").type(
            config["relative_attention_max_distance"]
        )
        linear(layer.ffn.linear_0, f"{block}.1.DenseReluDense.wi_0")
        linear(layer.ffn.linear_0_noact, f"{block}.1.DenseReluDense.wi_1")
        linear(layer.ffn.linear_1, f"{block}.1.DenseReluDense.wo")
        norm(layer.ffn.layer_norm, f"{block}.1.layer_norm")
    spec = transformer_spec.TransformerEncoderModelSpec(encoder)
    spec.config.layer_norm_epsilon = config["layer_norm_epsilon"]
    return spec


def bert() -> transformer_spec.TransformerEncoderModelSpec:
    encoder = transformer_spec.TransformerEncoderSpec(
        config["num_hidden_layers"],
        config["num_attention_heads"],
        pre_norm=False,
        activation=common_spec.Activation.GELU,
        layernorm_embedding=True,
        num_source_embeddings=2,
        embeddings_merge=common_spec.EmbeddingsMerge.ADD,
    )
    encoder.scale_embeddings = False
    encoder.embeddings[0].weight = weights["embeddings.word_embeddings.weight"]
    encoder.embeddings[1].weight = weights["embeddings.token_type_embeddings.weight"]
    encoder.position_encodings.encodings = weights["embeddings.position_embeddings.weight"]
    norm(encoder.layernorm_embedding, "embeddings.LayerNorm")
    for index, layer in enumerate(encoder.layer):
        own = f"encoder.layer.{index}"
        attention = layer.self_attention
        parts = [f"{own}.attention.self.{part}" for part in ("query", "key", "value")]
        linear(attention.linear[0], *parts)
        linear(attention.linear[1], f"{own}.attention.output.dense")
        norm(attention.layer_norm, f"{own}.attention.output.LayerNorm")
        linear(layer.ffn.linear_0, f"{own}.intermediate.dense")
        linear(layer.ffn.linear_1, f"{own}.output.dense")
        norm(layer.ffn.layer_norm, f"{own}.output.LayerNorm")
    spec = transformer_spec.TransformerEncoderModelSpec(encoder)
    spec.config.layer_norm_epsilon = config["layer_norm_eps"]
    return spec


folder, precision = Path(sys.argv[1]), sys.argv[2]
config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
makers = {"t5": (t5, "vocab_size"), "bert": (bert, "vocab_size")}
if config["model_type"] not in makers:
    sys.exit(f"no encoder of type {config['model_type']} is written for it here")
weights = load_file(folder / "model" / "model.safetensors")
make, words = makers[config["model_type"]]
spec = make()
spec.config.unk_token = "0"
spec.register_vocabulary([str(word) for word in range(config[words])])
spec.validate()
spec.optimize(quantization=None)
kind = {"fp32": "float32", "int8": "int8"}[precision]
with tempfile.TemporaryDirectory() as converted:
    spec.save(converted)
    model = ctranslate2.Encoder(converted, compute_type=kind, inter_threads=1, intra_threads=1)
feeds = load_file(folder / "inputs.safetensors")
ids, mask = feeds["input_ids"], feeds["attention_mask"]
rows = [row[: int(valid.sum())].tolist() for row, valid in zip(ids, mask, strict=True)]
types = {"bert": {"token_type_ids": [[0] * len(row) for row in rows]}}


def run() -> ctranslate2.StorageView:
    return model.forward_batch(rows, **types.get(config["model_type"], {})).last_hidden_state


found = np.array(run())
output = np.zeros((*mask.shape, found.shape[-1]), np.float32)
for index, row in enumerate(rows):
    output[index, : len(row)] = found[index, : len(row)]
save_file({"output": output}, folder / f"ctranslate2-{precision}.safetensors")
print("ready", ctranslate2.__version__, flush=True)
for _ in sys.stdin:
    start = time.process_time()
    run()
    print(time.process_time() - start, flush=True)
