"""The model itself, run on inputs: whether it takes them, what it gives, what Python reads, and how
a program differs from it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.capture.control_flow.detect.recorder import Read, Recorder, record
from enginecast.capture.outputs.flatten import ALL, Wanted, run_named
from enginecast.capture.python.quiet import quiet_torch
from enginecast.errors import EnginecastError, first_line
from enginecast.verification.eager.captured import capture_failures
from enginecast.verification.eager.outputs import Case, as_arrays, eager_outputs, reference_outputs
from enginecast.verification.floor import Floor
from enginecast.verification.metrics import Array
from enginecast.verification.reference import Reference, ReferenceCase
from enginecast.verification.runs import Runs

Inputs = Mapping[str, Tensor]
FAILS = (EnginecastError, IndexError, RuntimeError, ValueError)
"""Errors that a program raises for values or sizes it does not accept."""


def parameters_of(program: ExportedProgram) -> int:
    """How many elements the weights of a program have."""
    return sum(tensor.numel() for tensor in program.state_dict.values())


@dataclass(frozen=True)
class Eager:
    """A module in fp32."""

    module: nn.Module
    wanted: Wanted = ALL

    def error(self, inputs: Inputs) -> str:
        """The first line of the error that it raises on these inputs; empty if it runs.

        Raises:
            EnginecastError: one of ours, such as that a loop does not end.
        """
        given = {name: tensor.clone() for name, tensor in inputs.items()}
        try:
            with torch.no_grad(), quiet_torch(), Recorder(self.module, given):  # ends endless loops
                self.module(**given)
        except EnginecastError:
            raise
        except Exception as error:  # the model's own code
            return first_line(error) or type(error).__name__
        return ""

    def takes(self, inputs: Inputs) -> bool:
        """Whether it runs on these inputs."""
        return not self.error(inputs)

    def outputs(self, cases: Sequence[Case]) -> Mapping[str, Mapping[str, Array]]:
        """What it gives, by case and name.

        Raises:
            VerificationError: it does not run on one.
        """
        forward = partial(run_named, wanted=self.wanted)
        return eager_outputs(lambda _: self.module, cases, dtype="fp32", forward=forward)

    def reads(self, cases: Sequence[Inputs]) -> tuple[list[list[Read]], list[Inputs]]:
        """For each case what Python reads of tensors, and the outputs."""
        given: list[Inputs] = []

        def call(module: nn.Module, inputs: Inputs) -> None:
            given.append(run_named(module, inputs, self.wanted))

        with quiet_torch():
            return record(self.module, cases, call), given


def differences(
    outputs: Mapping[str, Mapping[str, Array]],
    traced: Mapping[str, Mapping[str, Array]],
    plain: Runs,
    exact: Runs,
    cases: Sequence[Case],
    guards: Collection[str] = (),
) -> list[str]:
    """How a program differs from eager by more than rounding.

    Args:
        outputs: what eager gives, by case and name.
        traced: what the program gives.
        plain, exact: run the program, and run it in fp64.
        guards: outputs of the program that eager has not.

    Raises:
        EnginecastError: the program does not run.
    """
    if all(_equal(traced[case.name], outputs[case.name]) for case in cases):
        return []  # fp64 takes eight times as long for convolutions
    wide = reference_outputs(exact, cases)
    found = (
        ReferenceCase(c.name, as_arrays(c.inputs), outputs[c.name], wide[c.name]) for c in cases
    )
    reference = Reference(tuple(found), Floor("fp32", {}))
    return list(capture_failures(plain, cases, reference, guards))


def _equal(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> bool:
    """Whether all outputs are equal, and of one kind of dtype."""
    return all(
        found[name].dtype.kind == array.dtype.kind
        and np.array_equal(found[name], array, equal_nan=array.dtype.kind in "fc")
        for name, array in wanted.items()
    )
