"""Compile a program ahead of time with Inductor: one package of machine code, one safetensors with
the weights that it reads.

The weights stay outside of the package: they are written one at a time, never linked, and loading
maps them.  The compiler sees tensors without values in their place, except for the small ones,
whose values Inductor writes into the code.
"""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass
from torch.fx import Node

from enginecast.errors import MissingError
from enginecast.exporters.assertions import drop_assertions
from enginecast.exporters.flat_calls import flatten_calls
from enginecast.exporters.hoist_weights import HoistedWeight, hoist_weights
from enginecast.exporters.inductor import compile_package, vector_isa
from enginecast.exporters.inductor_ops import plain_ops
from enginecast.exporters.onnx import WEIGHTS_FILE, Lowered, input_names, refuse_state
from enginecast.exporters.quantized_plain import lower_quantized_ops
from enginecast.exporters.weights_file import check_dtypes, write_weights
from enginecast.passes.graph_edit import (
    aten,
    dtype_of,
    first_input,
    structural_copy,
    value,
    weight_specs,
)
from enginecast.passes.lift_weights import lift_weights
from enginecast.passes.match import is_call
from enginecast.passes.structure import all_nodes
from enginecast.runtime.aotinductor_session import NAMES
from enginecast.runtime.fitness import gpu_of, requirements

PACKAGE_FILE = "engine.pt2"
INLINED = 4096
"""Bytes up to which a weight is compiled with its value: Inductor writes scalars and vectors of up
to 8 elements into the code (torch/_inductor/graph.py: `can_inline_constant`)."""


def lower_to_aotinductor(
    program: ExportedProgram,
    folder: Path,
    *,
    outputs: Sequence[str],
    device: str = "cpu",
    arch: str | None = None,
) -> Lowered:
    """Write `engine.pt2` and `weights.safetensors`.

    Args:
        program: after the passes; left as it is.
        folder: where the files go; it exists.
        outputs: names for the outputs, in the program's order.
        device: "cpu" or "cuda": what the code is for.
        arch: the GPU architecture asked for, such as "sm90"; None: the one that is here.

    Raises:
        LoweringError: Inductor cannot compile the program, or forward keeps state.  No file is left
            then.
        MissingError: there is no C++ compiler, or no GPU of this kind, to compile with.
    """
    if device == "cuda":
        _require_gpu(arch)
    program = structural_copy(program)
    refuse_state(program)
    notes = drop_assertions(program)
    plain_ops(program)
    lift_weights(program)
    weights = hoist_weights(program)
    check_dtypes(weights)
    _give_memory(program, weights, device)
    lower_quantized_ops(program, device=device)
    ops = op_counts(program)
    flatten_calls(program)
    names = {
        "inputs": input_names(program),
        "outputs": [*outputs],
        "weights": {weight.placeholder: weight.name for weight in weights},
    }
    files = (PACKAGE_FILE, *((WEIGHTS_FILE,) if weights else ()))
    try:
        compile_package(
            move_to_device_pass(program, device) if device != "cpu" else program,
            folder / PACKAGE_FILE,
            device=device,
            metadata={NAMES: json.dumps(names)},
        )
        if weights:
            write_weights(folder / WEIGHTS_FILE, weights)
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise
    needs = requirements(torch, device, vector_isa())
    return Lowered(
        files,
        sum(ops.values()),
        ops,
        opset=0,
        domains={},
        minimum_runtime=f"torch=={needs['torch']}.*",
        quantized=_quantized(program),
        notes=notes,
        requires=needs,
    )


def op_counts(program: ExportedProgram) -> dict[str, int]:
    """How often each op is called, blocks included, as "aten::linear"; a norm that reads a sum is
    counted as "aten::add+rms_norm", which Inductor makes one kernel of.
    """
    counted: Counter[str] = Counter()
    for node in all_nodes(program):
        if node.op == "call_function":
            counted[_op_name(node)] += 1
    return dict(sorted(counted.items()))


def _quantized(program: ExportedProgram) -> Literal["", "fp8", "int8"]:
    """What the engine holds, its weights included."""
    dtypes = {dtype_of(node) for node in all_nodes(program)}
    if dtypes & {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2}:
        return "fp8"
    return "int8" if torch.int8 in dtypes else ""


def _op_name(node: Node) -> str:
    if is_call(node, aten.rms_norm.default) and is_call(first_input(node), aten.add.Tensor):
        return "aten::add+rms_norm"
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket._qualified_op_name)
    return str(getattr(node.target, "__name__", node.target))


def _require_gpu(arch: str | None) -> None:
    here = gpu_of(torch)
    if arch is not None and arch != here:
        raise MissingError(
            f"--arch {arch}: the GPU here is {here}, and Inductor compiles and measures kernels on"
            " the GPU that they are for",
            hint=f"Export on a machine with {arch}.",
        )


def _give_memory(program: ExportedProgram, weights: Sequence[HoistedWeight], device: str) -> None:
    """Contiguous memory of its own for each weight, which is how Inductor tells them apart.

    That of a large one is asked for and never written, so that on the CPU it takes none.
    """
    for weight in weights:
        if weight.size <= INLINED:
            tensor = weight.compute()
        else:
            tensor = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        program._state_dict[weight.placeholder] = nn.Parameter(tensor, requires_grad=False)
    specs = weight_specs(program)
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in specs:
            node.meta["val"] = value(node).contiguous()  # scaled products look at strides
