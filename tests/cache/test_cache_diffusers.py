"""Prompts through the pipelines' own functions: a cache instead of an encoder changes nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cached_pipelines import PIPELINES as CACHED
from cached_pipelines import PROMPTS, Workshop, embedded, prompts_of
from exports import Exports
from pipeline_probe import mask_of, masked
from torch import Tensor

from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.cache.store.folders import open_store
from enginecast.cache.store.records import read_truncated
from enginecast.errors import CacheError, CacheMissError
from enginecast.runtime.load import load

SLOW = pytest.mark.slow
NAMED = (
    *("cogvideox", "flux", "pixart-alpha", "pixart-sigma", "sd3", "wan", "bria", "ernie-image"),
    *("flux2", "hunyuan-video", "hunyuan-video-15", "kandinsky5", "krea2", "ltx2", "lumina2"),
    *("ovis-image", "qwen-image", "qwen-image21", "sana", "z-image"),
)
MISPAIRED = ("ltx", "ltx2", "lumina2", "mochi", "sana")
"""diffusers repeats their masks in another order than their texts: see the table's notes."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, exports: Exports) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("workshop"), exports)


def unmasked(found: Sequence[Tensor]) -> list[Tensor]:
    """What a pipeline returns, as numbers; zeros where its own masks say that nobody reads."""
    made = []
    for index, one in enumerate(found):
        mask = mask_of(found[index + 1 :], one)
        number = one.to(torch.uint8) if one.dtype == torch.bool else one
        made.append(number if mask is None else masked(number, mask))
    return made


def assert_as_exact(
    cached: Sequence[Tensor], live: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """The cache is as near to fp64 as the live encoder is: three times its rounding, at most.

    In the L2 norm: the largest of 10^5 errors differs from run to run by as much as that.
    """
    for ours, theirs, reference in zip(*map(unmasked, (cached, live, exact)), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        right = reference.double()
        floor = (theirs.double() - right).norm()
        assert (ours.double() - right).norm() <= 3 * floor + 1e-6 * right.norm()


@pytest.mark.parametrize("images", [2])
@pytest.mark.parametrize(
    "pipeline", [p if p in NAMED else pytest.param(p, marks=SLOW) for p in CACHED]
)
def test_a_cache_filled_eagerly_gives_what_the_encoder_gives(
    workshop: Workshop, pipeline: str, images: int
) -> None:
    prompts = prompts_of(pipeline)[:1] if images > 1 and pipeline in MISPAIRED else None
    live = embedded(workshop.live(pipeline), prompts, images=images)
    cached = embedded(workshop.cached(pipeline, workshop.cache(pipeline)), prompts, images=images)
    assert max(float(one.abs().max()) for one in live if one.is_floating_point()) > 0.05
    for ours, theirs in zip(unmasked(cached), unmasked(live), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # Bit-equal but for the size of the batch, which a product's rounding may depend on.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    "pipeline", [p if p == "pixart-sigma" else pytest.param(p, marks=SLOW) for p in CACHED]
)
@pytest.mark.slow
def test_a_cache_filled_by_an_engine_gives_what_the_encoder_gives(
    workshop: Workshop, pipeline: str
) -> None:
    cached = embedded(workshop.cached(pipeline, workshop.cache(pipeline, "engine")))
    live, exact = embedded(workshop.live(pipeline)), embedded(workshop.live(pipeline, exact=True))
    assert_as_exact(cached, live, exact)
    shifted = [one.roll(1, dims=1) for one in cached]
    with pytest.raises(AssertionError):
        assert_as_exact(shifted, live, exact)


def test_an_engine_for_a_pipeline_gives_what_the_pipeline_reads(workshop: Workshop) -> None:
    """Texts go in as the pipeline's chat template has them, and layers that it does not read are
    not there.
    """
    prompts = prompts_of("z-image")
    bundle = workshop.bundle("qwen3", "z-image:text_encoder")
    with load(bundle) as engine:
        found, text = engine.encode(prompts), engine.manifest.text
        assert "1 of 3 layers left out (layers): nothing reads them" in engine.manifest.notes
        assert [one.name for one in engine.outputs] == ["hidden_states.-2"]
    assert text is not None
    assert text.max_length == 512
    lists, _ = workshop.live("z-image").encode_prompt(list(prompts), device=torch.device("cpu"))
    for states, mask, live in zip(
        found["hidden_states.-2"], found["attention_mask"], lists, strict=True
    ):
        wanted = live.detach()
        ours = torch.from_numpy(states)[torch.from_numpy(mask).bool()]
        torch.testing.assert_close(ours, wanted, rtol=0, atol=2e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("pipeline", ["krea2", "z-image"])
def test_a_prompt_that_is_too_long_is_cut_where_the_pipeline_cuts_it(
    workshop: Workshop, pipeline: str, tmp_path: Path
) -> None:
    texts = [f"{'狐狸 ' * 200}{ending}" for ending in ("in snow", "by night")]
    [(part, name)] = CACHED[pipeline].items()
    cache = workshop.fill(tmp_path / "cache", pipeline, name, prompts=texts)
    found = read_truncated(open_store(cache).encodings(part))
    assert {one.text for one in found} == {*texts}
    assert {one.key for one in found} == {found[0].key}  # what is cut off differs
    cached, live = (
        embedded(pipe, texts)
        for pipe in (workshop.cached(pipeline, cache), workshop.live(pipeline))
    )
    for ours, theirs in zip(unmasked(cached), unmasked(live), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))


def test_a_cache_of_another_template_is_stale(workshop: Workshop, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    other, texts = "<|im_start|>user\n{}<|im_end|>\n", prompts_of("z-image")
    workshop.fill(cache, "z-image", "qwen3", prompts=texts, template=other)
    with pytest.raises(
        CacheMissError, match=r"is there in the template .*, and this one is in another"
    ):
        embedded(workshop.cached("z-image", cache))
    with pytest.raises(CacheError, match=r"asked for: template: .<\|im_start"):
        workshop.fill(cache, "z-image", "qwen3")


@pytest.mark.parametrize("pipeline", ["flux", "pixart-sigma"])
def test_a_text_that_was_not_cached_is_named(workshop: Workshop, pipeline: str) -> None:
    pipe = workshop.cached(pipeline, workshop.cache(pipeline))
    with pytest.raises(CacheMissError) as missed:
        embedded(pipe, [PROMPTS[0], "a lamp that nobody cached"])
    assert "lamp" in missed.value.message
    assert "is not among its" in missed.value.message
    assert missed.value.hint


def in_cogvideox(workshop: Workshop, cache: Path, **others: Any) -> list[Tensor]:
    return embedded(
        workshop.pipeline("cogvideox", {"text_encoder": CachedEncoder(cache)}), **others
    )


def test_padding_that_was_left_out_shows_where_the_pipeline_reads_it(
    workshop: Workshop, tmp_path: Path
) -> None:
    """No reader can tell; so `--for cogvideox --trim` is refused where it is asked for."""
    cache = workshop.fill(
        tmp_path / "cache", None, "t5", mask=False, keep_all=False, max_length=226
    )
    live = embedded(workshop.live("cogvideox"))[0]
    ours = in_cogvideox(workshop, cache)[0]
    assert (ours - live).abs().max() > 0.1 * live.abs().max()
