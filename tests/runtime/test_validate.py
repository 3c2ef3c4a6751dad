"""Inputs: whatever does not fit is refused by name, and what fits is not copied."""

from typing import Any

import bundles
import ml_dtypes
import numpy as np
import pytest
import torch

from enginecast.errors import InputError
from enginecast.runtime.bundle.manifest import Input
from enginecast.runtime.size_checks import holds
from enginecast.runtime.validate import check_inputs
from enginecast.runtime.values.arrays import is_finite

CONTENT = bundles.manifest()
PIXELS = Input(name="pixels", kind="image", dtype="float32", shape=("batch", 3, 4))
MASK = Input(name="mask", kind="attention_mask", dtype="bool", shape=("batch",))
HALF = Input(name="half", kind="tensor", dtype="bfloat16", shape=("batch", 2))


def check(*specs: Input, **feeds: Any) -> dict[str, Any]:
    return check_inputs(specs or CONTENT.inputs, {"batch": (1, 4), "sequence": (2, 6)}, feeds)


def ids(batch: int = 2, sequence: int = 3, dtype: Any = np.int64) -> Any:
    return np.ones((batch, sequence), dtype)


def changed(index: tuple[int, int], value: int) -> Any:
    array = ids()
    array[index] = value
    return array


WRONG = {
    "missing": ({"input_ids": ids()}, "'attention_mask' is missing; expected input_ids, att"),
    "unknown": ({"input_idz": ids(), "attention_mask": ids()}, "'input_idz' is unknown"),
    "int32": ({"input_ids": ids(dtype=np.int32)}, "expected dtype int64, got int32"),
    "object": ({"input_ids": ids(dtype=object)}, "expected dtype int64, got object"),
    "rank": ({"input_ids": ids()[0]}, r"expected shape \[batch, sequence\], got \[3\]"),
    "too long": ({"input_ids": ids(2, 7)}, r"dimension 1 .* expected sequence in 2\.\.6, got 7"),
    "batch": ({"input_ids": ids(5)}, r"dimension 0 .* expected batch in 1\.\.4, got 5"),
    "empty": ({"input_ids": ids(0)}, r"expected batch in 1\.\.4, got 0"),
    "negative": ({"input_ids": changed((1, 2), -1)}, r"in 0\.\.8, got -1 at \[1, 2\]"),
    "beyond": ({"input_ids": changed((0, 1), 9)}, r"in 0\.\.8, got 9 at \[0, 1\]"),
    "transposed": ({"input_ids": ids(3, 2).T}, "expected a contiguous array, got strides"),
    "list": ({"input_ids": [[1, 2]]}, "got a list, which is neither numpy nor DLPack"),
}


@pytest.mark.parametrize(("feeds", "message"), WRONG.values(), ids=WRONG)
def test_wrong_inputs_are_refused_by_name(feeds: dict[str, Any], message: str) -> None:
    if len(feeds) == 1 and "missing" not in message:
        feeds = feeds | {"attention_mask": ids()}
    with pytest.raises(InputError, match=message):
        check(**feeds)


def test_right_inputs_pass_in_declared_order_and_uncopied() -> None:
    first, second = ids(), ids()
    arrays = check(attention_mask=second, input_ids=first)
    assert list(arrays) == ["input_ids", "attention_mask"]
    assert arrays["input_ids"] is first


@pytest.mark.parametrize("shape", [(1, 2), (4, 6)])
def test_ends_of_the_ranges_are_inside(shape: tuple[int, int]) -> None:
    check(input_ids=ids(*shape), attention_mask=ids(*shape))


@pytest.mark.parametrize("value", [0, 8])
def test_ends_of_the_id_range_are_inside(value: int) -> None:
    check(input_ids=changed((0, 0), value), attention_mask=ids())


@pytest.mark.parametrize("shape", [(1, 3), (2, 4)])
def test_a_symbol_has_one_size(shape: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"'attention_mask': .* = \d as in 'input_ids', got \d"):
        check(input_ids=ids(2, 3), attention_mask=ids(*shape))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("spec", "dtype"), [(PIXELS, np.float32), (HALF, ml_dtypes.bfloat16)])
def test_floats_are_finite(spec: Input, dtype: Any, value: float) -> None:
    shape: Any = (2, *spec.shape[1:])
    array = np.zeros(shape, dtype)
    array[(1,) * array.ndim] = value
    with pytest.raises(
        InputError, match=rf"'{spec.name}': expected finite values, got -?(nan|inf)"
    ):
        check(spec, **{spec.name: array})


@pytest.mark.parametrize(
    ("spec", "tensor"),
    [
        (PIXELS, torch.rand(2, 3, 4)),
        (MASK, torch.tensor([True, False])),
        (HALF, torch.rand(2, 2).bfloat16()),
    ],
    ids=["float32", "bool", "bfloat16"],
)
def test_torch_tensors_are_viewed_not_copied(spec: Input, tensor: torch.Tensor) -> None:
    array = check(spec, **{spec.name: tensor})[spec.name]
    assert array.ctypes.data == tensor.data_ptr()
    assert array.dtype.name == spec.dtype
    np.testing.assert_array_equal(array.astype(np.float32), tensor.float().numpy())


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.rand(2, 3, 4, requires_grad=True), "require.* gradient"),
        (torch.rand(4, 3, 2).permute(2, 1, 0), "contiguous"),
        (torch.rand(2, 3, 4).double(), "expected dtype float32, got float64"),
        (torch.rand(2, 3, 4).bfloat16(), "expected dtype float32, got bfloat16"),
        (torch.rand(2, 3, 4, device="meta"), "'pixels'"),
    ],
)
def test_wrong_tensors_are_refused(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(PIXELS, pixels=tensor)


class Elsewhere:
    """Says that it lies on a device of DLPack's numbers, and must not be read."""

    def __init__(self, device: int) -> None:
        self._device = device

    def __dlpack__(self) -> None:
        pytest.fail("its memory was asked for")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self._device, 1)


def test_tensors_on_other_devices_are_refused() -> None:
    with pytest.raises(InputError, match="a tensor on DLPack device 10:1, which is neither the"):
        check(PIXELS, pixels=Elsewhere(10))


@pytest.mark.parametrize(
    ("condition", "sizes", "is_held"),
    [
        ("a*b != 1369", (37, 37), False),
        ("a*b != 1369", (37, 36), True),
        ("max(a, b) // 2 >= 3 and a % 2 == 1", (7, 1), True),
        ("max(a, b) // 2 >= 3 and a % 2 == 1", (6, 1), False),
        ("math.trunc(float(a) * 1.3) == 3 or not a > -b", (3, 1), True),
        ("math.sqrt(a) * 2 > float(b)", (4, 3), True),
        ("__import__('os')", (1, 1), False),
        ("a.real > 0", (1, 1), False),
        ("c > 0", (1, 1), False),
        ("a >", (1, 1), False),
    ],
)
def test_conditions_on_sizes_are_read_and_nothing_else(
    condition: str, sizes: tuple[int, int], is_held: bool
) -> None:
    assert holds(condition, dict(zip("ab", sizes, strict=True))) is is_held


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("wrong", [None, np.nan, np.inf, -np.inf])
def test_finite_arrays_whose_sum_is_not_are_finite(dtype: type, wrong: float | None) -> None:
    """The largest values that there are, of both signs: a sum of them overflows."""
    array: Any = np.full((3, 5, 7), np.finfo(dtype).max, dtype)
    array[:, 0] *= -1
    assert is_finite(array)
    assert is_finite(np.empty((0, 3), dtype))
    if wrong is not None:
        array[2, 4, 6] = wrong
        assert not is_finite(array)
