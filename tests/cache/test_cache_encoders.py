"""Encoders that fill a cache: engines and eager models agree, and padding is what the spec says."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from cache_fixtures import T5_LENGTH, captions, short_captions
from exports import Exports

from enginecast.cache.encoders.open_encoder import Encoder, open_encoder
from enginecast.cache.encoders.request import EncoderRequest
from enginecast.cache.encoders.tokenizing import Tokenizing
from enginecast.cache.fill.local import pad_batch
from enginecast.cache.fill.schedule import Wanted
from enginecast.cache.store.spec import EncoderSpec
from enginecast.runtime.values.arrays import Array

TEXTS = ["", *short_captions(6, seed=5), *captions(2, seed=6)]


def rows_of(encoder: Encoder, texts: Sequence[str]) -> list[Wanted]:
    tokens = Tokenizing(encoder.tokenizer, encoder.spec).tokens(texts)
    return [Wanted(b"", text, one.ids) for text, one in zip(texts, tokens, strict=True)]


def encoded(encoder: Encoder, texts: Sequence[str]) -> list[dict[str, Array]]:
    """The outputs of each text, encoded in one batch, of tokens alone."""
    wanted = rows_of(encoder, texts)
    ids, mask = pad_batch(wanted, encoder.spec)
    outputs = encoder.encode(ids, mask)
    return [
        {
            name: real_rows(encoder.spec, values[row], len(one.ids))
            for name, values in outputs.items()
        }
        for row, one in enumerate(wanted)
    ]


def real_rows(spec: EncoderSpec, values: Array, tokens: int) -> Array:
    if values.ndim == 1:
        return values
    return values[:tokens] if spec.padding_side == "right" else values[len(values) - tokens :]


def bundle_of(exports: Exports, name: str, precision: str = "fp32") -> str:
    bundle = exports(name, precision).bundle
    assert bundle is not None
    return str(bundle.root)


def require_equal(
    ours: Sequence[dict[str, Array]], theirs: Sequence[dict[str, Array]], scale: float = 1.0
) -> None:
    """Equal but for fp32's rounding, which `scale` multiplies."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name, values in one.items():
            assert np.abs(values).max() > 0.1
            np.testing.assert_allclose(values, other[name], rtol=1e-3 * scale, atol=1e-4 * scale)


CLIPS = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("words-clip", "words-clip-projection")
]


@pytest.mark.parametrize("name", ["words-t5", *CLIPS])
def test_engine_and_eager_give_the_same(exports: Exports, name: str) -> None:
    engine = open_encoder(EncoderRequest(bundle_of(exports, name)))
    names = tuple(output.name for output in engine.spec.outputs)
    eager = open_encoder(EncoderRequest(exports.model(name), outputs=names))
    assert engine.spec.outputs == eager.spec.outputs
    assert engine.spec.model == eager.spec.model
    for field in ("tokenizer", "padding_id", "max_length", "mask", "rows"):
        assert getattr(engine.spec, field) == getattr(eager.spec, field)
    assert {*engine.spec.engine} == {"target", "pipeline", "file", "weights"}
    assert eager.spec.engine == {}
    assert engine.about.config == eager.about.config != {}
    assert engine.about.encoder == eager.about.encoder
    assert (engine.about.verdict, eager.about.verdict) == ("verified", "")
    require_equal(encoded(engine, TEXTS), encoded(eager, TEXTS))
    for encoder in (engine, eager):
        encoder.close()
        encoder.close()


@pytest.mark.parametrize("kind", ["engine", "eager"])
def test_masked_rows_do_not_depend_on_padding_and_others_do(exports: Exports, kind: str) -> None:
    model = bundle_of(exports, "words-t5") if kind == "engine" else exports.model("words-t5")
    trimmed = open_encoder(EncoderRequest(model))
    padded = open_encoder(EncoderRequest(model, keep_all=True))
    blind = open_encoder(EncoderRequest(model, mask=False))
    assert (trimmed.spec.padded, padded.spec.padded, blind.spec.padded) == (False, True, True)
    assert (trimmed.spec.rows, padded.spec.rows, blind.spec.rows) == ("real", "all", "all")
    alone = [encoded(trimmed, [text])[0] for text in TEXTS]
    require_equal(alone, encoded(trimmed, TEXTS))
    require_equal(alone, encoded(padded, TEXTS))
    largest = max(np.abs(one["last_hidden_state"]).max() for one in alone)
    for one, other in zip(alone, encoded(blind, TEXTS), strict=True):
        error = np.abs(one["last_hidden_state"] - other["last_hidden_state"]).max()
        assert error > 0.05 * largest


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"max_length": T5_LENGTH, "mask": True, "rows": "real", "template": "{}"}),
    ({"template": "a photo of {}"}, {"template": "a photo of {}"}),
    ({"clean": "lower-strip"}, {"clean": "lower-strip"}),
    ({"max_length": 40}, {"max_length": 40}),
    ({"mask": False}, {"mask": False, "rows": "all"}),
    ({"keep_all": True}, {"mask": True, "rows": "all"}),
    ({"extra_rows": 1}, {"extra_rows": 1, "rows": "real"}),
    ({"skip_rows": 3}, {"skip_rows": 3}),
    ({"padding_side": "left"}, {"padding_side": "left"}),
    ({"pipeline": "flux:text_encoder_2"}, {"mask": False, "rows": "all", "max_length": 512}),
]


@pytest.mark.parametrize(("asked", "wanted"), FIELDS)
def test_what_is_asked_for_is_in_the_spec(
    exports: Exports, asked: dict[str, Any], wanted: dict[str, Any]
) -> None:
    for model in (exports.model("words-t5"), bundle_of(exports, "words-t5")):
        spec = open_encoder(EncoderRequest(model, **asked)).spec
        assert {field: getattr(spec, field) for field in wanted} == wanted
        assert spec.padding_id == 0
