"""The shapes that a TensorRT engine is built for."""

import pytest

from enginecast.errors import UsageError
from enginecast.exporters.tensorrt.options import TensorRTOptions
from enginecast.exporters.tensorrt.profiles import profile_of
from enginecast.runtime.bundle.manifest import Input, ShapeRange

IDS = Input(name="input_ids", kind="token_ids", dtype="int64", shape=("batch", "sequence"))
IMAGE = Input(name="pixels", kind="image", dtype="float32", shape=("batch", 3, 16, 16))
FIXED = Input(name="bias", kind="tensor", dtype="float32", shape=(4, 4))
RANGES = {"batch": (1, 8), "sequence": (2, 512)}


def profile(*inputs: Input, **optimal: tuple[int, ...]) -> tuple[ShapeRange, ...]:
    return profile_of(inputs, RANGES, TensorRTOptions(optimal=optimal))


def test_the_largest_shape_is_tuned_for_unless_another_is_asked_for() -> None:
    assert profile(IDS, IMAGE, FIXED) == (
        ShapeRange(name="input_ids", least=(1, 2), optimal=(8, 512), greatest=(8, 512)),
        ShapeRange(
            name="pixels", least=(1, 3, 16, 16), optimal=(8, 3, 16, 16), greatest=(8, 3, 16, 16)
        ),
    )


@pytest.mark.parametrize(
    ("optimal", "message"),
    [
        (
            {"ids": (1, 128)},
            r"--target-option opt-shape=ids=1x128: expected one of the inputs input_ids, pixels",
        ),
        ({"input_ids": (1,)}, r"input_ids=1: expected 2 sizes, as of batchxsequence, got 1"),
        ({"input_ids": (1, 2, 3)}, r"expected 2 sizes, as of batchxsequence, got 3"),
        ({"input_ids": (9, 128)}, r"expected batch from 1 to 8, got 9"),
        ({"input_ids": (1, 1)}, r"expected sequence from 2 to 512, got 1"),
        ({"pixels": (1, 3, 16, 17)}, r"pixels=1x3x16x17: expected 16, which is fixed, got 17"),
        (
            {"input_ids": (1, 128), "pixels": (2, 3, 16, 16)},
            r"pixels=2x3x16x16: batch is 2 here and 1 in --target-option opt-shape=input_ids=1x128",
        ),
    ],
)
def test_refused_shapes(optimal: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profile(IDS, IMAGE, **optimal)
