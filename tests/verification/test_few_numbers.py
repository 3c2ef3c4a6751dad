"""Outputs of a few numbers: a correct engine passes however it sums, and a wrong one does not."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from enginecast.capture.inputs.examples import Case
from enginecast.verification.eager.make_reference import edge_reference, make_reference
from enginecast.verification.eager.other_kernels import with_all_kernels
from enginecast.verification.eager.outputs import as_arrays, reference_outputs, reference_program
from enginecast.verification.eager.sequence import LANES, in_sequence
from enginecast.verification.edges import edge_failures
from enginecast.verification.engine import where_it_ran
from enginecast.verification.reference import Reference
from enginecast.verification.runs import Runs
from enginecast.verification.verdict import judge


def half(x: Tensor) -> Tensor:
    return x.half().float()


def tf32(x: Tensor) -> Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class Net(nn.Module):
    """A small net of images; `wrong` names what it computes otherwise."""

    def __init__(self, head: Callable[["Net", Tensor], Tensor], wrong: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.wrong = head, wrong
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.last, self.linear = nn.Conv2d(8, 4, 1), nn.Linear(8, 2)
        mean, spread, bias = self.norm.running_mean, self.norm.running_var, self.first.bias
        assert mean is not None
        assert spread is not None
        assert bias is not None
        mean.normal_()
        spread.uniform_(0.5, 2.0)
        if wrong == "bias":
            bias.data[3] = 0
        self.norm.eps = 1e-6 if wrong == "eps" else 1e-5

    def low(self, x: Tensor) -> Tensor:
        changes: dict[str, Callable[[Tensor], Tensor]]
        changes = {"half": half, "tf32": tf32, "moved": lambda x: x + 2e-5}
        return changes[self.wrong](x) if self.wrong in changes else x

    def mean(self, x: Tensor, dims: tuple[int, ...]) -> Tensor:
        n = x[0].numel() if len(dims) > 2 else x.shape[2] * x.shape[3]
        factor = n / (n - 1) if self.wrong == "n-1" else 1.0
        return x.mean(dims) * factor

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x = self.low(F.relu(self.norm(self.first(image))))
        if self.wrong == "shifted":
            x = torch.cat([x[..., 1:], x[..., :1] * 0], -1)
        return {"y": self.head(self, x)}


def confidence(net: Net, x: Tensor) -> Tensor:
    return net.mean(net.low(net.last(x).softmax(1)).amax(1)[:, None], (0, 1, 2, 3))


def two_scores(net: Net, x: Tensor) -> Tensor:
    scores: Tensor = net.linear(net.low(net.mean(x, (2, 3))))
    return scores


def spread(net: Net, x: Tensor) -> Tensor:
    return net.low(net.last(x)).std((1, 2, 3), correction=int(net.wrong != "n-1"))


def difference(net: Net, x: Tensor) -> Tensor:
    y = net.low(net.last(x)).flatten(1)
    return y[:, ::2].mean(1) - y[:, 1::2].mean(1)


def normalized(net: Net, x: Tensor) -> Tensor:
    y = net.last(x).flatten(1)
    return net.low((y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)).mean(1)


HEADS = {h.__name__: h for h in (confidence, two_scores, spread, difference, normalized)}
IMAGES = {
    "example": torch.rand(1, 3, 64, 48, generator=torch.Generator().manual_seed(1)),
    "other": torch.rand(1, 3, 64, 48, generator=torch.Generator().manual_seed(2)),
}
EDGES = {
    "zeros": torch.zeros(1, 3, 64, 48),
    "large values": 1e3 * torch.randn(1, 3, 64, 48, generator=torch.Generator().manual_seed(3)),
}
CASES = [Case(name, {"image": image}) for name, image in IMAGES.items()]
EDGE_CASES = [Case(name, {"image": image}) for name, image in EDGES.items()]


@cache
def reference_of(head: str) -> Reference:
    net = Net(HEADS[head]).eval()
    program = torch.export.export(net, (IMAGES["example"],))
    exact = lambda cases: reference_outputs(  # noqa: E731
        Runs(lambda: reference_program(program), ["y"]), cases
    )
    forward = lambda model, inputs: model(**inputs)  # noqa: E731
    made = make_reference(
        program, lambda _: net, CASES, dtype="fp32", names=["y"], forward=forward, exact=exact
    )
    edges = edge_reference(lambda _: net, EDGE_CASES, forward, exact, program, ["y"])
    made = Reference(**{**vars(made), "edges": edges})
    return with_all_kernels(made, program, CASES, EDGE_CASES, ["y"])


def outcome(head: str, wrong: str = "", lanes: int = 0) -> str:
    """What becomes of an engine that computes like a net, with sums in pairs or in sequence."""
    reference, net = reference_of(head), Net(HEADS[head], wrong).eval()

    def run(image: Tensor) -> Mapping[str, Any]:
        with torch.no_grad(), in_sequence(lanes) if lanes else nullcontext():
            return as_arrays(net(image))

    measured = {
        case.name: reference.compare(case, run(IMAGES[case.name])) for case in reference.cases
    }
    problems = [f for edge in reference.edges for f in edge_failures(edge, run(EDGES[edge.name]))]
    found = judge(
        measured, reference.floor, where=where_it_ran(), engine_ran=True, problems=problems
    )
    return "; ".join(found.reasons) if found.outcome == "rejected" else found.outcome


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lanes", [*LANES, 16])
def test_a_sum_may_be_in_any_order(head: str, lanes: int) -> None:
    assert outcome(head, lanes=lanes) == "verified"


FAULTS = ("half", "tf32", "bias", "shifted", "eps", "n-1")
SHOWN = {"difference": FAULTS[:4], "normalized": ("moved",)}
"""The faults that an output shows: the mean of what is normalized is zero whatever it was."""


@pytest.mark.parametrize(("head", "wrong"), [(h, w) for h in HEADS for w in SHOWN.get(h, FAULTS)])
def test_a_wrong_engine_is_rejected(head: str, wrong: str) -> None:
    assert outcome(head, wrong) != "verified"
