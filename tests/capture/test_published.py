"""Checkpoints as they are published: what is quantized in them is read bit for bit."""

import json
import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers
import ml_dtypes
import numpy as np
import pytest
import torch
from models import t5_config, tiny_t5
from safetensors.torch import load_file, save_file
from tiny_components import CONFIGS, save
from torch import Tensor
from transformers import BitsAndBytesConfig, T5EncoderModel

from enginecast.api import export
from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.request import ModelOptions
from enginecast.errors import EnginecastError, MissingError, SourceError, UsageError
from enginecast.passes.quantize.plan.file import read_plan

Tensors = dict[str, Tensor]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_t5(tmp_path_factory.mktemp("t5"))


def layers_of(tensors: Tensors) -> list[str]:
    """The weights that are quantized, without ".weight"."""
    wanted = ("SelfAttention.q", "DenseReluDense.wo", "attn1.to_q", "ff.net.2")
    names = (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    return [name for name in names if name.endswith(wanted)]


def in_fp8(weight: Tensor, parts: tuple[int, ...], dtype: torch.dtype = E4M3) -> tuple[Tensor, ...]:
    """A weight [N, K] as values and a scale for each of so many parts of each dimension."""
    steps = [size // part for size, part in zip(weight.shape, parts, strict=True)]
    blocks = weight.float().unflatten(0, (parts[0], steps[0])).unflatten(2, (parts[1], steps[1]))
    scale = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(dtype).max
    return (blocks / scale).to(dtype).reshape(weight.shape), scale[:, 0, :, 0]


def comfy_of_old(tensors: Tensors) -> dict[str, str]:
    """`fp8_scaled` of 2024 and 2025; one layer stays as it is, with a scale of 1."""
    first, *others = layers_of(tensors)
    tensors[f"{first}.scale_weight"] = torch.ones(1)
    for layer in others:
        values, scale = in_fp8(tensors[f"{layer}.weight"], (1, 1))
        tensors |= {f"{layer}.weight": values, f"{layer}.scale_weight": scale.reshape(())}
        tensors[f"{layer}.scale_input"] = torch.ones(())
    tensors |= {"scaled_fp8": torch.zeros(2).to(E4M3), "spiece_model": torch.zeros(9).byte()}
    return {}


def comfy(tensors: Tensors) -> dict[str, str]:
    """One layer says its format beside it, the others in the metadata of the file."""
    first, *others = layers_of(tensors)
    said = {"format": "float8_e4m3fn"}
    for layer in (first, *others):
        values, scale = in_fp8(tensors[f"{layer}.weight"], (1, 1))
        tensors |= {f"{layer}.weight": values, f"{layer}.weight_scale": scale.reshape(())}
    tensors[f"{first}.comfy_quant"] = torch.tensor(list(json.dumps(said).encode())).byte()
    layers = dict.fromkeys(others, said)
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def by_row(tensors: Tensors) -> dict[str, str]:
    """As BFL, compressed-tensors and fbgemm have it: [N], or [N, 1] in bf16."""
    for place, layer in enumerate(layers_of(tensors)):
        values, scale = in_fp8(weight := tensors[f"{layer}.weight"], (len(weight), 1))
        scale = scale[:, 0] if place % 2 else scale.bfloat16()
        tensors |= {f"{layer}.weight": values, f"{layer}.weight_scale": scale}
        tensors[f"{layer}.input_scale"] = torch.tensor(0.5)
    return {}


def by_block(tensors: Tensors) -> dict[str, str]:
    for place, layer in enumerate(layers_of(tensors)):
        weight = tensors[f"{layer}.weight"]
        values, scale = in_fp8(weight, (2, 4) if place % 2 else (len(weight), 4))
        if place % 2:
            tensors |= {f"{layer}.weight": values, f"{layer}.weight_scale_inv": scale}
        else:  # musubi-tuner's
            tensors |= {f"{layer}.weight": values, f"{layer}.scale_weight": scale[..., None]}
    return {}


def cast(tensors: Tensors) -> dict[str, str]:
    """Everything, norms too."""
    for place, (name, tensor) in enumerate(tensors.items()):
        tensors[name] = tensor.to(E4M3 if place % 2 else torch.float8_e5m2)
    return {}


def mixed(tensors: Tensors) -> dict[str, str]:
    first, *others = layers_of(tensors)
    for layer in others:
        values, scale = in_fp8(tensors[f"{layer}.weight"], (1, 1), torch.float8_e5m2)
        tensors |= {f"{layer}.weight": values, f"{layer}.weight_scale": scale}
    tensors[f"{first}.weight"] = tensors[f"{first}.weight"].to(E4M3)
    return {}


LAYOUTS = (comfy_of_old, comfy, by_row, by_block, cast, mixed)


def independently(file: Path) -> dict[str, np.ndarray]:
    """The weights in fp32, by ml_dtypes."""
    kinds = {E4M3: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
    tensors, found = load_file(file), {}
    for name, tensor in tensors.items():
        layer, _, last = name.rpartition(".")
        if last not in ("weight", "bias", "scale_shift_table"):
            continue
        if tensor.dtype not in kinds:
            found[name] = tensor.float().numpy()
            continue
        found[name] = tensor.view(torch.uint8).numpy().view(kinds[tensor.dtype]).astype(np.float32)
        for kind in ("scale_weight", "weight_scale", "weight_scale_inv"):
            if f"{layer}.{kind}" in tensors:
                scale = tensors[f"{layer}.{kind}"].float().numpy()
                scale = scale[..., 0] if scale.ndim == 3 else scale
                scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
                steps = [n // m for n, m in zip(tensor.shape, scale.shape, strict=True)]
                found[name] = found[name] * np.kron(scale, np.ones(steps, np.float32))
    return found


@pytest.mark.parametrize("kind", ["transformers", "diffusers"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_is_widened_bit_for_bit(
    t5: Path, tmp_path: Path, layout: Callable[[Tensors], dict[str, str]], kind: str
) -> None:
    folder = tmp_path / "model"
    if kind == "diffusers":
        save("dit", folder)
    else:
        shutil.copytree(t5, folder)
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    metadata = layout(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt", **metadata})
    wanted, source = independently(file), open_source(str(folder))
    for name, tensor in source.eager().state_dict().items():
        stored = "shared.weight" if name.endswith("embed_tokens.weight") else name
        assert np.array_equal(tensor.float().numpy(), wanted[stored]), name
    assert source.fingerprint()
    [note] = source.stored.notes()
    unheld = [scale.isnan().all() for scale in source.scales().values()]  # by a scale for each row
    assert any(unheld) == (layout in (by_block, mixed, cast))
    assert all(unheld) == (layout is by_block)
    if layout is mixed:
        count, whole = len(layers_of(tensors)), sum(tensor.ndim > 1 for tensor in wanted.values())
        assert f"{count - 1} of {whole} layers are float8_e5m2 with scales" in note
        assert f"1 of {whole} layers are float8_e4m3fn without scales" in note


def changed(change: Callable[[Tensors, str], object]) -> Callable[[Tensors], dict[str, str]]:
    def layout(tensors: Tensors) -> dict[str, str]:
        comfy_of_old(tensors)
        change(tensors, layers_of(tensors)[1])
        return {}

    return layout


def said(**content: str) -> Tensor:
    return torch.tensor(list(json.dumps(content).encode())).byte()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t, n: t.pop(f"{n}.scale_weight"), "has no scale, and the file says that its"),
        (
            lambda t, n: t.update({f"{n}.scale_weight": torch.tensor(torch.inf)}),
            "wo.weight has a scale with non-finite elements: 1 infinite",
        ),
        (
            lambda t, n: t.update({f"{n}.scale_weight": torch.ones(5)}),
            r"wo.weight has shape \[32, 64\] and a scale of \[5\]; expected one for all",
        ),
        (
            lambda t, n: t.update({f"{n}.weight": t[f"{n}.weight"].view(torch.uint8)}),
            "wo.weight is uint8 with scale_weight; expected float8_e4m3fn or float8_e5m2",
        ),
        (
            lambda t, n: t.update({f"{n}.comfy_quant": said(format="nvfp4")}),
            "wo is in the format 'nvfp4'; expected float8_e4m3fn or",
        ),
        (lambda t, n: t.update({f"{n}.comfy_quant": said()}), "wo.comfy_quant holds no JSON with"),
        (
            lambda t, n: t[f"{n}.weight"].view(torch.uint8)[0].fill_(127),
            "wo.weight has non-finite elements: 64 NaN",
        ),
    ],
)
def test_scales_that_do_not_fit(
    t5: Path, tmp_path: Path, change: Callable[[Tensors, str], object], expected: str
) -> None:
    folder = shutil.copytree(t5, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    changed(change)(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SourceError, match=expected):
        open_source(str(folder)).weights()


def as_published(tensors: Tensors) -> Tensors:
    """A tiny Z-Image under the names of its authors, with ComfyUI's prefix."""
    found = dict(tensors)
    for name in tensors:
        if name.endswith("attention.to_q.weight"):
            layer = name.removesuffix("to_q.weight")
            parts = [found.pop(f"{layer}to_{each}.weight") for each in "qkv"]
            found[f"{layer}qkv.weight"] = torch.cat(parts)
    names = {
        **{"all_final_layer.2-1.": "final_layer.", "all_x_embedder.2-1.": "x_embedder."},
        **{".to_out.0.": ".out.", ".norm_k.": ".k_norm.", ".norm_q.": ".q_norm."},
    }
    for new, old in names.items():
        found = {name.replace(new, old): tensor for name, tensor in found.items()}
    return {f"model.diffusion_model.{name}": tensor for name, tensor in found.items()}


@pytest.fixture(scope="module")
def z_image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder with the config alone, and the file."""
    folder = save("z-image", tmp_path_factory.mktemp("published") / "z-image")
    [whole] = folder.glob("*.safetensors")
    file = folder.parent / "z_image_turbo.safetensors"
    save_file(as_published(load_file(whole)), file)
    whole.rename(folder.parent / "as_saved.safetensors")
    return folder, file


def test_a_single_file_of_a_denoiser(z_image: tuple[Path, Path]) -> None:
    folder, file = z_image
    options = ComponentOptions(single_file=file)
    wanted = diffusers.ZImageTransformer2DModel.from_single_file(
        str(file), config=str(folder), local_files_only=True
    ).state_dict()
    source = open_source(str(folder), component=options)
    found = source.eager().state_dict()
    assert source.name == "z_image_turbo"
    assert found.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
    kept = file.parent / "as_saved.safetensors"  # names of diffusers are taken, too
    again = open_source(str(folder), component=ComponentOptions(single_file=kept)).eager()
    assert all(torch.equal(tensor, wanted[n]) for n, tensor in again.state_dict().items())


def test_a_single_file_of_an_encoder(t5: Path, tmp_path: Path) -> None:
    """Beside its config it is a MODEL itself; what else it holds is left out."""
    for each in t5.iterdir():
        shutil.copy(each, tmp_path)
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    wanted = open_source(str(t5)).eager().state_dict()
    whole.unlink()
    file = tmp_path / "t5xxl_fp32.safetensors"
    save_file(
        {**tensors, "logit_scale": torch.ones(()), "lm_head.weight": torch.ones(96, 32)}, file
    )
    for found in (
        open_source(str(file)),
        open_source(str(t5), component=ComponentOptions(single_file=file)),
    ):
        assert found.name == "t5xxl_fp32"
        state = found.eager().state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in state.items())


def test_an_encoder_in_a_file_with_others(
    t5: Path, z_image: tuple[Path, Path], tmp_path: Path
) -> None:
    """The denoiser is marked as scaled, and the encoder is a plain cast beside another."""
    tensors = in_rows(load_file(z_image[1]))
    tensors["model.diffusion_model.scaled_fp8"] = torch.zeros(0).to(E4M3)
    encoder = {
        n: t.to(E4M3) if t.ndim > 1 else t for n, t in load_file(t5 / "model.safetensors").items()
    }
    for name, tensor in encoder.items():
        tensors[f"text_encoders.t5xxl.transformer.{name}"] = tensor
        tensors[f"text_encoders.larger.transformer.{name}"] = torch.zeros_like(tensor)
        tensors[f"text_encoders.larger.transformer.more.{name}"] = torch.zeros_like(tensor)
    save_file(tensors, tmp_path / "all.safetensors")
    options = ComponentOptions(single_file=tmp_path / "all.safetensors")
    source = open_source(str(t5), component=options)
    for name, tensor in source.weights().items():
        assert torch.equal(
            tensor.float(), encoder[name.replace("encoder.embed_tokens", "shared")].float()
        )
    assert all(scale == 1 for scale in source.scales().values())
    denoiser = open_source(str(z_image[0]), component=options)
    assert (
        len(denoiser.scales())
        == len(in_rows(load_file(z_image[1]))) - len(load_file(z_image[1])) + 2
    )


@pytest.mark.parametrize(
    ("name", "model", "content", "expected"),
    [
        ("x.bin", "t5", None, r"--single-file .*x.bin: expected .safetensors or .gguf"),
        ("missing.safetensors", "t5", None, "no such file"),
        ("x.safetensors", "t5", {"a": 3}, r"T5EncoderModel misses .*got 0, and other names: a"),
        (
            "x.safetensors",
            "z-image",
            {"a": 3, "b": 3},
            r"x.safetensors: what diffusers makes of it has other names; expected .* of a"
            r" ZImageTransformer2DModel, got a, b",
        ),
        ("x.safetensors", "dit", {"a": 3}, "diffusers has no from_single_file for DiTTransf"),
        ("x.safetensors", "flux", {"a": 3}, r"diffusers does not convert it \(IndexError: "),
    ],
)
def test_files_that_do_not_fit(
    t5: Path, tmp_path: Path, name: str, model: str, content: Any, expected: str
) -> None:
    folder, file = tmp_path / "folder", tmp_path / name
    if content is not None:
        save_file({key: torch.ones(size) for key, size in content.items()}, file)
    elif not name.startswith("missing"):
        file.write_bytes(b"x")
    shutil.copytree(t5, folder) if model == "t5" else folder.mkdir()
    if model in CONFIGS:
        kind, config = CONFIGS[model]
        (folder / "config.json").write_text(json.dumps({"_class_name": kind, **config}))
    with pytest.raises(EnginecastError, match=expected):
        open_source(str(folder), component=ComponentOptions(single_file=file)).weights()


def test_a_file_alone_needs_a_config(t5: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(t5 / "model.safetensors", tmp_path / "x.safetensors"))
    with pytest.raises(SourceError, match="weights alone: there is no config"):
        open_source(str(file))
    with pytest.raises(SourceError, match=r"y.safetensors does not exist"):
        open_source(str(tmp_path / "y.safetensors"))
    shutil.copy(t5 / "config.json", tmp_path)
    with pytest.raises(UsageError, match=r"--single-file does not fit .*x.safetensors"):
        open_source(str(file), component=ComponentOptions(single_file=file))


LLAMA_CPP = {
    "shared.weight": "token_embd.weight",
    "encoder.final_layer_norm.weight": "enc.output_norm.weight",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    **{f"layer.0.SelfAttention.{each}": f"attn_{each}" for each in "qkvo"},
    "layer.0.layer_norm": "attn_norm",
    **{
        f"layer.1.DenseReluDense.{n}": f"ffn_{m}"
        for n, m in zip(("wi_0", "wi_1", "wo"), ("gate", "up", "down"), strict=True)
    },
    "layer.1.layer_norm": "ffn_norm",
}
"""Names of a T5's tensors, or of their layers."""


def write_gguf(file: Path, architecture: str, tensors: Tensors, kind: str) -> dict[str, np.ndarray]:
    """Write matrices in a type of GGUF, all else in fp32; returns them as that type holds them."""
    gguf: Any = import_module("gguf")
    writer, found = gguf.GGUFWriter(str(file), architecture), {}
    for name, tensor in tensors.items():
        values, wanted = tensor.float().numpy(), gguf.GGMLQuantizationType[kind]
        if tensor.ndim < 2 or tensor.shape[-1] % 32:
            wanted = gguf.GGMLQuantizationType.F32
        data = gguf.quantize(values, wanted)
        writer.add_tensor(name, data, raw_dtype=wanted)
        found[name] = gguf.dequantize(data, wanted).reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16", "BF16"])
def test_gguf_is_dequantized_bit_for_bit(t5: Path, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    tensors = load_file(t5 / "model.safetensors")
    names = {name: name.replace("encoder.block.", "enc.blk.") for name in tensors}
    for old, new in LLAMA_CPP.items():
        names = {name: text.replace(old, new) for name, text in names.items()}
    file = tmp_path / "t5.gguf"
    stored = {names[name]: tensor for name, tensor in tensors.items()}
    wanted = write_gguf(file, "t5encoder", stored, kind)
    source = open_source(str(t5.parent / t5.name), component=ComponentOptions(single_file=file))
    for name, tensor in source.eager().state_dict().items():
        key = names["shared.weight" if name.endswith("embed_tokens.weight") else name]
        assert np.array_equal(tensor.numpy(), wanted[key]), name
    assert bool(source.stored.notes()) == kind.startswith("Q")


def test_gguf_of_a_denoiser(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="pip install gguf")
    folder = save("z-image", tmp_path / "z-image")
    [whole] = folder.glob("*.safetensors")
    tensors = as_published(load_file(whole))
    wanted = write_gguf(tmp_path / "z.gguf", "lumina2", tensors, "Q8_0")
    source = open_source(str(folder), component=ComponentOptions(single_file=tmp_path / "z.gguf"))
    found = as_published(dict(source.eager().state_dict()))
    assert all(np.array_equal(tensor.numpy(), wanted[name]) for name, tensor in found.items())
    assert "are Q8_0 of GGUF" in source.stored.notes()[0]
    data = (tmp_path / "z.gguf").read_bytes()
    name = b"model.diffusion_model.layers.0.attention.qkv.weight"
    kind = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions, and these
    for change, expected in (
        (data[: len(data) // 2], "cannot be read as GGUF"),
        (data[:kind] + b"\x63" + data[kind + 1 :], r"99\)? is not a valid GGMLQuantizationType"),
        (b"GGUX" + data[4:], "cannot be read as GGUF"),
    ):
        (tmp_path / "z.gguf").write_bytes(change)
        options = ComponentOptions(single_file=tmp_path / "z.gguf")
        with pytest.raises(SourceError, match=expected):
            open_source(str(folder), component=options).weights()


def test_gguf_needs_its_package(t5: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    options = ComponentOptions(single_file=tmp_path / "x.gguf")
    with pytest.raises(MissingError, match=r"x.gguf needs gguf, which is not installed") as found:
        open_source(str(t5), component=options).weights()
    assert (found.value.exit_code, found.value.hint) == (3, "pip install gguf")


def in_rows(tensors: Tensors) -> Tensors:
    """The matrices of the blocks in fp8, as BFL has them, except for one."""
    found = dict(tensors)
    names = [n for n, t in tensors.items() if ".layers.0." in n and n.endswith("weight")]
    for name in [n for n in names if tensors[n].ndim == 2 and "adaLN" not in n][1:]:
        values, scale = in_fp8(tensors[name], (len(tensors[name]), 1))
        found |= {name: values, name.replace(".weight", ".weight_scale"): scale[:, 0].contiguous()}
    return found


def test_scales_follow_their_weights(z_image: tuple[Path, Path], tmp_path: Path) -> None:
    """Through the conversion of diffusers, which splits some."""
    folder, whole = z_image
    tensors = in_rows(load_file(whole))
    save_file(tensors, tmp_path / "fp8.safetensors")
    options = ComponentOptions(single_file=tmp_path / "fp8.safetensors")
    source = open_source(str(folder), component=options)
    weights, scales = source.weights(), source.scales()
    layer = "model.diffusion_model.layers.0.attention.qkv"
    size = len(weights["layers.0.attention.to_k.weight"])
    wanted = tensors[f"{layer}.weight_scale"][size : 2 * size, None]
    assert torch.equal(scales["layers.0.attention.to_k.weight"], wanted)
    assert len(scales) == 2 + sum(tensor.dtype == E4M3 for tensor in tensors.values())
    for name, scale in scales.items():
        values = (weights[name] / scale).clamp(-448, 448).to(E4M3)
        assert torch.equal(values.float() * scale, weights[name]), name


@pytest.mark.parametrize("kind", ["encoder", pytest.param("denoiser", marks=pytest.mark.slow)])
def test_an_engine_keeps_values_and_scales(
    t5: Path, z_image: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    file = tmp_path / "fp8.safetensors"
    if kind == "encoder":
        tensors, folder = load_file(t5 / "model.safetensors"), t5
        comfy_of_old(tensors)
    else:
        folder, whole = z_image
        tensors = in_rows(load_file(whole))
    save_file(tensors, file)
    options = ModelOptions(
        keep_quantized=True,
        component=ComponentOptions(single_file=file, height=16, width=16)
        if kind == "denoiser"
        else ComponentOptions(single_file=file),
    )
    bundle = export(folder, tmp_path / "bundle", options=options)
    files = ("weights.safetensors", "engine.onnx")  # which has the small ones
    data = b"".join((tmp_path / "bundle" / name).read_bytes() for name in files)
    source = open_source(str(folder), component=options.component)
    scales, weights = source.scales(), source.weights()
    for name, scale in scales.items():
        values = (weights[name] / scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
        forms = (values, values.t().contiguous())
        assert any(form.numpy().tobytes() in data for form in forms), name
    assert bundle.manifest.quantization is not None
    assert bundle.manifest.quantization.max_error == 0
    note = f"{len(scales)} of {len(scales)} weights in fp8 are kept bit for bit"
    plan = read_plan(tmp_path / "bundle" / "plan.json")
    assert sum(layer.given for layer in plan.layers) == len(scales)
    assert plan.notes[0].startswith(note)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "--keep-quantized does not fit .*: no weight of it is in float8_e4m3fn"),
        ({"precision": "int8"}, "--keep-quantized does not go with --precision int8"),
        ({"precision": "fp32"}, "--keep-quantized does not go with --precision fp32"),
        ({"max_error": 0.1}, "--max-error does not go with --keep-quantized"),
    ],
)
def test_what_does_not_go_with_kept_weights(
    t5: Path, tmp_path: Path, more: dict[str, Any], expected: str
) -> None:
    folder = shutil.copytree(t5, tmp_path / "model")
    with pytest.raises(UsageError, match=expected):
        export(folder, tmp_path / "b", options=ModelOptions(keep_quantized=True), **more)


FP8_FOLDERS: dict[str, tuple[Callable[[Tensors], dict[str, str]], dict[str, Any]]] = {
    "fp8": (by_block, {"weight_block_size": [16, 8], "activation_scheme": "dynamic"}),
    "fbgemm_fp8": (by_row, {"activation_scale_ub": 1200.0}),
    "compressed-tensors": (by_row, {"format": "float-quantized", "config_groups": {}}),
    "modelopt": (comfy, {"quant_algo": "FP8"}),
}


def with_quantization(folder: Path, **config: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text()) | {"quantization_config": config}
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("method", FP8_FOLDERS)
def test_folders_in_fp8_need_no_library(t5: Path, tmp_path: Path, method: str) -> None:
    folder = shutil.copytree(t5, tmp_path / "model")
    layout, config = FP8_FOLDERS[method]
    with_quantization(folder, quant_method=method, **config)
    with pytest.raises(SourceError, match=f"says {method}, and no weight is in fp8"):
        open_source(str(folder)).weights()
    tensors = load_file(folder / "model.safetensors")
    layout(tensors)
    file = folder / "model.safetensors"
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, {"format": "pt"})
    wanted = independently(file)
    for name, tensor in open_source(str(folder)).weights().items():
        stored = "shared.weight" if name.endswith("embed_tokens.weight") else name
        assert np.array_equal(tensor.float().numpy(), wanted[stored]), name


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "gptq"}, "gptqmodel"),
        ({"quant_method": "awq"}, "gptqmodel"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvidia-modelopt"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
    ],
)
@pytest.mark.parametrize("kind", ["transformers", "diffusers"])
def test_other_folders_need_their_library(
    t5: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    package: str,
    kind: str,
) -> None:
    folder = tmp_path / "model"
    save("dit", folder) if kind == "diffusers" else shutil.copytree(t5, folder)
    for name in ("bitsandbytes", "torchao", "gptqmodel", "modelopt", "compressed_tensors"):
        monkeypatch.setitem(sys.modules, name, None)
    with_quantization(folder, **config)
    method = config["quant_method"]
    with pytest.raises(MissingError, match=f"{method} need {package}, which is not") as found:
        open_source(str(folder))
    assert (found.value.exit_code, found.value.hint) == (3, f"pip install {package}")


@pytest.mark.parametrize("bits", [4, 8])
def test_bitsandbytes_dequantizes_its_folders(t5: Path, tmp_path: Path, bits: int) -> None:
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    how = {"bnb_4bit_quant_type": "nf4"} if bits == 4 else {}
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, **how)
    wide = t5_config()
    wide.d_model, wide.d_kv = 64, 16
    T5EncoderModel(wide).save_pretrained(tmp_path / "wide")
    for size, folder in ((64, tmp_path / "wide"), (32, t5)):
        model = T5EncoderModel.from_pretrained(folder, quantization_config=config, device_map="cpu")
        model.save_pretrained(saved := tmp_path / f"{size}")
        stored, source = load_file(saved / "model.safetensors"), open_source(str(saved))
        layer = "encoder.block.1.layer.0.SelfAttention.q"
        weight = stored[f"{layer}.weight"]
        if bits == 8:
            wanted = weight.float() * stored[f"{layer}.SCB"][:, None] * 7.874015718698502e-3
        elif size == 32:  # blocks of 64
            with pytest.raises(SourceError, match=r"0.50 dequantizes wrongly on the CPU"):
                source.weights()
            return
        else:
            places = torch.stack([weight >> 4, weight & 15], -1).flatten().long()
            values = stored[f"{layer}.weight.quant_map"][places]
            wanted = values.view(-1, 64) * stored[f"{layer}.weight.absmax"][:, None]
        assert torch.equal(source.weights()[f"{layer}.weight"], wanted.view(-1, size))
        assert "layers are bitsandbytes" in source.stored.notes()[0]
