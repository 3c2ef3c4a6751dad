"""What is planned, and why the rest is kept."""

import pytest
import torch
from programs import (
    TOKENS,
    Text,
    calibrated,
    captured,
    prompts,
    rewritten,
    same_bits,
)
from rig import EOS, Rig
from tiny_programs import tiny_program
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.errors import PassError, SpecError
from enginecast.passes.ir.base import PassContext
from enginecast.passes.ir.edit import structural_copy
from enginecast.passes.ir.quantization_plan import LayerPlan, QuantizationPlan, plan_of
from enginecast.passes.quantize.plan.forms import modeled_gain, too_small
from enginecast.passes.registry import build


@pytest.fixture(scope="module")
def t5() -> ExportedProgram:
    return tiny_program("t5")


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


class Net(nn.Module):
    """A picture's patches, a layer, a head whose weight the embedding shares."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 2, stride=2)
        self.conv = nn.Conv2d(32, 32, 1)
        self.words = nn.Embedding(48, 32)
        self.few = nn.Embedding(48, 4)
        self.odd = nn.Linear(32, 33)
        self.layer = nn.Linear(33 + 4, 32)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.words.weight

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        seen = self.conv(self.patch((image - 0.5) / 0.25)).flatten(2).mean(2)[:, None]
        hidden = torch.relu(self.odd(seen + self.words(ids)))
        scores: Tensor = self.head(self.layer(torch.cat([hidden, self.few(ids)], -1)))
        return scores.float()


@pytest.fixture(scope="module")
def net() -> ExportedProgram:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = Net().requires_grad_(False)
        return captured(module, torch.randn(2, 3, 4, 4), torch.randint(48, (2, 5)))


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ("arch=sm90 min_gain=0", ("w8a8-dynamic", "row", "row")),
        ("arch=sm90 min_gain=0 static=true", ("w8a8-static", "tensor", "tensor")),
        ("arch=sm90 min_gain=0 target=onnxruntime", ("w8a8-static", "tensor", "tensor")),
        ("arch=sm90 min_gain=0 target=tensorrt", ("w8a8-static", "row", "tensor")),
        ("arch=sm89 min_gain=0 target=tensorrt", ("w8a8-static", "tensor", "tensor")),
        ("target=tensorrt", ("w8a8-dynamic", "row", "row")),
        ("arch=sm80 mode=storage", ("storage", "row", None)),
    ],
)
def test_form_by_architecture_and_target(
    net: ExportedProgram, options: str, form: tuple[str, str, str | None]
) -> None:
    head = of(planned(net, f"plan-fp8{{heads=true max_error=1 {options}}}"), "head")
    assert (head.choice, head.weights, head.activations) == form


@pytest.mark.parametrize(
    ("n", "k", "rowwise", "pays"),
    [
        (4096, 4096, True, True),
        (10240, 4096, True, True),
        (4096, 10240, True, True),
        (768, 768, True, False),
        (2048, 8192, True, False),
        (8192, 1024, True, False),
        (4096, 2048, True, False),
        (4097, 2048, True, True),
        (1024, 4096, False, False),
        (1025, 4096, False, True),
        (1024, 4097, False, True),
    ],
)
def test_torchaos_rule_decides_on_which_side_of_1_a_gain_lies(
    n: int, k: int, rowwise: bool, pays: bool
) -> None:
    assert too_small(n, k, rowwise=rowwise) is not pays
    assert (modeled_gain(n, k, rowwise=rowwise) > 1) is pays


@pytest.mark.slow
def test_of_all_layers_only_the_wo_whose_range_demands_it_moves() -> None:
    """One scale for all rows cannot hold the peak and the others; nothing here goes by names."""
    loud = "model.encoder.block.1.layer.1.DenseReluDense.wo"
    program = captured(Text(Rig().make()), *prompts(3, 7), dynamic=TOKENS)
    ids, mask = prompts(3, 11)
    ids[torch.arange(3), mask.sum(1) - 1] = EOS  # which is what the unit fires on
    given = PassContext(calibration=({"ids": ids, "mask": mask},), mask_input="mask")
    after, _ = rewritten(program, "plan-int8{static=true max_error=0.15}", given)
    plan = plan_of(after)
    assert plan is not None
    moved = [x for x in plan.layers if x.kind == "linear" and x.choice != "w8a8-static"]
    assert [layer.module for layer in moved] == [loud]
    assert "w8a8-static row/tensor loses" in moved[0].reason
    assert "it reads values up to 5." in moved[0].reason
    assert "e+04, " in moved[0].reason


@pytest.mark.parametrize(
    "spec", ["plan-int8{bits=4}", "plan-fp8{max_error=-1}", "plan-int8{min_gain=-0.5}"]
)
def test_options_that_do_not_fit_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        build(spec)
