"""Which transformers class a config means.  Needs no torch, because cache readers use it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEXT_ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel", "umt5": "UMT5EncoderModel"}
"""Who deploys these encoder-decoders wants the text encoder alone."""


def beside(folder: Path) -> tuple[Path, ...]:
    """Where a pipeline of diffusers has the tokenizer of a text encoder, whose folder this is."""
    name = folder.name.replace("text_encoder", "tokenizer", 1)
    return (folder.parent / name, folder.parent / "processor")


def class_named_by(config: Mapping[str, Any]) -> str:
    """The class that `huggingface.open_folder` loads by config.json; empty where none is named."""
    encoder = TEXT_ENCODERS.get(str(config.get("model_type")))
    names = [encoder] if encoder else [*(config.get("architectures") or ())]
    return str(names[0]) if names else ""
