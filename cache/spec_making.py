"""The spec of an encoder, from what a user asked, the model is, and its tokenizer says."""

from collections.abc import Sequence
from typing import get_args

from enginecast.cache.request import EncoderRequest, StoreDtype
from enginecast.cache.spec import Clean, EncoderSpec, OutputSpec
from enginecast.cache.text_model import ModelFacts
from enginecast.cache.tokenizer_files import TokenizerFacts
from enginecast.cache.tokenizing import check_template, digest_of
from enginecast.errors import UsageError


def make_spec(
    request: EncoderRequest,
    model: ModelFacts,
    tokenizer: TokenizerFacts,
    outputs: Sequence[OutputSpec],
) -> EncoderSpec:
    """Fill in what a user left open, and refuse what does not fit together.

    Args:
        outputs: as the encoder gives them.

    Raises:
        UsageError: an option does not fit the encoder or another option.
    """
    template = "{}" if request.template is None else request.template
    check_template(template)
    mask = _mask(request, model)
    keep_all = request.keep_all if request.keep_all is not None else not mask
    max_length = _max_length(request, model, tokenizer)
    if not mask and max_length < model.sequence[0]:
        raise UsageError(
            f"--max-length {max_length}: without a mask texts are padded to it, but the engine "
            f"takes {model.sequence[0]} tokens at least"
        )
    padding_id = _padding_id(model, tokenizer, needed=not mask)
    _check_vocabulary(model, tokenizer, padding_id)
    spec = EncoderSpec(
        model=dict(model.identity),
        engine=dict(model.engine),
        precision=model.precision,
        tokenizer=digest_of(tokenizer.text),
        template=template,
        clean=_clean(request),
        max_length=max_length,
        padding_id=padding_id,
        padding_side=request.padding_side or tokenizer.padding_side or model.padding_side,
        mask=mask,
        rows="all" if keep_all else "real",
        extra_rows=request.extra_rows or 0,
        skip_rows=request.skip_rows or 0,
        outputs=tuple(_stored(output, request.store_dtype) for output in outputs),
    )
    _check_rows(spec)
    return spec


def _mask(request: EncoderRequest, model: ModelFacts) -> bool:
    if request.mask and not model.takes_mask:
        raise UsageError(f"--mask: {model.about.source} takes no attention mask")
    return model.takes_mask if request.mask is None else request.mask


def _clean(request: EncoderRequest) -> Clean:
    clean = request.clean or "none"
    if clean not in get_args(Clean):
        raise UsageError(f"--clean {clean}: expected one of {', '.join(get_args(Clean))}")
    return clean


def _max_length(request: EncoderRequest, model: ModelFacts, tokenizer: TokenizerFacts) -> int:
    most = model.sequence[1]
    asked = request.max_length
    if asked is not None:
        if asked < 1 or (most is not None and asked > most):
            raise UsageError(
                f"--max-length {asked}: expected 1..{most}, which is what {model.about.source} "
                "takes"
                if most
                else f"--max-length {asked}: expected at least 1"
            )
        return asked
    said = tokenizer.max_length or model.default_length
    return said if most is None else min(said, most)


def _padding_id(model: ModelFacts, tokenizer: TokenizerFacts, *, needed: bool) -> int:
    """What is masked may be any id; without a mask it changes every row, and is not guessed."""
    for found in (tokenizer.padding_id, model.padding_id):
        if found is not None:
            return found
    if needed:
        raise UsageError(
            f"{model.about.source}: without a mask the padding token decides the outputs, but "
            "neither the tokenizer nor the model's config names one",
            hint="Add pad_token to tokenizer_config.json.",
        )
    return 0


def _check_vocabulary(model: ModelFacts, tokenizer: TokenizerFacts, padding_id: int) -> None:
    last = max(tokenizer.last_id, padding_id)
    if model.vocabulary is not None and last >= model.vocabulary:
        raise UsageError(
            f"{model.about.source}: it knows {model.vocabulary} token ids, but the tokenizer gives "
            f"ids up to {last}: it is another model's",
            hint="Give the model's own: --tokenizer PATH.",
        )


def _stored(output: OutputSpec, dtype: StoreDtype | None) -> OutputSpec:
    if dtype is None:
        return output
    if dtype not in get_args(StoreDtype):
        raise UsageError(f"--store-dtype {dtype}: expected {', '.join(get_args(StoreDtype))}")
    return OutputSpec(name=output.name, per=output.per, width=output.width, dtype=dtype)


def _check_rows(spec: EncoderSpec) -> None:
    if spec.extra_rows < 0 or spec.skip_rows < 0:
        raise UsageError("--extra-rows, --skip-rows: expected at least 0")
    if spec.extra_rows and spec.rows == "all":
        raise UsageError(
            f"--extra-rows {spec.extra_rows}: all rows are kept already",
            hint="Leave it out, or give --trim.",
        )
    if spec.extra_rows and spec.padding_side == "left":
        raise UsageError(
            f"--extra-rows {spec.extra_rows}: texts are padded on the left, so no rows of "
            "padding follow a text"
        )
    if spec.skip_rows and spec.padding_side == "left" and spec.rows != "all":
        raise UsageError(
            f"--skip-rows {spec.skip_rows}: texts are padded on the left, so the first rows of a "
            "text are not those of its row of ids, which is where pipelines drop some",
            hint="--keep-all keeps the rows of padding, and drops the first of the row; or give a "
            "tokenizer that pads on the right: --tokenizer PATH.",
        )
    if spec.skip_rows >= spec.max_length:
        raise UsageError(
            f"--skip-rows {spec.skip_rows}: expected fewer than --max-length {spec.max_length}"
        )
