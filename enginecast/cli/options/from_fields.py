"""Options that several commands share: one of the command line for each field of a dataclass."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, ForwardRef, Literal, get_args, get_origin

import typer

from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.capture.sources.place import kind_of
from enginecast.cli.terminal.output import loading, progress, say
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.errors import UsageError
from enginecast.option_fields import TOPICS, Option, flag_of, is_many, options_of


def said(owner: type, name: str) -> Option:
    """The option of a dataclass's field, for another dataclass that has it, too."""
    found = next(said for each, said in options_of(owner) if each.name == name)
    return replace(found, heading=None, commands=())


def shown(owner: type, name: str) -> Any:
    """The same for the signature of a command."""
    found = (one for one in options_of(owner) if one[0].name == name)
    return next(_shown(each, said, _heading_of(owner, said)) for each, said in found)


def _heading_of(owner: Any, said: Option) -> str:
    return str(owner.HEADING if said.heading is None else said.heading)


def _is_many(each: Field[Any]) -> bool:
    return is_many(get_args(each.type)[0])


def _shown(each: Field[Any], said: Option, heading: str) -> Any:
    return typer.Option(
        f"--{flag_of(each, said)}",
        metavar=said.metavar,
        help=said.help,
        min=said.least,
        max=said.most,
        parser=None if _is_many(each) else said.parse,
        rich_help_panel=heading or None,
    )


@dataclass(frozen=True)
class LoadFlags:
    """Which engine of a bundle is opened, and how."""

    HEADING: ClassVar[str] = "Loading"

    device: Annotated[str | None, said(ExportRequest, "device")] = None
    providers: Annotated[
        Sequence[str],
        Option("ONNX Runtime execution provider; repeatable.", "NAME", flag="provider"),
    ] = ()
    prefer: Annotated[
        Sequence[str],
        Option("Engine to prefer, such as onnxruntime-cpu; repeatable, in order.", "NAME"),
    ] = ()
    threads: Annotated[int | None, said(ExportRequest, "threads")] = None
    allow_code: Annotated[bool, said(ModelOptions, "allow_code")] = False
    public_key: Annotated[
        Path | None,
        Option("Load only bundles signed by this public key or certificate (PEM).", "FILE"),
    ] = None
    no_digests: Annotated[
        bool,
        Option("Check only the sizes of weights, not their digests: faster, but misses damage."),
    ] = False

    def arguments(self) -> dict[str, Any]:
        """Of `enginecast.load`."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        found["check"] = "size" if found.pop("no_digests") else "full"
        return found | {"providers": self.providers or None, "prefer": self.prefer or None}


@dataclass(frozen=True)
class RunFlags(LoadFlags):
    """The same, for commands that use what `tune` chose."""

    untuned: Annotated[bool, Option("Ignore what `enginecast tune` chose.")] = False

    def arguments(self) -> dict[str, Any]:
        found = super().arguments()
        return found | {"tuned": not found.pop("untuned")}


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Model folder, .safetensors, .gguf, pkg.mod:factory, .pt2 or .pt."
    ),
]
BundleDir = Annotated[Path, typer.Argument(metavar="DIR", help="A bundle.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
AllowCode = Annotated[bool, shown(ModelOptions, "allow_code")]
RandomWeights = Annotated[int | None, shown(ModelOptions, "random_weights")]
Inputs = Annotated[Path | None, shown(ModelOptions, "inputs")]
Prompts = Annotated[Path | None, shown(ModelOptions, "prompts")]
Dynamic = Annotated[list[str] | None, shown(ModelOptions, "dynamic")]
Values = Annotated[list[str] | None, shown(ModelOptions, "values")]
Height = Annotated[int | None, shown(ComponentOptions, "height")]
Width = Annotated[int | None, shown(ComponentOptions, "width")]
Frames = Annotated[int | None, shown(ComponentOptions, "frames")]
Precision = Annotated[str | None, shown(ExportRequest, "precision")]
Target = Annotated[str, shown(ExportRequest, "target")]
TargetOptions = Annotated[list[str] | None, shown(ExportRequest, "target_options")]
Overwrite = Annotated[bool, shown(ExportRequest, "overwrite")]
AllowFallback = Annotated[bool, shown(ExportRequest, "allow_fallback")]
Device = Annotated[str | None, shown(ExportRequest, "device")]
Arch = Annotated[str | None, shown(ExportRequest, "arch")]
DropGuilty = Annotated[bool, shown(ExportRequest, "drop_guilty")]
Optimize = Annotated[str, shown(ExportRequest, "optimize")]
Variant = Annotated[str, shown(ComponentOptions, "variant")]
MaxError = Annotated[float | None, shown(ExportRequest, "max_error")]
Threads = Annotated[int | None, shown(ExportRequest, "threads")]
Download = Annotated[
    bool,
    typer.Option("--download", help="Download MODEL (OWNER/NAME) from the Hugging Face Hub."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results and errors.")]
Verbose = Annotated[
    int, typer.Option("--verbose", "-v", count=True, help="Show the log.", show_default=False)
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each field of the dataclasses among its parameters.

    Each other field takes the value of the command's parameter of the same name.
    """
    parameters: list[Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in signature(command).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))
            continue
        groups[parameter.name] = kind
        for each, said, heading in _options(kind):
            if not said.commands or command.__name__ in said.commands:
                parameters.append(_parameter(each, said, heading))
    parameters.sort(key=lambda one: list(TOPICS).index(_heading(one)))

    @wraps(command)
    def run(**given: Any) -> None:
        for name, kind in groups.items():
            taken = {each.name: given.pop(each.name, None) for each, *_ in _options(kind)}
            given[name] = _built(kind, {**given, **taken})
        command(**given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(owner: Any) -> Iterator[tuple[Field[Any], Option, str]]:
    """The options of a dataclass, and of those in its fields, with their headings."""
    for each, said in options_of(owner):
        yield each, said, _heading_of(owner, said)
    for each in fields(owner):
        if is_dataclass(each.type):
            yield from _options(each.type)


def _parameter(each: Field[Any], said: Option, heading: str) -> Parameter:
    kind = get_args(each.type)[0] if said.kind is None else said.kind
    default = each.default
    if _is_many(each):
        kind, default = list[str] | None, None
    elif get_origin(kind) is Literal or isinstance(kind, str | ForwardRef):
        kind = str
    return Parameter(
        each.name,
        Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, _shown(each, said, heading)],
    )


def _heading(parameter: Parameter) -> str:
    said = get_args(parameter.annotation)[1:]
    return getattr(said[0], "rich_help_panel", None) or "" if said else ""


def _built(owner: Any, values: Mapping[str, Any]) -> Any:
    made: dict[str, Any] = {}
    known = {each.name: said for each, said in options_of(owner)}
    for each in fields(owner):
        value = values.get(each.name)
        if is_dataclass(each.type):
            made[each.name] = _built(each.type, values)
        elif value is not None:
            if each.name in known and _is_many(each):
                parse = known[each.name].parse or tuple
                value = parse(value)
            made[each.name] = value
    return owner(**made)


def refuse_given(context: typer.Context, names: Collection[str], why: str, hint: str) -> None:
    """Refuse options of a command line that would be ignored.

    Args:
        names: of the command's parameters.

    Raises:
        UsageError: lists those that were given.
    """
    found = [
        max(one.opts, key=len)
        for one in context.command.params
        if one.name in names
        and context.params.get(one.name) is not False
        and getattr(context.get_parameter_source(one.name), "name", "") == "COMMANDLINE"
    ]
    if found:
        raise UsageError(f"{', '.join(found)}: {why}", hint=hint)


def located(model: str, *, download: bool = False) -> str:
    """MODEL, which is there as far as can be told without torch; downloaded first, if asked.

    Raises:
        SourceError: there is no such folder, file or module.
    """
    if download:
        return fetched(model)
    kind_of(model)
    return model


def fetched(model: str) -> str:
    """The folder of a model of the Hugging Face hub; what is not such a name stays as it is."""
    loading()
    from enginecast.capture.sources.huggingface.hub import fetch, is_hub_name

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
