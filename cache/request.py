"""What is asked of a fill: which encoder, and how texts go into it."""

from dataclasses import dataclass
from typing import Literal

from enginecast.cache.spec import Clean, Side

TooLong = Literal["error", "truncate"]
StoreDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class EncoderRequest:
    """An encoder as a user names it.  Plain values, so that any worker process can open it.

    Args:
        model: a bundle, or a Hugging Face folder, which is run eagerly.
        tokenizer: a folder or `tokenizer.json`; None: the model's own.
        pipeline: "flux:text_encoder_2": a row of `pipelines.json` gives what is None below.
        template: a text goes in place of the braces; None: the text alone.
        clean: None: nothing is done to a text.
        max_length: in tokens; None: what the model takes, or its tokenizer says.
        mask: whether the encoder is told what is padding; None: where it takes a mask.
        keep_all: keep the rows of padding; None: only where the encoder gets no mask.
        extra_rows: rows of padding kept behind the tokens.
        skip_rows: rows dropped in front.
        padding_side: None: as the tokenizer's files say.
        outputs: names of the outputs to keep; empty: all that an engine gives, and
            `last_hidden_state` of an eager model.
        precision: "fp32", "bf16" or "fp16" of an eager model; None: as its weights are stored.  An
            engine has its own.
        store_dtype: None: as the encoder gives them.
        random_weights: seed, for a folder with a config alone.
        device: "cpu" or "cuda"; None: "cpu".
        providers: execution providers of ONNX Runtime.
        threads: within one operator.
        allow_code: open engine kinds that run code when they are loaded.
    """

    model: str
    tokenizer: str | None = None
    pipeline: str | None = None
    template: str | None = None
    clean: Clean | None = None
    max_length: int | None = None
    mask: bool | None = None
    keep_all: bool | None = None
    extra_rows: int | None = None
    skip_rows: int | None = None
    padding_side: Side | None = None
    outputs: tuple[str, ...] = ()
    precision: str | None = None
    store_dtype: StoreDtype | None = None
    random_weights: int | None = None
    device: str | None = None
    providers: tuple[str, ...] | None = None
    threads: int | None = None
    allow_code: bool = False
