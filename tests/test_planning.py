"""What is planned, and why the rest is kept."""

import pytest
import torch
from models import t5_config
from programs import TOKENS, Text, calibrated, captured, prompts, rewritten, same_bits, seeded
from torch.export import ExportedProgram
from transformers import T5EncoderModel

from enginecast.errors import PassError
from enginecast.passes.graph_edit import structural_copy
from enginecast.passes.quantization_plan import LayerPlan, QuantizationPlan, plan_of

WO = "model.encoder.block.0.layer.1.DenseReluDense.wo"


@pytest.fixture(scope="module")
def t5() -> ExportedProgram:
    torch.manual_seed(0)
    model = seeded(T5EncoderModel, t5_config())
    return captured(Text(model), *prompts(3, 7), dynamic=TOKENS)


def planned(program: ExportedProgram, spec: str) -> QuantizationPlan:
    after, _ = rewritten(program, spec, calibrated(program))
    found = plan_of(structural_copy(after))
    assert found is not None
    return found


def of(plan: QuantizationPlan, module: str) -> LayerPlan:
    (found,) = (layer for layer in plan.layers if layer.module == module)
    return found


def test_a_plan_changes_no_bit_and_has_one_site_for_each_layer(t5: ExportedProgram) -> None:
    after, sites = rewritten(t5, "plan-fp8", calibrated(t5))
    assert same_bits(t5, after, *prompts(2, 5))
    plan = plan_of(after)
    assert plan is not None
    assert [site.module for site in sites] == [layer.module for layer in plan.layers]
    assert [site.rewritten for site in sites] == [x.choice != "keep" for x in plan.layers]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (f'skip_modules="{WO}"', f"skip_modules={WO!r}"),
        (r'skip_modules_pattern="0.*\\.wo$"', r"skip_modules_pattern='0.*\\.wo$'"),
    ],
)
def test_skipped(t5: ExportedProgram, option: str, reason: str) -> None:
    plan = planned(t5, f"plan-fp8{{{option}}}")
    skipped = of(plan, WO)
    assert (skipped.choice, skipped.reason) == ("keep", reason)
    assert of(plan, WO.replace("wo", "wi_0")).choice == "w8a8-dynamic"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("skip_modules=wo", "skip_modules='wo': no layer has this name"),
        ("include_modules=wo", "include_modules='wo': no layer has this name"),
        ("skip_modules_pattern=wx", "skip_modules_pattern='wx': it matches no layer"),
        ('skip_modules_pattern="("', "is not a regular expression"),
        ("skip_modules_classes=T5Blok", "skip_modules_classes='T5Blok': it is around no layer"),
    ],
)
def test_a_skip_that_finds_nothing_is_named(t5: ExportedProgram, option: str, words: str) -> None:
    with pytest.raises(PassError) as refused:
        planned(t5, f"plan-fp8{{{option}}}")
    assert words in refused.value.message
