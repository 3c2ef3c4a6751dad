"""Folders of diffusers' components as MODEL: what is read, what is derived, what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_components import CONFIGS, save

import enginecast
from enginecast.api import compile as export
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import named_dims
from enginecast.capture.outputs.flatten import ALL, run_named
from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.capture.sources.huggingface.diffusers_folder import STEM, ComponentSource
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.request import ModelOptions
from enginecast.errors import EnginecastError

TWO_PARTS = {name for name in CONFIGS if name.startswith("vae")}
OF_VIDEOS = TWO_PARTS - {"vae", "vae-tiny", "vae-dc"}
ENTRIES = [
    (name, entry)
    for name in CONFIGS
    for entry in (("decode", "encode") if name in TWO_PARTS else ("",))
]


def small(entry: str, name: str = "") -> ComponentOptions:
    """Pixels and frames that a tiny component takes."""
    if (
        name == "vae-mochi"
    ):  # it has 32 channels at least, and convolutions of videos in fp64 are slow
        return ComponentOptions(entry=entry, height=16, width=16, frames=5)
    frames = {"ltx": 17, "vae-qwen-image": 1, "vae-cogvideox": 9}.get(name, 13)
    return ComponentOptions(entry=entry, height=64, width=64, frames=frames)


def opened(folder: Path, **options: Any) -> ComponentSource:
    source = open_source(str(folder), component=ComponentOptions(**options)).as_called()
    assert isinstance(source, ComponentSource)
    return source


def config_alone(name: str, folder: Path) -> Path:
    kind, config = CONFIGS[name]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": kind, **config}))
    return folder


@pytest.fixture(scope="module")
def dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("dit", tmp_path_factory.mktemp("components") / "dit")


@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi's
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated")  # Chroma's
@pytest.mark.parametrize(
    ("name", "entry"),
    [
        pytest.param(name, entry, marks=[pytest.mark.slow] if name in OF_VIDEOS else [])
        for name, entry in ENTRIES
    ],
)
def test_the_derived_inputs_fit_the_model(name: str, entry: str, tmp_path: Path) -> None:
    folder = config_alone(name, tmp_path / name)
    source = open_source(str(folder), random_weights=0, component=small(entry, name)).as_called()
    specs = source.inputs()
    assert ("batch" in named_dims(specs)) != source.is_one_image
    inputs = sample(specs, example_sizes(specs), 0)
    with torch.no_grad():
        found = run_named(source.eager(), inputs, ALL)
    assert all(tensor.isfinite().all() for tensor in found.values())


def _rename(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / f"{STEM}.safetensors"
        tensors = load_file(file)
        tensors[key] = tensors.pop("proj_out_2.bias")
        save_file(tensors, file)

    return change


def _config(**entries: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))

    return change


def _weights_as(suffix: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / f"{STEM}.safetensors"
        file.rename(file.with_suffix(suffix))

    return change


def _pipeline(folder: Path) -> None:
    (folder / "transformer").mkdir()
    shutil.move(folder / "config.json", folder / "transformer" / "config.json")
    (folder / "model_index.json").write_text("{}")


def _scheduler(folder: Path) -> None:
    (folder / "config.json").rename(folder / "scheduler_config.json")


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        (_config(_class_name="MyModel"), {}, "diffusers .* has no model class 'MyModel'"),
        (_config(_class_name="DDIMScheduler"), {}, "has no model class 'DDIMScheduler'"),
        (_config(auto_map={}), {}, "needs code from its own repository, which is not run"),
        (_config(quantization_config={}), {}, "quant_method: expected one of .*; got None"),
        (_config(num_layers="two"), {}, "DiTTransformer2DModel cannot be built from it"),
        (_config(num_layers=2), {}, "DiTTransformer2DModel misses transformer_blocks.1"),
        (_config(num_attention_heads=3), {}, r"has shape \[.*\], DiTTransformer2DModel expects"),
        (_rename("more"), {}, "misses proj_out_2.bias"),
        (_weights_as(".bin"), {}, "is a pickle: loading it can run code"),
        (_weights_as(".gguf"), {}, "is a GGUF file"),
        (_pipeline, {}, "is a whole pipeline, not a model"),
        (_scheduler, {}, "is a scheduler, which has no weights"),
        (None, {"variant": "fp16"}, "has no variant 'fp16'"),
        (None, {"entry": "encode"}, "--entry encode does not fit"),
        (None, {"height": 0}, "--height 0: expected at least 1"),
    ],
)
def test_refused_folders(
    dit: Path,
    tmp_path: Path,
    change: Callable[[Path], None] | None,
    options: dict[str, Any],
    expected: str,
) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(dit, folder)
    if change is not None:
        change(folder)
    with pytest.raises(EnginecastError, match=expected):
        opened(folder, **options).weights()


def test_an_engine_from_a_folder(tmp_path: Path) -> None:
    folder = save("vae-tiny", tmp_path / "vae")
    bundle = export(folder, tmp_path / "engine", options=options(entry="encode", height=8, width=8))
    assert bundle.manifest.symbols.keys() == {"batch", "height", "width"}
    assert bundle.manifest.steps == {"height": 2, "width": 2}
    assert bundle.manifest.model.fingerprint["entry"] == "encode"
    agrees(folder, tmp_path / "engine", "encode", 6, 10)


def test_weights_in_fp8_are_read_as_they_are(dit: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(dit, tmp_path / "dit")
    stored = {
        name: tensor.to(torch.float8_e4m3fn if tensor.ndim == 2 else torch.bfloat16)
        for name, tensor in load_file(folder / f"{STEM}.safetensors").items()
    }
    save_file(stored, folder / f"{STEM}.safetensors")
    eager = opened(folder).eager()
    assert all(torch.equal(t.float(), stored[n].float()) for n, t in eager.state_dict().items())
    save_file({**stored, "scale": torch.ones(1)}, folder / f"{STEM}.safetensors")
    with pytest.raises(EnginecastError, match="has no place for scale"):
        opened(folder).weights()


def options(**given: Any) -> ModelOptions:
    return ModelOptions(component=ComponentOptions(**given))


def agrees(folder: Path, bundle: Path, entry: str, height: int, width: int) -> None:
    """Compare engine and eager in other sizes and other timesteps than those of the export."""
    given = small(entry, folder.name)  # numbers in its inputs go with the sizes
    source = opened(folder, **vars(given))
    specs = {spec.name: spec for spec in source.inputs()}
    sizes = {"batch": 3, "height": height, "width": width, "text": 5, "patches": 24, "frames": 3}
    generator = torch.Generator().manual_seed(7)
    inputs = {}
    with enginecast.load(bundle) as engine:

        def size_of(name: str) -> int:
            least, most = engine.manifest.symbols[name]
            return min(max(sizes[name], least), most)

        for each in engine.manifest.inputs:
            shape = [size_of(d) if isinstance(d, str) else d for d in each.shape]
            spec, inputs[each.name] = specs[each.name], torch.randn(shape, generator=generator)
            if spec.low is not None and spec.high is not None:
                drawn = torch.randint(spec.low, spec.high + 1, shape, generator=generator)
                is_mask = spec.high == 1  # of which no row is empty
                inputs[each.name] = drawn.index_fill(-1, torch.tensor(0), 1) if is_mask else drawn
        found = engine.run({name: tensor.numpy() for name, tensor in inputs.items()})
    with torch.no_grad():
        expected = run_named(source.eager(), inputs, ALL)
    for name, tensor in expected.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), tensor, rtol=1e-3, atol=1e-4)
