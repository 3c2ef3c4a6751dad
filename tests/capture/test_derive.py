"""Inputs of models of every modality, from their configs and their classes alone."""

import inspect
from collections.abc import Mapping

import pytest
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from enginecast.capture.inputs.derive.from_facts import from_facts
from enginecast.capture.inputs.derive.model_facts import ModelFacts, documented
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import InputSpec
from enginecast.errors import UsageError

Sizes = tuple[int | str, ...]
BATCH = "batch=1..64"


def facts(class_name: str, config: PreTrainedConfig) -> ModelFacts:
    """What `facts_of` gathers of a source, without a folder."""
    model_class: type[PreTrainedModel] = getattr(transformers, class_name)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = [
        parameter
        for parameter in list(inspect.signature(model_class.forward).parameters.values())[1:]
        if parameter.kind not in variadic
    ]
    names = tuple(parameter.name for parameter in parameters)
    main = model_class.main_input_name
    return ModelFacts(
        config,
        names,
        class_name,
        tuple(p.name for p in parameters if p.default is p.empty),
        (main,) if main in names else (),
        documented(model_class),
    )


def derived(class_name: str, **fields: object) -> dict[str, InputSpec]:
    """The inputs of a class of transformers, by name."""
    model_class: type[PreTrainedModel] = getattr(transformers, class_name)
    config_class = model_class.config_class
    assert config_class is not None
    specs = from_facts(facts(class_name, config_class(**fields)))
    drawn = sample(specs, example_sizes(specs), 0)
    for spec in specs:  # what is derived can be drawn, and every named size stands for one name
        assert drawn[spec.name].dtype == spec.dtype
        assert tuple(drawn[spec.name].shape) == tuple(dim.size for dim in spec.dims)
    return {spec.name: spec for spec in specs}


def sizes(spec: InputSpec) -> Sizes:
    """Each dimension as a number, or as name=range."""
    return tuple(
        dim.size if dim.name is None else f"{dim.name}={dim.minimum}..{dim.maximum}"
        for dim in spec.dims
    )


def shapes(class_name: str, **fields: object) -> dict[str, Sizes]:
    return {name: sizes(spec) for name, spec in derived(class_name, **fields).items()}


def text(longest: int, *names: str) -> dict[str, Sizes]:
    names = names or ("input_ids", "attention_mask")
    return dict.fromkeys(names, (BATCH, f"sequence=1..{longest}"))


TARGET = "target_sequence=1.."


@pytest.mark.parametrize(
    ("class_name", "fields", "expected"),
    [
        ("BertModel", {}, text(512)),
        ("RobertaModel", {"max_position_embeddings": 514}, text(512)),
        ("GPT2Model", {"n_positions": 96}, text(96)),
        ("T5EncoderModel", {}, text(512)),
        ("CLIPTextModel", {}, text(77)),
        (
            "T5Model",
            {},
            text(512) | {"decoder_input_ids": (BATCH, TARGET + "512")},
        ),
        (
            "BartModel",
            {"max_position_embeddings": 40},
            text(40) | {"decoder_input_ids": (BATCH, TARGET + "40")},
        ),
    ],
)
def test_text(class_name: str, fields: Mapping[str, object], expected: dict[str, Sizes]) -> None:
    assert shapes(class_name, **fields) == expected


@pytest.mark.parametrize(
    ("class_name", "fields", "expected"),
    [
        ("ViTModel", {"image_size": 48}, (BATCH, 3, 48, 48)),
        ("ViTModel", {"image_size": (32, 48), "num_channels": 1}, (BATCH, 1, 32, 48)),
        ("Dinov2Model", {}, (BATCH, 3, 224, 224)),
        ("SamVisionModel", {}, (BATCH, 3, 1024, 1024)),
        ("SegformerModel", {}, (BATCH, 3, "height=64..2048", "width=64..2048")),
        ("VideoMAEModel", {"image_size": 32, "num_frames": 6}, (BATCH, 6, 3, 32, 32)),
    ],
)
def test_images(class_name: str, fields: Mapping[str, object], expected: Sizes) -> None:
    assert shapes(class_name, **fields) == {"pixel_values": expected}


CONVOLUTIONS = {"conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2), "conv_dim": (8, 8, 8)}


@pytest.mark.parametrize(
    ("class_name", "fields", "expected"),
    [
        (
            "WhisperModel",
            {"max_source_positions": 50, "max_target_positions": 30},
            {"input_features": (BATCH, 80, 100), "decoder_input_ids": (BATCH, TARGET + "30")},
        ),
        (
            "Speech2TextModel",
            {"max_source_positions": 600, "max_target_positions": 32},
            {
                "input_features": (BATCH, "frames=32..600", 80),
                "decoder_input_ids": (BATCH, TARGET + "32"),
            },
        ),
        ("Wav2Vec2BertModel", {}, {"input_features": (BATCH, "frames=32..5000", 160)}),
        (
            "HubertModel",
            {**CONVOLUTIONS, "num_feat_extract_layers": 3},
            {"input_values": (BATCH, "samples=170..10250")},
        ),
    ],
)
def test_sound(class_name: str, fields: Mapping[str, object], expected: dict[str, Sizes]) -> None:
    assert shapes(class_name, **fields) == expected


@pytest.mark.parametrize(
    ("class_name", "fields", "names"),
    [
        ("CLIPModel", {}, ["input_ids", "pixel_values", "attention_mask"]),
        ("SiglipModel", {}, ["input_ids", "pixel_values", "attention_mask"]),
        ("ViltModel", {}, ["input_ids", "attention_mask", "pixel_values"]),
        ("ClapModel", {}, ["input_ids", "input_features", "attention_mask"]),
        ("CLIPVisionModel", {}, ["pixel_values"]),
        # The features of an image go where the text has image tokens: as many as it has patches.
        ("LlavaModel", {}, ["input_ids", "attention_mask"]),
    ],
)
def test_several_modalities(class_name: str, fields: dict[str, object], names: list[str]) -> None:
    assert list(derived(class_name, **fields)) == names


def test_what_cannot_be_derived_is_named_with_what_is_known_of_it() -> None:
    config = transformers.Siglip2VisionConfig()
    with pytest.raises(UsageError) as refused:
        from_facts(facts("Siglip2VisionModel", config))
    assert refused.value.message == (
        "the input 'pixel_values' of Siglip2VisionModel cannot be derived: "
        "Tensor of shape (batch_size, num_channels, image_size, image_size)"
    )
    assert refused.value.hint == (
        "Give all inputs: --inputs FILE.safetensors, written by safetensors.torch.save_file({"
        '"pixel_values": <Tensor of shape (batch_size, num_channels, image_size, image_size)>, '
        '"pixel_attention_mask": <Tensor of shape (batch_size, image_size, image_size)>, '
        "\"spatial_shapes\": <LongTensor of shape (batch_size, 2)>}, 'FILE.safetensors')."
    )
