"""Pipelines of diffusers with tiny encoders, live or read from a cache that was really filled."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from cache_fixtures import (
    VOCABULARY,
    add_t5_tokenizer,
    short_captions,
    words_clip,
    words_t5,
)
from exports import Exports
from language_models import MISTRAL, ChatTokenizer, language_model
from language_models import PROMPTS as CHAT_PROMPTS
from models import save, t5_config
from pipeline_probe import ALONE, MADE_FOR_CHATS, build, encode, parts_of
from torch import Tensor, nn
from transformers import (
    ByT5Tokenizer,
    Gemma2Config,
    Gemma2Model,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

from enginecast.cache.encoders.request import EncoderRequest, part_of
from enginecast.cache.read.cached_encoder import CachedEncoder
from enginecast.cli.cache.fill import run_fill
from enginecast.cli.cache.options import FillFlags
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest, ModelOptions

PROMPTS = ["A  photo of a Red fox, cinematic", *short_captions(4, seed=3), " tiny boat\t& fog "]
"""Upper case, white space at the ends and within: what pipelines clean away, or do not."""


def wide_t5(folder: Path) -> Path:
    """A T5 as wide as two CLIPs, which Stable Diffusion 3 cuts to its width."""
    config = t5_config()
    config.vocab_size, config.d_model = VOCABULARY, 64
    save(T5EncoderModel, config, folder, torch.float32, 4)
    return add_t5_tokenizer(folder)


def umt5(folder: Path) -> Path:
    """UMT5, which has a position bias in each layer."""
    config = UMT5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4
    )
    config.architectures = ["UMT5EncoderModel"]
    save(UMT5EncoderModel, config, folder, torch.float32, 5)
    return add_t5_tokenizer(folder)


def gemma2(folder: Path) -> Path:
    """Gemma 2; its tokenizer pads on the left, as no file says but by its class."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        architectures=["Gemma2Model"],
    )
    save(Gemma2Model, config, folder, torch.float32, 6)
    file = add_t5_tokenizer(folder) / "tokenizer_config.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**said, "tokenizer_class": "GemmaTokenizer"}), encoding="utf-8")
    return folder


def byt5(folder: Path) -> Path:
    """A T5 encoder of bytes, whose tokenizer has no vocabulary."""
    config = t5_config()
    config.vocab_size = 384
    save(T5EncoderModel, config, folder, torch.float32, 8)
    ByT5Tokenizer().save_pretrained(folder)
    return folder


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "t5": words_t5,
    "wide-t5": wide_t5,
    "umt5": umt5,
    "gemma2": gemma2,
    "clip": words_clip,
    "clip-projection": lambda folder: words_clip(folder, projection=True),
    "clip-projection-2": lambda folder: words_clip(folder, projection=True, seed=7),
    "byt5": byt5,
    "flux2": lambda folder: language_model(
        folder, "mistral3", "Mistral3ForConditionalGeneration", 31, MISTRAL, "left"
    ),
    "flux2-klein": lambda folder: language_model(folder, "qwen3", "Qwen3ForCausalLM", 28),
    "qwen-image": lambda folder: language_model(
        folder, "qwen25-vl", "Qwen2_5_VLForConditionalGeneration", 2, side="left"
    ),
    "qwen3-vl": lambda folder: language_model(
        folder, "qwen3-vl", "Qwen3VLForConditionalGeneration", 2, side="left"
    ),
    "qwen3": lambda folder: language_model(folder, "qwen3", "Qwen3Model", 3),
    "qwen25-vl-text": lambda folder: language_model(
        folder, "qwen25-vl-text", "Qwen2_5_VLTextModel", 3
    ),
    "ltx2": lambda folder: language_model(
        folder, "gemma3", "Gemma3ForConditionalGeneration", 2, MISTRAL
    ),
    "krea2": lambda folder: language_model(folder, "qwen3-vl", "Qwen3VLModel", 36),
    "ernie-image": lambda folder: language_model(folder, "mistral3", "Mistral3Model", 3, MISTRAL),
    "llama": lambda folder: language_model(folder, "llama", "LlamaModel", 4, MISTRAL),
}
OWN_SIDE = {
    *(
        "byt5",
        "flux2",
        "flux2-klein",
        "qwen-image",
        "qwen3",
        "qwen3-vl",
        "qwen25-vl-text",
        "ltx2",
        "krea2",
    ),
    *("ernie-image", "llama"),
}
"""Models whose tokenizers' files say where they pad."""
SHARED: Mapping[tuple[str, ...], str] = {
    ("t5", "last_hidden_state"): "words-t5",
    ("clip", "pooler_output"): "words-clip",
    ("clip", "last_hidden_state"): "words-clip",
}
"""Models and outputs that engines of `Exports` give."""
T5 = {"text_encoder": "t5"}
UMT5 = {"text_encoder": "umt5"}
PIPELINES: Mapping[str, Mapping[str, str]] = {
    "allegro": T5,
    "auraflow": UMT5,
    "chroma": T5,
    "cogvideox": T5,
    "cogview3plus": T5,
    "cosmos": T5,
    "cosmos2": T5,
    "flux": {"text_encoder": "clip", "text_encoder_2": "t5"},
    "latte": T5,
    "ltx": T5,
    "mochi": T5,
    "pixart-alpha": T5,
    "pixart-sigma": T5,
    "sana": {"text_encoder": "gemma2"},
    "sd15": {"text_encoder": "clip"},
    "sd3": {
        "text_encoder": "clip-projection",
        "text_encoder_2": "clip-projection-2",
        "text_encoder_3": "wide-t5",
    },
    "sdxl": {"text_encoder": "clip", "text_encoder_2": "clip-projection"},
    "wan": UMT5,
    "wan22": UMT5,
    "bria": T5,
    "ernie-image": {"text_encoder": "ernie-image"},
    "flux2": {"text_encoder": "flux2"},
    "flux2-klein": {"text_encoder": "flux2-klein"},
    "hunyuan-video": {"text_encoder": "llama", "text_encoder_2": "clip"},
    "hunyuan-video-15": {"text_encoder": "qwen25-vl-text", "text_encoder_2": "byt5"},
    "kandinsky5": {"text_encoder": "qwen-image", "text_encoder_2": "clip"},
    "krea2": {"text_encoder": "krea2"},
    "ltx2": {"text_encoder": "ltx2"},
    "lumina2": {"text_encoder": "gemma2"},
    "ovis-image": {"text_encoder": "qwen3"},
    "qwen-image": {"text_encoder": "qwen-image"},
    "qwen-image21": {"text_encoder": "qwen3-vl"},
    "z-image": {"text_encoder": "qwen3"},
}
"""Models by part, as `MODELS` calls them."""


@dataclass
class Workshop:
    """Makes models, bundles, caches and pipelines, each once.

    Args:
        root: folder for them.
        shared: engines that other test files use, too.
    """

    root: Path
    shared: Exports
    _caches: dict[tuple[str, str], Path] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        """A model's folder."""
        folder = self.root / name
        return folder if folder.exists() else MODELS[name](folder)

    def bundle(self, name: str, part: str) -> Path:
        """An engine of a model, in fp32 on ONNX Runtime, that gives what a pipeline reads."""
        outputs = part_of(part).outputs
        if (name, *outputs) in SHARED:
            made = self.shared(SHARED[name, *outputs]).bundle
            assert made is not None
            return made.root
        folder = self.root / f"{name}-{part.replace(':', '-')}.bundle"
        if not folder.exists():
            options = ModelOptions(for_pipeline=part)
            done = export(
                ExportRequest(str(self.model(name)), folder, precision="fp32", options=options)
            )
            assert done.bundle is not None, done.report.verdict.reasons
        return folder

    def cache(self, pipeline: str, kind: str = "eager") -> Path:
        """A cache of `PROMPTS` for all encoders of a pipeline.

        Args:
            kind: what fills it: "eager" or "engine".
        """
        key = (pipeline, kind)
        if key not in self._caches:
            folder = self.root / f"cache-{len(self._caches)}"
            for part, name in PIPELINES[pipeline].items():
                self.fill(folder, f"{pipeline}:{part}", name, kind, prompts_of(pipeline))
            self._caches[key] = folder
        return self._caches[key]

    def fill(
        self,
        cache: Path,
        part: str | None,
        name: str,
        kind: str = "eager",
        prompts: Sequence[str] = PROMPTS,
        **request: Any,
    ) -> Path:
        """Run `cache fill`.

        Args:
            part: of the table; None: `request` says all.
            request: the rest of it.
        """
        texts = self.root / "texts.jsonl"
        lines = (json.dumps({"caption": prompt}) for prompt in prompts)
        texts.write_text("\n".join(lines), encoding="utf-8")
        model = self.model(name)
        if kind == "engine":
            assert part
            model = self.bundle(name, part)
        made = EncoderRequest(str(model), pipeline=part, **request)
        options = FillFlags(quiet=True)
        assert run_fill(made, texts, cache, options) == 0
        return cache

    def live(self, pipeline: str, *, exact: bool = False, **others: Any) -> Any:
        """The pipeline with its encoders, in fp64 where it is to be `exact`."""
        made = {part: self.encoder(name) for part, name in PIPELINES[pipeline].items()}
        if exact:
            made = {part: one.double() for part, one in made.items()}
        return self.pipeline(pipeline, made, **others)

    def cached(self, pipeline: str, cache: Path, **others: Any) -> Any:
        """The pipeline with a cache in place of its encoders."""
        made = {part: CachedEncoder(cache, part) for part in PIPELINES[pipeline]}
        return self.pipeline(pipeline, made, **others)

    def encoder(self, name: str) -> nn.Module:
        """A model as users load it."""
        folder = self.model(name)
        config = transformers.AutoConfig.from_pretrained(folder)
        found = getattr(transformers, config.architectures[0]).from_pretrained(folder).eval()
        assert isinstance(found, nn.Module)
        return found

    def pipeline(self, pipeline: str, encoders: Mapping[str, Any], **others: Any) -> Any:
        """The pipeline with some encoders and the tokenizers of its models."""
        tokenizers = {
            part: ByT5Tokenizer.from_pretrained(self.model(name))
            if name == "byt5"
            else ChatTokenizer.from_pretrained(
                self.model(name), **({} if name in OWN_SIDE else {"padding_side": side_of(name)})
            )
            for part, name in PIPELINES[pipeline].items()
        }
        return build(pipeline, encoders, tokenizers, **others)


def side_of(model: str) -> str:
    """The side on which the tokenizer of a model pads, as its class has it."""
    return "left" if model == "gemma2" else "right"


def prompts_of(pipeline: str) -> list[str]:
    """What its cache is filled with: in four languages where the encoder is a language model."""
    return CHAT_PROMPTS if pipeline in MADE_FOR_CHATS else PROMPTS


def embedded(pipe: Any, prompts: list[str] | None = None, **others: Any) -> list[Tensor]:
    """What the pipeline makes of prompts; the length that calling Wan hands on."""
    if type(pipe).__name__ == "WanPipeline":
        others.setdefault("max_sequence_length", 512)
    known = {parts_of(name)[0].function.partition(".")[0]: name for name in PIPELINES}
    pipeline = known[type(pipe).__name__]
    if pipeline == "lumina2":  # negative prompts have no template, and are another cache's
        others["do_classifier_free_guidance"] = False
    every = prompts_of(pipeline)
    prompts = [*every[-2:], *every[:-2][:3]] if prompts is None else prompts
    if pipeline in ALONE:
        return [one for text in prompts for one in encode(pipe, [text], **others)]
    return encode(pipe, prompts, **others)
