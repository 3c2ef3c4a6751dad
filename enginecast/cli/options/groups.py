"""Groups of options that several commands share, and the request that they make."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import typer

from enginecast.cli.terminal.output import loading, progress, say
from enginecast.errors import UsageError
from enginecast.exporters.registry import DEFAULT, TARGETS

if TYPE_CHECKING:  # these need torch, and `--help` does not
    from enginecast.capture.sources.source import Source
    from enginecast.compiler.request import ExportRequest, ModelOptions

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, pkg.mod:factory, .pt2 or .pt.")
]
BundleDir = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Allow files that can run code when loaded.")
]
Trust = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Load only bundles signed by this public key or certificate (PEM)."
    ),
]
RandomWeights = Annotated[
    int | None,
    typer.Option(metavar="SEED", help="Use random weights, for a folder with only a config."),
]
Inputs = Annotated[Path | None, typer.Option(metavar="FILE", help="Inputs (safetensors).")]
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts, one per line.")]
Dynamic = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME:DIM=MIN..MAX[/STEP]",
        help="Range of a dimension; NAME:DIM=SYMBOL[:MIN..MAX] ties dimensions; repeatable.",
    ),
]
Values = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=MIN..MAX", help="Range of an integer input; repeatable."),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,...", help="Outputs to keep, in order; repeatable."),
]
Task = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="text-generation: make the engine a step of `generate`, with the KV cache as inputs"
        " and outputs; and one of the encoder, where there is one.",
    ),
]
State = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="inputs: make the buffers that the model writes to inputs and outputs.",
    ),
]
Height = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Height of a diffusion pipeline's images.")
]
Width = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Width of a diffusion pipeline's images.")
]
Frames = Annotated[
    int | None, typer.Option(metavar="N", help="Frames of a diffusion pipeline's videos.")
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="A preset pipeline: fp32, fp16, bf16, mixed; int8, fp8; int8-storage, int4-storage,"
        " fp8-storage (weights only).",
    ),
]
Device = Annotated[str | None, typer.Option(metavar="cpu|cuda", help="Device the engine runs on.")]
Provider = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="ONNX Runtime execution provider; repeatable."),
]
Threads = Annotated[
    int | None, typer.Option(metavar="N", min=1, max=4096, help="Threads per operator.")
]
Download = Annotated[
    bool,
    typer.Option("--download", help="Download MODEL (OWNER/NAME) from the Hugging Face Hub."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Show the log.", show_default=False)
]
Arch = Annotated[str | None, typer.Option(metavar="NAME", help="GPU architecture, such as sm90.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of the groups (dataclasses) among its parameters."""
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(command).parameters.values():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        group: Any = parameter.annotation
        groups[parameter.name] = group
        parameters += [
            Parameter(
                f.name,
                Parameter.KEYWORD_ONLY,
                default=f.default,
                annotation=_shown_in(group, f.name, f.type),
            )
            for f in fields(group)
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        command(**given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _shown_in(group: type, name: str, annotation: Any) -> Any:
    """The annotation of a field, with the heading of the group that declares it, if it has one."""
    owner = next(one for one in group.__mro__ if name in vars(one).get("__annotations__", {}))
    panel = vars(owner).get("PANEL")
    if panel is None:
        return annotation
    kind, *more = get_args(annotation)
    shown = [copy(one) for one in more]
    for one in shown:
        one.rich_help_panel = panel
    return Annotated[kind, *shown]


def _max_error(text: str) -> float:
    from enginecast.compiler.request import parse_max_error

    return parse_max_error(text)


MaxError = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        parser=_max_error,
        help="Error limit for quantization, per output row: relative (0.02) or least cosine"
        " (cos=0.997).",
    ),
]


@dataclass(frozen=True)
class LoadFlags:
    """Which engine of a bundle is opened, and how."""

    PANEL: ClassVar[str] = "Loading"

    device: Device = None
    provider: Provider = None
    prefer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Engine to prefer, such as onnxruntime-cpu; repeatable, in order.",
        ),
    ] = None
    threads: Threads = None
    allow_code: AllowCode = False
    trust: Trust = None
    trust_digests: Annotated[
        bool,
        typer.Option(
            "--trust-digests",
            help="Check only the sizes of weights, not their digests: faster, but misses damage.",
        ),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Of `enginecast.load`."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        found["providers"] = found.pop("provider")
        found["check"] = "size" if found.pop("trust_digests") else "full"
        return found


@dataclass(frozen=True)
class RunFlags(LoadFlags):
    """The same, for commands that use what `tune` chose."""

    PANEL: ClassVar[str] = "Loading"

    untuned: Annotated[
        bool, typer.Option("--untuned", help="Ignore what `enginecast tune` chose.")
    ] = False

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        return found | {"tuned": not found.pop("untuned")}


@dataclass(frozen=True)
class ModelFlags:
    """What a user says of a model and its inputs."""

    PANEL: ClassVar[str] = "Model and inputs"

    inputs: Inputs = None
    prompts: Prompts = None
    dynamic: Dynamic = None
    values: Values = None
    outputs: Outputs = None
    hidden_state: Annotated[
        list[str] | None,
        typer.Option(
            "--hidden-state", metavar="INDEX", help="Add a hidden state as an output; repeatable."
        ),
    ] = None
    task: Task = ""
    state: State = ""
    random_weights: RandomWeights = None
    variant: Annotated[
        str, typer.Option(metavar="NAME", help="Variant of a folder's weight files, such as fp16.")
    ] = ""
    entry: Annotated[
        str,
        typer.Option(metavar="NAME", help="Part of a diffusers autoencoder: decode or encode."),
    ] = ""
    height: Height = None
    width: Width = None
    frames: Frames = None
    allow_code: AllowCode = False
    download: Download = False

    def found(self, model: str) -> str:
        """A MODEL argument, or the folder that its files were downloaded to."""
        return fetched(model) if self.download else model

    def source(self, model: str) -> "Source":
        """Open a MODEL argument."""
        from enginecast.compiler.open_model import open_model

        return open_model(model, self.options())

    def options(self, **more: Any) -> "ModelOptions":
        """The same as one value, with `more` of its fields."""
        loading()
        from enginecast.capture.sources.source import ComponentOptions
        from enginecast.compiler.request import ModelOptions

        return ModelOptions(
            self.random_weights,
            self.allow_code,
            self.inputs,
            self.prompts,
            tuple(self.dynamic or ()),
            tuple(self.values or ()),
            tuple(self.outputs or ()),
            tuple(self.hidden_state or ()),
            component=ComponentOptions(
                self.variant, self.entry, self.height, self.width, self.frames
            ),
            task=self.task,
            state=self.state,
            **more,
        )


@dataclass(frozen=True)
class PassFlags:
    """What is done with a program, and for which device."""

    PANEL: ClassVar[str] = "Precision and passes"

    precision: Precision = None
    pipeline: Annotated[
        str | None,
        typer.Option("--pipeline", metavar="SPEC", help="Use these passes instead of a preset."),
    ] = None
    skip_modules_pattern: Annotated[
        list[str] | None,
        typer.Option(metavar="RE", help="Modules to leave unchanged (regex); repeatable."),
    ] = None
    skip_modules_classes: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Module classes to leave unchanged; repeatable."),
    ] = None
    device: Device = None

    def request(self, model: str, options: "ModelOptions", **more: Any) -> "ExportRequest":
        """What is asked for, with `more` of its fields."""
        from enginecast.compiler.request import ExportRequest

        names = {f.name for f in fields(ExportRequest)} & {f.name for f in fields(self)}
        given = {name: getattr(self, name) for name in names}
        asked = {name: value for name, value in given.items() if value is not None}
        return ExportRequest(model, options=options, **asked, **more)


@dataclass(frozen=True)
class EngineFlags(PassFlags):
    """What engine is made."""

    PANEL: ClassVar[str] = "Engine"

    target: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"Runtime for the engine: {', '.join(TARGETS)}, or a plugin's.",
        ),
    ] = DEFAULT
    arch: Arch = None
    max_error: MaxError = None
    plan: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Use this quantization plan (JSON)."),
    ] = None
    fallback: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How far to go if torch.export refuses: none, rewrite, specialise, torchscript.",
        ),
    ] = "torchscript"


def fetched(model: str) -> str:
    """The folder of a model of the Hugging Face hub; what is not such a name stays as it is."""
    loading()
    from enginecast.capture.sources.hub import fetch, is_hub_name

    if not is_hub_name(model):
        return model
    say(progress(), f"downloading {model}")
    return str(fetch(model))


def require_folder(output: Path) -> None:
    """Refuse a file that could not be written or would break a bundle, before the work.

    Raises:
        UsageError: says why.
    """
    from enginecast.runtime.bundle.staging import bundle_around

    if not output.parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.parent}")
    if output.is_dir():
        raise UsageError(f"-o {output}: expected the name of a file, got a folder")
    if (around := bundle_around(output)) is not None:
        raise UsageError(
            f"-o {output}: {around} is a bundle, whose files are sealed by their digests",
            hint="Write the file beside it.",
        )
