"""The Python API's `compile`: an export as one call."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from enginecast.capture.sources.calls.recording import Recorded
from enginecast.capture.sources.calls.recording import record as record
from enginecast.capture.tracing.attempt import Fallback
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest, ModelOptions, parse_max_error
from enginecast.compiler.steps import Steps
from enginecast.errors import VerificationError
from enginecast.exporters.registry import DEFAULT
from enginecast.runtime.bundle.reader import Bundle


def compile(
    model: str | os.PathLike[str] | nn.Module,
    output: str | os.PathLike[str],
    *,
    example: Mapping[str, Any] | Recorded | None = None,
    target: str = DEFAULT,
    precision: str | None = None,
    pipeline: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    outputs: Sequence[str] = (),
    hidden_states: Sequence[int] = (),
    drop_guilty: bool = False,
    accept: Sequence[str] = (),
    dynamic: Sequence[str] = (),
    values: Sequence[str] = (),
    fallback: Fallback | None = None,
    allow_fallback: bool = False,
    arch: str | None = None,
    also: Sequence[str] = (),
    target_options: Any = None,
    max_error: float | str | None = None,
    plan: str | os.PathLike[str] | None = None,
    options: ModelOptions | None = None,
    steps: Steps | None = None,
) -> Bundle:
    """Export a model and publish the bundle.

    Args:
        example: inputs by name, for a module: tensors, and dicts, lists, tuples and dataclasses of
            them, which become inputs called `NAME_KEY`; numbers are part of the engine.  Or what
            `enginecast.record` kept of the module's calls.
        outputs: names of the outputs that the engine gives, in order; empty: all.
        hidden_states: indices of hidden states that come as outputs, too, as `hidden_states.-2`.
        accept: errors to accept although they are larger than the floor allows, `OUTPUT`,
            `OUTPUT/CASE` or one of them with a bound, `score=2e-5`; the verdict lists them.
        dynamic: sizes of dimensions, `NAME:DIM=MIN..MAX[/STEP]` each, as on the command line.
        values: ranges of inputs of integers, `NAME=MIN..MAX` each.
        fallback: how far a capture may go where torch.export refuses the model for its control
            flow: "none", "rewrite", "specialise" or "torchscript"; None: as `options` say.
        allow_fallback: publish an engine that lacks something that was asked for, such as one of
            TorchScript; its manifest lists what (`downgrades`).
        options: weights, inputs, and what else is said of a model.
        steps: gets the progress.

    The other arguments are the fields of `enginecast.compiler.request.ExportRequest`.

    Raises:
        VerificationError: the result does not agree with eager, or lacks something that was asked
            for; nothing was published.
        EnginecastError: see the tree in `enginecast.errors`.
    """
    options = options or ModelOptions()
    dynamic = dynamic or options.dynamic
    if isinstance(example, Recorded):  # whose calls say how other dimensions vary
        dynamic = (*dynamic, *example.dynamic(dynamic))
    request = ExportRequest(
        model if isinstance(model, nn.Module) else os.fspath(model),
        output,
        target=target,
        precision=precision,
        pipeline=pipeline,
        device=device,
        arch=arch,
        max_error=None if max_error is None else parse_max_error(str(max_error)),
        plan=plan,
        also=also,
        target_options=target_options,
        options=replace(
            options,
            outputs=outputs or options.outputs,
            hidden_states=hidden_states or options.hidden_states,
            dynamic=dynamic,
            values=values or options.values,
            fallback=fallback or options.fallback,
        ),
        example=example,
        threads=threads,
        overwrite=overwrite,
        allow_fallback=allow_fallback,
        drop_guilty=drop_guilty,
        accept=tuple(accept),
    )
    done = export(request, steps)
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
