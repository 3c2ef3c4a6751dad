"""`enginecast diffusers`: whole diffusion pipelines, from a folder to engines and to pictures."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import msgspec
import typer

from enginecast.cli.options.from_fields import (
    AllowFallback,
    Arch,
    AsJson,
    Device,
    DropGuilty,
    Frames,
    Height,
    LoadFlags,
    Optimize,
    Overwrite,
    Precision,
    Quiet,
    Target,
    TargetOptions,
    Threads,
    Variant,
    Verbose,
    Width,
    grouped,
    shown,
)
from enginecast.cli.terminal.output import (
    loading,
    print_json,
    progress,
    results,
    results_apart,
    say,
    show_log,
)
from enginecast.compiler.request import ExportRequest, parse_max_error
from enginecast.errors import UsageError
from enginecast.exporters.registry import DEFAULT
from enginecast.pipelines.record import RECORD, require_original, require_pipeline
from enginecast.runtime.bundle.staging import require_target
from enginecast.verification.report.layout import print_table

if TYPE_CHECKING:
    from enginecast.pipelines.export import PipelineExport
    from enginecast.pipelines.record import CheckOutcome

app = typer.Typer(
    help="Export a whole diffusion pipeline, and run it.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)

_run = partial(typer.Option, rich_help_panel="Run of the pipeline")
Steps = Annotated[int | None, _run("--steps", metavar="N", help="Denoising steps.")]
Seed = Annotated[int | None, _run("--seed", metavar="N", help="Seed of the noise.")]
Guidance = Annotated[float | None, _run("--guidance-scale", metavar="X", help="Guidance scale.")]
Negative = Annotated[str | None, _run("--negative-prompt", metavar="TEXT", help="What to avoid.")]
Images = Annotated[
    list[str] | None,
    _run(
        "--image",
        metavar="[ARGUMENT=]FILE",
        help="Image that the pipeline takes, or mask_image=FILE and the like; repeatable.",
    ),
]
More = Annotated[
    list[str] | None,
    _run(
        "--set",
        metavar="NAME=VALUE",
        help="Another pipeline argument, such as max_sequence_length=128; repeatable.",
    ),
]


@app.command()
@grouped
@results_apart()
def export(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of a diffusers pipeline.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="New folder of engines.")
    ],
    precision: Precision = None,
    component: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PRECISION", help="Precision of one component; repeatable."),
    ] = None,
    max_error: Annotated[
        str | None,
        typer.Option(
            "--max-error",
            metavar="X|latents=X",
            help="Error limit for quantization: per row of a component (0.02 or cos=0.997), or of"
            " each prompt's latents (latents=0.05).",
        ),
    ] = None,
    drop_guilty: DropGuilty = False,
    optimize: Optimize = "speed",
    eager: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Leave this component in eager PyTorch; repeatable."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Prompt of the recorded run; repeatable."),
    ] = None,
    negative_prompt: Negative = None,
    steps: Steps = 4,
    guidance_scale: Guidance = None,
    height: Height = None,
    width: Width = None,
    frames: Frames = None,
    seed: Seed = 0,
    image: Images = None,
    more: More = None,
    variant: Variant = "",
    target: Target = DEFAULT,
    device: Device = None,
    arch: Arch = None,
    target_options: TargetOptions = None,
    threads: Threads = None,
    overwrite: Overwrite = False,
    allow_fallback: AllowFallback = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = 0,
) -> None:
    """Export the components of a pipeline.

    Compares the whole pipeline with eager.
    """
    show_log(verbose)
    asked = _pairs("--component", component)
    row_limit, latents = _limits(max_error)
    base = ExportRequest(
        str(folder),
        target=target,
        device=device,
        arch=arch,
        max_error=row_limit,
        optimize=cast(Literal["speed", "size"], optimize),  # `check` refuses any other
        drop_guilty=drop_guilty,
        target_options=target_options,
        threads=threads,
    )
    for name in {precision, *asked.values()}:
        replace(base, precision=name).check()
    require_original(folder)
    require_pipeline(folder)
    require_target(output, overwrite=overwrite, marker=RECORD, what="pipeline of engines")
    loading()
    from enginecast.compiler.steps import Steps as Progress
    from enginecast.pipelines.export import PipelineRequest, export_pipeline
    from enginecast.pipelines.generate import PROMPTS, Wish

    wish = Wish(
        prompts=_two(prompt, PROMPTS),
        negative_prompt=negative_prompt or "",
        steps=steps,
        height=height,
        width=width,
        frames=frames,
        guidance_scale=guidance_scale,
        seed=seed or 0,
        more=_values(more),
        images=_images(image),
    )
    request = PipelineRequest(
        folder,
        output,
        wish,
        base,
        precision=precision or "fp32",
        precisions=asked,
        max_latents=latents,
        own_prompts=len(prompt or ()),
        eager=tuple(eager or ()),
        variant=variant,
        overwrite=overwrite,
        allow_fallback=allow_fallback,
    )
    console = progress(quiet)
    progressed = Progress(console)
    done = export_pipeline(request, progressed)
    if as_json:
        print_json(_as_json(done, progressed.seconds))
    else:
        _show(done)
    raise typer.Exit(0 if done.is_whole else 1)


@app.command()
@grouped
@results_apart()
def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of engines.")],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Image file; for video .gif, .mp4 or a new folder of frames.",
        ),
    ],
    prompt: Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Prompt.")],
    negative_prompt: Negative = None,
    steps: Annotated[
        int | None,
        _run("--steps", metavar="N", help="Denoising steps; default: the pipeline's own."),
    ] = None,
    guidance_scale: Guidance = None,
    height: Height = None,
    width: Width = None,
    frames: Frames = None,
    seed: Seed = None,
    image: Images = None,
    more: More = None,
    device: Annotated[str | None, shown(LoadFlags, "device")] = None,
    threads: Annotated[int | None, shown(LoadFlags, "threads")] = None,
    prefer: Annotated[list[str] | None, shown(LoadFlags, "prefer")] = None,
    allow_code: Annotated[bool, shown(LoadFlags, "allow_code")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline of engines.

    Steps default to the pipeline's own number; sizes and other arguments to those of the recording.
    """
    loading()
    from enginecast.pipelines.pictures import require_frames_fit, require_output, save_pictures
    from enginecast.pipelines.record import usable_record
    from enginecast.pipelines.run import (
        load_pipeline,
        made_how,
        require_device,
        run_pipeline,
        wish_of,
    )

    device = device or "cpu"
    require_output(output)
    require_device(device)
    record = usable_record(folder)
    recorded = wish_of(record)
    asked: dict[str, Any] = {
        "negative_prompt": negative_prompt,
        "guidance_scale": guidance_scale,
        "height": height,
        "width": width,
        "frames": frames,
        "seed": seed,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    # The recording has few steps, which is enough to compare and not to make a picture.
    more_values = {**recorded.more, **_values(more)}
    images = _images(image)
    if lacking := recorded.images.keys() - images:
        options = " ".join(f"--image {name}=FILE" for name in sorted(lacking))
        raise UsageError(f"{folder}: the pipeline was recorded with images: give {options}")
    wish = replace(
        recorded, prompts=(prompt,), steps=steps, **given, more=more_values, images=images
    )
    pipe = load_pipeline(
        folder, record, device, threads=threads, prefer=prefer, allow_code=allow_code
    )
    require_frames_fit(output, pipe, wish.frames)
    made = run_pipeline(pipe, record, wish)
    files = save_pictures(made.pictures, output)
    if as_json:
        print_json({"output": str(output), "files": [str(file) for file in files]})
    else:
        several = f"{len(files)} files, " if len(files) > 1 else ""
        say(results(), f"{output}: {several}{made_how(pipe, wish, made)}")


def _two(given: list[str] | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Two prompts at least: so the batch varies."""
    found = tuple(given or ())
    return found if len(found) > 1 else (*found, *default)[:2]


def _limits(given: str | None) -> tuple[float | None, float | None]:
    """The limit of a component's rows, and that of latents."""
    kind, _, number = (given or "").partition("=")
    if given is None or kind != "latents":
        return None if given is None else parse_max_error(given), None
    return None, parse_max_error(number)


def _images(given: list[str] | None) -> dict[str, str]:
    named = (text if "=" in text else f"image={text}" for text in given or ())
    return _pairs("--image", list(named))


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    found = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{option} {text}: expected NAME=VALUE")
        if name in found:
            raise UsageError(f"{option} {text}: {name} is given twice")
        found[name] = value
    return found


def _values(given: list[str] | None) -> dict[str, Any]:
    """Numbers, true, false, null and lists as in JSON; anything else is text."""
    found: dict[str, Any] = {}
    for name, value in _pairs("--set", given).items():
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _show(done: "PipelineExport") -> None:
    from enginecast.verification.report.tables import print_downgrades

    console = results()
    rows: list[tuple[str, ...]] = []
    for name, part in done.record.components.items():
        for entry, engine in part.engines.items():
            row = (f"{name}/{entry}", part.kind, part.precision, engine.outcome)
            rows.append((*row, f"{engine.error:.2g}"))
        if not part.engines:
            reason = part.reason if part.outcome == "eager" else ""
            rows.append((name, part.kind, "eager", part.outcome, reason))
    print_table(console, ("component", "class", "precision", "outcome", "error"), rows)
    _show_check(done.record.check)
    print_downgrades(done.record.downgrades, console)
    missing = [each for each in done.record.downgrades if each.consent == "missing"]
    if missing:
        own = " ".join(dict.fromkeys(each.option for each in missing))
        say(console, "exit code 1: the engines lack something that was asked for")
        say(console, f"to accept it: export again with {own} or --allow-fallback")
    say(console, str(done.folder))


def _show_check(check: "CheckOutcome") -> None:
    console = results()
    stages = [*check.steps, *([check.pictures] if check.pictures else [])]
    rows = [
        (
            each.name,
            "not finite" if each.error is None else f"{each.error:.2g}",
            f"{each.limit:.2g}",
        )
        for each in stages
    ]
    if rows:
        print_table(console, ("whole pipeline", "relative error", "allowed"), rows)
        psnr = "equal" if check.psnr is None else f"PSNR {check.psnr:.1f} dB"
        parted = f"they diverge at {check.parts_at}" if check.parts_at else "they do not diverge"
        say(console, f"pictures: {psnr}; worst: {check.worst}; {parted}")
    if check.max_error is not None:
        say(console, f"quantized: latents may be off by {check.max_error:.2g}")
        off = ", ".join("not finite" if e is None else f"{e:.2g}" for e in check.prompts)
        say(console, f"latents by prompt are off by {off}")
    reasons = f": {'; '.join(check.reasons)}" if check.reasons else ""
    say(console, f"whole pipeline: {check.outcome}{reasons}")


def _as_json(done: "PipelineExport", seconds: dict[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(done.record)
    return {**found, "folder": str(done.folder), "failed": list(done.failed), "seconds": seconds}
