"""A whole pipeline, its denoiser and decoder in small: a cache gives the image of the encoders."""

from typing import Any

import numpy as np
import pytest
import torch
from cached_pipelines import PROMPTS, Workshop
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
)
from exports import Exports


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, exports: Exports) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"), exports)


def decoder(channels: int) -> AutoencoderKL:
    return AutoencoderKL(
        sample_size=32,
        block_out_channels=(4,),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.6,
    )


def pixart() -> dict[str, Any]:
    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
    )
    return {"transformer": transformer, "vae": decoder(4), "scheduler": DDIMScheduler()}


def flux() -> dict[str, Any]:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    return {"transformer": transformer, "vae": decoder(1), "scheduler": scheduler}


def image(pipe: Any, prompt: str, **options: Any) -> np.ndarray[Any, Any]:
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        prompt,
        num_inference_steps=3,
        height=16,
        width=16,
        generator=torch.Generator().manual_seed(3),
        output_type="np",
        **options,
    ).images
    assert isinstance(made, np.ndarray)
    return made


@pytest.mark.parametrize("pipeline", ["flux", "pixart-sigma"])
def test_a_cache_gives_the_same_image(workshop: Workshop, pipeline: str) -> None:
    torch.manual_seed(0)
    others = flux() if pipeline == "flux" else pixart()
    for parameter in others["transformer"].parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    options = {} if pipeline == "flux" else {"use_resolution_binning": False}
    live = workshop.live(pipeline, **others)
    cached = workshop.cached(pipeline, workshop.cache(pipeline), **others)
    ours, theirs = image(cached, PROMPTS[0], **options), image(live, PROMPTS[0], **options)
    assert theirs.std() > 0.01
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    other = image(cached, PROMPTS[1], **options)
    assert np.abs(other - theirs).max() > 1e-3
