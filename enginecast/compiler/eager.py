"""The model itself, run on inputs: whether it takes them, what it gives, and what Python reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from enginecast.capture.control_flow.detect.recorder import Read, Recorder, record
from enginecast.capture.outputs.flatten import ALL, Wanted, run_named
from enginecast.capture.python.quiet import quiet_torch
from enginecast.errors import EnginecastError, first_line

Inputs = Mapping[str, Tensor]


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

    def outputs(self, inputs: Inputs) -> dict[str, Tensor]:
        """What it gives, by name.

        Raises:
            Exception: whatever the model's own code does.
        """
        with torch.no_grad(), quiet_torch():
            return run_named(self.module, inputs, self.wanted)

    def reads(self, cases: Sequence[Inputs]) -> tuple[list[list[Read]], list[Mapping[str, Tensor]]]:
        """For each case what Python reads of tensors, and the outputs."""
        given: list[Mapping[str, Tensor]] = []

        def call(module: nn.Module, inputs: Inputs) -> None:
            given.append(run_named(module, inputs, self.wanted))

        with quiet_torch():
            return record(self.module, cases, call), given
