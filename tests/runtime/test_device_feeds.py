"""Tensors fed by address.  On the CPU they go the way that tensors on a GPU go."""

from pathlib import Path
from typing import Any

import bundles
import ml_dtypes
import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnxruntime import InferenceSession, IOBinding

from enginecast.errors import InputError
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.values.device_tensor import DeviceTensor

DTYPES = {
    "bool": TensorProto.BOOL,
    "uint8": TensorProto.UINT8,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float32": TensorProto.FLOAT,
    "float64": TensorProto.DOUBLE,
}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return load(bundles.make_bundle(tmp_path / "out"))


def unary(folder: Path, dtype: Any, operator: str = "Identity") -> Engine:
    content = bundles.unary_manifest(dtype)
    return load(bundles.make_unary_bundle(folder / "u", content, operator, DTYPES[dtype]))


def by_address(feeds: dict[str, Any]) -> dict[str, DeviceTensor]:
    return {name: DeviceTensor(torch.from_numpy(array)) for name, array in feeds.items()}


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What happens, in order: each wait, each address that is bound, the run."""
    reported: list[Any] = []
    bind, run, wait = IOBinding.bind_input, InferenceSession.run_with_iobinding, DeviceTensor.wait

    def telling_bind(self: Any, name: str, device: str, index: int, *rest: Any) -> None:
        reported.append((name, device, index, rest[-1]))
        bind(self, name, device, index, *rest)

    def telling_run(self: Any, *args: Any) -> None:
        reported.append("run")
        run(self, *args)

    def telling_wait(self: DeviceTensor) -> None:
        reported.append("wait")
        wait(self)

    monkeypatch.setattr(IOBinding, "bind_input", telling_bind)
    monkeypatch.setattr(InferenceSession, "run_with_iobinding", telling_run)
    monkeypatch.setattr(DeviceTensor, "wait", telling_wait)
    return reported


def test_tensors_are_bound_by_address_once_they_are_there(engine: Engine, bound: list[Any]) -> None:
    feeds = bundles.feeds()
    tensors = by_address(feeds)
    found = engine.run(tensors)["hidden"]
    assert bound == [
        "wait",
        ("input_ids", "cpu", 0, tensors["input_ids"].pointer),
        "wait",
        ("attention_mask", "cpu", 0, tensors["attention_mask"].pointer),
        "run",
    ]
    np.testing.assert_array_equal(found, engine.run(feeds)["hidden"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_goes_by_address(tmp_path: Path, dtype: str, bound: list[Any]) -> None:
    tensor = torch.tensor([[0, 1, 3], [5, 7, 1]]).to(getattr(torch, dtype))
    found = unary(tmp_path, dtype).run({"x": DeviceTensor(tensor)})["y"]
    assert found.dtype.name == dtype
    wanted = tensor.float().numpy()
    np.testing.assert_array_equal(found.astype(np.float32), wanted)
    assert bound[1][-1] == tensor.data_ptr()


WRONG = {
    "dtype": (torch.ones(2, 3, dtype=torch.int32), "expected dtype int64, got int32"),
    "strides": (torch.ones(3, 2, dtype=torch.int64).T, r"contiguous tensor, got strides \(8, 16\)"),
    "shape": (torch.ones(2, 7, dtype=torch.int64), r"expected sequence in 2\.\.6, got 7"),
    "rank": (torch.ones(2, dtype=torch.int64), r"expected shape \[batch, sequence\], got \[2\]"),
    "below": (torch.tensor([[1, 2, 3], [1, -1, 1]]), r"in 0\.\.8, got -1 at \[1, 1\]"),
    "beyond": (torch.tensor([[1, 2, 9], [1, 1, 1]]), r"in 0\.\.8, got 9 at \[0, 2\]"),
}


@pytest.mark.parametrize(("ids", "message"), WRONG.values(), ids=WRONG)
def test_wrong_tensors_are_refused_by_name(
    engine: Engine, bound: list[Any], ids: torch.Tensor, message: str
) -> None:
    mask = torch.ones(2, 3, dtype=torch.int64)
    feeds = {"input_ids": DeviceTensor(ids), "attention_mask": DeviceTensor(mask)}
    with pytest.raises(InputError, match=f"'input_ids': .*{message}"):
        engine.run(feeds)
    assert "run" not in bound


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_looked_at_unless_that_is_declined(
    tmp_path: Path, dtype: str, value: float
) -> None:
    tensor = torch.ones(2, 3, dtype=getattr(torch, dtype))
    tensor[1, 2] = value
    with unary(tmp_path, dtype) as engine:
        with pytest.raises(InputError, match=r"'x': expected finite values, got .* at \[1, 2\]"):
            engine.run({"x": DeviceTensor(tensor)})
        found = engine.run({"x": DeviceTensor(tensor)}, check_finite=False)["y"]
        np.testing.assert_array_equal(found.astype(np.float32), tensor.float().numpy())
        with pytest.raises(InputError, match="expected finite values"):
            engine.run({"x": array_of(tensor)}, check_finite=False)


def array_of(tensor: torch.Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def test_a_tensor_elsewhere_than_the_engine_is_refused() -> None:
    tensor = DeviceTensor(torch.zeros(2))
    tensor.require_on("x", "cpu", 0)
    with pytest.raises(InputError, match="on cuda:1, where the engine runs, got one on cpu"):
        tensor.require_on("x", "cuda", 1)
