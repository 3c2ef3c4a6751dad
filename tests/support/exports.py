"""Exports that several test files share, and the command line in this process."""

import contextlib
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from cache_fixtures import words_clip, words_t5
from family_models import FAMILIES
from filelock import FileLock
from json_schemas import hold
from models import add_tokenizer, tiny_bert, tiny_llama, tiny_t5, tiny_vit
from torch import Tensor
from torch.utils._pytree import tree_map_only
from transformers import T5EncoderModel

from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.huggingface.transformers_folder import HuggingFaceSource
from enginecast.capture.tracing.captured import Captured, capture
from enginecast.cli.app import main
from enginecast.compiler.export.session import export
from enginecast.compiler.prepare import program
from enginecast.compiler.publication.bundle import Export
from enginecast.compiler.request import ExportRequest
from enginecast.passes.ir.edit import structural_copy
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, FileRecord
from enginecast.runtime.bundle.manifest_json import decode, encode
from enginecast.runtime.bundle.reader import Bundle, digest
from enginecast.verification.report.data import Report


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str
    words: tuple[str, ...] = ()
    """The command line."""

    @property
    def json(self) -> Any:
        """The one JSON object on stdout; fails when there is more, or not what its schema says."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        hold(self.words, found)
        return found


def cast(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ran:
    """Run `enginecast ARGUMENTS` in this process."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    code = stop.value.code
    assert isinstance(code, int)
    return Ran(code, captured.out, captured.err, tuple(map(str, arguments)))


def make(model: str, output: Path, precision: str) -> Export:
    """Export; the engine must have been accepted."""
    done = export(ExportRequest(model, output, precision=precision))
    assert done.bundle is not None, done.report.verdict.reasons
    return done


PLAIN = '''
import torch
from torch import nn


class Pooled(nn.Module):
    """Masked mean of two normed layers."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(12, 40)
        self.norm = nn.LayerNorm(40)
        self.narrow = nn.Linear(40, 20)

    def forward(self, features, keep):
        hidden = self.narrow(self.norm(torch.relu(self.wide(features))))
        weight = keep.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weight).sum(1) / (weight.sum(1) + 0.5)
        return {"hidden": hidden, "pooled": pooled}


def make():
    torch.manual_seed(3)
    example = {"features": torch.randn(3, 7, 12), "keep": torch.rand(3, 7) > 0.3}
    return Pooled(), example
'''


def save_half(folder: Path) -> Path:
    """A T5 of four layers that was made fp16 with `.half()`: its `wo` are fp16 too."""
    made = tiny_t5(folder, layers=4)
    T5EncoderModel.from_pretrained(made).half().save_pretrained(made)
    return made


def save_shards(folder: Path, dtype: torch.dtype) -> Path:
    """A relu T5 in several files."""
    made = tiny_t5(folder, gated=False, dtype=dtype)
    model = T5EncoderModel.from_pretrained(made, dtype="auto")
    (made / "model.safetensors").unlink()
    model.save_pretrained(made, max_shard_size="20KB")
    return made


MODELS: Mapping[str, Callable[[Path], Path]] = {
    "t5": lambda folder: add_tokenizer(tiny_t5(folder)),
    "t5-4": lambda folder: tiny_t5(folder, layers=4),
    "t5-wo-in-fp32": lambda folder: tiny_t5(folder, dtype=torch.float16),
    "t5-4-wo-in-fp32": lambda folder: tiny_t5(folder, layers=4, dtype=torch.float16),
    "t5-4-half": save_half,
    "t5-relu-shards-fp16": lambda folder: save_shards(folder, torch.float16),
    "t5-relu-shards-bf16": lambda folder: save_shards(folder, torch.bfloat16),
    "words-t5": words_t5,
    "words-clip": words_clip,
    "words-clip-projection": lambda folder: words_clip(folder, projection=True),
    "bert": tiny_bert,
    "vit": tiny_vit,
    "llama": tiny_llama,
    **{f"family-{family.name}": family.make for family in FAMILIES if family.factory is None},
}
FACTORIES = {f"family-{family.name}": family for family in FAMILIES if family.factory is not None}


@dataclass(frozen=True)
class Made:
    """What tests ask of an export that was accepted."""

    folder: Path
    bundle: Bundle
    report: Report
    nodes: int


class Exports:
    """Models and their bundles, each made when a test first asks for it and never changed.

    The processes that run the tests share the bundles: an export takes seconds.  Half of it is the
    capture, which each process makes once for a model and the options that concern it.
    """

    def __init__(self, root: Path, shared: Path | None = None) -> None:
        self._root = root.resolve()
        self._shared = shared or root
        self._made: dict[tuple[str, str], Made] = {}
        self._captured: dict[str, Captured] = {}
        pytest.MonkeyPatch().setattr(program, "capture", self._capture_once)

    def model(self, name: str) -> str:
        """The MODEL argument; a factory wants `root` as the current folder."""
        if name == "plain":
            (self.root / "plain_model.py").write_text(PLAIN, encoding="utf-8")
            return "plain_model:make"
        if name in FACTORIES:
            FACTORIES[name].make(self.root)
            return str(FACTORIES[name].factory)
        folder = self.root / name
        return str(folder if folder.exists() else MODELS[name](folder))

    @property
    def root(self) -> Path:
        return self._root

    def _capture_once(self, source: Source, *arguments: Any, **options: Any) -> Captured:
        """What `capture` returns, for models that are made here."""
        is_here = (
            isinstance(source, HuggingFaceSource) and source.folder.resolve().parent == self.root
        )
        is_plain = source.name == "plain_model:make" and Path.cwd() == self.root
        if not is_here and not is_plain:
            return capture(source, *arguments, **options)
        given = tree_map_only(Tensor, Tensor.tolist, (arguments, options))
        key = repr((source.name, source.fingerprint(), source.call, given))
        if key not in self._captured:
            self._captured[key] = capture(source, *arguments, **options)
        found = self._captured[key]
        return replace(found, program=structural_copy(found.program))

    def __call__(self, name: str, precision: str = "fp32") -> Made:
        """The accepted export of a model."""
        key = (name, precision)
        if key not in self._made:
            file = self._shared / f"{name}-{precision}.pickle"
            with FileLock(file.with_suffix(".lock"), timeout=300):
                if not file.exists():
                    file.write_bytes(pickle.dumps(self._export(name, precision)))
            self._made[key] = pickle.loads(file.read_bytes())
        return self._made[key]

    def _export(self, name: str, precision: str) -> Made:
        output = self._shared / f"{name}-{precision}.bundle"
        with contextlib.chdir(self.root):
            done = make(self.model(name), output, precision)
        assert done.bundle is not None
        return Made(done.folder, done.bundle, done.report, done.nodes)


def reseal(bundle: Path) -> None:
    """Write a manifest that fits the files there are, as if they had been published so."""
    path = bundle / MANIFEST_NAME
    content = decode(path.read_bytes())
    paths = [bundle / file.name for file in content.files]
    files = tuple(
        FileRecord(name=path.name, size=path.stat().st_size, sha256=digest(path))
        for path in paths
        if path.exists()
    )
    path.write_bytes(encode(msgspec.structs.replace(content, files=files)))
