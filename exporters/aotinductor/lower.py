"""Compile a program ahead of time with Inductor: one package of machine code, and one safetensors
file with its weights.

The weights stay outside of the package: they are written one at a time, never linked, and loading
maps them.  The compiler sees tensors without values in their place, except for the small ones,
whose values Inductor writes into the code.
"""

import json
from collections.abc import Mapping
from typing import Literal

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.passes import move_to_device_pass

from enginecast.errors import MissingError
from enginecast.exporters.aotinductor.inductor import compile_package, vector_isa
from enginecast.exporters.files import all_or_none
from enginecast.exporters.program import op_counts
from enginecast.exporters.target import Artifact, LoweringRequest
from enginecast.exporters.weights.file import WEIGHTS_FILE, check_dtypes, write_weights
from enginecast.passes.ir.blocks import all_nodes
from enginecast.passes.ir.deferred_weights import DeferredWeight, deferred_weights
from enginecast.passes.ir.edit import dtype_of, input_names, structural_copy
from enginecast.runtime.device.fitness import requirements
from enginecast.runtime.device.gpu import arch_of
from enginecast.runtime.sessions.aotinductor import NAMES

PACKAGE_FILE = "engine.pt2"
INLINED = 4096
"""Bytes up to which a weight is compiled with its value: Inductor writes scalars and vectors of up
to 8 elements into the code (torch/_inductor/graph.py: `can_inline_constant`)."""


def lowering(device: str) -> str:
    """The passes that make the form that `lower_to_aotinductor` compiles, as a spec."""
    return (
        "drop-assertions,decompose-fused,lift-weights,hoist-weights,"
        f"decompose-quantized{{device={device}}},flatten-calls"
    )


def lower_to_aotinductor(request: LoweringRequest) -> Artifact:
    """Write `engine.pt2` and `weights.safetensors`.

    Raises:
        LoweringError: Inductor cannot compile the program.  No file is left then.
        MissingError: there is no C++ compiler, or no GPU of the kind asked for, to compile with.
    """
    program, device = request.program, request.device
    if device == "cuda":
        here = arch_of(torch)
        if request.arch not in (None, here):
            raise MissingError(
                f"--arch {request.arch}: the GPU here is {here}, and Inductor compiles and measures"
                " kernels on the GPU that they are for",
                hint=f"Export on a machine with {request.arch}.",
            )
    weights = deferred_weights(program)
    check_dtypes(weights.values())
    ops = op_counts(program)
    names = {
        "inputs": input_names(program),
        "outputs": [*request.outputs],
        "weights": {target: weight.name for target, weight in weights.items()},
    }
    files = (PACKAGE_FILE, *((WEIGHTS_FILE,) if weights else ()))
    with all_or_none(request.folder, files):
        compile_package(
            _on_device(program, weights, device),
            request.folder / PACKAGE_FILE,
            device=device,
            metadata={NAMES: json.dumps(names)},
        )
        if weights:
            write_weights(request.folder / WEIGHTS_FILE, weights.values())
    needs = requirements(torch, device, vector_isa())
    return Artifact(
        files,
        ops,
        minimum_runtime=f"torch=={needs['torch']}.*",
        quantized=_quantized(program),
        requires=needs,
    )


def _quantized(program: ExportedProgram) -> Literal["", "fp8", "int8"]:
    """What the engine holds, its weights included."""
    dtypes = {dtype_of(node) for node in all_nodes(program)}
    if dtypes & {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2}:
        return "fp8"
    return "int8" if torch.int8 in dtypes else ""


def _on_device(
    program: ExportedProgram, weights: Mapping[str, DeferredWeight], device: str
) -> ExportedProgram:
    """A copy with contiguous memory of its own for each weight, which is how Inductor tells them
    apart.

    That of a large one is asked for and never written, so that on the CPU it takes none.
    """
    program = structural_copy(program)
    for target, weight in weights.items():
        if weight.size <= INLINED:
            tensor = weight.compute()
        else:
            tensor = torch.empty(weight.shape, dtype=weight.dtype, device=device)
        program.state_dict[target] = nn.Parameter(tensor, requires_grad=False)
    return program if device == "cpu" else move_to_device_pass(program, device)
