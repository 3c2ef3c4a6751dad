"""smooth-outliers: every bit kept in every family, a reason where not, and less error in int8."""

import golden
import models
import pytest
import torch
from programs import (
    TOKENS,
    Text,
    calibrated,
    captured,
    ir_diff,
    prompts,
    reasons,
    reloaded,
    rewritten,
    same_bits,
    seeded,
)
from tiny_programs import tiny_program
from torch import Tensor
from torch.export import ExportedProgram
from transformers import T5EncoderModel

from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import aten, weight_expressions
from enginecast.passes.ir.pipeline import run_pipeline
from enginecast.passes.ir.scaled_values import scale_of
from enginecast.passes.registry import build
from enginecast.verification.program.observer import Observer

ALWAYS = "smooth-outliers{alpha=0.6}"
FUSED = "canonicalize,fuse-gelu,fuse-rms-norm,fuse-attention,fuse-skip-norm"
SPELLINGS = {"plain": "canonicalize", "fused": FUSED, "merged": f"{FUSED},merge-linears"}
SMOOTHED = {"t5": 8, "t5 relu": 8, "bert": 2, "llama": 8, "vit": 6}
"""Of the 8 values that the linears of two layers read."""
DEFAULT = {("t5", "merged")}


def model_program(name: str, spelling: str) -> tuple[ExportedProgram, PassContext]:
    """A model before the pass, and its calibration inputs."""
    torch.manual_seed(1)
    is_text = name != "vit"
    inputs = prompts(4, 12) if is_text else (torch.randn(2, 3, 16, 16),)
    program = tiny_program(name)
    context = calibrated(program, *inputs, mask_input="mask" if is_text else None)
    return rewritten(program, SPELLINGS[spelling])[0], context


class Named:
    """A case of the verifier."""

    def __init__(self, name: str, inputs: dict[str, Tensor]) -> None:
        self.name, self.inputs = name, inputs


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        pytest.param(*pair, marks=[] if pair in DEFAULT else pytest.mark.slow)
        for pair in ((name, spelling) for name in SMOOTHED for spelling in SPELLINGS)
    ],
)
def test_every_family_keeps_every_bit_at_every_boundary(name: str, spelling: str) -> None:
    before, context = model_program(name, spelling)
    program = rewritten(before, "canonicalize")[0]
    observer = Observer(program, [Named("case", dict(context.calibration[0]))])
    (run,) = run_pipeline(build(ALWAYS), program, context, [observer])
    (check,) = observer.checks
    assert (check.failure, check.moved, check.worst_error) == ("", (), 0.0)
    assert run.rewritten == SMOOTHED[name], reasons(run.sites)
    others = prompts(3, 9) if name != "vit" else (torch.randn(3, 3, 16, 16),)
    assert same_bits(before, program, *others)
    assert same_bits(before, reloaded(program), *others)
    # Only factors of weights are new: nothing is multiplied when the model runs.
    added = {n.name for n in program.graph.nodes} - {n.name for n in before.graph.nodes}
    new = {n for n in program.graph.nodes if n.name in added and n.op == "call_function"}
    assert {n.target for n in new} == {aten.mul.Tensor}
    assert new <= weight_expressions(program)
    scaled = [scale_of(node) for node in program.graph.nodes]
    assert sum(isinstance(found, Tensor) for found in scaled) >= SMOOTHED[name]


def test_the_rewrite_of_a_t5_is_the_golden_one() -> None:
    model = seeded(T5EncoderModel, models.t5_config(layers=1))
    torch.manual_seed(1)
    inputs = prompts(4, 12)
    before, _ = rewritten(captured(Text(model), *inputs, dynamic=TOKENS), SPELLINGS["merged"])
    after, _ = rewritten(before, ALWAYS, calibrated(before, *inputs, mask_input="mask"))
    golden.check("smooth_outliers.diff", ir_diff(before, after))
