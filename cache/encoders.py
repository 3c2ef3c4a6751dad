"""Opening the encoder that fills a cache."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from enginecast.cache.encoder import Encoder
from enginecast.cache.request import EncoderRequest
from enginecast.cache.spec import About, EncoderSpec
from enginecast.cache.spec_making import make_spec
from enginecast.cache.text_model import TextModel
from enginecast.cache.tokenizer_files import find_tokenizer
from enginecast.errors import SourceError
from enginecast.runtime.arrays import Array
from enginecast.runtime.manifest import MANIFEST_NAME


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
    model = _open_model(request)
    try:
        tokenizer = find_tokenizer(model.facts.folder, request.tokenizer)
        spec = make_spec(request, model.facts, tokenizer, model.outputs(request.outputs))
    except BaseException:
        model.close()
        raise
    return OpenEncoder(model, spec, tokenizer.text)


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
        found = self._model.run(ids, mask if self._spec.mask else None, names)
        return _as_stored(self._spec, found)

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
