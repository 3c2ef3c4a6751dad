"""Files of TorchScript as models: told from checkpoints unread, exported, verified, inspected."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import cast
from safetensors.torch import save_file
from torch import Tensor, nn
from typer.testing import CliRunner

import enginecast
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.script_file import sniff
from enginecast.cli.app import app
from enginecast.compiler.request import ModelOptions
from enginecast.errors import SourceError, UsageError, VerificationError
from enginecast.runtime.load import load

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Branch(nn.Module):
    """Takes a path by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = torch.relu(self.first(x)) * scale
        if bool(y.sum() > 10):
            y = y + 1
        found: Tensor = self.last(y)
        return found


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.first(x)))
        return found


class Hostile:
    """Would leave a file behind if its pickle was run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return (Path.touch, (self.file,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("scripts")
    torch.manual_seed(0)
    torch.jit.save(torch.jit.script(Branch()), place / "branch.pt")
    torch.jit.save(torch.jit.trace(Plain(), (torch.randn(3, 8),)), place / "plain.pt")
    save_file({"x": torch.randn(3, 8), "scale": torch.randn(1)}, place / "branch.safetensors")
    save_file({"x": torch.randn(3, 8)}, place / "plain.safetensors")
    return place


def run(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(words), standalone_mode=False)
    found = result.exit_code
    error = result.exception
    if error is not None and not isinstance(error, SystemExit):
        found = getattr(error, "exit_code", 99)
    assert found == code, (found, result.output, error)
    return result.stdout


def test_what_a_file_holds_is_told_without_running_it(folder: Path, tmp_path: Path) -> None:
    torch.save(Plain().state_dict(), tmp_path / "weights.pt")
    torch.save({"state_dict": Plain().state_dict(), "epoch": 3}, tmp_path / "trained.ckpt")
    torch.save(Plain(), tmp_path / "module.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "layer.pt")
    torch.save(Hostile(tmp_path / "ran"), tmp_path / "hostile.pt")
    assert sniff(folder / "branch.pt") == sniff(folder / "plain.pt") == "a TorchScript module"
    assert sniff(tmp_path / "weights.pt").startswith("a checkpoint: weights by name")
    assert sniff(tmp_path / "trained.ckpt").startswith("a checkpoint: weights by name")
    assert "test_script_file.Plain" in sniff(tmp_path / "module.pt")
    assert "torch.nn.modules.linear.Linear" in sniff(tmp_path / "layer.pt")
    assert "a pickled object" in sniff(tmp_path / "hostile.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("junk.pt", b"PK\x03\x04junk", "not a zip file that torch wrote"),
        ("old.pt", pickle.dumps({"a": 1}), "not a zip file that torch wrote"),
        ("empty.pt", b"", "not a zip file that torch wrote"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        open_source(str(tmp_path / name), allow_code=True)


def test_a_script_is_code(folder: Path) -> None:
    with pytest.raises(UsageError, match="a TorchScript module: loading it can run code"):
        open_source(str(folder / "branch.pt"))


def test_a_script_is_a_model_with_named_arguments(folder: Path) -> None:
    source = open_source(str(folder / "branch.pt"), allow_code=True)
    assert source.required_arguments == ("x", "scale")
    x, scale = torch.randn(2, 8), torch.ones(1)
    first = source.eager()
    wide = source.eager(torch.float64)(x=x.double(), scale=scale.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(first(x=x, scale=scale), wide.float())
    assert len(source.weights()) == 4
    with pytest.raises(SourceError, match=r"torch\.export does not capture it"):
        source.empty()


def test_a_script_takes_an_example(folder: Path, tmp_path: Path) -> None:
    model, options = str(folder / "plain.pt"), ModelOptions(allow_code=True)
    x = torch.randn(3, 8)
    for example in (x, (x,), {"x": x}):
        assert open_source(model, allow_code=True, example=example).example()["x"] is x
    with pytest.raises(SourceError, match="has 2 arguments, and forward takes 1"):
        open_source(model, allow_code=True, example=(x, x))
    with pytest.raises(SourceError, match="expected an example of one tensor for each argument"):
        open_source(model, allow_code=True, example={"x": [x]})
    bundle = enginecast.export(model, tmp_path / "b", example=x, options=options, threads=1)
    assert bundle.manifest.inputs[0].name == "x"


def test_both_paths_of_a_script_reach_its_engine(folder: Path, tmp_path: Path) -> None:
    inputs = ("--inputs", str(folder / "branch.safetensors"), "--allow-code")
    model, bundle = str(folder / "branch.pt"), str(tmp_path / "bundle")
    run("export", model, "-o", bundle, "--target", "torchscript", *inputs, "--threads", "1")
    run("verify", bundle, "--allow-code")
    run("verify", bundle, "--model", model, *inputs)
    eager = torch.jit.load(model)
    taken = set()
    with load(bundle, allow_code=True, threads=1) as engine:
        for scale in (0.01, 100.0):
            x = torch.randn(5, 8)
            wanted = eager(x, torch.full((1,), scale))
            taken.add(bool((torch.relu(eager.first(x)) * scale).sum() > 10))
            found = engine.run({"x": x.numpy(), "scale": torch.full((1,), scale).numpy()})
            torch.testing.assert_close(torch.from_numpy(found["output_0"]), wanted)
    assert taken == {False, True}


def test_a_script_with_branches_is_not_converted_unwatched(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = ("--inputs", str(folder / "branch.safetensors"), "--allow-code")
    words = ("export", str(folder / "branch.pt"), "-o", str(tmp_path / "b"), *inputs, "--no-speed")
    kept = tmp_path / "b.rejected"
    for _ in range(2):  # the second one replaces the first
        done = cast(capsys, *words)
        assert done.code == 1
        assert (
            f"mv {kept} {tmp_path / 'b'}, or export again with --fallback torchscript" in done.out
        )
    found = cast(capsys, *words, "--json").json
    assert (found["bundle"], found["rejected"]) == (None, str(kept))
    [lacking] = [each for each in found["downgrades"] if each["consent"] == "missing"]
    assert "has a branch or loop" in lacking["text"]
    assert not (tmp_path / "b").exists()
    with pytest.raises(VerificationError, match="not what was asked for: no ONNX engine") as caught:
        enginecast.compile(
            str(folder / "branch.pt"),
            tmp_path / "b",
            options=ModelOptions(inputs=folder / "branch.safetensors", allow_code=True),
        )
    assert "allow_fallback=True accepts it" in caught.value.hint
    done = cast(capsys, *words, "--allow-fallback")
    assert done.code == 0
    assert "(accepted)" in done.out
    assert (tmp_path / "b" / "model.ts.pt").exists()


def test_targets_of_programs_refuse_a_script(folder: Path, tmp_path: Path) -> None:
    inputs = ("--inputs", str(folder / "plain.safetensors"), "--allow-code")
    place = ("-o", str(tmp_path / "b"), "--target", "aotinductor")
    run("export", str(folder / "plain.pt"), *place, *inputs, code=2)
    assert not (tmp_path / "b").exists()
