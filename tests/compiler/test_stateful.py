"""Modules that write to their buffers, as engines with state as inputs and outputs."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import cast
from torch import Tensor, nn

import enginecast
from enginecast.capture.sources import stateful
from enginecast.compiler.request import ModelOptions
from enginecast.errors import SourceError, UsageError, VerificationError
from enginecast.runtime import Stepper
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.engine import Engine
from enginecast.verification.reference import REFERENCE_NAME, read_reference
from enginecast.verification.stepping import step_failures

STATE = ModelOptions(stateful=True)


class Stream(nn.Module):
    """A convolution that goes on where the last call ended, and counts."""

    past: Tensor
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 6, 3)
        self.register_buffer("past", torch.full((1, 4, 2), 0.5))
        self.register_buffer("n", torch.tensor(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        whole = torch.cat([self.past, x], -1)
        self.past.copy_(whole[..., -2:])
        self.n += 1
        return {"y": self.convolution(whole) * self.n}


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Smoothed(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor, share: float = 0.6) -> Tensor:
        out = share * x + (1 - share) * self.last
        self.last = out.mean(0)
        return out


class Grows(Smoothed):
    def forward(self, x: Tensor, share: float = 1.0) -> Tensor:
        self.last = torch.cat([share * self.last, x[0]])
        return x + self.last.sum()


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval()


def export(module: nn.Module, folder: Path, example: dict[str, Any], **options: Any) -> Bundle:
    return enginecast.compile(module, folder, example=example, options=STATE, threads=1, **options)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stream") / "bundle"
    module = seeded(lambda: Outer(Stream()))
    return export(module, folder, {"x": torch.randn(1, 4, 9)}).root


@pytest.fixture
def engine(bundle: Path) -> Iterator[Engine]:
    with enginecast.load(bundle, threads=1) as engine:
        yield engine


def follow(engine: Engine, module: nn.Module, calls: list[dict[str, Tensor]], output: str) -> None:
    stepper, module = Stepper(engine), copy.deepcopy(module)
    for call in calls:
        with torch.no_grad():
            wanted = module(**call)
        wanted = wanted[output] if isinstance(wanted, dict) else wanted
        found = stepper({name: tensor.numpy() for name, tensor in call.items()})[output]
        np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-5)


def test_calls_in_turn_are_those_of_the_module(engine: Engine) -> None:
    calls = [{"x": torch.randn(1, 4, 9) * n} for n in range(1, 12)]
    follow(engine, seeded(lambda: Outer(Stream())), calls, "y")


def test_the_manifest_pairs_inputs_and_outputs(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cast(capsys, "inspect", bundle, "--json").json
    assert [(each["input"], each["output"], each["grows"]) for each in found["states"]] == [
        ("state_inner_past", "next_inner_past", None),
        ("state_inner_n", "next_inner_n", None),
    ]
    assert found["stepped"]["calls"] == 8
    assert not any("overwrites" in note for note in found["notes"])
    assert cast(capsys, "verify", bundle, "--json").json["outcome"] == "verified"


def test_an_engine_that_is_not_fed_what_it_gave_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = read_reference(engine.folder / REFERENCE_NAME)
    assert step_failures(engine, reference) == ()
    run = engine.run
    start = Stepper(engine).state["state_inner_past"]

    def stale(feeds: dict[str, Any], **options: Any) -> Any:
        return run({**feeds, "state_inner_past": start}, **options)

    monkeypatch.setattr(engine, "run", stale)
    assert "case 'call 2 in turn'" in " ".join(step_failures(engine, reference))


@pytest.mark.parametrize("wrong", ["old", pytest.param("early", marks=pytest.mark.slow)])
def test_a_wrong_state_is_rejected(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program and eager with inputs agree: the module that keeps its own state tells."""
    plain = stateful.StatefulSource._fed

    def fed(source: Any, module: nn.Module) -> nn.Module:
        made = plain(source, module)
        forward: Any = made.forward

        def wrongly(*args: Any, **tensors: Any) -> Any:
            if args or "state_last" not in tensors:
                return forward(*args, **tensors)
            found = forward(**tensors)
            if wrong == "old":
                return {**found, "next_last": tensors["state_last"].clone()}
            return {**found, "next_last": found["next_last"] * 0.999}

        wrongly.__signature__ = forward.__signature__  # type: ignore[attr-defined]
        wrongly.__wrapped__ = forward  # type: ignore[attr-defined]
        made.forward = wrongly
        return made

    monkeypatch.setattr(stateful.StatefulSource, "_fed", fed)
    with pytest.raises(VerificationError, match="consecutive calls: "):
        export(Smoothed(), tmp_path / "bundle", {"x": torch.randn(3, 8)})
    assert not (tmp_path / "bundle").exists()


def test_what_has_no_such_state_is_refused(tmp_path: Path) -> None:
    x = {"x": torch.randn(3, 8)}
    with pytest.raises(UsageError, match="its forward writes to no buffer"):
        export(Outer(nn.Linear(8, 8)), tmp_path / "none", x)
    with pytest.raises(SourceError, match=r"forward makes the buffer last torch.float32 \[16\]"):
        export(Grows(), tmp_path / "grows", x)
    with pytest.raises(UsageError, match="does not go with --kv-cache"):
        ModelOptions(stateful=True, kv_cache=True)
    with pytest.raises(UsageError, match="--stateful does not go with --precision int8"):
        export(Smoothed(), tmp_path / "int8", x, precision="int8")
