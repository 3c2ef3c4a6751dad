"""Modules that write to their buffers, as engines with state as inputs and outputs."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from control_flow import SIZE, BufferCounter, KvCache
from decoders import decoder
from doc_examples import run_example
from exports import cast
from safetensors.numpy import load_file
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import enginecast
from enginecast.capture.sources import stateful
from enginecast.capture.sources.factory import take_module
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.stateful import with_state
from enginecast.compiler.request import ModelOptions
from enginecast.errors import CaptureError, InputError, SourceError, UsageError, VerificationError
from enginecast.exporters.registry import target_of
from enginecast.runtime import Stepper
from enginecast.runtime.bundle.manifest import STATE_NAME
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


class Recurrent(nn.Module):
    h: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(5, 7), nn.Linear(7, 2)
        self.register_buffer("h", torch.zeros(3, 7))

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.cell(x, self.h)
        found: Tensor = self.out(self.h)
        return found


class Ring(nn.Module):
    """Keys in a buffer of a fixed length, written in turn."""

    keys: Tensor
    place: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(16, 4))
        self.register_buffer("place", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.keys.index_copy_(0, self.place.reshape(1) % 16, x)
        self.place += 1
        scores = self.query(x) @ self.keys.T
        known = torch.arange(16) < self.place
        found: Tensor = scores.masked_fill(~known, float("-inf")).softmax(-1) @ self.keys
        return found


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


def test_the_example_runs(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stream.bundle").symlink_to(bundle)
    monkeypatch.chdir(tmp_path)
    run_example(Stepper, "Stepper")


def test_steps_take_tensors_and_positions(engine: Engine) -> None:
    x = torch.ones(1, 4, 9)
    found, wanted = Stepper(engine)(x), Stepper(engine)(x=x.numpy())
    assert torch.equal(found["y"], torch.from_numpy(wanted["y"]))
    assert "\n" not in repr(Stepper(engine))


def test_the_state_starts_as_it_was_and_can_begin_again(engine: Engine) -> None:
    stepper = Stepper(engine)
    x = np.ones((1, 4, 9), np.float32)
    first, second = stepper(x=x)["y"], stepper({"x": x})["y"]
    assert (first != second).any()
    assert stepper.state["state_inner_n"] == 5
    stepper.reset()
    assert (stepper({"x": x})["y"] == first).all()
    stored = load_file(engine.folder / STATE_NAME)
    assert stored["state_inner_n"] == 3
    assert (stored["state_inner_past"] == 0.5).all()
    with pytest.raises(InputError, match="'state_inner_n' is state"):
        stepper({"x": x, "state_inner_n": stored["state_inner_n"]})
    with pytest.raises(InputError, match="'x' was given twice"):
        stepper({"x": x}, x=x)


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


def test_without_the_option_the_refusal_names_it(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="writes to its own state") as caught:
        enginecast.compile(BufferCounter(), tmp_path / "bundle", example={"x": torch.randn(2, 3)})
    assert "--stateful" in caught.value.hint


class Given(nn.Module):
    """Buffers by name, and what forward does with them."""

    def __init__(self, step: Callable[[Any, Tensor], Any], **buffers: Tensor | None) -> None:
        super().__init__()
        self.step = step
        self.inner, self.other = nn.Module(), nn.Module()
        for name, tensor in buffers.items():
            module, _, key = name.rpartition("__")
            self.get_submodule(module).register_buffer(key, tensor)

    def forward(self, x: Tensor) -> Any:
        return self.step(self, x)


def _returns_its_buffer(m: Any, x: Tensor) -> Any:
    m.h += x
    return x * 2, m.h


def _shares(m: Any, x: Tensor) -> Any:
    m.inner.h += x
    return x + m.other.h


def _parts(m: Any, x: Tensor) -> Any:
    m.inner.h = m.inner.h + x
    return x + m.other.h


def _names_its_output(m: Any, x: Tensor) -> Any:
    m.h += x
    return {"next_h": x, "y": m.h}


def _makes(m: Any, x: Tensor) -> Any:
    m.h = x if m.h is None else m.h + x
    return m.h


def _writes_to_a_view(m: Any, x: Tensor) -> Any:
    m.h += x
    return x + m.first


def _turns(m: Any, x: Tensor) -> Any:
    m.h *= 1j
    return x + m.h.real


def _sets_data(m: Any, x: Tensor) -> Any:
    m.h.data = m.h.data + x
    return m.h + x


def test_modules_may_return_a_buffer_and_share_it(tmp_path: Path) -> None:
    one = torch.zeros(4)
    for step, buffers in (
        (_returns_its_buffer, {"h": torch.zeros(4)}),
        (_shares, {"inner__h": one, "other__h": one}),
    ):
        module = Given(step, **buffers)
        made = export(copy.deepcopy(module), tmp_path / step.__name__, {"x": torch.randn(4)})
        assert len(made.manifest.states) == 1
        last = made.manifest.outputs[-2].name
        calls = [torch.randn(4) for _ in range(3)]
        with enginecast.load(made.root, threads=1) as engine:
            stepper = Stepper(engine)
            for x in calls:
                wanted = module(x)
                wanted = wanted[-1] if isinstance(wanted, tuple) else wanted
                np.testing.assert_allclose(stepper({"x": x.numpy()})[last], wanted, rtol=1e-5)


def test_buffers_that_are_not_state_of_their_own_are_refused(tmp_path: Path) -> None:
    one = torch.zeros(4)
    for step, buffers, text in (
        (
            _parts,
            {"inner__h": one, "other__h": one},
            "are the same buffer, and forward replaces only",
        ),
        (_names_its_output, {"h": torch.zeros(4)}, "would be the output 'next_h', which forward"),
        (_makes, {"h": None}, "makes the buffer h, which was None before"),
        (_turns, {"h": torch.ones(4, dtype=torch.complex64)}, "engines take no complex state"),
        (_writes_to_a_view, {"h": one, "first": one[:1]}, "shares its memory with first"),
    ):
        with pytest.raises(SourceError, match=text):
            export(Given(step, **buffers), tmp_path / "bundle", {"x": torch.randn(4)})
    with pytest.raises(CaptureError, match="sets the data of a tensor"):
        export(Given(_sets_data, h=torch.zeros(4)), tmp_path / "bundle", {"x": torch.randn(4)})


def test_a_number_is_part_of_the_engine_and_is_reported(tmp_path: Path) -> None:
    example = {"x": torch.randn(3, 8), "share": 0.25}
    made = export(seeded(Smoothed), tmp_path / "bundle", example)
    assert "part of the engine: share 0.25" in made.manifest.notes
    module, calls = seeded(Smoothed), [torch.randn(3, 8) for _ in range(3)]
    with enginecast.load(made.root, threads=1) as engine:
        stepper = Stepper(engine)
        for x in calls:
            wanted = module(x, share=0.25)
            found = stepper({"x": x.numpy()})["output_0"]
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_module_that_was_given_keeps_its_state() -> None:
    module = Smoothed()
    with torch.no_grad():
        source = stateful.with_state(
            take_module(module, {}),
            [{"x": torch.randn(3, 8)} for _ in range(3)],
        )
    assert not module.last.any()
    assert [*source.buffers] == ["last"]
    assert not source.calls[0]["state_last"].any()
    assert source.calls[1]["state_last"].any()
    fed = source.eager()
    found = fed(x=torch.ones(3, 8), state_last=torch.full((8,), 2.0))
    assert torch.allclose(found["next_last"], torch.full((8,), 1.4))
    assert not fed.last.any()  # type: ignore[operator]


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "counter": (BufferCounter, {"x": torch.randn(2, 3)}),
    "cache": (KvCache, {"x": torch.randn(3, SIZE), "position": torch.tensor([0, 1, 2])}),
    "recurrent": (Recurrent, {"x": torch.randn(3, 5)}),
    "ring": (Ring, {"x": torch.randn(1, 4)}),
    "smoothed": (Smoothed, {"x": torch.randn(3, 8)}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kinds_of_state(name: str, tmp_path: Path) -> None:
    make, example = CASES[name]
    made = export(seeded(make), tmp_path / "bundle", example)
    assert made.manifest.stepped is not None
    calls = [
        {n: t * (k + 1) if t.is_floating_point() else t for n, t in example.items()}
        for k in range(6)
    ]
    with enginecast.load(made.root, threads=1) as engine:
        follow(engine, seeded(make), calls, "output_0")


@pytest.mark.slow
def test_what_was_not_called_in_turn_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, example = CASES["smoothed"]
    monkeypatch.setattr(type(target_of("onnxruntime")), "open_twin", lambda *_: None)
    with pytest.raises(VerificationError, match="no consecutive calls were compared"):
        export(seeded(make), tmp_path / "bundle", example, precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_low_precision_by_emulation(precision: str, tmp_path: Path) -> None:
    make, example = CASES["recurrent"]
    made = export(seeded(make), tmp_path / "bundle", example, precision=precision)
    assert made.manifest.engines[0].verdict.outcome == "verified-by-emulation"
    assert made.manifest.stepped is not None


class Kept:
    """An object that a module holds and that is not a module, as a cache is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.keys = tensor
        self.layers = [{"keys": tensor}]


class Holding(torch.nn.Module):
    """Writes to a buffer by another object that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 3))
        self.kept = Kept(self.keys)  # type: ignore[arg-type] # a buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.keys.add_(x)
        found: torch.Tensor = self.kept.layers[0]["keys"]
        return found * 2


def test_other_objects_may_hold_a_buffer() -> None:
    calls = [{"x": torch.full((2, 3), float(n))} for n in (1, 2)]
    module = with_state(take_module(Holding(), {"x": torch.ones(2, 3)}), calls).eager()
    found = module(x=torch.ones(2, 3), state_keys=torch.full((2, 3), 5.0))
    assert (found["next_keys"] == 6).all()
    assert (found["0"] == 12).all()
    again = module(x=torch.ones(2, 3), state_keys=torch.zeros(2, 3))
    assert (again["0"] == 2).all()


@pytest.mark.slow
def test_a_static_cache_is_stepped(tmp_path: Path) -> None:
    model = decoder("llama")
    model.generation_config = GenerationConfig(
        pad_token_id=0, eos_token_id=2, use_cache=True, cache_implementation="static"
    )
    module = TorchExportableModuleWithStaticCache(model, 1, 24, torch.device("cpu"))
    options = ModelOptions(stateful=True, values=("cache_position=0..23",))
    example = {"input_ids": torch.tensor([[5]]), "cache_position": torch.tensor([0])}
    made = enginecast.compile(module, tmp_path / "bundle", example=example, options=options)
    prompt = torch.tensor([[5, 17, 8]])
    wanted: Any = model.generate(prompt, max_new_tokens=16, do_sample=False)
    ids = prompt[0].tolist()
    with enginecast.load(made.root) as engine:
        step = Stepper(engine)
        for place in range(wanted.shape[1] - 1):
            outputs = step(input_ids=np.array([[ids[place]]]), cache_position=np.array([place]))
            [logits] = (outputs[name] for name in outputs if not name.startswith("next_"))
            if place + 1 == len(ids):
                ids.append(int(logits[0, -1].argmax()))
    assert ids == wanted[0].tolist()


def test_a_torchscript_module_with_state_is_refused(tmp_path: Path) -> None:
    module = torch.jit.script(BufferCounter())
    torch.jit.save(module, tmp_path / "counter.pt")
    source = open_source(str(tmp_path / "counter.pt"), allow_code=True)
    with pytest.raises(UsageError, match="which is a TorchScript module"):
        with_state(source, [{"x": torch.ones(2)}] * 2)
