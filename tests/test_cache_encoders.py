"""Encoders that fill a cache: engines and eager models agree, and padding is what the spec says."""

from collections.abc import Sequence

import numpy as np
import pytest
from cache_fixtures import captions
from exports import Exports

from enginecast.cache.encoder import Encoder
from enginecast.cache.encoders import open_encoder
from enginecast.cache.request import EncoderRequest
from enginecast.cache.tokenizing import Tokenizing
from enginecast.runtime.arrays import Array

TEXTS = ["", *captions(6, seed=5)]


def encoded(encoder: Encoder, texts: Sequence[str], width: int | None = None) -> dict[str, Array]:
    """Outputs of texts in one batch, padded to `width`; None: to the longest of them."""
    spec = encoder.spec
    rows = [tokens.ids for tokens in Tokenizing(encoder.tokenizer, spec).tokens(texts)]
    width = width or max(map(len, rows))
    ids = np.full((len(rows), width), spec.padding_id, np.int64)
    mask = np.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(0, len(row)) if spec.padding_side == "right" else slice(-len(row), None)
        ids[number, place], mask[number, place] = row, 1
    return encoder.encode(ids, mask if spec.mask else np.ones_like(ids))


def bundle_of(exports: Exports, name: str) -> str:
    bundle = exports(name).bundle
    assert bundle is not None
    return str(bundle.root)


@pytest.mark.parametrize("name", ["words-t5", "words-clip", "words-clip-projection"])
def test_engine_and_eager_give_the_same(exports: Exports, name: str) -> None:
    engine = open_encoder(EncoderRequest(bundle_of(exports, name)))
    names = tuple(output.name for output in engine.spec.outputs)
    eager = open_encoder(EncoderRequest(exports.model(name), outputs=names))
    assert engine.spec.outputs == eager.spec.outputs
    assert engine.spec.model == eager.spec.model
    assert engine.about.config == eager.about.config != {}
    assert engine.about.encoder == eager.about.encoder
    assert (engine.about.verdict, eager.about.verdict) == ("verified", "")
    ours, theirs = encoded(engine, TEXTS), encoded(eager, TEXTS)
    for output in names:
        assert np.abs(ours[output]).max() > 0.5
        np.testing.assert_allclose(ours[output], theirs[output], rtol=1e-3, atol=1e-4)
