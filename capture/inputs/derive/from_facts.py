"""Inputs of a model of transformers without examples: from its config and its `forward`."""

from collections.abc import Mapping, Sequence

from enginecast.capture.inputs.derive.known_inputs import (
    AUDIO_INPUTS,
    PATCH_INPUTS,
    SERIES_INPUTS,
    TEXT_INPUTS,
    VISION_INPUTS,
    Derive,
    as_documented,
)
from enginecast.capture.inputs.derive.model_facts import ModelFacts
from enginecast.capture.inputs.specs import InputSpec, with_example_sizes
from enginecast.capture.inputs.text_config import placeholders_of
from enginecast.errors import UsageError

INPUTS: Mapping[str, Derive] = {
    **TEXT_INPUTS,
    **VISION_INPUTS,
    **PATCH_INPUTS,
    **AUDIO_INPUTS,
    **SERIES_INPUTS,
}
"""For each derivable argument, the function that makes it, which returns None if the config does
not describe it."""

MODALITIES = (*VISION_INPUTS, *AUDIO_INPUTS, *SERIES_INPUTS, "input_ids")
"""If `main_input_name` is not an argument of `forward`, the first of these is the main input."""

COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "attention_mask": ("input_ids",),
    "input_features_mask": ("input_features",),
    "bbox": ("input_ids",),
    "decoder_input_ids": ("input_ids", "input_features", "input_values"),
    "decoder_input_values": ("input_values",),
}
"""Arguments with a default that are given with one of these all the same: a mask, so that the
engine can be fed rows of several lengths; the boxes of the words on a page; the text so far, which
some encoder-decoders shift from the input and others miss."""

TOWERS: Mapping[str, tuple[str, ...]] = {
    "pixel_values": ("vision_config", "image_config"),
    "pixel_values_videos": ("video_config", "vision_config"),
    "input_features": ("audio_config", "speech_config"),
    "input_values": ("audio_config", "speech_config"),
}
"""Configs that, next to a text config, describe a tower of their own, with an input besides the
text's."""

COUNTED = (*VISION_INPUTS, *AUDIO_INPUTS)


def from_facts(facts: ModelFacts) -> tuple[InputSpec, ...]:
    """Inputs of a transformers model, in the order of its `forward`.

    Raises:
        UsageError: a required one cannot be derived, or none can.
    """
    # The arguments to derive: required ones, the main input, towers, companions, and the
    # tokenizer's outputs.
    known = [name for name in MODALITIES if name in facts.arguments]
    main = [*(facts.main or facts.required or known[:1])]
    wanted = {*facts.required, *main} - facts.fixed.keys()
    if not placeholders_of(facts.config):
        wanted |= {name for name in known if _is_own_tower(facts, name)}
    wanted |= {
        name
        for name, owners in COMPANIONS.items()
        if wanted.intersection(owners) and _is_fitting(facts, name)
    }
    if "input_ids" in wanted:
        wanted |= {name for name in facts.tokenized if name in TEXT_INPUTS}
    names = tuple(name for name in facts.arguments if name in wanted)
    if not names:
        raise UsageError(
            f"the inputs of {facts.name} cannot be derived: forward takes "
            f"{', '.join(facts.arguments[:4]) or 'no arguments'}, of which none is known",
            hint=_how_to_give(facts, facts.arguments[:1]),
        )
    return with_example_sizes(tuple(_derived(facts, name, names) for name in names))


def _is_own_tower(facts: ModelFacts, name: str) -> bool:
    """Whether `name` is needed next to the main input, as images are next to CLIP's text.

    A model that takes images and token ids needs both, even with one config for both (ViLT).
    """
    if name == "input_ids":
        has_text = any(hasattr(facts.config, f"{part}_config") for part in ("text", "vision"))
        return has_text or not facts.main
    if name == "pixel_values" and "input_ids" in facts.arguments:
        return True
    return any(hasattr(facts.config, part) for part in TOWERS.get(name, ()))


def _is_fitting(facts: ModelFacts, name: str) -> bool:
    if name.startswith("decoder_"):
        return bool(getattr(facts.config, "is_encoder_decoder", False))
    return name in facts.arguments and INPUTS[name](facts) is not None


def _derived(facts: ModelFacts, name: str, names: Sequence[str]) -> InputSpec:
    placeholders = [*placeholders_of(facts.config)]
    if placeholders and name in COUNTED and "input_ids" in names:
        known = f"input_ids must hold the id {placeholders[0]} once for each of its features"
        raise _underivable(facts, name, names, known)
    spec = INPUTS[name](facts) if name in INPUTS else None
    if spec is None and name in facts.required:
        spec = as_documented(facts, name)
    if spec is None:
        raise _underivable(facts, name, names, facts.shapes.get(name, ""))
    return spec


def _underivable(facts: ModelFacts, name: str, names: Sequence[str], known: str) -> UsageError:
    what = f": {known}" if known else f" from the config of {type(facts.config).__name__}"
    return UsageError(
        f"the input {name!r} of {facts.name} cannot be derived{what}",
        hint=_how_to_give(facts, [name, *(other for other in names if other != name)]),
    )


def _how_to_give(facts: ModelFacts, names: Sequence[str]) -> str:
    """Instructions for writing the file, with the shape of each tensor if known."""
    entries = ", ".join(f'"{name}": {_tensor(facts, name)}' for name in names)
    return (
        "Give all inputs: --inputs FILE.safetensors, written by "
        f"safetensors.torch.save_file({{{entries}}}, 'FILE.safetensors')."
    )


def _tensor(facts: ModelFacts, name: str) -> str:
    spec = INPUTS[name](facts) if name in INPUTS else None
    if spec is not None:
        return f"torch.zeros({[dim.size for dim in spec.dims]}, dtype={spec.dtype})"
    shape = facts.shapes.get(name, "")
    return f"<{shape}>" if shape else "..."
