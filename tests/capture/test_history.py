"""Results that depend on earlier calls, on random numbers or on the mode are refused, with what is
kept and its line; caches and counters that decide nothing are not.
"""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import enginecast
from enginecast.capture.tracing.state.repeated_calls import CalledInTurn
from enginecast.errors import CaptureError

Forward = Callable[[Any, Tensor], Tensor]
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
TABLES: dict[int, Tensor] = {}
seen: list[torch.Size] = []
calls = 0


class Model(nn.Module):
    """Runs a function of itself and of its input."""

    shared = 0

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run = forward
        self.count = 0
        self.largest = 0.0
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def smoothed(model: Model, x: Tensor) -> Tensor:
    last = x if model.last is None or model.last.shape != x.shape else model.last
    model.last = 0.6 * x + 0.4 * last
    return model.last


def warm_up(model: Model, x: Tensor) -> Tensor:
    model.count += 1
    return x if model.count < 5000 else x * 2


def of_the_largest(model: Model, x: Tensor) -> Tensor:
    model.largest = max(model.largest, float(x.abs().max()))
    return x / model.largest


def by_a_global(model: Model, x: Tensor) -> Tensor:
    global calls
    calls += 1
    return x if calls < 300 else x * 2


def by_a_list(model: Model, x: Tensor) -> Tensor:
    seen.append(x.shape)
    return x if len(seen) < 40 else x + 1


def by_its_class(model: Model, x: Tensor) -> Tensor:
    Model.shared += 1
    return x if Model.shared < 50 else x + 1


def look(forward: Forward, others: list[Tensor] | None = None) -> tuple[str, ...]:
    """What is noted of a model."""
    call = CalledInTurn(
        lambda module, inputs: {"y": module(inputs["x"])},
        {"x": X},
        [{"x": other} for other in others or [X * -1.7 + 0.6, torch.ones(9, 4)]],
    )
    call(Model(forward), {"x": X})
    return call.notes


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (smoothed, "last"),
        (warm_up, "count"),
        (of_the_largest, "largest"),
        (by_a_global, "calls"),
        (by_a_list, "seen"),
        (by_its_class, "Model.shared"),
    ],
)
def test_a_result_that_depends_on_earlier_calls_is_refused(forward: Forward, name: str) -> None:
    with pytest.raises(CaptureError) as caught:
        look(forward)
    assert f"forward changes {name} " in caught.value.message
    assert "a later call with equal inputs gives another 'y'" in caught.value.message


@functools.lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size).cos()


def cached(model: Model, x: Tensor) -> Tensor:
    if x.shape[0] > model.count:
        model.count, model.last = x.shape[0], torch.arange(x.shape[0]).sin()
    assert model.last is not None
    return x * model.last[: x.shape[0], None]


def from_tables(model: Model, x: Tensor) -> Tensor:
    if x.shape[1] not in TABLES:
        TABLES[x.shape[1]] = torch.arange(x.shape[1]).sin()
    return x * TABLES[x.shape[1]] + table(x.shape[1])


def counted(model: Model, x: Tensor) -> Tensor:
    model.count += 1
    return x * 2


@pytest.mark.parametrize(
    ("forward", "names"),
    [(cached, ["count", "last"]), (counted, ["count"]), (from_tables, ["TABLES"])],
)
def test_what_decides_nothing_is_noted(forward: Forward, names: list[str]) -> None:
    TABLES.clear()
    notes = look(forward)
    assert [note.split()[2] for note in notes] == names
    assert all(f" at {__file__}:" in note for note in notes)


def test_what_the_first_calls_gave_is_not_computed_again() -> None:
    called: list[int] = []
    note = called.append  # which is not watched

    def run(module: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        note(len(given["x"]))
        return {"y": module(given["x"])}

    model, batch = Model(lambda _, x: x * 2), torch.ones(6, 4)
    call = CalledInTurn(run, {"x": X}, [{"x": batch}])
    found = [call(model, {"x": x.clone()})["y"] for x in (X, batch, X)]
    assert called == [3, 6, 3, 3]  # the last one was asked for once more
    assert all(torch.equal(y, x * 2) for x, y in zip((X, batch, X), found, strict=True))
    call(Model(lambda _, x: x * 2), {"x": batch})
    assert called[4:] == [6]  # another module


class Trained(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.part(x)
        return made


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


def look_at_trained(part: nn.Module) -> None:
    """Look at a module that was given in train mode; it is left in eval mode, its buffers alone."""
    module = Trained(part)
    trained = frozenset(name for name, _ in module.named_modules())
    before = {name: tensor.clone() for name, tensor in module.named_buffers()}
    call = CalledInTurn(
        lambda m, given: {"y": m(given["x"])}, {"x": X}, [{"x": X + 1}], trained=trained
    )
    try:
        call(module.eval(), {"x": X})
    finally:
        assert not any(part.training for part in module.modules())
        assert all(torch.equal(t, before[name]) for name, t in module.named_buffers())


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (nn.BatchNorm1d(4), "'part' (BatchNorm1d) uses and updates the statistics of the batch"),
        (Asks(), "its code asks for self.training"),
        (nn.Dropout(0.2), "'part' (Dropout) drops values"),
    ],
)
def test_train_mode_is_refused_where_it_decides(part: nn.Module, why: str) -> None:
    with pytest.raises(CaptureError) as caught:
        look_at_trained(part)
    assert why in caught.value.message
    assert caught.value.hint == "Call .eval() on it first."


def test_caches_of_the_caller_hold_no_tensors_of_a_trace(tmp_path: Path) -> None:
    TABLES.clear()
    table.cache_clear()
    model = Model(from_tables).eval()
    bundle = enginecast.compile(model, tmp_path / "engine", example={"x": X})
    wanted = model(X)
    assert type(TABLES[4]) is type(table(4)) is Tensor
    with enginecast.load(bundle.root) as engine:
        [found] = engine.run({"x": X.numpy()}).values()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-6)
