"""`enginecast inspect`: the plan of an export, or what a bundle holds."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.cli.options.from_fields import (
    AsJson,
    Download,
    fetched,
    grouped,
    located,
    refuse_given,
)
from enginecast.cli.options.pipeline_folders import Component, each_component, of_pipelines
from enginecast.cli.terminal.output import loading, print_json, progress, results, results_apart
from enginecast.compiler.request import ExportRequest
from enginecast.errors import (
    CaptureError,
    EnginecastError,
    UsageError,
    VerificationError,
    first_line,
)
from enginecast.option_fields import said_target_option, target_option_keys
from enginecast.runtime.bundle.manifest import MANIFEST_NAME
from enginecast.runtime.bundle.pipeline_folder import pipeline_at

REPORT = "report.json"
SHOWS = {"model", "as_json", "quiet", "verbose", "config", "allow_code"}
"""What `inspect` takes for a bundle, which is as it is."""
PLANS = frozenset(
    {"precision", "pipeline", "skip_modules_pattern", "skip_modules_classes", "max_error"}
    | {"optimize", "plan", "save_plan"}
)
"""What it takes for a model that is captured, as a TorchScript module is not."""


@grouped
@results_apart()
@of_pipelines("model", alone=("save_plan",))
def inspect(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|DIR", help="A model or a bundle, or a pipeline of either."),
    ],
    request: ExportRequest,
    download: Download = False,
    save_plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the quantization plan to edit and reuse."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the plan of an export, or what a bundle holds.

    For a DIR.rejected, shows why the engine was rejected.
    """
    is_bundle = (Path(model) / MANIFEST_NAME).is_file()
    if is_bundle or is_rejected(Path(model)):
        refuse_given(
            context,
            {str(one.name) for one in context.command.params} - SHOWS,
            f"{model} is {'a bundle' if is_bundle else 'a rejected export'}, which is shown as it"
            " is",
            hint="Leave them out, or give the MODEL that it was made from.",
        )
    if is_bundle:
        from enginecast.cli.inspect.bundle import show_bundle

        show_bundle(Path(model), as_json=as_json)
        return
    if is_rejected(Path(model)):
        from enginecast.cli.inspect.bundle import show_rejected

        show_rejected(Path(model), as_json=as_json)
        return
    request.check()
    if request.target_options is not None:
        _refuse_of_builds(request.target_options)
    model = fetched(model) if download else model
    request = replace(request, model=model)
    if pipeline_at(Path(model)) == "source":
        _plan_components(context, request, save_plan, as_json)
    _plan(context, replace(request, model=located(model)), save_plan, as_json)


def _refuse_of_builds(options: Any) -> None:
    """Refuse options of a target that change no plan.

    Raises:
        UsageError: lists those that were given.
    """
    unset = type(options)()
    found = [
        key
        for key, (each, said) in target_option_keys(type(options)).items()
        if said is not None and said.commands and "inspect" not in said.commands
        if getattr(options, each.name) != getattr(unset, each.name)
    ]
    if found:
        raise UsageError(
            f"{', '.join(map(said_target_option, found))}: for an export alone: it changes no plan",
            hint="Leave it out.",
        )


def is_rejected(path: Path) -> bool:
    """Whether a folder holds the reports of an engine that was rejected, and nothing to run."""
    return (path / REPORT).is_file() and not (path / "config.json").exists()


def _plan_components(
    context: typer.Context, request: ExportRequest, save_plan: Path | None, as_json: bool
) -> NoReturn:
    """Plan each component of a pipeline by itself."""
    if save_plan is not None:
        raise UsageError("--save-plan goes with one component, such as FOLDER/unet")
    loading()
    from enginecast.pipelines.folder import open_pipeline

    variant = request.options.component.variant
    folder = open_pipeline(Path(str(request.model)), variant)
    parts = []
    for name in folder.models:
        library = folder.foreign(name)
        eager = f"{folder.parts[name][1]} of {library}" if library else ""
        parts.append(Component(name, folder.path / name, eager))

    def one(part: Component) -> None:
        own = folder.is_of_diffusers(part.name)  # others know no sizes of pictures
        component = replace(
            request.options.component if own else ComponentOptions(),
            variant=folder.variant_of(part.name),
        )
        options = replace(request.options, component=component)
        _plan(context, replace(request, model=str(part.folder), options=options), None, as_json)

    each_component(folder.kind.__name__, parts, one, as_json=as_json)


def _plan(
    context: typer.Context, request: ExportRequest, save_plan: Path | None, as_json: bool
) -> None:
    """Capture and plan; print, and say last what the target cannot express."""
    loading()
    from enginecast.cli.inspect.pages import (
        print_attempts,
        print_flow,
        print_inspection,
        print_script,
    )
    from enginecast.compiler.export_attempts import (
        FIRST,
        Tried,
        causes_of,
        may_be_script,
        ways_for,
    )
    from enginecast.compiler.inspection.flow import flow_of, flow_of_refused
    from enginecast.compiler.inspection.plan import inspect_model
    from enginecast.compiler.inspection.script import inspect_script
    from enginecast.compiler.prepare.open_model import given_plan, input_specs, open_model
    from enginecast.compiler.prepare.program import prepare
    from enginecast.compiler.publication.bundle import write_model_plan
    from enginecast.compiler.steps import Steps
    from enginecast.exporters.registry import target_of

    config, options = request.resolve(), request.options
    if save_plan is not None and not config.quantized:
        raise UsageError(
            "--save-plan: nothing is quantized here", hint="It goes with --precision int8 or fp8."
        )
    source = open_model(request.model, options)
    if source.given_script() is not None:
        refuse_given(
            context,
            PLANS,
            f"{source.name} is a TorchScript module, of which code and weights are shown",
            hint="Leave them out.",
        )
        script = inspect_script(source)
        if as_json:
            print_json(asdict(script))
        else:
            print_script(script, results())
        return

    def show_flow(flow: list[dict[str, Any]], error: EnginecastError) -> None:
        """What the model's code decides, although nothing else can be said of it."""
        error.details["control_flow"] = flow
        if not as_json:
            print_flow(flow, results())

    try:
        prepared = prepare(source, options, Steps(progress()), given_plan(config, source))
    except CaptureError as error:
        specs = input_specs(source, options.inputs, options.dynamic).specs
        goes_on = "refused" in causes_of(error) and may_be_script(options)
        if not as_json:
            takes = target_of(config.target).takes
            ways = ways_for(options, takes=takes, is_script=False)
            follows = next((way for way in ways if way.follows(FIRST, causes_of(error))), None)
            rungs = getattr(error, "rungs", ())  # of a refusal by torch.export
            then = [] if follows is None else [f"an export may go on with {follows}"]
            tried = str(Tried(FIRST, "failed", first_line(error)))
            print_attempts([tried, *(f"    {rung}" for rung in rungs), *then], results())
        if goes_on:
            error.hint = (
                f"{error.hint} An export goes on with TorchScript (--fallback torchscript)."
            )
        show_flow(flow_of_refused(error, source, specs, goes_on=goes_on), error)
        raise
    try:
        found = inspect_model(prepared, config)
    except VerificationError as error:  # the program fails on inputs that eager takes
        show_flow(flow_of(prepared), error)
        raise
    if save_plan is not None and found.quantization is not None:
        write_model_plan(save_plan, found.quantization, source)
    refusal = found.tensorrt.refusal if found.tensorrt is not None else None
    if not as_json:
        print_inspection(found, results())
    elif refusal is None:
        print_json(found.to_json())
    else:  # standard output gets one object, and that is the error's
        refusal.details |= found.to_json()
    if refusal is not None:
        raise refusal
