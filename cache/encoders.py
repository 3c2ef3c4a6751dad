"""Opening the encoder that fills a cache."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from enginecast.cache.encoder import Encoder
from enginecast.cache.pipelines import resolve
from enginecast.cache.request import EncoderRequest
from enginecast.cache.spec import About, EncoderSpec
from enginecast.cache.spec_making import make_spec
from enginecast.cache.text_model import TextModel
from enginecast.cache.tokenizer_files import find_tokenizer
from enginecast.cache.tokenizing import Tokenizing
from enginecast.errors import MissingError, SourceError, UsageError
from enginecast.runtime.arrays import Array
from enginecast.runtime.manifest import MANIFEST_NAME
from enginecast.runtime.out_of_memory import lacks_memory

_PROBE = "a photo of a fox"
_PROBE_PADDING = 5
_ROUNDING: Mapping[str, float] = {"fp32": 1e-3}
"""How much the outputs of a T5 differ when rows are padded: 1e-6 of the largest in fp32 ..."""
_ROUNDING_16_BITS = 0.1
"""... and 0.015 in bf16; without a mask by more than all of it."""


def open_encoder(request: EncoderRequest) -> Encoder:
    """Open a bundle, or a Hugging Face folder to be run eagerly.

    Raises:
        SourceError, BundleError: neither, or damaged; no tokenizer.
        MissingError: this machine lacks what runs it.
        InputError: it takes other inputs than text.
        UsageError: an option does not fit the encoder or another option.

    Warns:
        EnginecastWarning: the verdict of an engine does not cover a run here.
    """
    request = resolve(request)
    model = _open_model(request)
    try:
        tokenizer = find_tokenizer(model.facts.folder, request.tokenizer)
        spec = make_spec(request, model.facts, tokenizer, model.outputs(request.outputs))
        tokenizing = Tokenizing(tokenizer.text, spec)
        if not spec.padded:
            _require_trimmable(model, spec, tokenizing)
    except BaseException:
        model.close()
        raise
    return OpenEncoder(model, spec, tokenizer.text)


def _require_trimmable(model: TextModel, spec: EncoderSpec, tokenizing: Tokenizing) -> None:
    """Refuse to leave out rows of padding that change the others, masked though they are.

    Positions that count from the left do that where padding is on the left.
    """
    names = [output.name for output in spec.outputs]
    ids = tokenizing.tokens([_PROBE])[0].ids.astype(np.int64)[np.newaxis]
    if ids.shape[1] >= spec.max_length > 1:
        ids = ids[:, : spec.max_length // 2]  # room for padding
    tokens, left = ids.shape[1], spec.padding_side == "left"
    more = min(_PROBE_PADDING, spec.max_length - tokens)
    around = ((0, 0), (more, 0) if left else (0, more))
    padded = np.pad(ids, around, constant_values=spec.padding_id)
    bare = model.run(ids, np.ones_like(ids), names)
    found = model.run(padded, np.pad(np.ones_like(ids), around), names)
    limit = _ROUNDING.get(spec.precision, _ROUNDING_16_BITS)
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
    largest = float(np.abs(one).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        error = float(np.abs(one - other).max(initial=0.0)) / (largest or 1.0)
    if not np.isfinite(one).all():
        return 0.0
    return error if np.isfinite(error) else np.inf


def _open_model(request: EncoderRequest) -> TextModel:
    folder = Path(request.model)
    if (folder / MANIFEST_NAME).is_file():
        from enginecast.cache.engine_encoder import open_engine

        return open_engine(request)
    if not (folder / "config.json").is_file():
        what = "holds neither" if folder.is_dir() else "is no folder"
        raise SourceError(
            f"{request.model}: expected a bundle ({MANIFEST_NAME}) or a Hugging Face folder "
            f"(config.json), but it {what}",
            hint="`enginecast export MODEL -o DIR` makes a bundle.",
        )
    from enginecast.cache.eager_encoder import open_eager

    return open_eager(request)


class OpenEncoder:
    """A text encoder with its spec and its tokenizer; see `encoder.Encoder`."""

    def __init__(self, model: TextModel, spec: EncoderSpec, tokenizer: bytes) -> None:
        self._model = model
        self._spec = spec
        self._tokenizer = tokenizer

    @property
    def spec(self) -> EncoderSpec:
        return self._spec

    @property
    def about(self) -> About:
        return self._model.facts.about

    @property
    def tokenizer(self) -> bytes:
        return self._tokenizer

    def encode(self, ids: Array, mask: Array) -> dict[str, Array]:
        names = [output.name for output in self._spec.outputs]
        try:
            found = self._model.run(ids, mask if self._spec.mask else None, names)
            return _as_stored(self._spec, found)
        except (MemoryError, RuntimeError) as error:
            if not lacks_memory(error):
                raise
            raise MissingError(
                f"{self.about.source}: too little memory for {len(ids)} texts of {ids.shape[1]} "
                f"tokens: {error}",
                hint="Give a smaller --batch-tokens.  What was committed is safe.",
            ) from error

    def close(self) -> None:
        self._model.close()


def _as_stored(spec: EncoderSpec, found: Mapping[str, Array]) -> dict[str, Array]:
    """Cast to the dtypes of the spec; what one cannot hold becomes infinite, and is refused."""
    with np.errstate(over="ignore", invalid="ignore"):
        return {output.name: _cast(found[output.name], output.dtype) for output in spec.outputs}


def _cast(values: Array, dtype: str) -> Array:
    if values.dtype.name == dtype:
        return values
    return values.astype(np.float32).astype(np.dtype(dtype))
