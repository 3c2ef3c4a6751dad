"""What a pipeline of diffusers does with its text encoders, found by running its own function.

`Recorder` stands for an encoder: it keeps what it is called with, and each value that it gives
tells which encoder, call, output and row it is.  So what the pipeline returns tells what it read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from models import add_tokenizer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import (
    BaseModelOutput,
    BaseModelOutputWithPast,
    BaseModelOutputWithPooling,
    CausalLMOutputWithPast,
)
from transformers.models.clip.modeling_clip import CLIPTextModelOutput
from transformers.utils import ModelOutput

from enginecast.cache.encoders.request import Part, table

WIDTH, LAYERS, CLIP_LENGTH = 8, 37, 77
_MOST_OUTPUTS, _MOST_ROWS = 64, 2048
_OUTPUTS = ("text_embeds", "pooler_output", "last_hidden_state", "hidden_states")
_KINDS: Mapping[str, type[ModelOutput]] = {
    "CLIPTextModel": BaseModelOutputWithPooling,
    "CLIPTextModelWithProjection": CLIPTextModelOutput,
    "Gemma2Model": BaseModelOutputWithPast,
    "LlamaModel": BaseModelOutputWithPast,
    **dict.fromkeys(
        ("Qwen2_5_VLTextModel", "Qwen3Model", "Qwen3VLModel", "Mistral3Model"),
        BaseModelOutputWithPast,
    ),
    **dict.fromkeys(
        (
            "Gemma3ForConditionalGeneration",
            "Mistral3ForConditionalGeneration",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ForCausalLM",
            "Qwen3VLForConditionalGeneration",
        ),
        CausalLMOutputWithPast,
    ),
}
ALONE = ("bria", "ernie-image", "hunyuan-video-15", "kandinsky5")
"""Pipelines that encode texts one by one, or should be asked to."""
MADE_FOR_CHATS = (
    *("flux2", "flux2-klein", "hunyuan-video-15", "kandinsky5", "krea2"),
    *("ltx2", "ernie-image", "ovis-image", "qwen-image", "qwen-image21", "z-image"),
)
"""Pipelines whose tokenizers have chat templates, or tokens of chats."""
POOLED = -1
"""Stands for the row of an output per text."""


class Asked(nn.Module):
    """Stands for components of which a pipeline wants to know some numbers."""

    temporal_compression_ratio = spatial_compression_ratio = 4
    dtype = torch.float32
    config = SimpleNamespace(
        shift_factor=0.0,
        latent_channels=4,
        block_out_channels=[4],
        target_size=64,
        image_embed_dim=8,
    )


class Processor:
    """Stands for the processor of Qwen-Image 2.1, which counts 14 tokens of its system message."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, **given: Any) -> Any:
        return self.tokenizer(**given)

    def apply_chat_template(self, messages: Any, **given: Any) -> list[list[int]]:
        return [[0] * 14]


@dataclass(frozen=True)
class Call:
    """What an encoder was called with: ids int64 [batch, sequence], and the mask if there was."""

    ids: Tensor
    mask: Tensor | None


class Recorder(nn.Module):
    """Stands for the encoder of a row of the table.

    Args:
        number: of the encoder in its pipeline.
        part: its row.
    """

    def __init__(self, number: int, part: Part) -> None:
        super().__init__()
        self.number, self.part = number, part
        self.calls: list[Call] = []
        self.config = SimpleNamespace(hidden_size=WIDTH, d_model=WIDTH)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.model = nn.Module()
        self.model.norm = nn.Identity()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool = False,
        **others: Any,
    ) -> Any:
        asked = {name for name, value in others.items() if value is not None and value is not False}
        assert asked <= {"return_dict", "position_ids"}
        self.calls.append(Call(input_ids, attention_mask))
        kind = _KINDS.get(self.part.model, BaseModelOutput)
        names = kind.__dataclass_fields__
        given: dict[str, Any] = {
            name: self._values(input_ids, index, pooled=index < 2)
            for index, name in enumerate(_OUTPUTS[:3])
            if name in names
        }
        if output_hidden_states:
            layers = [self._values(input_ids, 3 + layer, pooled=False) for layer in range(LAYERS)]
            given["hidden_states"] = tuple(layers)
        return kind(**given)

    def _values(self, ids: Tensor, output: int, *, pooled: bool) -> Tensor:
        batch, sequence = ids.shape
        base = ((self.number * 4 + len(self.calls)) * _MOST_OUTPUTS + output) * _MOST_ROWS
        rows = torch.zeros(1) if pooled else torch.arange(1, sequence + 1)
        width = 2 * WIDTH if self.part.part == "text_encoder_3" else WIDTH  # SD3 joins the others
        codes = (base + rows).float()[:, None].expand(-1, width)
        return (codes if pooled else codes[None]).expand(batch, *codes.shape[pooled:]).clone()


@dataclass
class Reading:
    """What one call of an encoder was read for: rows by output, for each text of the batch."""

    part: Part
    call: Call
    rows: list[dict[str, set[int]]] = field(default_factory=list)


def word_tokenizer(folder: Any, length: int, side: str = "right") -> PreTrainedTokenizerFast:
    """The tests' tokenizer as pipelines call it; a text is at most `length` tokens long."""
    file = add_tokenizer(folder) / "tokenizer.json"
    return PreTrainedTokenizerFast(
        tokenizer_file=str(file),
        pad_token="<pad>",
        eos_token="</s>",
        model_max_length=length,
        padding_side=side,
        model_input_names=["input_ids", "attention_mask"],
    )


def parts_of(pipeline: str) -> list[Part]:
    return [part for part in table().parts if part.pipeline == pipeline]


def build(
    pipeline: str, encoders: Mapping[str, Any], tokenizers: Mapping[str, Any], **others: Any
) -> Any:
    """The real pipeline, its other components None."""
    made = getattr(diffusers, parts_of(pipeline)[0].function.partition(".")[0])
    names = [name for name in made._optional_components if name not in encoders]
    needed = dict.fromkeys([*made._get_signature_keys(made)[0], *names])
    given = {part.replace("text_encoder", "tokenizer"): found for part, found in tokenizers.items()}
    if pipeline == "qwen-image21":
        given = {"processor": Processor(given.pop("tokenizer"))}
    if pipeline in ("cosmos", "cosmos2"):
        others["safety_checker"] = nn.Module()  # anything: None would load a model
    if pipeline in ("bria", "hunyuan-video-15"):
        others["vae"] = others["transformer"] = Asked()
    needed.pop("self", None)
    return made(**needed | dict(encoders) | given | others)


def encode(pipe: Any, prompts: list[str], images: int = 1, **others: Any) -> list[Tensor]:
    """Call `encode_prompt`; what it returns, without None and positions.  Lists of texts' rows are
    filled up with zeros.
    """
    function = type(pipe).encode_prompt
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    given: dict[str, Any] = {"prompt": list(prompts), "device": torch.device("cpu")}
    if "negative_prompt" in names:
        given |= {"negative_prompt": [""] * len(prompts), "do_classifier_free_guidance": True}
    given |= {name: images for name in names if name.startswith("num_")}
    given |= {name: None for name in ("prompt_2", "prompt_3") if name in names}
    given |= {"batch_size": len(prompts)} if "batch_size" in names else {}
    with torch.no_grad():
        found = function(pipe, **given | others)
    found = [found] if isinstance(found, list) else found
    rows = [pad_sequence(one, True) if isinstance(one, list) else one for one in found if one != []]
    return [one for one in rows if one is not None and one.ndim > 1 and one.shape[-1] not in (3, 4)]


def readings(recorders: Sequence[Recorder], returned: Sequence[Tensor]) -> list[Reading]:
    """What a pipeline read of its encoders; rows that its masks leave out are not."""
    made = {
        (recorder.number, index): Reading(recorder.part, call, [{} for _ in call.ids])
        for recorder in recorders
        for index, call in enumerate(recorder.calls, start=1)
    }
    for index, embeds in enumerate(returned):
        if embeds.max() <= 1:
            continue  # a mask
        mask = mask_of(returned[index + 1 :], embeds)
        read = embeds if mask is None else masked(embeds, mask)
        for text, codes in enumerate(read):
            for code in codes[codes > 0].long().unique().tolist():
                _note(made, text, code)
    return list(made.values())


def mask_of(later: Sequence[Tensor], embeds: Tensor) -> Tensor | None:
    """The mask that belongs to embeddings: the next of their shape."""
    shaped = (one for one in later if embeds.ndim >= 3 and one.shape == embeds.shape[:2])
    return next(shaped, None)


def masked(embeds: Tensor, mask: Tensor) -> Tensor:
    """Embeddings [texts, rows, ...] with zeros where a mask [texts, rows] has them."""
    return embeds * mask.reshape(*mask.shape, *[1] * (embeds.ndim - 2)).to(embeds.dtype)


def _note(made: Mapping[tuple[int, int], Reading], text: int, code: int) -> None:
    base, row = divmod(code, _MOST_ROWS)
    base, output = divmod(base, _MOST_OUTPUTS)
    layer = f"hidden_states.{output - 3 - LAYERS}"
    name = layer if output >= 3 else _OUTPUTS[output]
    made[divmod(base, 4)].rows[text].setdefault(name, set()).add(row - 1)
