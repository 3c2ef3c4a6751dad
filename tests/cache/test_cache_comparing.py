"""Comparing caches: the numbers are those that numpy gives on all entries at once."""

from pathlib import Path

import numpy as np
import pytest
from cache_entries import (
    HIDDEN,
    entries,
    fill,
    spec_with,
    texts,
)

from enginecast.cache.store.shard import Entry
from enginecast.cache.store.spec import EncoderSpec, OutputSpec
from enginecast.cache.upkeep.comparing import compare
from enginecast.errors import CacheError

TEXTS = texts(40)
OTHER = spec_with(precision="bf16")


def reference(first: list[Entry], second: list[Entry], name: str) -> dict[str, np.ndarray]:
    """Per row the cosine, per text the relative error, in float64."""
    cosines, relative, largest = [], [], []
    for one, other in zip(first, second, strict=True):
        ours = np.atleast_2d(one.outputs[name].astype(np.float64))
        theirs = np.atleast_2d(other.outputs[name].astype(np.float64))
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosines += ((ours * theirs).sum(1) / lengths).tolist()
        relative.append(np.linalg.norm(ours - theirs) / np.linalg.norm(ours))
        largest.append(np.abs(ours - theirs).max())
    return {
        "cosine": np.array(cosines),
        "relative": np.array(relative),
        "largest": np.array(largest),
    }


def test_the_numbers_are_right(tmp_path: Path) -> None:
    first, second = entries(TEXTS), entries(TEXTS, OTHER, noise=0.02)
    found = compare(
        fill(tmp_path / "a", first[:30], first[30:]),
        fill(tmp_path / "b", second[::2], second[1::2], spec=OTHER),
    )
    assert (found.texts, found.only_first, found.only_second) == (40, 0, 0)
    assert found.joined_by == "ids"
    assert found.differs == ("precision: 'fp32', 'bf16'",)
    assert [one.name for one in found.outputs] == ["last_hidden_state", "pooler_output"]
    for one in found.outputs:
        wanted = reference(first, second, one.name)
        assert one.rows == len(wanted["cosine"])
        assert one.cosine_least == pytest.approx(wanted["cosine"].min(), rel=1e-9)
        assert one.cosine_p1 == pytest.approx(np.percentile(wanted["cosine"], 1), rel=1e-7)
        assert one.cosine_median == pytest.approx(np.median(wanted["cosine"]), rel=1e-9)
        assert one.relative_median == pytest.approx(np.median(wanted["relative"]), rel=1e-12)
        assert one.relative_largest == pytest.approx(wanted["relative"].max(), rel=1e-12)
        assert one.largest == wanted["largest"].max()
        assert 0.9 < one.cosine_least < one.cosine_p1 < one.cosine_median < 1


def test_the_worst_texts_are_listed_with_their_worst_token(tmp_path: Path) -> None:
    first, second = entries(TEXTS), entries(TEXTS, OTHER)
    for number, token in ((17, 2), (9, 0), (30, 1)):
        assert len(second[number].ids) > token
        second[number].outputs["last_hidden_state"][token] *= -1
    pooled = second[5].outputs["pooler_output"]
    pooled += 100
    found = compare(fill(tmp_path / "a", first), fill(tmp_path / "b", second, spec=OTHER), worst=4)
    assert found.worst[0].text == TEXTS[5]
    assert (found.worst[0].output, found.worst[0].token) == ("pooler_output", None)
    rest = {one.text: one for one in found.worst[1:]}
    assert {text: one.token for text, one in rest.items()} == {
        TEXTS[17]: 2,
        TEXTS[9]: 0,
        TEXTS[30]: 1,
    }
    assert all(one.cosine == pytest.approx(-1) for one in rest.values())
    assert [one.relative for one in found.worst] == sorted(
        (one.relative for one in found.worst), reverse=True
    )
    hidden = found.outputs[0]
    assert hidden.cosine_least == pytest.approx(-1)
    assert hidden.cosine_median == 1.0


def narrow() -> OutputSpec:
    return OutputSpec(name=HIDDEN.name, per="token", width=4, dtype="bfloat16")


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (spec_with(outputs=(narrow(),)), "expected 5 values per token as in the first, got 4"),
        (spec_with(rows="all"), "rows: 'real', 'all'"),
        (spec_with(skip_rows=1), "skip_rows: 0, 1"),
        (spec_with(mask=False, max_length=9), "max_length: 8, 9"),
        (
            spec_with(outputs=(OutputSpec(name="x", per="text", width=3, dtype="float32"),)),
            "have no output in common: last_hidden_state, pooler_output; x",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, other: EncoderSpec, problem: str
) -> None:
    first = fill(tmp_path / "a", entries(TEXTS[:5]))
    with pytest.raises(CacheError) as raised:
        compare(first, fill(tmp_path / "b", entries(TEXTS[:5], other), spec=other))
    assert problem in raised.value.message
