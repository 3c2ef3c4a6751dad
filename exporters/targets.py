"""What an export can be made for: how a program gets there, and what can be seen of its engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from enginecast.errors import UsageError
from enginecast.exporters.aotinductor import lower_to_aotinductor
from enginecast.exporters.onnx import Lowered, lower_to_onnx
from enginecast.exporters.order import Order
from enginecast.exporters.readers import onnxruntime_on
from enginecast.exporters.tensorrt import lower_to_tensorrt, require_tensorrt
from enginecast.exporters.tensorrt_options import TensorRTOptions


@dataclass(frozen=True)
class Target:
    """One way to an engine."""

    lower: Callable[[Order], Lowered]
    tells_ops: bool
    """Whether the runtime says which ops it executes."""
    require: Callable[[TensorRTOptions], None] = lambda options: None
    """Raises MissingError where this machine cannot make the engine, before any work is done."""


def _onnx(order: Order) -> Lowered:
    return lower_to_onnx(
        order.program,
        order.folder,
        outputs=order.outputs,
        symbols=order.symbols,
        shapes=order.shapes,
        reader=onnxruntime_on(order.device),
        # Its kernels are those of one architecture; without a name, the portable form.
        gemm_float8=order.device == "cuda" and order.arch is not None,
    )


def _aotinductor(order: Order) -> Lowered:
    return lower_to_aotinductor(
        order.program,
        order.folder,
        outputs=order.outputs,
        device=order.device,
        arch=order.arch,
    )


TARGETS: Mapping[str, Target] = {
    "onnxruntime": Target(_onnx, tells_ops=True),
    "tensorrt": Target(lower_to_tensorrt, tells_ops=False, require=require_tensorrt),
    "aotinductor": Target(_aotinductor, tells_ops=False),
}
"""Targets that take a program of torch.export."""


def target_of(name: str) -> Target:
    """The target of this name.

    Raises:
        UsageError: none takes a program by it.
    """
    if name not in TARGETS:
        raise UsageError(f"target '{name}' takes no program; {', '.join(TARGETS)} do")
    return TARGETS[name]
