"""Eager with the choices of an engine, where its values tie: what `topk` takes is not promised.

Nothing here comes from `enginecast.verification`.  The engine's file is run with the places that
each TopK gives as further outputs; eager's calls of topk, in turn, take these, if every value that
they choose is as good as the one that eager would have chosen.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from enginecast.capture.outputs.flatten import name_result
from enginecast.runtime.engine import Engine

TIE = 1e-5
"""How much worse a value may be that is chosen, as a part of the largest: a hundredth of what an
output may be off."""

Array = NDArray[Any]


class WorseError(Exception):
    """A value was chosen that is worse by more than rounding."""


def with_choices(
    engine: Engine, eager: nn.Module, feeds: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """The outputs of eager with what the engine chose; None if it chose something worse."""
    places = _chosen(engine, feeds)
    if not places:
        return None
    try:
        with torch.no_grad(), _Choosing(places) as mode:
            found = name_result(eager(**feeds), inputs=feeds).tensors
    except WorseError:
        return None
    return dict(found) if not mode.left else None


def _chosen(engine: Engine, feeds: Mapping[str, Tensor]) -> list[Array]:
    """The places that each TopK of an engine's graph gives, in turn."""
    file = engine.folder / engine.record.file
    model = onnx.load(file, load_external_data=False)
    names = [node.output[1] for node in model.graph.node if node.op_type == "TopK"]
    if not names:
        return []
    model.graph.output.extend(
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, None) for name in names
    )
    copy = file.with_name("engine-choices.onnx")  # beside the weights that it refers to
    copy.write_bytes(model.SerializeToString())
    try:
        session = onnxruntime.InferenceSession(copy, providers=["CPUExecutionProvider"])
    finally:
        copy.unlink()
    given = {spec.name for spec in session.get_inputs()}
    arrays = {name: tensor.numpy() for name, tensor in feeds.items() if name in given}
    return list(session.run(names, arrays))


class _Choosing(TorchFunctionMode):
    """Calls of topk take the places that are given."""

    def __init__(self, places: Sequence[Array]) -> None:
        super().__init__()
        self.left = list(places)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        given = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | (
            kwargs or {}
        )
        if not self.left or self.left[0].shape != tuple(found.indices.shape):
            raise WorseError
        dim, places = given.get("dim", -1), torch.from_numpy(self.left.pop(0))
        scores, best = given["input"], found.values
        chosen = scores.gather(dim, places)
        got = chosen
        if not given.get("sorted", True):  # then the order is not promised, either
            order = {"dim": dim, "descending": given.get("largest", True)}
            got, best = chosen.sort(**order).values, best.sort(**order).values
        finite = scores[scores.isfinite()]
        most = TIE * float(finite.abs().max()) if len(finite) else 0.0
        repeats = (places.sort(dim=dim).values.diff(dim=dim) == 0).any()
        if repeats or not bool(((got == best) | ((got - best).abs() <= most)).all()):
            raise WorseError
        return torch.return_types.topk((chosen, places))
