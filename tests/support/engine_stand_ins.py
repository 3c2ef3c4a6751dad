"""Engines that eager computes, behind manifests as exports write them."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.specs import ranges_of
from enginecast.capture.outputs.flatten import OutputSpec, parse_wanted, run_named
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.calls.recording import Recorded
from enginecast.capture.sources.huggingface.component_options import DEFAULTS, ComponentOptions
from enginecast.compiler.prepare.open_model import input_specs, open_model
from enginecast.compiler.prepare.program import OpenedModel
from enginecast.compiler.publication.manifest import describe_manifest
from enginecast.compiler.request import ModelOptions
from enginecast.runtime.bundle.manifest import Manifest
from enginecast.runtime.bundle.manifest_json import decode, encode
from enginecast.runtime.bundle.reader import Bundle, unpublished
from enginecast.runtime.load import load
from enginecast.runtime.validate import check_inputs


class StandIn:
    """What `load` returns: it takes what the manifest says, and runs eager."""

    backend = "onnxruntime-cpu"

    def __init__(self, folder: Path, source: Source, manifest: Manifest, wanted: Any) -> None:
        self.folder, self.source, self.manifest, self.wanted = folder, source, manifest, wanted
        self.module = source.eager()
        self.runs: list[Mapping[str, Any]] = []
        self.closed = False

    def run(self, feeds: Mapping[str, Any], *, as_dlpack: bool) -> dict[str, Any]:
        assert as_dlpack
        assert not self.closed
        it = self.manifest
        check_inputs(it.inputs, it.symbols, feeds, steps=it.steps, size_checks=it.size_checks)
        self.runs.append(feeds)
        with torch.no_grad():
            return run_named(self.module, dict(feeds), self.wanted)

    def close(self) -> None:
        self.closed = True


def stand_in(
    folder: Path,
    module: nn.Module | str,
    example: Recorded | Mapping[str, Any] | None = None,
    *,
    dynamic: Iterable[str] = (),
    outputs: Iterable[str] = (),
    hidden_states: Iterable[int] = (),
    component: ComponentOptions = DEFAULTS,
) -> StandIn:
    """Write a manifest as an export of a module would, and what lies beside it."""
    source = open_model(module, ModelOptions(component=component), example)
    asked = list(dynamic)
    if isinstance(example, Recorded):
        asked += example.dynamic(asked)
    specs = input_specs(source, None, asked).specs
    drawn = sample(specs, example_sizes(specs), 0)
    specs = tuple(
        replace(spec, low=None, high=None) if spec.origin == "example" else spec for spec in specs
    )  # an export finds the range
    wanted = parse_wanted(tuple(outputs), tuple(map(str, hidden_states)))
    with torch.no_grad():
        found = run_named(source.eager(), source.example() or drawn, wanted)
    given = [OutputSpec(n, tensor.dtype, tuple(tensor.shape)) for n, tensor in found.items()]
    config: Any = SimpleNamespace(pipeline="", precision="fp32", engines=())
    manifest = describe_manifest(OpenedModel(source, specs, (), wanted), config, given, [])
    assert manifest.symbols == dict(ranges_of(specs))
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(encode(manifest))
    source.write_beside(folder)
    return StandIn(folder, source, decode(encode(manifest)), wanted)


@contextmanager
def loaded(*engines: StandIn) -> Iterator[None]:
    """Have `enginecast.attach` open these in the place of bundles."""
    known = {engine.folder: engine for engine in engines}

    def opened(path: Path, **options: Any) -> Bundle:
        return unpublished(Path(path), known[Path(path)].manifest)

    def found(path: Path, **options: Any) -> Any:
        engine = known[Path(path)]
        engine.closed = False
        assert {*options} <= {*inspect.signature(load).parameters}
        return engine

    with ExitStack() as stack:
        stack.enter_context(patch("enginecast.pipelines.attach.open_bundle", opened))
        stack.enter_context(patch("enginecast.pipelines.engine_component.load", found))
        yield
