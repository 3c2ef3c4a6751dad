"""The noise floor: what eager loses, and that a verdict by it finds mutations."""

import pytest
import torch
from program_edits import (
    MASKED,
    WHERE,
    Edit,
    change_epsilon,
    drop_the_mask,
    forward,
    low_reference,
    perturb_one_weight,
)
from small_programs import NAMES, cases, encoder, program
from torch import Tensor, nn

from enginecast.errors import VerificationError
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.emulate.profiles import get_profile
from enginecast.verification.emulate.run import true_dtype_check
from enginecast.verification.verdict import judge


def test_the_reference_knows_which_output_follows_the_mask() -> None:
    reference = low_reference("fp32")
    assert reference.masked == MASKED
    assert reference.cases[0].reference["hidden"].dtype == "float64"
    assert reference.cases[0].outputs["hidden"].dtype == "float32"
    assert 0 < reference.floor.cases["ragged"]["hidden"].relative < 1e-6


@pytest.mark.parametrize("edit", [change_epsilon, perturb_one_weight, drop_the_mask])
def test_the_verdict_finds_the_same_mutations(edit: Edit) -> None:
    reference = low_reference("fp32")
    exported = program(encoder())
    edit(exported)
    run = true_dtype_check(exported, cases(), reference, get_profile("torch-cpu"), names=NAMES)
    verdict = judge(run.measured, reference.floor, where=WHERE, engine_ran=True)
    assert verdict.outcome == "rejected"
    assert "the error of eager fp32" in verdict.reasons[0]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_eager_that_cannot_run_is_said_so(kind: type[Exception]) -> None:
    class Stubborn(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            raise kind("not implemented for 'Half'")

    reported = r"case 'full' \(input_ids \[.*\].*\): eager fp16 cannot run here"
    with pytest.raises(VerificationError, match=reported):
        make_reference(
            program(encoder()),
            lambda dtype: Stubborn() if dtype is torch.float16 else encoder().to(dtype),
            cases(),
            dtype="fp16",
            names=NAMES,
            forward=forward,
        )
