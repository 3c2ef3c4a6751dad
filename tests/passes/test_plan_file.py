"""Plans as files: written, changed by hand, read again, refused by name where they do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import calibrated, captured, rewritten
from torch import Tensor, nn
from torch.export import ExportedProgram

from enginecast.errors import InputError, PassError
from enginecast.passes.ir.quantization_plan import QuantizationPlan, plan_of
from enginecast.passes.quantize.plan.file import (
    check_model,
    decode_plan,
    encode_plan,
    read_plan,
    write_plan,
)

FILE = Path("p.json")
ANY = "max_error=9 heads=true"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(48, 32)
        self.wide = nn.Linear(32, 64)
        self.odd = nn.Linear(64, 17)
        self.narrow = nn.Linear(17, 32)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.narrow(self.odd(torch.relu(self.wide(self.words(ids)))))
        return found


@pytest.fixture(scope="module")
def net() -> ExportedProgram:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return captured(Net().requires_grad_(False), torch.randint(48, (2, 5)))


def made(program: ExportedProgram, spec: str) -> QuantizationPlan:
    after, _ = rewritten(program, spec, calibrated(program))
    plan = plan_of(after)
    assert plan is not None
    return plan


def reused(program: ExportedProgram, content: Any, spec: str) -> QuantizationPlan:
    """The plan that a pass leaves when it is given one."""
    given = decode_plan(json.dumps(content).encode())
    after, _ = rewritten(program, spec, calibrated(program, plan=given))
    plan = plan_of(after)
    assert plan is not None
    return plan


def content_of(plan: QuantizationPlan) -> Any:
    return json.loads(encode_plan(plan))


def test_a_plan_survives_its_file_and_is_used_again(net: ExportedProgram, tmp_path: Path) -> None:
    plan = made(net, f"plan-int8{{{ANY}}}")
    file = tmp_path / "plan.json"
    write_plan(file, plan)
    assert read_plan(file) == plan
    assert reused(net, content_of(plan), "plan-int8") == plan


def test_an_edited_plan_is_carried_out_and_its_error_measured_anew(net: ExportedProgram) -> None:
    content = content_of(made(net, f"plan-int8{{{ANY}}}"))
    wide = content["layers"][1]
    assert (wide["module"], wide["activations"]) == ("wide", "row")
    wide |= {"choice": "keep", "reason": "I want it so"}
    for layer in content["layers"][2:]:
        layer |= {"choice": "keep"}
    plan = reused(net, content, "plan-int8")
    assert plan.layers[1].reason == "I want it so"
    assert plan.predicted_error is not None
    assert 0 < plan.predicted_error < content["predicted_error"]


@pytest.mark.parametrize(
    ("place", "changed", "words"),
    [
        (0, {"module": "wordz"}, "layers[0] (wordz): the program has no such layer"),
        (1, {"source": "other.py:1"}, "the module is there, but not other.py:1 #0"),
        (1, {"shape": [64, 33]}, "shape: the program has [64, 32], the plan [64, 33]"),
        (0, {"choice": "w8a8-dynamic"}, "choice: 'w8a8-dynamic' of a layer that is not a linear"),
        (1, {"activations": None}, "activations: none with 'w8a8-dynamic'"),
        (1, {"choice": "storage", "activations": None}, "bits: 7 bits are for products of rows"),
        (1, {"choice": "w8a8-static", "activations": "row"}, "'row': a static scale is one"),
        (1, {"weights": "block"}, "activations: blocks are for weight and activations alike"),
        (2, {"weights": "block", "activations": "block", "block": 48}, "block: 48"),
        (1, {"signed": True}, "signed: True, expected False of this layer"),
    ],
)
def test_what_a_plan_cannot_demand(
    net: ExportedProgram, place: int, changed: dict[str, Any], words: str
) -> None:
    content = content_of(made(net, f"plan-int8{{{ANY}}}"))
    content["layers"][place] |= changed
    with pytest.raises(PassError) as refused:
        reused(net, content, "plan-int8")
    assert words in refused.value.message
    assert content["layers"][place]["module"] in refused.value.message


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("layers", 0, "choise"), "keep", "$.layers[0]: object contains unknown field `choise`"),
        (("layers", 1, "choice"), "fp4", "$.layers[1].choice: invalid enum value 'fp4'"),
        (("layers", 1, "bits"), 6, "$.layers[1].bits: invalid enum value 6"),
        (("layers", 1, "error"), -0.5, "$.layers[1].error: expected `float` >= 0"),
        (("schema_version",), 99, "$.schema_version: expected 1, got 99"),
    ],
)
def test_a_file_that_is_not_a_plan_names_the_field(
    net: ExportedProgram, tmp_path: Path, path: tuple[Any, ...], value: Any, words: str
) -> None:
    content = content_of(made(net, "plan-int8{measure=false heads=true}"))
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_plan(file)
    assert f"--plan {file}: {words}" in refused.value.message


def test_a_plan_for_another_model_is_refused_with_both_fingerprints() -> None:
    plan = QuantizationPlan(
        format="fp8", arch="cpu", max_error=0.1, layers=(), model={"config": "aa", "weights": "bb"}
    )
    check_model(plan, {"config": "aa", "weights": "bb", "more": "x"}, FILE)
    check_model(QuantizationPlan(format="fp8", arch="cpu", max_error=0.1, layers=()), {}, FILE)
    with pytest.raises(InputError) as refused:
        check_model(plan, {"config": "aa", "weights": "cc"}, FILE)
    assert refused.value.message == (
        "--plan p.json: $.model.weights: the plan was made for bb, and the model has cc"
    )
