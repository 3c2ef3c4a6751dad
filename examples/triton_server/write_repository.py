"""A bundle as a model repository of Triton Inference Server: a recipe to copy and change.

    python examples/triton_server/write_repository.py t5.bundle -o models

REPO/NAME            the engine, with its weights under the name that the graph refers to
REPO/NAME_tokenizer  for text models: the bundle's tokenizer, in the Python backend
REPO/NAME_text       both as one model (an ensemble): texts in, outputs out

It takes engines of ONNX Runtime and TensorRT.  It prints the checks of `enginecast.load` and
`Engine.run` that Triton does not make, and writes them to the repository's README.md.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from enginecast.errors import EnginecastError, InputError, UsageError
from enginecast.runtime.bundle.manifest import (
    TOKENIZER_NAME,
    EngineRecord,
    Input,
    Manifest,
    Output,
)
from enginecast.runtime.bundle.onnx_file import check_onnx, weight_files
from enginecast.runtime.bundle.reader import Bundle, open_bundle
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.prompts import PromptEncoder
from enginecast.runtime.sessions.integer_sums import ANY_CPU, SUMS

MARKER = "enginecast-triton.json"
"""By which `--overwrite` knows a repository of ours; Triton looks at folders alone."""
TYPES = {"bool": "TYPE_BOOL", "bfloat16": "TYPE_BF16"}
TYPES |= {f"float{bits}": f"TYPE_FP{bits}" for bits in (16, 32, 64)}
TYPES |= {f"int{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)} | {"uint8": "TYPE_UINT8"}
BACKENDS = {
    "onnxruntime": ("onnxruntime", "onnxruntime_onnx", "model.onnx"),
    "tensorrt": ("tensorrt", "tensorrt_plan", "model.plan"),
}
"""Backend, platform and file name by target."""
QUEUE_MICROSECONDS = 5000
"""How long a request waits for others: as long as `Batcher` lets it wait."""


class Name(str):
    """A value of an enum: `KIND_CPU`, without quotes."""

    __slots__ = ()


def engine_of(manifest: Manifest) -> EngineRecord:
    """The first engine that Triton runs as it was verified.

    Raises:
        UsageError: there is none.
    """
    fit = [one for one in manifest.engines if one.target in BACKENDS and one.network is None]
    if not fit:
        raise UsageError(
            f"Triton runs no engine of {', '.join(one.target for one in manifest.engines)} as it"
            " was verified",
            hint="Export with --target onnxruntime, or add that engine with --also onnxruntime.",
        )
    if fit[0].target != "tensorrt":
        for spec in (*manifest.inputs, *manifest.outputs):
            if spec.dtype == "bfloat16":
                raise UsageError(
                    f"{spec.name!r} is bfloat16, which Triton's onnxruntime backend does not take",
                    hint="Export in fp32 or fp16.",
                )
    return fit[0]


def no_batches(manifest: Manifest) -> str:
    """Why Triton may not join requests into batches; empty: it may."""
    if manifest.guards:
        return "the engine was specialised, and its guards are about a whole request"
    batch = manifest.inputs[0].shape[:1]
    if not batch or not isinstance(batch[0], str):
        return "the first dimension of the inputs does not vary"
    for spec in (*manifest.inputs, *manifest.outputs):
        if spec.shape[:1] != batch or batch[0] in spec.shape[1:]:
            return f"{batch[0]!r} is not dimension 0 alone of {spec.name!r}"
    for check in manifest.size_checks:
        if re.search(rf"\b{re.escape(batch[0])}\b", check.condition):
            return f"the number of rows has to hold {check.condition}, which a batch may break"
    return ""


def write_repository(
    bundle: Bundle, target: Path, *, name: str = "", max_batch: int | None = None, **how: Any
) -> list[str]:
    """Write the repository, whole or not at all; returns what Triton does not check.

    Args:
        max_batch: rows that run together; 0: requests run alone; None: as many as the engine takes.
        how: of `enginecast.runtime.bundle.staging.stage`: overwrite.
    """
    manifest, name = bundle.manifest, name or bundle.root.name.removesuffix(".bundle")
    if re.fullmatch(r"\w[\w.-]*", name, re.ASCII) is None:
        raise UsageError(f"--name: expected letters, digits, '_', '-' and '.', got {name!r}")
    record, why = engine_of(manifest), no_batches(manifest)
    if record.target == "onnxruntime":
        check_onnx(bundle.read(record.file), record.file, weight_files(bundle, record.weights))
    rows = 0
    if not why and max_batch != 0:
        batch = str(manifest.inputs[0].shape[0])
        least, most = manifest.symbols[batch]
        if not least <= (max_batch or most) <= most:
            raise UsageError(f"--max-batch: expected 0 or {least}..{most}, got {max_batch}")
        rows = (max_batch or most) // manifest.steps.get(batch, 1) * manifest.steps.get(batch, 1)
    encoder, notes = None, list(unchecked(manifest, record, rows))
    notes += [f"Requests are not joined into batches: {why}."] if why else []
    for part in bundle.parts.values():
        notes.append(
            f"The engine reads what that of {part.root} gives, which needs a repository, too."
        )
    text = manifest.text
    if text is not None and (text.template, text.clean) != ("{}", "none"):
        notes.append("There is no tokenizer in the repository: texts go into a template first.")
    elif text is not None:
        try:
            encoder = PromptEncoder(bundle.root, manifest, bundle.read(TOKENIZER_NAME))
        except InputError as error:  # it takes more than token ids
            notes.append(f"There is no tokenizer in the repository: {error.message}.")
    with stage(target, marker=MARKER, what="Triton repository", **how) as staging:
        write_engine(bundle, record, name, rows, staging.folder)
        if encoder is not None:
            write_text_models(bundle, encoder, name, rows, staging.folder)
        marker = {"bundle": bundle.sha256, "name": name, "notes": notes}
        (staging.folder / MARKER).write_text(json.dumps(marker, indent=1) + "\n")
        text = "".join(f"- {note}\n" for note in notes)
        (staging.folder / "README.md").write_text(f"# {name}\n\nTriton does not check:\n\n{text}")
        bundle.require_whole()
        bundle.require_unchanged()
        staging.publish_folders()
    return notes


def unchecked(manifest: Manifest, record: EngineRecord, rows: int) -> Iterator[str]:
    """What Triton does not check, and what its user should know."""
    if record.verdict.outcome != "verified":
        yield f"The engine is {record.verdict.outcome}: it did not run on its device."
    for name, (least, most) in manifest.symbols.items():
        if not rows or name != manifest.inputs[0].shape[0] or least > 1:
            yield f"Sizes: {name} is {least}..{most}."
    for name, step in manifest.steps.items():
        if step > 1:
            yield f"Sizes: {name} is a multiple of {step}."
    for check in manifest.size_checks:
        yield f"Sizes: {check.condition}."
    for spec in manifest.inputs:
        bounds = ("" if one is None else f"{one:g}" for one in (spec.minimum, spec.maximum))
        if (shown := "..".join(bounds)) != "..":
            yield f"Values: {spec.name} is {shown}."
    for guard in manifest.guards:
        yield (
            f"Output {guard.output!r} has to be true; else the model takes another path than the"
            f" engine, and the other outputs are wrong ({guard.code})."
        )
    if record.minimum_runtime:
        yield f"The Triton release must have {record.minimum_runtime}."
    if record.target == "tensorrt":
        for name, version in sorted(record.requires.items()):
            yield f"The plan runs with {name} {version} alone."
    elif record.quantized == "int8" and record.requires.get(SUMS) != ANY_CPU:
        yield "On x86 CPUs without VNNI, its int8 products may saturate."
    yield "Triton returns NaN and infinities, which `Engine.run` refuses."


def write_engine(bundle: Bundle, record: EngineRecord, name: str, rows: int, folder: Path) -> None:
    """The folder of the engine."""
    manifest = bundle.manifest
    backend, platform, file = BACKENDS[record.target]
    judged = (record.verdict.where.provider, record.verdict.arithmetic, *record.providers[:1])
    on_gpu = any(word in one.lower() for one in judged for word in ("cuda", "tensorrt", "trt"))
    config: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "platform": platform,
        "max_batch_size": rows,
        "default_model_filename": file,
        "input": [tensor(spec, rows, inside=True) for spec in manifest.inputs],
        # Guards are outputs, so that a client can look at them.
        "output": [tensor(spec, rows, inside=True) for spec in manifest.engine_outputs],
        "instance_group": [{"count": 1, "kind": Name("KIND_GPU" if on_gpu else "KIND_CPU")}],
    }
    if rows:
        config["dynamic_batching"] = {
            "preferred_batch_size": [rows],
            "max_queue_delay_microseconds": QUEUE_MICROSECONDS,
        }
    if record.target == "onnxruntime" and record.quantized:
        # The extended level would turn DequantizeLinear and MatMul into integer products.
        config["optimization"] = {"graph": {"level": -1}}
    elif record.target == "onnxruntime" and record.precision == "fp16" and not on_gpu:
        # The layout optimizers of the last level crash on some fp16 graphs.
        config["optimization"] = {"graph": {"level": 1}}
        config["parameters"] = mapped({"enable_mem_arena": {"string_value": "0"}})
    version = model_folder(folder, config)
    copy(bundle, record.file, version / file)
    if record.weights is not None and record.target == "onnxruntime":
        copy(bundle, record.weights, version / record.weights)


def write_text_models(
    bundle: Bundle, encoder: PromptEncoder, name: str, rows: int, folder: Path
) -> None:
    """The tokenizer, and the ensemble of it and the engine: as `Engine.encode`, with the mask."""
    manifest, rules = bundle.manifest, encoder.rules
    text = {"name": "text", "data_type": Name("TYPE_STRING"), "dims": [1] if rows else [-1]}
    told = {key: str(value) for key, value in vars(rules).items()}
    told["most_texts"] = str(rows or rules.most_texts)
    told |= {f"kind_of_{spec.name}": spec.kind for spec in manifest.inputs}
    tokenizer = {
        "name": f"{name}_tokenizer",
        "backend": "python",
        "max_batch_size": rows,
        "input": [text],
        "output": [tensor(spec, rows) for spec in manifest.inputs],
        "instance_group": [{"count": 1, "kind": Name("KIND_CPU")}],
        "parameters": mapped({key: {"string_value": value} for key, value in told.items()}),
    }
    version = model_folder(folder, tokenizer)
    shutil.copyfile(Path(__file__).with_name("tokenizer_model.py"), version / "model.py")
    copy(bundle, TOKENIZER_NAME, version / TOKENIZER_NAME)
    outputs = {spec.name: tensor(spec, rows) for spec in manifest.engine_outputs}
    inside = {spec.name: f"{name}_tokenizer.{spec.name}" for spec in manifest.inputs}
    for spec in manifest.inputs:
        if spec.kind == "attention_mask" and spec.name not in outputs:
            inside[spec.name] = spec.name
            outputs[spec.name] = tensor(spec, rows)
    steps = (
        (f"{name}_tokenizer", {"text": "text"}, inside),
        (name, inside, {spec.name: spec.name for spec in manifest.engine_outputs}),
    )
    ensemble = {
        "name": f"{name}_text",
        "platform": "ensemble",
        "max_batch_size": rows,
        "input": [text],
        "output": list(outputs.values()),
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": model,
                    "model_version": -1,
                    "input_map": mapped(taken),
                    "output_map": mapped(given),
                }
                for model, taken, given in steps
            ]
        },
    }
    # Object stores and git keep no empty folders, and a model without a version is not loaded.
    (model_folder(folder, ensemble) / ".keep").touch()


def tensor(spec: Input | Output, rows: int, *, inside: bool = False) -> dict[str, Any]:
    """An input or an output: `inside`, as the backend takes it, else as those who send requests."""
    shape = spec.shape[1:] if rows else spec.shape
    dims = [size if isinstance(size, int) else -1 for size in shape]
    made = {"name": spec.name, "data_type": Name(TYPES[spec.dtype]), "dims": dims or [1]}
    # Triton's own tensors have a dimension at least.
    return made if dims or not inside else made | {"reshape": {"shape": []}}


def model_folder(folder: Path, config: Mapping[str, Any]) -> Path:
    """Write a model's config; returns the folder of its version."""
    version = folder / str(config["name"]) / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text("\n".join(lines(config)) + "\n", encoding="utf-8")
    return version


def copy(bundle: Bundle, name: str, target: Path) -> None:
    with bundle.opened(name) as source:
        shutil.copyfile(source, target)


def mapped(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A map of protobuf's: a message with key and value for each entry."""
    return [{"key": key, "value": value} for key, value in values.items()]


def lines(message: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """Protobuf's text format."""
    for name, value in message.items():
        many = [value] if isinstance(value, str) or not isinstance(value, Sequence) else value
        if any(isinstance(one, Mapping) for one in many):
            for one in many:
                yield from (f"{indent}{name} {{", *lines(one, f"{indent}  "), f"{indent}}}")
        else:
            scalars = [one if isinstance(one, Name) else json.dumps(one) for one in many]
            shown = f"[{', '.join(scalars)}]" if many is value else scalars[0]
            yield f"{indent}{name}: {shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="new model repository")
    parser.add_argument("--name", default="", help="name of the model; default: the bundle's")
    parser.add_argument("--max-batch", type=int, help="largest batch; 0: requests run alone")
    parser.add_argument("--overwrite", action="store_true", help="replace a repository of ours")
    given = parser.parse_args()
    try:
        notes = write_repository(
            open_bundle(given.bundle),
            given.output,
            name=given.name,
            max_batch=given.max_batch,
            overwrite=given.overwrite,
        )
    except EnginecastError as error:
        sys.exit(f"error: {error}")
    print(given.output)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


if __name__ == "__main__":
    main()
