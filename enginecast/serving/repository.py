"""A bundle as a model repository of Triton Inference Server.

REPO/
  README.md                    what there is, and which checks Triton does not make
  enginecast-triton.json       which bundle it was made from
  NAME/config.pbtxt            the engine
  NAME/1/model.onnx            and its weights, under the name that the graph refers to
  NAME_tokenizer/config.pbtxt  for text models: the bundle's tokenizer, in the Python backend
  NAME_tokenizer/1/model.py
  NAME_tokenizer/1/tokenizer.json
  NAME_text/config.pbtxt       both as one model (an ensemble): texts in, outputs out
"""

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from enginecast.errors import InputError, UsageError
from enginecast.runtime.bundle.manifest import (
    TOKENIZER_NAME,
    EngineRecord,
    Input,
    Manifest,
    Output,
    Verdict,
)
from enginecast.runtime.bundle.onnx_file import check_onnx, weight_files
from enginecast.runtime.bundle.reader import Bundle
from enginecast.runtime.bundle.staging import Staging, require_space, stage
from enginecast.runtime.prompts import PromptEncoder
from enginecast.serving.backends import TYPES, Backend, choose
from enginecast.serving.batching import Batching, batching
from enginecast.serving.text_format import Message, Name, map_field, text_format

MARKER = "enginecast-triton.json"
"""By which a repository of ours is known; Triton looks at folders alone."""
WHAT = "Triton repository"
SCHEMA_VERSION = 1
QUEUE_MICROSECONDS = 5000
"""How long a request waits for others: as long as `Batcher` lets it wait."""
VERSION = "1"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@dataclass(frozen=True)
class Repository:
    """A model repository that was written.

    Args:
        folder: where it is.
        models: those in it; the first is the engine.
        engine: the engine's record in the manifest.
        backend: what runs it.
        batching: how requests are joined.
        notes: what Triton does not check, and what its user should know.
    """

    folder: Path
    models: tuple[str, ...]
    engine: EngineRecord
    backend: Backend
    batching: Batching
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """What will be written."""

    name: str
    bundle: Bundle
    engine: EngineRecord
    backend: Backend
    batching: Batching
    encoder: PromptEncoder | None
    text_reason: str
    """Why there is no tokenizer; empty: there is one, or no engine that takes texts."""

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    def engine_name(self, spec: Input | Output) -> str:
        """What the backend calls an input or an output."""
        if not self.backend.indexed:
            return spec.name
        specs: tuple[Input | Output, ...] = (
            self.manifest.inputs if isinstance(spec, Input) else self.manifest.engine_outputs
        )
        return f"{spec.name}__{[one.name for one in specs].index(spec.name)}"

    @property
    def models(self) -> tuple[str, ...]:
        if self.encoder is None:
            return (self.name,)
        return (self.name, f"{self.name}_tokenizer", f"{self.name}_text")


def write_repository(
    bundle: Bundle,
    target: str | os.PathLike[str],
    *,
    name: str | None = None,
    max_batch: int | None = None,
    engine: str | None = None,
    device: str | None = None,
    overwrite: bool = False,
) -> Repository:
    """Write a model repository for Triton Inference Server.

    Args:
        bundle: its files were compared with their digests.
        target: the folder of the repository; it must not exist.
        name: of the model; None: that of the bundle's folder.
        max_batch: rows that run together; 0: requests run alone; None: as many as the engine takes.
        engine: the target whose engine it is; None: the first that Triton can run.
        device: what it runs on, "cpu" or "cuda"; None: what the engine was judged for.
        overwrite: replace a repository that is there.

    Raises:
        UsageError: Triton cannot serve the engine, or an argument does not fit.
        BundleError: the target exists, or the bundle is damaged.
        MissingError: the disk is full.
    """
    plan = _plan(bundle, name, max_batch, choose(bundle.manifest, engine, device))
    record = plan.engine
    if plan.backend.file.endswith(".onnx"):
        files = weight_files(bundle, record.weights)
        check_onnx(bundle.read(record.file), record.file, files)
    with stage(target, overwrite=overwrite, marker=MARKER, what=WHAT) as staging:
        copied = [record.file]
        if plan.backend.weights and record.weights is not None:
            copied.append(record.weights)
        require_space(staging.folder, sum(map(bundle.size, copied)))
        notes = tuple(_notes(plan))
        _write_engine(plan, staging.folder)
        if plan.encoder is not None:
            _write_tokenizer(plan, plan.encoder, staging.folder)
            _write_ensemble(plan, staging.folder)
        _write(staging.folder / "README.md", _readme(plan, notes))
        _write_marker(plan, staging, notes)
        bundle.require_whole()
        bundle.require_unchanged()
        folder = staging.publish_folders()
    return Repository(folder, plan.models, record, plan.backend, plan.batching, notes)


def _plan(
    bundle: Bundle,
    name: str | None,
    max_batch: int | None,
    chosen: tuple[EngineRecord, Backend],
) -> _Plan:
    manifest = bundle.manifest
    called = bundle.root.name.removesuffix(".bundle") if name is None else name
    if _NAME.fullmatch(called) is None:
        raise UsageError(
            f"--name: expected letters, digits, '_', '-' and '.', got {called!r}",
            hint="" if name else "Choose a name with --name.",
        )
    engine, backend = chosen
    rows = batching(manifest, engine, max_batch, reason=backend.batch_reason)
    encoder, reason = None, ""
    if manifest.text is not None:
        try:
            encoder = PromptEncoder(bundle.root, manifest, bundle.read(TOKENIZER_NAME))
        except InputError as error:  # it takes more than token ids
            reason = error.message
    return _Plan(called, bundle, engine, backend, rows, encoder, reason)


def _write_engine(plan: _Plan, folder: Path) -> None:
    backend, record, rows = plan.backend, plan.engine, plan.batching
    manifest = plan.manifest
    # Guards are outputs, so that a client can look at them.
    config: dict[str, Any] = {
        "name": plan.name,
        "backend": backend.name,
        **({"platform": backend.platform} if backend.platform else {}),
        "max_batch_size": rows.most,
        "default_model_filename": backend.file,
        "input": [_tensor(plan, spec) for spec in manifest.inputs],
        "output": [_tensor(plan, spec) for spec in manifest.engine_outputs],
        "instance_group": [
            {"count": 1, "kind": Name("KIND_GPU" if backend.on_gpu else "KIND_CPU")}
        ],
    }
    if rows.preferred:
        config["dynamic_batching"] = {
            "preferred_batch_size": rows.preferred,
            "max_queue_delay_microseconds": QUEUE_MICROSECONDS,
        }
    if backend.level is not None:
        config["optimization"] = {"graph": {"level": backend.level}}
    if backend.parameters:
        config["parameters"] = _parameters(backend.parameters)
    version = _model_folder(folder, config)
    _copy(plan.bundle, record.file, version / backend.file)
    if backend.weights and record.weights is not None:
        _copy(plan.bundle, record.weights, version / record.weights)  # named so by the graph


def _tensor(plan: _Plan, spec: Input | Output) -> Message:
    """An input or an output of the engine, as its backend calls it."""
    described = _described(plan, spec) | {"name": plan.engine_name(spec)}
    if len(spec.shape) > bool(plan.batching.most):
        return described
    return described | {"reshape": {"shape": ()}}  # Triton's own tensors have a dimension at least


def _described(plan: _Plan, spec: Input | Output) -> dict[str, Any]:
    """An input or an output as those who send requests see it."""
    shape = spec.shape[1:] if plan.batching.most else spec.shape
    return {
        "name": spec.name,
        "data_type": Name(TYPES[spec.dtype]),
        "dims": [size if isinstance(size, int) else -1 for size in shape] or [1],
    }


def _text_input(plan: _Plan) -> Message:
    """Texts: one a row of a batch, or any number."""
    dims = [1] if plan.batching.most else [-1]
    return {"name": "text", "data_type": Name("TYPE_STRING"), "dims": dims}


def _write_tokenizer(plan: _Plan, encoder: PromptEncoder, folder: Path) -> None:
    manifest, rules = plan.manifest, encoder.rules
    kinds = {f"kind_of_{spec.name}": spec.kind for spec in manifest.inputs}
    columns = [-1] if plan.batching.most else [-1, -1]
    config: dict[str, Any] = {
        "name": f"{plan.name}_tokenizer",
        "backend": "python",
        "max_batch_size": plan.batching.most,
        "input": [_text_input(plan)],
        "output": [
            {"name": spec.name, "data_type": Name(TYPES[spec.dtype]), "dims": columns}
            for spec in manifest.inputs
        ],
        "instance_group": [{"count": 1, "kind": Name("KIND_CPU")}],
        "parameters": _parameters(
            {
                "padding_id": str(rules.padding_id),
                "padding_side": rules.padding_side,
                "longest": str(rules.longest),
                "least_tokens": str(rules.least_tokens),
                "step": str(rules.step),
                "least_texts": str(rules.least_texts),
                "most_texts": str(plan.batching.most or rules.most_texts),
                **kinds,
            }
        ),
    }
    version = _model_folder(folder, config)
    source = resources.files("enginecast.serving").joinpath("tokenizer_model.py")
    _write(version / "model.py", source.read_text(encoding="utf-8"))
    _copy(plan.bundle, TOKENIZER_NAME, version / TOKENIZER_NAME)


def _write_ensemble(plan: _Plan, folder: Path) -> None:
    """Texts in, outputs and the attention mask out, as `Engine.encode` has them."""
    manifest, rows = plan.manifest, plan.batching
    outputs = {spec.name: _described(plan, spec) for spec in manifest.engine_outputs}
    inside = {spec.name: f"{plan.name}_tokenizer.{spec.name}" for spec in manifest.inputs}
    for spec in manifest.inputs:
        if spec.kind == "attention_mask" and spec.name not in outputs:
            inside[spec.name] = spec.name
            outputs[spec.name] = _described(plan, spec)
    config: dict[str, Any] = {
        "name": f"{plan.name}_text",
        "platform": "ensemble",
        "max_batch_size": rows.most,
        "input": [_text_input(plan)],
        "output": list(outputs.values()),
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": f"{plan.name}_tokenizer",
                    "model_version": -1,
                    "input_map": map_field({"text": "text"}),
                    "output_map": map_field(inside),
                },
                {
                    "model_name": plan.name,
                    "model_version": -1,
                    "input_map": map_field(
                        {plan.engine_name(spec): inside[spec.name] for spec in manifest.inputs}
                    ),
                    "output_map": map_field(
                        {plan.engine_name(spec): spec.name for spec in manifest.engine_outputs}
                    ),
                },
            ]
        },
    }
    # Object stores and git keep no empty folders, and a model without a version is not loaded.
    _write(_model_folder(folder, config) / ".keep", "")


def _parameters(values: Any) -> list[Message]:
    return map_field({key: {"string_value": value} for key, value in values.items()})


def _model_folder(folder: Path, config: Message) -> Path:
    """Write a model's config; returns the folder of its version."""
    version = folder / str(config["name"]) / VERSION
    version.mkdir(parents=True)
    _write(version.parent / "config.pbtxt", text_format(config))
    return version


def _copy(bundle: Bundle, name: str, target: Path) -> None:
    with bundle.opened(name) as source:
        shutil.copyfile(source, target)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_marker(plan: _Plan, staging: Staging, notes: tuple[str, ...]) -> None:
    content = {
        "schema_version": SCHEMA_VERSION,
        "bundle": plan.bundle.sha256,
        "models": plan.models,
        "engine": {"target": plan.engine.target, "file": plan.engine.file},
        "notes": notes,
    }
    _write(staging.folder / MARKER, json.dumps(content, indent=1) + "\n")


def _values(manifest: Manifest) -> str:
    """The ranges of the inputs that have one."""
    return ", ".join(
        f"{spec.name} {_bound(spec.minimum)}..{_bound(spec.maximum)}"
        for spec in manifest.inputs
        if spec.minimum is not None or spec.maximum is not None
    )


def _of_parts(bundle: Bundle) -> Iterator[str]:
    """What a client has to run besides."""
    for part in bundle.parts.values():
        yield f"The engine reads what that of {part.root} gives, which needs a repository, too."


def _of_verdict(verdict: Verdict) -> Iterator[str]:
    if verdict.outcome != "verified":
        yield f"The engine is {verdict.outcome}: it did not run on its device."
    if verdict.accepted:
        names = ", ".join(dict.fromkeys(excess.accepted for excess in verdict.accepted))
        yield f"Errors beyond the limit were accepted when it was exported: {names}."


def _notes(plan: _Plan) -> Iterator[str]:
    """What Triton does not check, and what its user should know."""
    manifest, rows = plan.manifest, plan.batching
    if rows.why:
        yield f"Requests are not joined into batches: {rows.why}."
    yield from rows.notes
    yield from plan.backend.notes
    yield from _of_parts(plan.bundle)
    yield from _of_verdict(plan.engine.verdict)
    if plan.text_reason:
        yield f"There is no tokenizer in the repository: {plan.text_reason}."
    batch = manifest.inputs[0].shape[0] if rows.most else ""  # max_batch_size bounds it
    ranges = [
        f"{name} {least}..{most}"
        for name, (least, most) in manifest.symbols.items()
        if name != batch
    ]
    if ranges:
        yield f"Triton does not check ranges of sizes: {', '.join(ranges)}."
    if values := _values(manifest):
        yield f"Triton does not check values: {values}."
    for name, step in manifest.steps.items():
        if step > 1:
            yield f"Triton does not check that {name} is a multiple of {step}."
    for check in manifest.size_checks:
        yield f"Triton does not check sizes: {check.condition}."
    for guard in manifest.guards:
        yield (
            f"Output {guard.output!r} has to be true; else the model takes another path than the"
            f" engine, and the other outputs are wrong. Triton does not check it ({guard.code})."
        )
    yield "Triton returns NaN and infinities, which `Engine.run` refuses."


def _bound(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _readme(plan: _Plan, notes: tuple[str, ...]) -> str:
    engine, name = plan.engine, plan.name
    lines = [
        f"# Triton model repository: {name}",
        "",
        f"Written by enginecast from a bundle of {plan.manifest.model.name}"
        f" ({engine.target}, {engine.quantized or engine.precision}, {engine.verdict.outcome}).",
        "",
        "```",
        "tritonserver --model-repository=$PWD",
        "```",
        "",
        f"- `{name}`: the engine ({plan.backend.name} backend)",
    ]
    if plan.encoder is not None:
        lines += [
            f"- `{name}_tokenizer`: texts to token ids (Python backend; the server's Python needs"
            " `pip install tokenizers`)",
            f"- `{name}_text`: both as one model; send texts as `text`",
        ]
    shape = (
        f"Requests have their rows as dimension 0, at most {plan.batching.most}."
        if plan.batching.most
        else "Requests have every dimension, as the engine takes them."
    )
    return "\n".join([*lines, "", shape, "", *[f"- {note}" for note in notes], ""])
