"""Engines in the place of a pipeline's components: what pipelines see of them, and refusals."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import diffusers
import pytest
import torch
from diffusers.hooks import apply_layerwise_casting
from diffusers.models import attention_processor
from engine_stand_ins import StandIn, loaded, stand_in
from exports import Exports
from test_components import ENTRIES, small
from tiny_components import CONFIGS, save
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

import enginecast
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.sources.calls.recording import Calls, record
from enginecast.errors import (
    InputError,
    UsageError,
)
from enginecast.exporters.registry import TargetName
from enginecast.pipelines.attach import Replaced, attach
from enginecast.runtime.bundle.directory import Directory, State


def model(kind: str, **more: Any) -> Any:
    name, config = CONFIGS[kind]
    torch.manual_seed(0)
    return getattr(diffusers, name).from_config({**config, **more}).eval()


def clip() -> Any:
    torch.manual_seed(1)
    config = CLIPTextConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=2,
        num_hidden_layers=2,
        projection_dim=16,
        eos_token_id=2,
    )
    return CLIPTextModel(config).eval()


def stable_diffusion(**more: Any) -> Any:
    parts = {
        "vae": model("vae"),
        "unet": model("sd15-unet"),
        "text_encoder": clip(),
        "tokenizer": None,
        "scheduler": diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        "safety_checker": None,
        "feature_extractor": None,
    }
    pipe = diffusers.StableDiffusionPipeline(**parts | more, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def image(pipe: Any, **more: Any) -> Tensor:
    ids = torch.arange(2 * 77).reshape(2, 77) % 50
    text = pipe.text_encoder(ids, attention_mask=None)[0]
    generator = torch.Generator().manual_seed(3)
    given = {"height": 16, "width": 16, "num_inference_steps": 2, **more}
    found = pipe(
        prompt_embeds=text[:1],
        negative_prompt_embeds=text[1:],
        generator=generator,
        output_type="pt",
        **given,
    ).images
    assert isinstance(found, Tensor)
    return found


class Attached:
    """A pipeline with engines that eager computes."""

    def __init__(self, folder: Path) -> None:
        self.pipe = stable_diffusion()
        with record(self.pipe) as calls, torch.no_grad():
            self.before = image(self.pipe)
            image(self.pipe, height=32, width=24)
            self.pipe.vae.encode(self.before)
        self.calls: Calls = calls
        self.engines: dict[str, StandIn] = {
            name: stand_in(folder / name.replace(".", "/"), self.part(name), calls[name])
            for name in calls
        }
        self.folder = folder
        self.eager: Replaced

    def part(self, name: str) -> Any:
        return getattr(self.pipe, name.partition(".")[0])


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Attached:
    return Attached(tmp_path_factory.mktemp("engines"))


@pytest.fixture
def attached(parts: Attached) -> Iterator[Attached]:
    with loaded(*parts.engines.values()):
        parts.eager = attach(parts.pipe, parts.folder)
        yield parts
        parts.eager.put_back()


def test_a_pipeline_computes_the_same_with_engines(attached: Attached) -> None:
    pipe, eager = attached.pipe, attached.eager
    assert [*eager] == ["text_encoder", "unet", "vae"]
    with patch("enginecast.pipelines.engine_component.backends") as slow:
        assert torch.equal(image(pipe), attached.before)
    assert not slow.called  # it reads what packages are installed
    assert image(pipe, height=32, width=24).shape == (1, 3, 32, 24)
    assert all(engine.runs for name, engine in attached.engines.items() if name != "vae.encode")
    assert all(p.is_meta for name in eager for p in [*getattr(pipe, name).parameters()][1:])
    eager.put_back()
    assert pipe.unet is eager["unet"]
    assert torch.equal(image(pipe), attached.before)


@pytest.mark.parametrize("how", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_offloading_leaves_engines_where_they_are(attached: Attached, how: str) -> None:
    getattr(attached.pipe, how)(device="cpu")
    try:
        assert torch.equal(image(attached.pipe), attached.before)
    finally:
        attached.pipe.remove_all_hooks()


def test_an_engine_is_freed_where_the_component_moves_away(attached: Attached) -> None:
    slot, engine = attached.pipe.unet._engines["forward"], attached.engines["unet"]
    attached.pipe.unet.to("cpu")
    assert not engine.closed
    slot.move("cuda")
    assert engine.closed
    image(attached.pipe)
    assert not engine.closed
    attached.pipe.unet.to("meta").to("cpu")  # it holds no weights that would be lost
    assert attached.pipe.unet.device.type == "cpu"
    image(attached.pipe)


UNET = (torch.ones(2, 4, 8, 8), torch.tensor(5), torch.ones(2, 77, 16))


@pytest.mark.parametrize(
    ("given", "expected", "hint"),
    [
        ({"cross_attention_kwargs": {"scale": 0.5}}, r"cross_attention_kwargs.scale is 0.5, and the"
         " engine was made without it", "fuse_lora"),
        ({"cross_attention_kwargs": {"scale": 0.0}}, r"cross_attention_kwargs.scale is 0.0, and the"
         " engine was made without it", "fuse_lora"),
        ({"added_cond_kwargs": {"image_embeds": [torch.ones(2)]}}, "image_embeds.0 is a tensor, and"
         " the engine was made without it", "IP-Adapter"),
        ({"mid_block_additional_residual": torch.ones(2)}, "mid_block_additional_residual is a"
         " tensor, and the engine was", "ControlNet"),
        ({"class_labels": torch.ones(2)}, "class_labels is a tensor, and the", "enginecast.record"),
    ],
)  # fmt: skip
def test_arguments_that_the_engine_was_made_without(
    attached: Attached, given: dict[str, Any], expected: str, hint: str
) -> None:
    with pytest.raises(InputError, match=f"unet: .*{expected}") as refused:
        attached.pipe.unet(*UNET, **given)
    assert hint in refused.value.hint


def test_gradients_are_refused_and_not_lost(attached: Attached) -> None:
    sample, step, text = UNET
    latents = sample.clone().requires_grad_()
    with pytest.raises(InputError, match="unet: sample requires a gradient, and an engine") as no:
        attached.pipe.unet(latents, step, text)
    assert "torch.no_grad()" in no.value.hint
    with torch.no_grad():
        found = attached.pipe.unet(latents, step, text).sample
        assert torch.equal(found, attached.pipe.unet(*UNET).sample)


def test_what_engines_have_fixed_is_refused(attached: Attached) -> None:
    pipe = attached.pipe
    for call, expected in (
        (lambda: pipe.enable_freeu(0.9, 0.2, 1.2, 1.4), "unet is an engine, which has no enable_f"),
        (pipe.fuse_qkv_projections, "unet is an engine, which has no fuse_qkv_projections"),
        (lambda: pipe.unet.set_attention_backend("native"), "which has no set_attention_backend"),
        (pipe.unet.state_dict, "unet is an engine, which has no state_dict"),
        (lambda: pipe.text_encoder.final_layer_norm(torch.ones(1)), "final_layer_norm was called"),
        (lambda: attach(pipe, attached.folder), "text_encoder is an engine already"),
    ):
        with pytest.raises(UsageError, match=expected):
            call()


def test_attention_of_another_kind_is_refused(attached: Attached) -> None:
    unet = attached.pipe.unet
    part = unet.mid_block.attentions[0].transformer_blocks[0].attn1
    plain = unet(*UNET).sample
    part.set_processor(attention_processor.SlicedAttnProcessor(1))
    assert torch.equal(unet(*UNET).sample, plain)
    part.set_processor(attention_processor.PAGIdentitySelfAttnProcessor2_0())
    with pytest.raises(InputError, match=r"unet: .*attn1 has got a PAGIdentity"):
        unet(*UNET)


def test_adapters_are_refused(attached: Attached) -> None:
    """Before pipelines look for PEFT, read a file, or load what goes with the adapter."""
    pipe, nowhere = attached.pipe, attached.folder / "nowhere"
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: pipe.load_lora_weights(nowhere), "^unet .*: no load_lora_weights"),
        (lambda: pipe.set_adapters("lora"), "^unet .*: no set_adapters"),
        (lambda: pipe.load_ip_adapter(nowhere, None, "x"), "^unet .*: no load_ip_adapter"),
        (lambda: pipe.load_textual_inversion(nowhere), "^text_encoder .*: no load_textual_inv"),
        (lambda: pipe.unet.load_lora_adapter({}), "no load_lora_adapter"),
        (lambda: pipe.unet.add_adapter(None), "no add_adapter"),
        (lambda: pipe.unet._load_ip_adapter_weights([]), "no _load_ip_adapter_weights"),
        (lambda: pipe.text_encoder.load_adapter("lora"), "no load_adapter"),
    ]
    for call, expected in calls:
        with pytest.raises(UsageError, match=expected):
            call()
    attached.eager.put_back()
    with pytest.raises(Exception, match="PEFT backend is required"):
        pipe.set_adapters("lora")
    assert not {"set_adapters", "load_ip_adapter", "load_textual_inversion"} & {*vars(pipe)}


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "casting": (
        lambda pipe: apply_layerwise_casting(pipe.unet, torch.float8_e4m3fn, torch.float32),
        "unet: conv_in has another forward than when",
    ),
    "layer": (
        lambda pipe: setattr(pipe.unet.mid_block, "attentions", torch.nn.ModuleList()),
        "unet: mid_block has other layers than",
    ),
    "parameter": (
        lambda pipe: setattr(pipe.unet.conv_in, "bias", torch.nn.Parameter(torch.ones(8))),
        "unet: conv_in has other weights than",
    ),
    "in place": (
        lambda pipe: pipe.unet.conv_in.bias.add_(torch.ones(8)),
        "unet: conv_in has other weights than",
    ),
    "hook": (
        lambda pipe: pipe.unet.conv_in.register_forward_hook(lambda *given: None),
        "unet: conv_in has other hooks than",
    ),
    "setting": (
        lambda pipe: setattr(pipe.unet, "sample_size_limit", 3),
        "unet: sample_size_limit is 3, and was None when",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_component_that_is_changed_is_refused(attached: Attached, what: str) -> None:
    change, expected = CHANGES[what]
    change(attached.pipe)
    with pytest.raises(InputError, match=f"{expected} .*engine"):
        image(attached.pipe)


def test_an_autoencoder_works_by_tiles_and_slices(attached: Attached) -> None:
    vae, eager = attached.pipe.vae, model("vae")
    latents = torch.randn(2, 4, 24, 24, generator=torch.Generator().manual_seed(5))
    with torch.no_grad(), pytest.raises(InputError, match="vae: "):
        vae.decode(latents)  # larger than what was recorded
    for one in (vae, eager):
        one.enable_tiling()
        one.enable_slicing()
        one.tile_latent_min_size, one.tile_sample_min_size = 8, 16
        one.tile_overlap_factor = 0  # the engine takes multiples of 8, as they were recorded
    with torch.no_grad():
        torch.testing.assert_close(vae.decode(latents).sample, eager.decode(latents).sample)
        one = vae.decode(latents[:1], return_dict=False)[0]
    torch.testing.assert_close(one, eager.decode(latents[:1]).sample.detach())


def test_engines_of_another_model_are_refused(parts: Attached, tmp_path: Path) -> None:
    other = stand_in(tmp_path / "unet", model("sd15-unet", norm_eps=1e-3), parts.calls["unet"])
    trained = model("sd15-unet")
    torch.nn.init.normal_(trained.conv_in.weight)
    trained = stand_in(tmp_path / "trained", trained, parts.calls["unet"])
    decoder = parts.engines["vae.decode"]
    given: list[tuple[Any, str]] = [
        ({"unet": other.folder}, r"the engine's unet differs .*: norm_eps 1e-05, not 0\.001"),
        ({"unet": trained.folder}, r"different weights from the pipeline's: conv_in.weight"),
        ({"unet": decoder.folder}, r"an engine of AutoencoderKL, and unet is a UNet2DCondition"),
        ({"vae": decoder.folder, "vae.decode": decoder.folder}, "another engine of decode"),
        ({"transformer": decoder.folder}, r"no model 'transformer'; it has .*unet"),
        ({"unet": tmp_path / "nowhere"}, "unet: there is no bundle in .*nowhere$"),
        ({"vae.encode": decoder.folder}, "vae.encode: .* holds an engine of decode"),
        ({"vae.unite": decoder.folder}, "vae.unite: .* holds an engine of decode"),
        (tmp_path / "nowhere", "holds no engines of vae"),
    ]
    for engines, expected in given:
        with loaded(other, trained, decoder), pytest.raises(UsageError, match=expected):
            attach(parts.pipe, engines)
    with pytest.raises(UsageError, match="a int has no components"):
        attach(3, tmp_path)


def test_an_exported_text_encoder(exports: Exports, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def noted(directory: Directory, name: str) -> tuple[str, State]:
        compared.append(str(directory.root / name))
        return digested(directory, name)

    digested = Directory.digest
    monkeypatch.setattr(Directory, "digest", noted)
    encoder = CLIPTextModel.from_pretrained(exports.model("words-clip")).eval()
    pipe = stable_diffusion(text_encoder=encoder)
    ids = torch.arange(2 * 9).reshape(2, 9)
    with torch.no_grad():
        expected = pipe.text_encoder(ids, attention_mask=None)
    eager = enginecast.attach(pipe, {"text_encoder": exports("words-clip").folder})
    found = pipe.text_encoder(ids, attention_mask=None)
    assert type(found) is type(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
    eager.put_back()
    assert pipe.text_encoder is encoder
    assert compared
    assert len(compared) == len({*compared})  # a digest takes seconds for each GB


def test_images_that_do_not_see_one_another_run_one_by_one(tmp_path: Path) -> None:
    parts = {"transformer": model("z-image"), "vae": model("vae")}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    encoder = {"text_encoder": None, "tokenizer": None}
    pipe: Any = diffusers.ZImagePipeline(scheduler=scheduler, **parts, **encoder)
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randn(tokens, 8, generator=generator) for tokens in (5, 40, 7, 32)]

    def pictures(height: int, count: int, **more: Any) -> Tensor:
        made = pipe(
            prompt_embeds=texts[:count],
            negative_prompt_embeds=texts[2 : 2 + count],
            height=height,
            width=32,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
            **more,
        ).images
        assert isinstance(made, Tensor)
        return made

    with record(pipe) as calls, torch.no_grad():
        before = pictures(48, 2)
        pictures(32, 1)
        pictures(32, 1, cfg_truncation=0.5)  # without guidance in some steps
    engine = stand_in(tmp_path / "engine", pipe.transformer, calls["transformer"])
    assert {*engine.manifest.symbols} == {"x_0_2", "cap_feats_0_0"}
    plain = pipe.transformer
    with torch.no_grad(), loaded(engine):
        attach(pipe, {"transformer": engine.folder})
        torch.testing.assert_close(pictures(48, 2), before, rtol=1e-4, atol=1e-4)
        assert len(engine.runs) == 2 * 4
        given = [torch.ones(4, 1, 24, 16)] * 3, torch.rand(3), texts[:3]
        found, expected = pipe.transformer(*given), plain(*given)
        assert type(found) is type(expected)
        require_close(found, expected)
        with pytest.raises(InputError, match=r"controlnet_block_samples\.0 is a tensor"):
            pipe.transformer(*given, controlnet_block_samples={0: torch.ones(3, 96, 24)})


@pytest.mark.slow
@pytest.mark.parametrize("target", ["onnxruntime", "torchscript", "aotinductor"])
def test_recorded_exported_and_put_back(target: TargetName, tmp_path: Path) -> None:
    pipe = stable_diffusion(vae=model("vae-tiny"))
    with enginecast.record(pipe) as calls:
        before = image(pipe)
    for name in ("unet", "vae.decode"):
        folder = tmp_path / name.replace(".", "/")
        part = getattr(pipe, name.partition(".")[0])
        enginecast.compile(part, folder, example=calls[name], target=target)
    eager = enginecast.attach(pipe, tmp_path, allow_code=True)
    assert [*eager] == ["unet", "vae"]
    torch.testing.assert_close(image(pipe), before, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:In CPU autocast")  # Mochi's
@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated")  # Chroma's
@pytest.mark.parametrize(("name", "entry"), ENTRIES)
def test_every_family_is_called_as_its_class(name: str, entry: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path / name)
    eager: Any = getattr(diffusers, CONFIGS[name][0]).from_pretrained(folder).eval()
    engine = stand_in(tmp_path / "engine", str(folder), component=small(entry, name))
    call = engine.source.call
    assert call is not None
    specs = engine.source.inputs()
    given = call.filled(sample(specs, example_sizes(specs), 0))
    pipe = SimpleNamespace(components={"it": eager})
    with torch.no_grad(), loaded(engine):
        attach(pipe, {"it": engine.folder})
        for packing in ({}, {"return_dict": False}):
            expected = getattr(eager, call.entry)(**given, **packing)
            found = getattr(pipe.it, call.entry)(**given, **packing)
            assert type(found) is type(expected)
            require_close(found, expected)


def require_close(found: Any, expected: Any) -> None:
    """Compare tensors, tuples, outputs by name, and distributions."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    elif isinstance(expected, Mapping):
        require_close([*found.values()], [*expected.values()])
    elif isinstance(expected, (tuple, list)):
        for one, other in zip(found, expected, strict=True):
            require_close(one, other)
    else:
        require_close(found.parameters, expected.parameters)
