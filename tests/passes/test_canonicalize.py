"""canonicalize: every rule keeps every bit, and stays away where it would not."""

from collections.abc import Callable
from typing import Any

import golden
import models
import pytest
import torch
from programs import (
    TOKENS,
    Function,
    canonical,
    captured,
    count,
    floats,
    ir_diff,
    program_of,
    reloaded,
    same_bits,
    targets,
)
from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import PreTrainedModel, T5EncoderModel

Make = Callable[..., Any]


# Function, ops that go, ops that stay.
GONE: dict[str, tuple[Make, str, list[str]]] = {
    "dropout": (lambda x: nn.functional.dropout(x, 0.5, False) * 2, "dropout", ["mul.Tensor"]),
    "same dtype": (lambda x: x.to(torch.float32) * 2, "to", ["mul.Tensor"]),
    "exact round trip": (lambda x: x.half().float().half() * 2, "", ["to.dtype", "mul.Tensor"]),
    "detach": (lambda x: x.detach() * 2, "detach", ["mul.Tensor"]),
    "contiguous": (
        lambda x: (x * 3).t().contiguous() * 2,
        "contiguous",
        ["mul.Tensor", "t.default", "mul.Tensor"],
    ),
    "same view": (lambda x: (x * 2).reshape(x.shape), "reshape", ["mul.Tensor"]),
    "same expand": (lambda x: (x * 2).expand(x.shape), "expand", ["mul.Tensor"]),
    "integer zero": (
        lambda x: ((x > 0).long() + 0) * 2,
        "add",
        ["gt.Scalar", "to.dtype", "mul.Tensor"],
    ),
    "expand before add": (
        lambda x: x[:, :1].expand(x.shape) + x,
        "expand",
        ["slice.Tensor", "add.Tensor"],
    ),
    "true and": (
        lambda x: (torch.arange(x.shape[1]) >= 0) & (x > 0),
        "__and__",
        ["gt.Scalar"],
    ),
    "equal values": (
        lambda x: (x * 2).sin() + (x * 2).sin(),
        "",
        ["mul.Tensor", "sin.default", "add.Tensor"],
    ),
    "constants": (lambda x: x + torch.arange(4).sum() * 2.5, "arange", ["add.Tensor"]),
    "full range index": (
        lambda x: x[torch.arange(x.shape[0])[:, None, None, None], torch.arange(x.shape[1])] * 2,
        "index",
        ["unsqueeze.default", "unsqueeze.default", "mul.Tensor"],
    ),
}


@pytest.mark.parametrize("case", GONE)
def test_rule_drops_what_changes_nothing(case: str) -> None:
    function, gone, stays = GONE[case]
    before = program_of(function, floats(2, 5))
    after = canonical(before)
    assert [t for t in targets(after) if not t.startswith(("sym_", "_assert"))] == stays
    assert not gone or count(before, gone)
    assert same_bits(before, after, floats(3, 7))


def test_dead_weights_do_not_travel_along() -> None:
    class Dead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.dead = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            self.dead(x)
            out: Tensor = self.used(x)
            return out

    before = captured(Dead(), torch.randn(2, 4))
    after = canonical(before)
    assert set(after.state_dict) == {"used.weight", "used.bias"}
    assert "dead.weight" in before.state_dict
    assert same_bits(reloaded(after), after, torch.randn(2, 4))


def t5_encoder(layers: int) -> PreTrainedModel:
    torch.manual_seed(0)
    model = T5EncoderModel(models.t5_config(layers=layers)).eval().requires_grad_(False)
    models.perturb(model)
    return model


def t5_program(layers: int) -> ExportedProgram:
    ids = torch.randint(2, models.VOCABULARY, (3, 7))
    model = t5_encoder(layers)
    forward = Function(lambda ids, mask: model(ids, mask).last_hidden_state)
    forward.add_module("model", model)
    return captured(forward, ids, torch.ones_like(ids), dynamic=TOKENS)


@pytest.fixture(scope="module")
def t5_programs() -> dict[int, ExportedProgram]:
    return {layers: t5_program(layers) for layers in (1, 3)}


@pytest.mark.slow
def test_t5_bias_and_mask_are_computed_once_whatever_the_depth(
    t5_programs: dict[int, ExportedProgram],
) -> None:
    counts = {}
    for layers, before in t5_programs.items():
        after = canonical(before)
        counts[layers] = [count(after, op) for op in ("log", "where", "embedding", "index")]
        assert count(after, "dropout", "contiguous", "expand", "add_") == 0
        for shape in ((1, 2), (3, 7), (5, 19)):
            ids = torch.randint(2, models.VOCABULARY, shape)
            mask = (torch.arange(shape[1])[None] < torch.arange(shape[0])[:, None] + 1).long()
            mask[0] = 0
            assert same_bits(before, after, ids, mask)
    assert counts[1] == counts[3]
    assert counts[1] == [1, 2, 2, 0]


def test_golden_canonicalize() -> None:
    def shift(x: Tensor) -> Tensor:
        y = nn.functional.dropout(x.float() * 2, 0.1, False)
        return y + x * 2

    before = program_of(shift, floats(2, 5))
    golden.check("canonicalize.diff", ir_diff(before, canonical(before)))
