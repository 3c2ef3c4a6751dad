"""Inputs of the components of diffusion pipelines, by class.

Names are paths: `added_cond_kwargs.text_embeds` is the input `added_cond_kwargs_text_embeds`.  An
image has the size of its latents, or of its pixels for an encoder.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from enginecast.capture.inputs.calls import items_of
from enginecast.capture.inputs.specs import BATCH, DimSpec, InputSpec
from enginecast.errors import UsageError

Dim = DimSpec | int

MOST_ROWS = 32
"""Largest batch: upsampling in UNets and autoencoders takes another path from 64 on."""
LARGEST_SIDE = 2048
"""Largest image side in pixels, unless four times the example's side is larger."""
LONGEST_TEXT = 512
CLIP_TOKENS = 77
MOST_PATCHES = 16384
MOST_FRAMES = 64
STEPS = 1000
"""Steps of the schedule that a model was trained with."""
SIDE = 512
"""Image side in pixels if neither the config nor the user gives one and the model takes a single
size."""
EXAMPLE_SIDE = 256
EXAMPLE_VIDEO_SIDE = 128
"""Side of the example in pixels if sizes vary, so that it may be small."""
FRAMES = 17
TIME_IDS = 6
"""Number of image sizes and crops that SDXL takes as numbers."""
REFINER_TIME_IDS = 5


@dataclass(frozen=True)
class Described:
    """The arguments of a component."""

    inputs: tuple[InputSpec, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Component:
    """A component as its config and the user describe it."""

    name: str
    """Of the model, for messages."""
    settings: Mapping[str, Any]
    """Its config, with the defaults of the class."""
    entry: str = ""
    """The method that is the engine: "encode" or "decode" of an autoencoder."""
    height: int | None = None
    """In pixels, as the user gave it; so are the two that follow."""
    width: int | None = None
    frames_given: int | None = None

    def __getitem__(self, name: str) -> Any:
        """A setting of the config."""
        return self.settings.get(name)

    def first(self, *names: str) -> int | None:
        """The first of these settings that is an integer, or a list's first item."""
        for name in names:
            value = self[name]
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int):
                return value
        return None

    def sides(
        self, factor: int, step: int = 1, default: int | None = None
    ) -> tuple[DimSpec, DimSpec]:
        """Height and width, which vary in steps.

        Args:
            factor: pixels of an image to one of the input.
            step: sizes are multiples of it.
            default: size where the user gives none; the config's `sample_size`, or 256 pixels.
        """
        size = default or self.first("sample_size") or EXAMPLE_SIDE // factor
        found = []
        for name, given in (("height", self.height), ("width", self.width)):
            if given is not None and given % (factor * step):
                raise UsageError(
                    f"--{name} {given}: {self.name} takes multiples of {factor * step}"
                )
            example = max(size - size % step, step) if given is None else given // factor
            least = min(2 * step, example)
            most = max(LARGEST_SIDE // factor, 4 * example)
            found.append(_varying(name, example, least, most - most % step, step))
        return found[0], found[1]

    def fixed_sides(self, factor: int, step: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of a model that takes one size."""
        return self.sides(factor, step, height)[0].size, self.sides(factor, step, width)[1].size

    def frames(self, factor: int, default: int | None = None) -> int:
        """Frames of the input: the first counts alone, then each `factor` count as one."""
        count = self.frames_given or default or FRAMES
        if (count - 1) % factor:
            raise UsageError(
                f"--frames {count}: {self.name} takes {factor}k + 1 frames, such as"
                f" {count - 1 - (count - 1) % factor + factor + 1}"
            )
        return (count - 1) // factor + 1


Rows = Callable[[Component], Sequence[InputSpec]]
"""Makes inputs of a component."""


def batch() -> DimSpec:
    """The first dimension of most inputs."""
    return DimSpec(BATCH, 2, 1, MOST_ROWS)


def text(tokens: int = CLIP_TOKENS) -> DimSpec:
    """Tokens of the prompt."""
    return _varying("text", tokens, 1, max(LONGEST_TEXT, tokens))


def patches(it: Component, factor: int, side: int, frames: int = 1) -> DimSpec:
    """Patches of an image or a video, for a model that takes them as one sequence.

    Args:
        factor: pixels to a patch, along a side.
        side: pixels of the example, where the user gives none.
        frames: of the latents.
    """
    high, wide = it.fixed_sides(factor, 1, side // factor, side // factor)
    count = high * wide * frames
    return _varying("patches", count, 1, max(MOST_PATCHES, count))


def latent_frames(it: Component, factor: int, patch: int, default: int | None = None) -> Dim:
    """Frames of a video's latents, which vary if each is a patch."""
    count = it.frames(factor, default)
    return _varying("frames", max(count, 2), 1, MOST_FRAMES) if patch == 1 else count


def _varying(name: str, example: int, least: int, most: int, step: int = 1) -> DimSpec:
    """A size that varies if the model's code allows it, and is fixed to the example's otherwise."""
    return DimSpec(name, example, least, most, given=example, step=step)


def floats(name: str, *dims: Dim) -> InputSpec:
    """An input of floats."""
    return InputSpec(name, "tensor", torch.float32, _dims(dims))


def whole(name: str, most: int, *dims: Dim) -> InputSpec:
    """An input of integers from 0 on."""
    return InputSpec(name, "tensor", torch.int64, _dims(dims), 0, most)


def step_of() -> InputSpec:
    """`timestep` [batch]: as integers, which no precision rounds."""
    return whole("timestep", STEPS - 1, batch())


def mask(name: str, *dims: Dim) -> InputSpec:
    """Ones where there is text."""
    return whole(name, 1, *dims)


def _dims(dims: tuple[Dim, ...]) -> tuple[DimSpec, ...]:
    return tuple(DimSpec.static(dim) if isinstance(dim, int) else dim for dim in dims)


def unet(it: Component) -> Described:
    """UNets of Stable Diffusion, with what SDXL adds."""
    step = 2 ** (len(it["block_out_channels"]) - 1)
    sample = floats("sample", batch(), it["in_channels"], *it.sides(8, step))
    return Described((sample, step_of(), *_conditions(it)))


def controlnet(it: Component) -> Described:
    """ControlNets; their image is 8 times the sample, so that sizes are fixed."""
    step = 2 ** (len(it["block_out_channels"]) - 1)
    factor = 2 ** (len(it["conditioning_embedding_out_channels"]) - 1)
    size = it.first("sample_size") or SIDE // factor
    high, wide = it.fixed_sides(factor, step, size, size)
    sample = floats("sample", batch(), it["in_channels"], high, wide)
    image = it["conditioning_channels"], high * factor, wide * factor
    cond = floats("controlnet_cond", batch(), *image)
    return Described((sample, step_of(), *_conditions(it), cond))


def _conditions(it: Component) -> tuple[InputSpec, ...]:
    """Inputs of a UNet besides sample and timestep."""
    width = it.first("encoder_hid_dim") or it.first("cross_attention_dim") or 1280
    found = [floats("encoder_hidden_states", batch(), text(), width)]
    if it["num_class_embeds"]:
        found.append(whole("class_labels", it["num_class_embeds"] - 1, batch()))
    if it["time_cond_proj_dim"]:
        found.append(floats("timestep_cond", batch(), it["time_cond_proj_dim"]))
    if it["addition_embed_type"] == "text_time":
        each, whole_width = (
            it["addition_time_embed_dim"],
            it["projection_class_embeddings_input_dim"],
        )
        is_refiner = whole_width - REFINER_TIME_IDS * each == width
        count = REFINER_TIME_IDS if is_refiner else TIME_IDS
        found += [
            floats("added_cond_kwargs.text_embeds", batch(), whole_width - count * each),
            floats("added_cond_kwargs.time_ids", batch(), count),
        ]
    elif it["addition_embed_type"]:
        raise _unknown(it, f"addition_embed_type {it['addition_embed_type']!r}")
    return tuple(found)


def unet_2d(it: Component) -> Described:
    """A UNet without text."""
    step = 2 ** (len(it["block_out_channels"]) - 1)
    labels = it["num_class_embeds"]
    more = (whole("class_labels", labels - 1, batch()),) if labels else ()
    sample = floats("sample", batch(), it["in_channels"], *it.sides(1, step))
    return Described((sample, step_of(), *more))


def autoencoder(it: Component) -> Described:
    """Autoencoders of images."""
    names = ("block_out_channels", "encoder_block_out_channels", "dim_mult")
    levels = next(it[name] for name in names if it[name])
    factor = 2 ** (len(levels) - 1)
    if it.entry == "encode":
        sides = it.sides(1, factor, min(it.first("sample_size") or EXAMPLE_SIDE, EXAMPLE_SIDE))
        return Described((floats("x", batch(), it.first("in_channels") or 3, *sides),))
    latents = min(it.first("sample_size") or EXAMPLE_SIDE, EXAMPLE_SIDE) // factor
    argument = "x" if it["_class_name"] == "AutoencoderTiny" else "z"
    sides = it.sides(factor, 1, latents)
    return Described((floats(argument, batch(), it["latent_channels"], *sides),))


def video_autoencoder(it: Component) -> Described:
    """Autoencoders of videos; they loop over the frames, so that the number of frames is fixed."""
    space, time = _compression(it)
    if it.entry == "encode":
        channels = it.first("input_channels", "out_channels") or 3
        count = (it.frames(time) - 1) * time + 1
        sides = it.sides(1, space, EXAMPLE_VIDEO_SIDE)
        return Described((floats("x", batch(), channels, count, *sides),))
    channels = it.first("latent_channels", "z_dim") or 16
    latents = EXAMPLE_VIDEO_SIDE // space
    return Described(
        (floats("z", batch(), channels, it.frames(time), *it.sides(space, 1, latents)),)
    )


def _compression(it: Component) -> tuple[int, int]:
    """Pixels to a latent, along a side and in time."""
    if it["temperal_downsample"]:  # as diffusers spells it
        return (
            2 ** len(it["temperal_downsample"]) * (it.first("patch_size") or 1),
            2 ** sum(it["temperal_downsample"]),
        )
    if it["spatio_temporal_scaling"]:
        levels = sum(it["spatio_temporal_scaling"])
        return 2**levels * it["patch_size"], 2**levels * it["patch_size_t"]
    if it["temporal_expansions"]:
        return math.prod(it["spatial_expansions"]), math.prod(it["temporal_expansions"])
    space = it.first("spatial_compression_ratio") or 2 ** (len(it["block_out_channels"]) - 1)
    return space, int(it["temporal_compression_ratio"])


def transformer(*rows: Rows, **constants: Any) -> Callable[[Component], Described]:
    """A family whose arguments are those of these rows."""

    def described(it: Component) -> Described:
        return Described(tuple(spec for row in rows for spec in row(it)), constants)

    return described


def row(name: str, *dims: str | DimSpec | int) -> Rows:
    """A batch of floats; a name stands for a setting of the config."""

    def made(it: Component) -> list[InputSpec]:
        return [floats(name, batch(), *(it[d] if isinstance(d, str) else d for d in dims))]

    return made


def latents(
    factor: int = 8,
    *frames: Callable[[Component], Dim],
    side: int | None = None,
    within: Callable[[Component], tuple[int, int]] | None = None,
) -> Rows:
    """`hidden_states` [batch, channels, frames, height, width].

    Args:
        factor: pixels to one of them.
        frames: of a video.
        side: of the example, where the user gives none.
        within: rows and columns of patches that tables of positions end with.
    """

    def made(it: Component) -> list[InputSpec]:
        step = it["patch_size"]
        step = step[1] if isinstance(step, (list, tuple)) else step
        sides = it.sides(factor, step, side)
        if within is not None:
            most = [size * step for size in within(it)]
            pairs = zip(sides, most, strict=True)
            sides = tuple(replace(s, maximum=min(s.maximum, n)) for s, n in pairs)  # type: ignore[assignment]
        count = (number(it) for number in frames)
        return [floats("hidden_states", batch(), it["in_channels"], *count, *sides)]

    return made


def prompt(width: str, tokens: Callable[[Component], DimSpec] = lambda _: text()) -> Rows:
    """`encoder_hidden_states` [batch, text, width]."""
    return lambda it: [floats("encoder_hidden_states", batch(), tokens(it), it[width])]


def prompt_mask(
    name: str = "encoder_attention_mask", tokens: Callable[[Component], DimSpec] = lambda _: text()
) -> Rows:
    """Ones where there is text, [batch, text]."""
    return lambda it: [mask(name, batch(), tokens(it))]


def _step(it: Component) -> list[InputSpec]:
    return [step_of()]


def _guidance(it: Component) -> list[InputSpec]:
    return [floats("guidance", batch())] if it["guidance_embeds"] else []


def _trained_tokens(it: Component) -> DimSpec:
    return text(it["max_sequence_length"])


def _tokens_of_lumina(it: Component) -> DimSpec:
    return replace(text(), maximum=min(it["axes_lens"][0] - 1, LONGEST_TEXT))


def _resolution(it: Component) -> list[InputSpec]:
    """What PixArt-alpha takes besides, and Sigma does not."""
    if not _takes_resolution(it):
        return []
    named = {"resolution": 2, "aspect_ratio": 1}
    return [floats(f"added_cond_kwargs.{name}", batch(), n) for name, n in named.items()]


def _takes_resolution(it: Component) -> bool:
    uses = it["use_additional_conditions"]
    return bool(uses if uses is not None else it["sample_size"] == 128)


def pixart(it: Component) -> Described:
    """PixArt-alpha and Sigma."""
    rows = (latents(), prompt("caption_channels"), _step, _resolution, prompt_mask())
    conditions = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}
    return transformer(*rows, **({} if _takes_resolution(it) else conditions))(it)


def dit(it: Component) -> Described:
    """DiT, by classes: it takes squares, of one size."""
    side = it["sample_size"]
    sample = floats("hidden_states", batch(), it["in_channels"], side, side)
    return Described((sample, step_of(), whole("class_labels", it["num_embeds_ada_norm"], batch())))


def flux(it: Component) -> Described:
    """Flux and Kontext; positions have no batch."""
    count, axes = patches(it, 16, EXAMPLE_SIDE), len(it["axes_dims_rope"])
    return Described(
        (
            floats("hidden_states", batch(), count, it["in_channels"]),
            floats("encoder_hidden_states", batch(), text(), it["joint_attention_dim"]),
            floats("pooled_projections", batch(), it["pooled_projection_dim"]),
            floats("timestep", batch()),
            floats("img_ids", count, axes),
            floats("txt_ids", text(), axes),
            *_guidance(it),
        )
    )


def flux2(it: Component) -> Described:
    """Flux 2 and others, without pooled text."""
    inputs = flux(it).inputs
    return Described(tuple(spec for spec in inputs if spec.name != "pooled_projections"))


def chroma(it: Component) -> Described:
    """Chroma, whose mask is a factor of each token of text and image."""
    image, prompt, *others = flux2(it).inputs
    tokens = DimSpec.sum_of("tokens", (prompt.dims[1], image.dims[1]))
    return Described((image, prompt, *others, floats("attention_mask", batch(), tokens)))


def qwen_image(it: Component) -> Described:
    """Qwen-Image, whose positions are numbers: one size."""
    high, wide = it.fixed_sides(16, 1, SIDE // 16, SIDE // 16)
    made = transformer(
        row("hidden_states", high * wide, "in_channels"),
        prompt("joint_attention_dim"),
        prompt_mask("encoder_hidden_states_mask"),
        row("timestep"),
        _guidance,
        img_shapes=[[(1, high, wide)]],
    )
    return made(it)


def ltx(it: Component) -> Described:
    """LTX-Video, with the coordinates of its patches."""
    count = patches(it, 32, EXAMPLE_VIDEO_SIDE, it.frames(8))
    made = transformer(
        row("hidden_states", count, "in_channels"),
        prompt("caption_channels"),
        _step,
        prompt_mask(),
        row("video_coords", 3, count),
    )
    return made(it)


def cogvideox(it: Component) -> Described:
    """CogVideoX.  Rows of rotary tables go with a product of sizes, and learned positions are those
    of the size that it was trained with: both fix it.
    """
    step, time = it["patch_size"], it["patch_size_t"]
    tokens = it["max_text_seq_length"]
    if not it["use_rotary_positional_embeddings"] and not it["use_learned_positional_embeddings"]:
        high, wide = it["sample_height"], it["sample_width"]
        latents = latent_frames(
            it, it["temporal_compression_ratio"], time or 1, it["sample_frames"]
        )
        sides = it.sides(8, step, high)[0], it.sides(8, step, wide)[1]
        return Described(
            (
                floats("hidden_states", batch(), latents, it["in_channels"], *sides),
                floats("encoder_hidden_states", batch(), tokens, it["text_embed_dim"]),
                step_of(),
            )
        )
    high, wide = it.fixed_sides(8, step, it["sample_height"], it["sample_width"])
    frames = it.frames(it["temporal_compression_ratio"], it["sample_frames"])
    frames += -frames % (time or 1)
    more: tuple[InputSpec, ...] = ()
    if it["use_rotary_positional_embeddings"]:
        count = frames // (time or 1) * (high // step) * (wide // step)
        more = tuple(
            floats(f"image_rotary_emb.{n}", count, it["attention_head_dim"]) for n in (0, 1)
        )
    if it["ofs_embed_dim"]:
        more = (floats("ofs", 1), *more)
    return Described(
        (
            floats("hidden_states", batch(), frames, it["in_channels"], high, wide),
            floats("encoder_hidden_states", batch(), tokens, it["text_embed_dim"]),
            step_of(),
            *more,
        )
    )


def allegro(it: Component) -> Described:
    """Allegro, in the size that it was trained with; positions are tables and places in them."""
    step = it["patch_size"]
    high, wide = it.fixed_sides(8, step, it["sample_height"], it["sample_width"])
    frames = it.frames(4, 4 * (it["sample_frames"] - 1) + 1)
    counts = frames // it["patch_size_t"], high // step, wide // step
    third = it["attention_head_dim"] // 3
    tables = tuple(
        floats(f"image_rotary_emb.0.{axis}.{part}", count, third)
        for axis, count in enumerate(counts)
        for part in (0, 1)
    )
    places = tuple(
        whole(f"image_rotary_emb.1.{axis}", count - 1, 1, math.prod(counts))
        for axis, count in enumerate(counts)
    )
    return Described(
        (
            floats("hidden_states", batch(), it["in_channels"], frames, high, wide),
            floats("encoder_hidden_states", batch(), text(), it["caption_channels"]),
            step_of(),
            mask("encoder_attention_mask", batch(), text()),
            *(*tables, *places),
        )
    )


def z_image(it: Component) -> Described:
    """Z-Image, which takes lists: an engine is of one image and its prompt."""
    if it["siglip_feat_dim"]:
        raise _unknown(it, "siglip_feat_dim: images in the prompt")
    places, *most = it["axes_lens"]
    step = it["all_patch_size"][0]
    pairs = zip(it.sides(8, step), most, strict=True)
    sides = (replace(s, maximum=min(s.maximum, n * step)) for s, n in pairs)
    tokens = text()
    tokens = replace(tokens, maximum=min(tokens.maximum, (places - 2) // 32 * 32))
    return Described(
        (
            floats("x.0", it["in_channels"], it["all_f_patch_size"][0], *sides),
            floats("t", 1),
            floats("cap_feats.0", tokens, it["cap_feat_dim"]),
        )
    )


WAN: tuple[Rows, ...] = (
    latents(8, lambda it: latent_frames(it, 4, it["patch_size"][0]), side=16),
    _step,
    prompt("text_dim"),
    lambda it: (
        [floats("encoder_hidden_states_image", batch(), 257, it["image_dim"])]
        if it["image_dim"]
        else []
    ),
)
"""What Wan takes, and those made of it."""


def _control(it: Component) -> list[InputSpec]:
    """What VACE takes besides: latents of another video, and how much each layer reads of them."""
    [video] = WAN[0](it)
    return [
        floats("control_hidden_states", batch(), it["vace_in_channels"], *video.dims[2:]),
        floats("control_hidden_states_scale", len(it["vace_layers"])),
    ]


FAMILIES: Mapping[str, Callable[[Component], Described]] = {
    "UNet2DConditionModel": unet,
    "UNet2DModel": unet_2d,
    "ControlNetModel": controlnet,
    "AutoencoderKL": autoencoder,
    "AutoencoderTiny": autoencoder,
    "AutoencoderDC": autoencoder,
    "AutoencoderKLWan": video_autoencoder,
    "AutoencoderKLQwenImage": video_autoencoder,
    "AutoencoderKLCogVideoX": video_autoencoder,
    "AutoencoderKLLTXVideo": video_autoencoder,
    "AutoencoderKLHunyuanVideo": video_autoencoder,
    "AutoencoderKLMochi": video_autoencoder,
    "PixArtTransformer2DModel": pixart,
    "DiTTransformer2DModel": dit,
    "FluxTransformer2DModel": flux,
    "Flux2Transformer2DModel": flux2,
    "SD3Transformer2DModel": transformer(
        latents(within=lambda it: (it["pos_embed_max_size"],) * 2),
        prompt("joint_attention_dim"),
        row("pooled_projections", "pooled_projection_dim"),
        row("timestep"),
    ),
    "SanaTransformer2DModel": transformer(
        latents(32), prompt("caption_channels"), row("timestep"), _guidance, prompt_mask()
    ),
    "Lumina2Transformer2DModel": transformer(
        latents(within=lambda it: tuple(it["axes_lens"][1:])),
        row("timestep"),
        prompt("cap_feat_dim", _tokens_of_lumina),
        prompt_mask(tokens=_tokens_of_lumina),
    ),
    "QwenImageTransformer2DModel": qwen_image,
    "ZImageTransformer2DModel": z_image,
    "ChromaTransformer2DModel": chroma,
    "OvisImageTransformer2DModel": flux2,
    "LongCatImageTransformer2DModel": flux2,
    "BriaTransformer2DModel": flux2,
    "AuraFlowTransformer2DModel": transformer(
        latents(within=lambda it: (math.isqrt(it["pos_embed_max_size"]),) * 2),
        prompt("joint_attention_dim"),
        row("timestep"),
    ),
    "CogView4Transformer2DModel": transformer(
        latents(),
        prompt("text_embed_dim"),
        _step,
        *(row(name, 2) for name in ("original_size", "target_size", "crop_coords")),
    ),
    "PRXTransformer2DModel": transformer(
        latents(), row("timestep"), prompt("context_in_dim"), prompt_mask("attention_mask")
    ),
    "ErnieImageTransformer2DModel": transformer(
        latents(16),
        row("timestep"),
        row("text_bth", text(), "text_in_dim"),
        lambda it: [whole("text_lens", LONGEST_TEXT, batch())],
    ),
    "WanTransformer3DModel": transformer(*WAN),
    "WanVACETransformer3DModel": transformer(*WAN, _control),
    "SkyReelsV2Transformer3DModel": transformer(*WAN),
    "ChronoEditTransformer3DModel": transformer(*WAN),
    "SanaVideoTransformer3DModel": transformer(
        WAN[0], prompt("caption_channels"), row("timestep"), _guidance, prompt_mask()
    ),
    "LTXVideoTransformer3DModel": ltx,
    "CogVideoXTransformer3DModel": cogvideox,
    "HunyuanVideoTransformer3DModel": transformer(
        latents(8, lambda it: latent_frames(it, 4, it["patch_size_t"]), side=16),
        _step,
        prompt("text_embed_dim"),
        prompt_mask(),
        row("pooled_projections", "pooled_projection_dim"),
        _guidance,
    ),
    "MochiTransformer3DModel": transformer(
        latents(8, lambda it: latent_frames(it, 6, 1, 19), side=16),
        prompt("text_embed_dim", _trained_tokens),
        _step,
        prompt_mask(tokens=_trained_tokens),
    ),
    "AllegroTransformer3DModel": allegro,
    "LatteTransformer3DModel": transformer(
        latents(8, lambda it: it["video_length"]), _step, prompt("caption_channels")
    ),
}
"""For each class, what makes its inputs: rows, or a function where they depend on one another."""

ONE_BY_ONE: Mapping[str, frozenset[str]] = {
    "ZImageTransformer2DModel": frozenset({"x", "t", "cap_feats"}),
}
"""Classes that take images of different sizes, which do not see one another, and their arguments
that are lists with a tensor for each image, or tensors with a row: an engine is of one image."""


def one_by_one(
    model_class: str, arguments: Mapping[str, Any], *, others: bool = False
) -> list[Mapping[str, Any]]:
    """A call as one for each image, where it is of such a class; else the call itself.

    Args:
        others: whether a call with other tensors, which each image gets, is taken apart, too.
    """
    names = ONE_BY_ONE.get(model_class, frozenset())
    counts = {_count(arguments.get(name)) for name in names}
    more = (value for name, value in arguments.items() if name not in names)
    is_mixed = not others and any(map(_holds_tensors, more))
    if len(counts) != 1 or not all(counts) or is_mixed:
        return [arguments]
    return [
        {n: v[at : at + 1] if n in names else v for n, v in arguments.items()}
        for at in range(counts.pop())
    ]


def _count(value: Any) -> int:
    """Rows of a tensor, or tensors of a list; 0 where it is something else."""
    is_list = isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value)
    return len(value) if is_list or (isinstance(value, Tensor) and value.ndim) else 0


def _holds_tensors(value: Any) -> bool:
    items = items_of(value)
    return isinstance(value, Tensor) if items is None else any(map(_holds_tensors, items.values()))


def _unknown(it: Component, what: str) -> UsageError:
    return UsageError(
        f"the inputs of {it.name} cannot be derived: {what}",
        hint="Record them from a pipeline (enginecast.record), or give them:"
        " --inputs FILE.safetensors.",
    )
