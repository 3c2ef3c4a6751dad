"""A text encoder as a bundle: run without torch, where the engine needs none."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from enginecast.cache.encoders.request import EncoderRequest, layers_in, named_outputs
from enginecast.cache.encoders.text_model import ModelFacts, stored_output
from enginecast.cache.store.spec import About, OutputSpec
from enginecast.capture.sources.huggingface.text_encoders import class_named_by
from enginecast.errors import InputError, UsageError
from enginecast.runtime.bundle.manifest import Input, Manifest
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.runtime.prompts import PLAIN
from enginecast.runtime.values.arrays import Array

CONFIG_FILE = "config.json"
_KINDS = ("token_ids", "attention_mask", "token_type_ids")


def open_engine(request: EncoderRequest) -> "EngineModel":
    """Load the engine of the bundle that a request names; see `open_encoder`."""
    own = {"--precision": request.precision, "--random-weights": request.random_weights}
    for option, value in own.items():
        if value is not None:
            raise UsageError(
                f"{option} {value}: {request.model} is a bundle, and {option} is for eager models",
                hint="Export the model again for an engine of another precision.",
            )
    engine = load(
        request.model,
        providers=request.providers,
        device=None if request.providers else request.device,
        threads=request.threads,
        allow_code=request.allow_code,
        public_key=request.public_key,
    )
    return EngineModel(engine)


class EngineModel:
    """An engine that takes token ids, and possibly a mask and token types, all of them 0.

    Batches that are too large are run in pieces.  A batch that is too small is filled up with
    copies of its last row, and a row that is too short with masked padding; both are cut off again.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        ids = _token_ids(engine.inputs)
        self._dims = ids.shape
        self._batch = _sizes(engine.manifest, ids.shape[0])
        self._sequence = _sizes(engine.manifest, ids.shape[1])
        self.facts = _describe(engine, ids, self._sequence)

    def outputs(self, names: Sequence[str]) -> tuple[OutputSpec, ...]:
        given = {output.name: output for output in self._engine.outputs}
        names = named_outputs(names, layers_in(self.facts.about.config))
        for name in (one for one in names if one not in given):
            raise UsageError(
                f"--outputs {name}: the engine has no output {name!r}",
                hint=f"It has {', '.join(given)}; export again for others.",
            )
        return tuple(
            stored_output(
                name, given[name].shape, self._dims, given[name].dtype, "the engine gives"
            )
            for name in names or given
        )

    def run(self, ids: Array, mask: Array | None, outputs: Sequence[str]) -> dict[str, Array]:
        mask = np.ones_like(ids) if mask is None else mask
        most = self._batch[1]
        parts = [
            self._run(ids[start : start + most], mask[start : start + most], outputs)
            for start in range(0, len(ids), most)
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in outputs}

    def _run(self, ids: Array, mask: Array, outputs: Sequence[str]) -> dict[str, Array]:
        rows, tokens = ids.shape
        wider = max(0, self._sequence[0] - tokens)
        grown = ((0, max(0, self._batch[0] - rows)), (0, 0))
        feeds = {}
        for spec in self._engine.inputs:
            array = {"token_ids": ids, "attention_mask": mask}.get(spec.kind, np.zeros_like(ids))
            filling = (self.facts.padding_id or 0) if spec.kind == "token_ids" else 0
            array = np.pad(array, ((0, 0), (0, wider)), constant_values=filling)
            array = np.pad(array, grown, mode="edge")
            feeds[spec.name] = np.ascontiguousarray(array, dtype=spec.dtype)
        found = self._engine.run(feeds, outputs=outputs, check_finite=False, pad_rows="exact")
        cut = {name: found[name][:rows] for name in outputs}
        return {name: one[:, :tokens] if one.ndim > 2 else one for name, one in cut.items()}

    def close(self) -> None:
        self._engine.close()


def _describe(engine: Engine, ids: Input, sequence: tuple[int, int]) -> ModelFacts:
    manifest, text = engine.manifest, engine.manifest.text
    file = engine.folder / CONFIG_FILE  # which a bundle need not have
    config: dict[str, Any] = json.loads(file.read_bytes()) if file.is_file() else {}
    record, digests = engine.record, {file.name: file.sha256 for file in manifest.files}
    files = {"file": record.file, "weights": record.weights, "network": record.network}
    found = {part: digests[name] for part, name in files.items() if name}
    return ModelFacts(
        about=About(
            encoder=class_named_by(config),
            source=engine.folder.name,
            config=config,
            verdict=engine.verdict.outcome,
        ),
        folder=engine.folder,
        identity=manifest.model.fingerprint,
        precision=manifest.asked_precision,
        takes_mask=any(spec.kind == "attention_mask" for spec in engine.inputs),
        sequence=sequence,
        default_length=min(text.max_length, sequence[1]) if text else sequence[1],
        vocabulary=None if ids.maximum is None else int(ids.maximum) + 1,
        padding_id=text.padding_id if text else None,
        padding_side=text.padding_side if text else "right",
        longest_text=text.max_length if text else None,
        form=text or PLAIN,
        engine={"target": record.target, "pipeline": manifest.pipeline, **found},
    )


def _token_ids(inputs: Sequence[Input]) -> Input:
    ids = [spec for spec in inputs if spec.kind == "token_ids"]
    for spec in inputs:
        if spec.kind not in _KINDS or (ids and spec.shape != ids[0].shape) or len(spec.shape) != 2:
            raise InputError(
                f"input {spec.name!r}: expected token ids, mask or types [batch, sequence], got "
                f"{spec.kind} {spec.dtype} {list(spec.shape)}",
                hint="A cache holds outputs of text encoders alone.",
            )
    if len(ids) != 1:
        raise InputError(f"expected an engine with one input of token ids, got {len(ids)}")
    return ids[0]


def _sizes(manifest: Manifest, size: int | str) -> tuple[int, int]:
    return manifest.symbols[size] if isinstance(size, str) else (size, size)
