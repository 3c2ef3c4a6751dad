"""Pipelines of diffusers with tiny encoders, live or read from a cache that was really filled."""

import json
from collections.abc import Callable, Mapping
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
from models import save, t5_config
from pipeline_probe import build, encode
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
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


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "t5": words_t5,
    "wide-t5": wide_t5,
    "umt5": umt5,
    "gemma2": gemma2,
    "clip": words_clip,
    "clip-projection": lambda folder: words_clip(folder, projection=True),
    "clip-projection-2": lambda folder: words_clip(folder, projection=True, seed=7),
}
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

    def bundle(self, name: str, outputs: tuple[str, ...]) -> Path:
        """An engine of a model, in fp32 on ONNX Runtime, that gives some outputs."""
        if (name, *outputs) in SHARED:
            made = self.shared(SHARED[name, *outputs]).bundle
            assert made is not None
            return made.root
        folder = self.root / f"{name}-{'-'.join(outputs)}.bundle"
        if not folder.exists():
            options = ModelOptions(outputs=outputs)
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
                self.fill(folder, f"{pipeline}:{part}", name, kind)
            self._caches[key] = folder
        return self._caches[key]

    def fill(
        self, cache: Path, part: str | None, name: str, kind: str = "eager", **request: Any
    ) -> Path:
        """Run `cache fill`.

        Args:
            part: of the table; None: `request` says all.
            request: the rest of it.
        """
        texts = self.root / "texts.jsonl"
        lines = (json.dumps({"caption": prompt}) for prompt in PROMPTS)
        texts.write_text("\n".join(lines), encoding="utf-8")
        model = self.model(name)
        if kind == "engine":
            assert part
            model = self.bundle(name, part_of(part).outputs)
        made = EncoderRequest(str(model), pipeline=part, **request)
        options = FillFlags(too_long="truncate", quiet=True)
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
            part: PreTrainedTokenizerFast.from_pretrained(
                self.model(name), padding_side=side_of(name)
            )
            for part, name in PIPELINES[pipeline].items()
        }
        return build(pipeline, encoders, tokenizers, **others)


def side_of(model: str) -> str:
    """The side on which the tokenizer of a model pads, as its class has it."""
    return "left" if model == "gemma2" else "right"


def embedded(pipe: Any, prompts: list[str] | None = None, **others: Any) -> list[Tensor]:
    """What the pipeline makes of prompts; the length that calling Wan hands on."""
    if type(pipe).__name__ == "WanPipeline":
        others.setdefault("max_sequence_length", 512)
    return encode(pipe, [*PROMPTS[-2:], PROMPTS[0]] if prompts is None else prompts, **others)
