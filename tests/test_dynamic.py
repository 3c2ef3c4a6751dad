"""`--dynamic` options."""

import pytest
import torch
from models import t5_config, vit_config

from enginecast.capture.inputs.derive.derive import from_facts
from enginecast.capture.inputs.derive.model_facts import ModelFacts
from enginecast.capture.inputs.given import apply_dynamic, parse_dynamic
from enginecast.capture.inputs.specs import DimSpec, InputSpec
from enginecast.errors import UsageError

TEXT = from_facts(ModelFacts(t5_config(), ("input_ids", "attention_mask")))
IMAGE = from_facts(ModelFacts(vit_config(), ("pixel_values",)))


def applied(specs: tuple[InputSpec, ...], *texts: str) -> tuple[InputSpec, ...]:
    return apply_dynamic(specs, [parse_dynamic(text) for text in texts])


def test_parse() -> None:
    option = parse_dynamic("pixel_values:2=32..512")
    assert (option.input, option.dim, option.minimum, option.maximum) == (
        "pixel_values",
        2,
        32,
        512,
    )
    assert parse_dynamic("x:0=4").is_static


@pytest.mark.parametrize("text", ["", "x", "x:0", "x=1..2", "x:a=1..2", "x:0=1..", "x:-1=1..2"])
def test_other_forms_are_refused_with_the_text(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected NAME:DIM=MIN\.\.MAX") as refused:
        parse_dynamic(text)
    assert f"--dynamic {text}:" in refused.value.message


@pytest.mark.parametrize("text", ["x:0=0..4", "x:0=5..4"])
def test_empty_ranges_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected 1 <= MIN <= MAX"):
        parse_dynamic(text)


def test_a_shared_name_changes_in_all_inputs() -> None:
    ids, mask = applied(TEXT, "attention_mask:1=4..128")
    assert ids.dims[1] == mask.dims[1] == DimSpec("sequence", 7, 4, 128)


def test_a_fixed_size_is_static_in_all_inputs() -> None:
    ids, mask = applied(TEXT, "input_ids:0=1")
    assert ids.dims[0] == mask.dims[0] == DimSpec.static(1)


def test_a_static_dimension_becomes_dynamic_under_its_own_name() -> None:
    (pixels,) = applied(IMAGE, "pixel_values:2=8..64", "pixel_values:3=8..64")
    assert [dim.name for dim in pixels.dims] == ["batch", None, "height", "width"]
    sizes = [dim.size for dim in pixels.dims]
    assert len(set(sizes)) == len(sizes)
    assert all(size % 4 == 0 for size in sizes[2:])  # patches of four still divide them
    dims = (DimSpec.static(4), DimSpec.static(5))
    (other,) = applied((InputSpec("x", "tensor", torch.float32, dims),), "x:1=2..9")
    assert other.dims[1] == DimSpec("x_1", 5, 2, 9)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["ids:0=1..2"], "no input 'ids'; there is input_ids, attention_mask"),
        (["input_ids:2=1..2"], "input_ids has dimensions 0 to 1"),
        (["input_ids:1=1..9", "attention_mask:1=1..8"], "attention_mask:1=1..8 contradicts"),
        (["input_ids:0=2", "attention_mask:0=3"], "contradicts --dynamic input_ids:0=2"),
    ],
)
def test_options_that_do_not_fit(texts: list[str], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        applied(TEXT, *texts)
    assert message in refused.value.message
