"""--outputs and --hidden-state on the command line, for every kind of model."""

import copy
from pathlib import Path

import pytest
import torch
from exports import Exports, cast
from models import llama_config
from transformers import DynamicCache, LlamaModel

from enginecast.capture.outputs.flatten import Wanted, name_result, run_named
from enginecast.errors import UsageError
from enginecast.runtime.bundle.manifest import Manifest
from enginecast.runtime.bundle.manifest_json import decode

Capture = pytest.CaptureFixture[str]

FACTORIES = """
import torch
from models import llama_config
from torch import nn
from transformers import LlamaModel


def plain():
    return nn.Linear(6, 4), {"input": torch.randn(3, 6)}


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = LlamaModel(llama_config(layers=1))

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=True)


def cached():
    return Cached(), {"input_ids": torch.randint(0, 90, (3, 7))}
"""


@pytest.fixture(scope="module")
def root(exports: Exports) -> Path:
    root = exports.root
    for name in ("bert", "t5"):
        exports.model(name)
    (root / "wanted_factories.py").write_text(FACTORIES, encoding="utf-8")
    return root


@pytest.fixture(autouse=True)
def _where_the_models_are(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


def manifest(bundle: Path) -> Manifest:
    return decode((bundle / "manifest.json").read_bytes())


def export(capsys: Capture, bundle: Path, *arguments: object) -> tuple[str, ...]:
    """Export; the names of the outputs."""
    done = cast(capsys, "export", *arguments, "-o", bundle, "--threads", 1)
    assert done.code == 0, done.err
    return tuple(output.name for output in manifest(bundle).outputs)


def refused(capsys: Capture, tmp_path: Path, *arguments: object) -> str:
    done = cast(capsys, "export", *arguments, "-o", tmp_path / "refused")
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.count("error: ") == 1
    assert list(tmp_path.glob("*refused*")) == []
    return " ".join(done.err.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("bert", "--outputs", "logits"),
            "--outputs logits: the model gives no output 'logits'"
            " It gives last_hidden_state, pooler_output.",
        ),
        (("bert", "--hidden-state", "two"), "--hidden-state two: expected an integer"),
        (("bert", "--hidden-state", "-4"), "the model gives 3 hidden states Expected -3..2."),
        (
            ("wanted_factories:plain", "--hidden-state", "-1"),
            "--hidden-state -1: the model gives no hidden states",
        ),
    ],
)
def test_what_a_model_does_not_give(
    tmp_path: Path, capsys: Capture, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refused(capsys, tmp_path, *arguments)


def test_a_cache_gives_its_keys_and_values() -> None:
    cache, key = DynamicCache(), torch.randn(1, 2, 3, 4)
    for layer in range(2):
        cache.update(key, key + layer, layer)
    found = name_result({"state": key, "past": cache}).tensors
    names = ("key", "value")
    assert [*found] == ["state", *(f"past.{n}.{name}" for n in range(2) for name in names)]
    assert torch.equal(found["past.1.value"], key + 1)


def test_a_hidden_state_from_before_the_last_norm() -> None:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = LlamaModel(llama_config()).eval()
        ids = {"input_ids": torch.randint(0, 90, (3, 7))}
        wanted = model(**ids).last_hidden_state
        norm = copy.deepcopy(model.norm)
        [raw] = run_named(model, ids, Wanted(("raw_hidden_states.-1",))).values()
    torch.testing.assert_close(norm(raw), wanted)
    for names, why in (
        (("raw_hidden_states.-1", "last_hidden_state"), "last_hidden_state is behind it"),
        (("hidden_states.-1", "raw_hidden_states.-1"), "hidden_states.-1 is behind it"),
    ):
        with pytest.raises(UsageError, match=f"cannot leave out the last norm, as {why}"):
            run_named(model, ids, Wanted(names))
    model.norm = None
    with pytest.raises(UsageError, match="as the model has no model"):
        run_named(model, ids, Wanted(("raw_hidden_states.-1",)))
