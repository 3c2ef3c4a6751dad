"""The encoder that fills a cache, and the spec of everything that decides its outputs."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from enginecast.cache.encoders.request import EncoderRequest, StoreDtype, part_of, resolve
from enginecast.cache.encoders.text_model import ModelFacts, TextModel
from enginecast.cache.encoders.tokenizer_files import TokenizerFacts, find_tokenizer
from enginecast.cache.encoders.tokenizing import Tokenizing, digest_of
from enginecast.cache.store.spec import About, Clean, EncoderSpec, OutputSpec, pad_rows
from enginecast.capture.sources.place import WEIGHTS
from enginecast.errors import MissingError, SourceError, UsageError
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.bundle.pipeline_folder import pipeline_at
from enginecast.runtime.device.out_of_memory import lacks_memory
from enginecast.runtime.values.arrays import Array

_PROBE = "a photo of a fox"
_PROBE_PADDING = 5
_ROUNDING, _ROUNDING_16_BITS = 1e-3, 0.1
"""How much the outputs of a T5 may differ when rows are padded: they do by 1e-6 of the largest in
fp32, by 0.015 in bf16; without a mask by more than all of it."""


class Encoder:
    """A text encoder with its spec, and the text of the `tokenizer.json` that makes its ids."""

    def __init__(self, model: TextModel, spec: EncoderSpec, tokenizer: bytes) -> None:
        self._model = model
        self.spec = spec
        self.about: About = model.facts.about
        self.tokenizer = tokenizer

    def encode(self, ids: Array, mask: Array) -> dict[str, Array]:
        """Run on a batch.

        Args:
            ids: int64 [batch, sequence], padded as the spec says.
            mask: int64 [batch, sequence], 1 for tokens; all ones where the spec has no mask.

        Returns:
            The spec's outputs in its dtypes: [batch, sequence, width], or [batch, width] for an
            output per text.  Values may be NaN or infinite: who stores them looks.

        Raises:
            MissingError: too little memory.
        """
        names = [output.name for output in self.spec.outputs]
        try:
            found = self._model.run(ids, mask if self.spec.mask else None, names)
            # What a dtype cannot hold becomes infinite, and is refused.
            with np.errstate(over="ignore", invalid="ignore"):
                return {
                    one.name: found[one.name]
                    if found[one.name].dtype.name == one.dtype
                    else found[one.name].astype(np.float32).astype(np.dtype(one.dtype))
                    for one in self.spec.outputs
                }
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            raise MissingError(
                f"{self.about.source}: too little memory for {len(ids)} texts of {ids.shape[1]} "
                f"tokens: {error}",
                hint="Give a smaller --batch-tokens.  What was committed is safe.",
            ) from error

    def close(self) -> None:
        """Give the memory back; twice does no harm."""
        self._model.close()


def open_encoder(request: EncoderRequest) -> Encoder:
    """Open a bundle, or a Hugging Face folder, or its file of weights, to be run eagerly.

    Raises:
        SourceError, BundleError: neither, or damaged, or an engine that was rejected; no tokenizer.
        MissingError: this machine lacks what runs it, a GPU for example.
        InputError: it takes other inputs than text.
        UsageError: an option does not fit the encoder or another option.

    Warns:
        EnginecastWarning: the verdict of an engine does not cover a run here.
    """
    request = resolve(request)
    folder = Path(request.model)
    model: TextModel
    if (folder / MANIFEST_NAME).is_file():
        from enginecast.cache.encoders.engine import open_engine

        model = open_engine(request)
    elif (folder / "config.json").is_file() or (folder.suffix in WEIGHTS and folder.is_file()):
        from enginecast.cache.encoders.eager import open_eager

        model = open_eager(request)
    else:
        what = "holds neither" if folder.is_dir() else "is not a folder"
        hint = "`enginecast export MODEL -o DIR` makes a bundle."
        if (kind := pipeline_at(folder)) is not None:
            what = f"is a pipeline{' of engines' if kind == 'engines' else ''}"
            inner = "text_encoder/forward" if kind == "engines" else "text_encoder"
            hint = f"Give the folder of its text encoder, such as {folder / inner}."
        raise SourceError(
            f"{request.model}: expected a bundle ({MANIFEST_NAME}) or a Hugging Face folder "
            f"(config.json), but it {what}",
            hint=hint,
        )
    try:
        tokenizer = find_tokenizer(model.facts.folder, request.tokenizer)
        spec = make_spec(request, model.facts, tokenizer, model.outputs(request.outputs))
        tokenizing = Tokenizing(tokenizer.text, spec)
        if not spec.padded:
            _require_trimmable(model, spec, tokenizing)
    except BaseException:
        model.close()
        raise
    return Encoder(model, spec, tokenizer.text)


def _require_trimmable(model: TextModel, spec: EncoderSpec, tokenizing: Tokenizing) -> None:
    """Refuse to leave out rows of padding that change the others, masked though they are.

    Positions that count from the left do that where padding is on the left.
    """
    names = [output.name for output in spec.outputs]
    ids = tokenizing.tokens([_PROBE])[0].ids
    if len(ids) >= spec.max_length > 1:
        ids = ids[: spec.max_length // 2]  # room for padding
    tokens, left = len(ids), spec.padding_side == "left"
    more = min(_PROBE_PADDING, spec.max_length - tokens)
    bare = model.run(*pad_rows(spec, [ids], tokens), names)
    found = model.run(*pad_rows(spec, [ids], tokens + more), names)
    limit = _ROUNDING if spec.precision == "fp32" else _ROUNDING_16_BITS
    for output in spec.outputs:
        here, there = bare[output.name], found[output.name]
        if output.per == "token":
            there = there[:, more:] if left else there[:, :tokens]
        error = _distance(here, there)
        if error > limit:
            raise UsageError(
                f"{model.facts.about.source}: padding is masked, but changes {output.name} by "
                f"{error:.2g} of its largest value, so its rows cannot be left out",
                hint="--keep-all stores all rows, padded to --max-length.",
            )


def _distance(one: Array, other: Array) -> float:
    """Largest difference, in parts of the largest value; 0 where no text can be stored anyway."""
    one, other = one.astype(np.float64), other.astype(np.float64)
    if not np.isfinite(one).all():
        return 0.0
    largest = float(np.abs(one).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        error = float(np.abs(one - other).max(initial=0.0)) / (largest or 1.0)
    return error if np.isfinite(error) else np.inf


def _said(asked: bool | None, own: bool) -> bool:
    return own if asked is None else asked


def make_spec(
    request: EncoderRequest,
    model: ModelFacts,
    tokenizer: TokenizerFacts,
    outputs: Sequence[OutputSpec],
) -> EncoderSpec:
    """Fill in what a user left open; a UsageError where something does not fit together."""
    if request.clean not in (None, *get_args(Clean)):
        expected = ", ".join(get_args(Clean))
        raise UsageError(f"--clean {request.clean}: expected one of {expected}")
    if request.store_dtype not in (None, *get_args(StoreDtype)):
        expected = ", ".join(get_args(StoreDtype))
        raise UsageError(f"--store-dtype {request.store_dtype}: expected {expected}")
    if request.mask and not model.takes_mask:
        raise UsageError(f"--mask: {model.about.source} takes no attention mask")
    mask = model.takes_mask if request.mask is None else request.mask
    keep_all = request.keep_all if request.keep_all is not None else not mask
    most, max_length = model.sequence[1], request.max_length or 0
    if request.max_length is None:
        said = tokenizer.max_length or model.default_length
        cut = model.longest_text if request.tokenizer is None else None
        max_length = min(limit for limit in (said, most, cut) if limit is not None)
    elif max_length < 1 or (most is not None and max_length > most):
        takes = f"1..{most}, which is what {model.about.source} takes"
        raise UsageError(f"--max-length {max_length}: expected {takes if most else 'at least 1'}")
    if not mask and max_length < model.sequence[0]:
        raise UsageError(
            f"--max-length {max_length}: without a mask texts are padded to it, but the engine "
            f"takes {model.sequence[0]} tokens at least"
        )
    # What is masked may be any id; without a mask it changes every row, and is not guessed.
    padding_id = model.padding_id if tokenizer.padding_id is None else tokenizer.padding_id
    if padding_id is None and not mask:
        raise UsageError(
            f"{model.about.source}: without a mask the padding token decides the outputs, but "
            "neither the tokenizer nor the model's config names one",
            hint="Add pad_token to tokenizer_config.json.",
        )
    form = model.form
    spec = EncoderSpec(
        model=dict(model.identity),
        engine=dict(model.engine),
        precision=model.precision,
        tokenizer=digest_of(tokenizer.text),
        template=form.template if request.template is None else request.template,
        clean=request.clean or form.clean,
        special_tokens=_said(request.special_tokens, form.special_tokens),
        keep_end=_said(request.keep_end, form.keep_end),
        max_length=max_length,
        padding_id=padding_id or 0,
        padding_side=request.padding_side or tokenizer.padding_side or model.padding_side,
        mask=mask,
        rows="all" if keep_all else "real",
        extra_rows=request.extra_rows or 0,
        skip_rows=request.skip_rows or 0,
        outputs=tuple(
            msgspec.structs.replace(one, dtype=request.store_dtype or one.dtype) for one in outputs
        ),
    )
    last = max(tokenizer.last_id, spec.padding_id)
    if model.vocabulary is not None and last >= model.vocabulary:
        raise UsageError(
            f"{model.about.source}: it knows {model.vocabulary} token ids, but the tokenizer gives "
            f"ids up to {last}: it is another model's",
            hint="Give the model's own: --tokenizer PATH.",
        )
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
    skips_text = request.pipeline is not None and part_of(request.pipeline).skips_text
    left = spec.padding_side == "left" and not skips_text
    if spec.skip_rows and left and spec.rows != "all":
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
    return spec
