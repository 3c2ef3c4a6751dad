"""`--dynamic` options, and what torch.export has for them."""

from typing import Any

import pytest
import torch
from models import t5_config, vit_config
from torch.export import Dim

from enginecast.capture.inputs.calls import call_of
from enginecast.capture.inputs.derive.from_facts import from_facts
from enginecast.capture.inputs.derive.model_facts import ModelFacts
from enginecast.capture.inputs.dynamic_shapes import dynamic_texts
from enginecast.capture.inputs.examples import verification_inputs
from enginecast.capture.inputs.given import ProfileRange, apply_dynamic, parse_dynamic
from enginecast.capture.inputs.specs import InputSpec, from_example
from enginecast.errors import UsageError

pytestmark = pytest.mark.all_sizes

TEXT = from_facts(ModelFacts(t5_config(), ("input_ids", "attention_mask")))
IMAGE = from_facts(ModelFacts(vit_config(), ("pixel_values",)))


def applied(specs: tuple[InputSpec, ...], *texts: str) -> tuple[InputSpec, ...]:
    return apply_dynamic(specs, [parse_dynamic(text) for text in texts])


def of_profiles(*texts: str) -> list[str]:
    """The sizes of the inputs of a text encoder."""
    found = apply_dynamic(TEXT, [parse_dynamic(text) for text in texts])
    return [" ".join(dim.shown for dim in spec.dims) for spec in found]


@pytest.mark.parametrize(
    ("texts", "sizes"),
    [
        ((ProfileRange("input_ids:0=1"), ProfileRange("attention_mask:0=1..8")), "1..8 1..512"),
        (("input_ids:1=1..64", ProfileRange("attention_mask:1=8..32")), "1..64 1..64"),
        ((ProfileRange("attention_mask:1=8..32"), "input_ids:1=1..64"), "1..64 1..64"),
    ],
)
def test_ranges_of_profiles_join_and_give_way(texts: tuple[str, ...], sizes: str) -> None:
    assert of_profiles(*texts) == [sizes] * 2


def test_a_range_of_a_profile_is_named_as_one() -> None:
    with pytest.raises(UsageError, match=r"^--profile \(ids:0=1\): no input"):
        of_profiles(ProfileRange("ids:0=1"))


def test_parse() -> None:
    option = parse_dynamic("pixel_values:2=32..512")
    assert (option.input, option.dim, option.minimum, option.maximum) == (
        "pixel_values",
        2,
        32,
        512,
    )
    assert parse_dynamic("x:0=4").is_static
    stepped = parse_dynamic("sample:2=8..128/8")
    assert (stepped.sizes, stepped.symbol) == ((8, 128, 8), "")
    tied = parse_dynamic("x:1=seq:1..512")
    assert (tied.sizes, tied.symbol) == ((1, 512, 1), "seq")
    assert parse_dynamic("y:1=seq").symbol == "seq"


@pytest.mark.parametrize(
    "text",
    [
        *["", "x", "x:0", "x:0=", "x=1..2", "x:a=1..2", "x:0=1..", "x:-1=1..2"],
        *["x:0=seq:", "x:0=8/8", "x:0=1..8/", "x:0=2n"],
    ],
)
def test_other_forms_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected NAME:DIM=MIN\.\.MAX") as refused:
        parse_dynamic(text)
    assert f"--dynamic {text}:" in refused.value.message


@pytest.mark.parametrize("text", ["x:0=0", "x:0=0..0", "x:0=5..4"])
def test_empty_ranges_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected MIN <= MAX, and a MAX"):
        parse_dynamic(text)


def test_steps_are_kept_by_every_size_that_is_chosen() -> None:
    (pixels,) = applied(IMAGE, "pixel_values:2=8..64/8", "pixel_values:3=16..64/8")
    height, width = pixels.dims[2:]
    assert (height.sizes, width.sizes) == (range(8, 65, 8), range(16, 65, 8))
    assert height.size != width.size
    assert height.size % 8 == width.size % 8 == 0
    cases = verification_inputs([pixels], 0)
    sizes = {case.inputs["pixel_values"].shape[2:] for case in cases}
    assert (8, 16) in sizes
    assert len(sizes) > 2
    assert all(rows in height.sizes and columns in width.sizes for rows, columns in sizes)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ids:0=1..2"], "no input 'ids'; expected one of input_ids, attention_mask"),
        (["input_ids:2=1..2"], "input_ids has dimensions 0 to 1"),
        (["input_ids:1=1..9", "attention_mask:1=1..8"], "attention_mask:1=1..8 contradicts"),
        (["input_ids:0=2", "attention_mask:0=3"], "contradicts --dynamic input_ids:0=2"),
        (["input_ids:1=8..64/8", "attention_mask:1=8..64/4"], "contradicts"),
        (["input_ids:1=n:1..9", "attention_mask:1=n:1..8"], "contradicts"),
    ],
)
def test_options_that_do_not_fit(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        applied(TEXT, *texts)
    assert message in refused.value.message


ROWS, SMALL = Dim("rows"), Dim("rows", min=2, max=8)
EXAMPLE: dict[str, Any] = {
    "x": torch.zeros(3, 8),
    "pair": {"a": torch.zeros(5, 8), "b": [torch.zeros(70, 4)]},
}


def said(dynamic: Any, example: Any = EXAMPLE) -> tuple[str, ...]:
    """What `--dynamic` would have; a default batch of `x` is called so."""
    call, tensors = call_of(example, "model")
    return dynamic_texts(dynamic, call, from_example(tensors))


@pytest.mark.parametrize(
    ("dynamic", "texts"),
    [
        ("x:0=1..4", ("x:0=1..4",)),
        (["x:0=1..4", "x:1=8"], ("x:0=1..4", "x:1=8")),
        ({"x": {0: ROWS}}, ("x:0=rows:1..64",)),
        ({"x": (SMALL, None)}, ("x:0=rows:2..8", "x:1=8")),
        ({"x": {-1: Dim.DYNAMIC(max=9)}}, ("x:1=1..9",)),
        ({"x": {0: Dim.AUTO, 1: Dim.AUTO}}, ("x:1=1..64",)),
        ({"x": None}, ("x:0=3", "x:1=8")),
        ({"x": {1: 4 * Dim("q", max=3)}}, ("x:1=q:4..12/4",)),
        ({"x": {1: 8 * Dim("q")}}, ("x:1=q:8..64/8",)),
        (({0: SMALL}, {"a": {0: SMALL}}), ("x:0=rows:2..8", "pair_a:0=rows:2..8")),
        ({"x": {}, "pair": {}}, ()),
    ],
)
def test_shapes_as_torch_export_has_them(dynamic: Any, texts: tuple[str, ...]) -> None:
    assert said(dynamic) == texts
    assert [parse_dynamic(text).text for text in said(dynamic)] == list(texts)


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (5, "dynamic: got a int"),
        ({"y": {0: ROWS}}, "no input 'y'; expected one of x, pair"),
        (({0: ROWS}, {}, {0: ROWS}), "shapes of 3 inputs, expected 2: x, pair"),
        ({"x": [ROWS]}, "dynamic: x: got 1 dimensions, expected 2"),
        ({"x": 3}, "dynamic: x: got 3"),
        ({"x": {0: ROWS, 1: 2 * ROWS}}, "dynamic: x:1: 2.rows, and x:0 is Dim.'rows'"),
        ({"x": {0: ROWS, 1: SMALL}}, "dynamic: x:0: rows has other ends elsewhere"),
    ],
)
def test_what_cannot_be_said_is_refused(dynamic: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        said(dynamic)
