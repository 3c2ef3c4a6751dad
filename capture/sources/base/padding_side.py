"""On which sides a tokenizer pads and cuts, by its files."""

from collections.abc import Mapping
from typing import Any, Literal

Side = Literal["right", "left"]
PADS_LEFT = frozenset(
    f"{family}Tokenizer" for family in ("CodeLlama", "Cohere", "Gemma", "Llama", "Siglip2", "XLNet")
)
"""Tokenizers of transformers 5.23 that pad on the left unless their files say otherwise."""


def padding_side(said: Mapping[str, Any], content: Mapping[str, Any]) -> Side | None:
    """Where padding goes; None where nothing says so.

    Args:
        said: what `tokenizer_config.json` holds.
        content: what `tokenizer.json` holds.
    """
    side = said.get("padding_side", direction(content, "padding"))
    if side is None and isinstance(kind := said.get("tokenizer_class"), str):
        side = "left" if kind.removesuffix("Fast") in PADS_LEFT else "right"
    if not isinstance(side, str):
        return None
    return "left" if side == "left" else "right" if side == "right" else None


def cuts_left(said: Mapping[str, Any], content: Mapping[str, Any]) -> bool:
    """Whether long texts lose their first tokens; arguments are those of `padding_side`."""
    side: object = said.get("truncation_side", direction(content, "truncation"))
    return side == "left"


FROM_THE_LEFT = {"direction": "Left", "max_length": 512, "strategy": "LongestFirst", "stride": 0}
"""As `tokenizer.json` says it; who tokenizes texts gives a length of their own."""


def direction(content: Mapping[str, Any], part: str) -> str | None:
    """Of "padding" or "truncation" in `tokenizer.json`, in lower case."""
    found = content.get(part)
    side = found.get("direction") if isinstance(found, Mapping) else None
    return side.lower() if isinstance(side, str) else None
