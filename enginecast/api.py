"""The Python API's `export`: an export as one call."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram
from transformers import PreTrainedConfig

from enginecast.capture.inputs.calls import call_of
from enginecast.capture.inputs.dynamic_shapes import Dynamic, dynamic_texts
from enginecast.capture.inputs.specs import from_example
from enginecast.capture.sources.calls.recording import Recorded, require_one
from enginecast.capture.sources.calls.recording import record as record
from enginecast.capture.sources.factory import arguments_of, as_written
from enginecast.capture.sources.huggingface.hub import fetch, is_hub_name
from enginecast.capture.tracing.attempt import Fallback
from enginecast.compiler.export import session
from enginecast.compiler.request import ExportRequest, ModelOptions, parse_max_error
from enginecast.compiler.steps import Steps
from enginecast.errors import UsageError, VerificationError
from enginecast.exporters.registry import DEFAULT, TargetName
from enginecast.passes.presets import PrecisionName
from enginecast.runtime.bundle.reader import Bundle

Example = Tensor | Sequence[Any] | Mapping[str, Any] | Recorded
"""The inputs of a module, in one of the forms that `export` takes."""


def export(
    model: str | os.PathLike[str] | nn.Module,
    output: str | os.PathLike[str],
    *,
    example: Example | None = None,
    target: TargetName = DEFAULT,
    precision: PrecisionName | None = None,
    pipeline: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    outputs: Sequence[str] = (),
    hidden_states: Sequence[int] = (),
    for_pipeline: str | None = None,
    drop_guilty: bool = False,
    accept: Sequence[str] = (),
    dynamic: Dynamic = (),
    values: Sequence[str] = (),
    fallback: Fallback | None = None,
    allow_fallback: bool = False,
    arch: str | None = None,
    also: Sequence[TargetName] = (),
    target_options: Any = None,
    max_error: float | str | None = None,
    optimize: Literal["speed", "size"] = "speed",
    plan: str | os.PathLike[str] | None = None,
    options: ModelOptions | None = None,
    steps: Steps | None = None,
    download: bool = False,
) -> Bundle:
    """Export a model: make an engine, compare it with eager, and publish the bundle.

    Args:
        model: a module, which is copied; the folder of a Hugging Face model or of a diffusion
            component, or a file of weights beside its config; `package.module:factory`; or a `.pt2`
            or TorchScript file.
        output: the bundle's folder; it must not exist, except with `overwrite`.
        example: the inputs of a module or a TorchScript file, in any sizes: one tensor, a tuple or
            list of arguments by position, or a dict of arguments by name. A module's tensors in a
            dict, list, tuple or dataclass become inputs named `NAME_KEY`; numbers become constants.
            Or its calls, as recorded by `enginecast.record`.
        target: what runs the engine; other packages may add names.
        precision: the preset: "mixed" is fp16 with the residual stream in fp32; "int8" and "fp8"
            quantize weights and activations, "...-storage" only weights. None: "fp32", or what
            `pipeline` or `plan` says.
        pipeline: the passes to run instead of a preset: "canonicalize,fuse-rms-norm";
            "@fp16,my-pass" adds to a preset.
        device: what the engine is for. None: the CPU, or a GPU if no CPU has the precision.
        threads: threads within an operator during verification; None: all cores.
        overwrite: replace an existing bundle.
        outputs: names of the outputs to keep, in order; empty: all.
        hidden_states: indices of hidden states to add as outputs: -2 is `hidden_states.-2`.
        for_pipeline: what `PIPELINE` or `PIPELINE:PART` of diffusers reads of its text encoder,
            whose folder `model` is: its outputs, its longest text and its template, as
            "flux2:text_encoder".
        drop_guilty: leave out rewrites that lose too much accuracy, instead of rejecting.
        accept: errors to accept beyond their limit: `OUTPUT`, `OUTPUT/CASE`, or one of these with
            a bound, `score=2e-5`. The verdict lists them.
        dynamic: which dimensions vary. As on the command line, strings such as "x:1=1..512",
            "x:2=8..128/8" (multiples of 8), "x:0=4" (fixed) and "y:0=rows:1..64" (named). Or as
            in torch.export: for each input, by name or position, a dict from dimension to size or
            a tuple of all sizes: `{"x": {0: Dim("rows", max=64)}}`. A size is a `Dim`, a multiple
            of one, `Dim.DYNAMIC`, `Dim.AUTO` (narrowed to what the code supports), a number, a
            string (what follows the `=` above), or None (the example's). A missing end is that of
            the default range: 1 to 64, or to the example's size if that is larger. Dimensions that
            are not mentioned keep their defaults.
        values: ranges of integer inputs, "NAME=MIN..MAX" each.
        fallback: how far to go if torch.export refuses the model's control flow; None: as
            `options` say, by default "torchscript".
        allow_fallback: publish an engine that lacks something you asked for, such as a TorchScript
            engine; its manifest lists what (`downgrades`).
        arch: GPU architecture, such as "sm90"; None: this machine's.
        also: targets of more engines in the bundle, made from the same program.
        target_options: the target's own options: an instance, such as `TensorRTOptions`, or texts
            as of `--target-option`, `["level=3"]`.
        max_error: limit for an output row, for quantization or a 16-bit engine: its relative L2
            error, 0.02, or its lowest cosine, "cos=0.997". None: the precision's default.
        optimize: the goal of a quantization plan: "speed" leaves layers alone that would not
            become faster, "size" stores their weights in few bits.
        plan: a file with a quantization plan (JSON) to use.
        options: weights, files of inputs and other facts about the model.
        steps: receives the progress.
        download: fetch the model OWNER/NAME from the Hugging Face Hub, if there is no such folder:
            safetensors, configs and tokenizers, never code. False: use no network.

    Returns:
        The published bundle; `bundle.root` is its folder.

    Raises:
        VerificationError: the result does not match eager, or lacks something you asked for;
            nothing was published.
        UsageError: an argument is invalid; the message names it.
        SourceError: the model or the example cannot be read.
        CaptureError: torch.export refuses the model; the message has the line.
        MissingError: this machine lacks a package or a device.
        EnginecastError: see the tree in `enginecast.errors`.

    Examples:
        >>> import enginecast, torch
        >>> from torch.export import Dim
        >>> model = torch.nn.Linear(8, 2)
        >>> bundle = enginecast.export(
        ...     model,
        ...     "linear.bundle",
        ...     example=torch.randn(3, 8),
        ...     dynamic={"input": {0: Dim("rows", max=32)}},
        ... )
        >>> bundle
        Bundle('...linear.bundle': Linear, onnxruntime fp32 verified, ...)
        >>> bundle.manifest.symbols
        {'rows': (1, 32)}
    """
    require_one(example)
    if isinstance(model, nn.Module):
        model = as_written(model, type(model).__name__)
    for name, given, kind in (("options", options, ModelOptions), ("steps", steps, Steps)):
        if not isinstance(given, kind | None):
            wanted, got = f"{kind.__module__}.{kind.__name__}", type(given).__name__
            raise UsageError(f"{name}: expected {wanted}, got a {got}")
    options = options or ModelOptions()
    ranges = _ranges(model, example, dynamic or options.dynamic)
    if isinstance(example, Recorded):  # whose calls say how other dimensions vary
        ranges = (*ranges, *example.dynamic(ranges))
    if not isinstance(model, nn.Module):
        if not isinstance(model, (str, os.PathLike)):
            kind = f"the class {model.__name__}" if isinstance(model, type) else f"{model!r}"
            hint = ""
            if isinstance(model, ExportedProgram):  # whose repr is all of its code
                kind = "an ExportedProgram"
                hint = 'Save it: torch.export.save(program, "m.pt2"); and give that file, with'
                hint += " options=ModelOptions(allow_code=True)."
            raise UsageError(f"model: expected a module or a path, got {kind}", hint=hint)
        model = os.fspath(model)
        model = str(fetch(model)) if download and is_hub_name(model) else model
    request = ExportRequest(
        model,
        output,
        target=target,
        precision=precision,
        pipeline=pipeline,
        device=device,
        arch=arch,
        max_error=None if max_error is None else parse_max_error(str(max_error)),
        optimize=optimize,
        plan=plan,
        also=_texts(also),
        target_options=target_options,
        options=replace(
            options,
            outputs=_texts(outputs) or options.outputs,
            hidden_states=hidden_states or options.hidden_states,
            for_pipeline=for_pipeline or options.for_pipeline,
            dynamic=ranges,
            values=_texts(values) or options.values,
            fallback=fallback or options.fallback,
        ),
        example=example,
        threads=threads,
        overwrite=overwrite,
        allow_fallback=allow_fallback,
        drop_guilty=drop_guilty,
        accept=_texts(accept),
    )
    done = session.export(request, steps)
    if done.withheld:
        raise VerificationError(
            f"not what was asked for: {'; '.join(each.text for each in done.withheld)}",
            hint=f"allow_fallback=True accepts it; the bundle is in {done.folder}.",
        )
    if done.bundle is None:
        raise VerificationError(
            f"rejected: {'; '.join(done.report.verdict.reasons)}",
            hint=f"The report is in {done.folder}.",
        )
    return done.bundle


compile = export
"""The first name of `export`, which stays."""


def _texts(given: Sequence[str]) -> tuple[str, ...]:
    """Several texts; one alone may stand without a list."""
    return (given,) if isinstance(given, str) else tuple(given)


def _ranges(model: object, example: Example | None, dynamic: Dynamic) -> tuple[str, ...]:
    """What varies, in the words of `--dynamic`."""
    if isinstance(example, Recorded):
        alone = example.is_one_image
        specs = from_example(example.example, of_pipeline=True, no_batch=alone)
        return dynamic_texts(dynamic, example.call, specs)
    if not isinstance(model, nn.Module) or example is None:
        return dynamic_texts(dynamic)
    name = type(model).__name__
    call, tensors = call_of(arguments_of(example, name, model.forward), name)
    config = getattr(model, "config", None)
    config = config if isinstance(config, PreTrainedConfig) else None
    return dynamic_texts(dynamic, call, from_example(tensors, config) if tensors else ())
