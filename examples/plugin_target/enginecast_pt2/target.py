"""The half that exports: a program after its passes to a .pt2 file."""

import json

import torch

from enginecast.exporters.program import op_counts
from enginecast.exporters.target import Artifact, LoweringRequest, Target

ENGINE_FILE = "program.pt2"
OUTPUTS = "enginecast_outputs"
"""Extra file of the archive: JSON with the names of the outputs."""


class Pt2(Target):
    """The program of torch.export, for the CPU."""

    name = "pt2"
    arithmetic = "torch-cpu"
    only_device = "cpu"
    holds_weights = True

    def lower(self, request: LoweringRequest) -> Artifact:
        torch.export.save(
            request.program,
            request.folder / ENGINE_FILE,
            extra_files={OUTPUTS: json.dumps(list(request.outputs))},
        )
        version = ".".join(torch.__version__.split(".")[:2])
        return Artifact((ENGINE_FILE,), op_counts(request.program), f"torch>={version}")
