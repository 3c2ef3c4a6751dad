"""Folders of sentence-transformers: pooling, projections and normalization are in the engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import cast
from models import add_tokenizer, tiny_bert
from safetensors.torch import save_file
from torch import Tensor

from enginecast.capture.sources.base.padding_side import FROM_THE_LEFT
from enginecast.capture.sources.huggingface.sentence_folder import EMBEDDING
from enginecast.capture.sources.open_source import open_source
from enginecast.errors import SourceError
from enginecast.runtime.load import load
from enginecast.runtime.prompts import open_tokenizer

WIDTH = 32
NEW = "sentence_transformers.base.modules.some."


def sentence_folder(folder: Path, *parts: tuple[str, Mapping[str, Any]], prefix: str = NEW) -> Path:
    """A tiny BERT, and the modules after it, written as sentence-transformers writes them."""
    add_tokenizer(tiny_bert(folder))
    entries = [{"idx": 0, "name": "0", "path": "", "type": f"{prefix}Transformer"}]
    generator = torch.Generator().manual_seed(7)
    for index, (kind, config) in enumerate(parts, start=1):
        path = f"{index}_{kind}"
        (folder / path).mkdir()
        entries.append({"idx": index, "name": str(index), "path": path, "type": prefix + kind})
        (folder / path / "config.json").write_text(json.dumps(config))
        if weights := weights_of(kind, config, generator):
            save_file(weights, folder / path / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(entries))
    return folder


def weights_of(
    kind: str, config: Mapping[str, Any], generator: torch.Generator
) -> dict[str, Tensor]:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if kind == "LayerNorm":
        return {"norm.weight": drawn(config["dimension"]), "norm.bias": drawn(config["dimension"])}
    if kind != "Dense":
        return {}
    found = {"linear.weight": drawn(config["out_features"], config["in_features"])}
    if config.get("bias", True):
        found["linear.bias"] = drawn(config["out_features"])
    if config.get("use_residual") and config["in_features"] != config["out_features"]:
        found["residual.weight"] = drawn(config["out_features"], config["in_features"])
    return found


IDS = torch.arange(15).reshape(3, 5) + 3
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]])


def embedded(folder: Path) -> tuple[Tensor, Tensor]:
    """The embeddings of eager, and the last hidden states that they are made of."""
    with torch.no_grad():
        found = open_source(str(folder)).eager()(input_ids=IDS, attention_mask=MASK)
    return found[EMBEDDING], found["last_hidden_state"]


def expected(mode: str, tokens: Tensor) -> Tensor:
    """Text by text, over its own tokens alone."""
    rows = []
    for row, mask in zip(tokens, MASK, strict=True):
        own = row[mask.bool()]
        place = torch.arange(1, len(own) + 1)[:, None]
        rows.append(
            {
                "cls": own[0],
                "max": own.max(0).values,
                "mean": own.mean(0),
                "mean_sqrt_len_tokens": own.sum(0) / len(own) ** 0.5,
                "weightedmean": (own * place).sum(0) / place.sum(),
                "lasttoken": own[-1],
            }[mode]
        )
    return torch.stack(rows)


MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


@pytest.mark.parametrize("mode", MODES)
def test_pooling_reads_the_tokens_of_a_text_alone(tmp_path: Path, mode: str) -> None:
    folder = sentence_folder(tmp_path / "m", ("Pooling", {"pooling_mode": mode}))
    found, tokens = embedded(folder)
    torch.testing.assert_close(found, expected(mode, tokens), rtol=1e-6, atol=1e-6)


PROJECTED: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("Pooling", {"pooling_mode": "mean"}),
    ("Dense", {"in_features": WIDTH, "out_features": 24, "activation_function": "torch.nn.GELU"}),
    ("LayerNorm", {"dimension": 24}),
    (
        "Dense",
        {
            "in_features": 24,
            "out_features": 16,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
            "use_residual": True,
        },
    ),
    ("Dropout", {"dropout": 0.3}),
    ("Normalize", {}),
)


def test_an_engine_gives_the_embeddings_of_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sentence_folder(tmp_path / "m", *PROJECTED)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 6}')
    bundle = tmp_path / "bundle"
    done = cast(capsys, "export", folder, "-o", bundle, "--json", "--quiet", "--no-speed")
    assert (done.code, done.json["outcome"]) == (0, "verified")

    weights = open_source(str(folder)).weights()
    hidden = torch.nn.functional.gelu
    with load(bundle, threads=1) as engine:
        assert engine.manifest.text is not None
        assert engine.manifest.text.max_length == 6
        assert [output.name for output in engine.outputs] == [
            "last_hidden_state",
            "pooler_output",
            EMBEDDING,
        ]
        found = engine.encode(["red fox", "two cats sleep on a sofa and on a bed"])
    assert found["attention_mask"].sum(1).max() == 6
    tokens, mask = found["last_hidden_state"], found["attention_mask"][..., None]
    pooled = torch.from_numpy((tokens * mask).sum(1) / mask.sum(1)).float()
    x = hidden(pooled @ weights["sentence.layers.0.linear.weight"].T + bias(weights, 0))
    norm = weights["sentence.layers.1.norm.weight"], weights["sentence.layers.1.norm.bias"]
    x = torch.nn.functional.layer_norm(x, (24,), *norm)
    x = (
        x
        @ (
            weights["sentence.layers.2.linear.weight"]
            + weights["sentence.layers.2.residual.weight"]
        ).T
    )
    np.testing.assert_allclose(found[EMBEDDING], x / x.norm(dim=1, keepdim=True), atol=2e-6)


def bias(weights: Mapping[str, Tensor], layer: int) -> Tensor:
    return weights[f"sentence.layers.{layer}.linear.bias"]


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda f: (f / "modules.json").write_text("{}"), "Expected `array`, got `object`"),
        (lambda f: (f / "modules.json").write_text("[]"), "Transformer as its first module"),
        (
            lambda f: (f / "modules.json").write_text(
                (f / "modules.json").read_text().replace("2_Dense", "../../x")
            ),
            "outside the folder",
        ),
        (lambda f: (f / "2_Dense/model.safetensors").unlink(), "do not fit"),
        (
            lambda f: (f / "2_Dense/config.json").write_text("{}"),
            "missing required field `in_features`",
        ),
        *(
            (
                lambda f, key=key, value=value: change(f / "2_Dense/config.json", **{key: value}),
                rf"2_Dense/config\.json: {key}: expected",
            )
            for key, value in [
                ("activation_function", 3),
                ("activation_function", "torch.nn.Linear"),
                ("activation_function", "torch.nn.Module"),
                ("in_features", "32"),
                ("in_features", -32),
                ("in_features", 10**30),
                ("bias", "no"),
                ("use_residual", 1),
            ]
        ),
        *(
            (
                lambda f, value=value: change(f / "1_Pooling/config.json", pooling_mode=value),
                "pooling_mode: expected cls, max",
            )
            for value in (3, [], [["mean"]])
        ),
        (
            lambda f: (f / "1_Pooling/config.json").write_text('{"pooling_mode": "median"}'),
            "pooling_mode: expected cls, max",
        ),
    ],
)
def test_damaged_folders_are_refused_by_file(tmp_path: Path, break_it: Any, said: str) -> None:
    folder = sentence_folder(tmp_path / "m", *PROJECTED[:2])
    break_it(folder)
    with pytest.raises(SourceError, match=said):
        open_source(str(folder)).weights()


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_where_the_tokenizer_cuts(tmp_path: Path, side: str) -> None:
    """Though tokenizer.json says otherwise: the other file comes before it."""
    folder = sentence_folder(tmp_path / "m", ("Pooling", {"pooling_mode": "mean"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"truncation_side": side}))
    if side == "right":
        change(folder / "tokenizer.json", truncation=FROM_THE_LEFT)
    whole = open_tokenizer(folder / "tokenizer.json", 99).encode("a b c d").ids
    (tmp_path / "b").mkdir()
    open_source(str(folder)).write_beside(tmp_path / "b")
    cut = open_tokenizer(tmp_path / "b" / "tokenizer.json", 3).encode("a b c d").ids
    assert cut == ([*whole[2:4], whole[-1]] if side == "left" else [*whole[:2], whole[-1]])
