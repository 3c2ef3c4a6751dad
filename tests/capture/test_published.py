"""Checkpoints as they are published: what is quantized in them is read bit for bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from models import tiny_t5
from safetensors.torch import load_file, save_file
from tiny_components import save
from torch import Tensor

from enginecast.capture.sources.open_source import open_source
from enginecast.errors import SourceError

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
    [note] = source.stored.notes
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
