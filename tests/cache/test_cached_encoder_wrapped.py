"""The drop-in under what trainers and pipelines put around an encoder: offload, casts, graphs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload, cpu_offload_with_hook
from accelerate.state import AcceleratorState
from cached_models import TEXTS, batch_of, fill, spec_of, tiny
from diffusers import CogVideoXPipeline
from torch import Tensor, nn
from transformers import CLIPTextModelWithProjection, PreTrainedModel

from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.errors import CacheError

OUTPUTS = ("text_embeds", "hidden_states.-2")


@pytest.fixture(autouse=True)
def no_state_of_accelerate() -> Iterator[None]:
    """Accelerate keeps the precision of the process; other tests have their own."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny(CLIPTextModelWithProjection)


@pytest.fixture
def clip(tmp_path: Path, model: PreTrainedModel) -> CachedEncoder:
    fill(tmp_path / "clip", model, spec_of(model, OUTPUTS, mask=False, rows="all"))
    return CachedEncoder(tmp_path / "clip")


@pytest.fixture
def ids() -> Tensor:
    return batch_of(TEXTS, 12).ids


@torch.no_grad()
def call(encoder: Any, ids: Tensor) -> Any:
    return encoder(ids, output_hidden_states=True)


def require_like(found: Any, live: Any, plain: Any, dtype: torch.dtype = torch.float32) -> None:
    """Outputs come as the encoder's do, with the values of `plain`; another is still an error."""
    picks: tuple[Callable[[Any], Tensor], ...] = (
        lambda one: one.text_embeds,
        lambda one: one.hidden_states[-2],
        lambda one: one.hidden_states[1],
    )
    for pick in picks:
        got, wanted = pick(found), pick(live)
        assert (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device)
        assert torch.equal(got, pick(plain).to(dtype).to(wanted.dtype))
    assert len(found.hidden_states) == len(live.hidden_states)
    with pytest.raises(CacheError, match=r"hidden_states\.2 is not in the cache"):
        _ = found.hidden_states[-1]
    with pytest.raises(CacheError, match="last_hidden_state is not in the cache"):
        _ = found.last_hidden_state.shape


def offloaded(encoder: nn.Module) -> Any:
    return cpu_offload(encoder, torch.device("cpu"))


def with_hooks(encoder: nn.Module) -> Any:
    """As `enable_model_cpu_offload` of diffusers chains them."""
    _, first = cpu_offload_with_hook(nn.Linear(1, 1), "cpu")
    made, hook = cpu_offload_with_hook(encoder, "cpu", first)
    following, _ = cpu_offload_with_hook(nn.Linear(1, 1), "cpu", hook)

    def run(*given: Any, **named: Any) -> Any:
        found = made(*given, **named)
        following(torch.ones(1, 1))  # looks where the encoder is
        return found

    return run


def prepared(encoder: nn.Module) -> Any:
    made = Accelerator(mixed_precision="bf16", cpu=True).prepare(encoder)
    assert made is encoder
    return made


def in_half(encoder: nn.Module) -> Any:
    """Cast by the trainer, then prepared: outputs are float32 again."""
    return prepared(encoder.bfloat16())


def in_a_compiled_step(encoder: nn.Module) -> Any:
    def step(*given: Any, **named: Any) -> Any:
        return encoder(*given, **named)

    return torch.compile(step, backend="eager")


@pytest.mark.parametrize(
    "wrap",
    [offloaded, with_hooks, prepared, in_half, in_a_compiled_step],
)
def test_what_wraps_an_encoder_wraps_it(
    clip: CachedEncoder,
    model: PreTrainedModel,
    ids: Tensor,
    wrap: Callable[[nn.Module], Any],
) -> None:
    plain = call(clip, ids)
    live, found = call(wrap(model), ids), call(wrap(clip), ids)
    require_like(found, live, plain, clip.dtype)


def test_a_pipelines_offload(clip: CachedEncoder, ids: Tensor) -> None:
    pipeline = CogVideoXPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=None, scheduler=None
    )
    pipeline.text_encoder = clip
    plain = clip(ids).text_embeds
    pipeline.enable_model_cpu_offload(device="cpu")
    assert torch.equal(pipeline.text_encoder(ids).text_embeds, plain)
    pipeline.maybe_free_model_hooks()
