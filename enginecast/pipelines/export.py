"""From the folder of a pipeline to one of engines: record, export, check the whole."""

import gc
import math
import shutil
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from enginecast.capture.sources.calls.recording import Calls, Recorded, record
from enginecast.capture.sources.huggingface.component_options import ComponentOptions
from enginecast.capture.sources.open_source import open_source
from enginecast.compiler.export.session import export
from enginecast.compiler.request import ExportRequest, ModelOptions
from enginecast.compiler.steps import Steps
from enginecast.errors import (
    EnginecastError,
    EnginecastWarning,
    MissingError,
    SourceError,
    UsageError,
    VerificationError,
    first_line,
)
from enginecast.passes.presets import QUANTIZED
from enginecast.pipelines.check import engine_outcome, whole_outcome, with_noise
from enginecast.pipelines.components import save_empty
from enginecast.pipelines.folder import PipelineFolder, open_pipeline
from enginecast.pipelines.generate import Made, Wish, generate
from enginecast.pipelines.record import (
    INDEX,
    RECORD,
    CheckOutcome,
    ComponentOutcome,
    EngineOutcome,
    PipelineRecord,
    require_original,
    versions,
    write_record,
)
from enginecast.pipelines.run import with_engines
from enginecast.public import some
from enginecast.runtime.bundle.manifest import Downgrade
from enginecast.runtime.bundle.staging import stage
from enginecast.runtime.device.machine import available

NO_PLAN: Mapping[str, Any] = {"max_error": None, "optimize": "speed"}
"""Options of a quantization plan, for a component that has none."""
MOST_PLANS = 6
"""How often the plans of quantized components are made, each more exact than the one before."""
MOST_WORDS = 1200
"""Of a text that is longer than any pipeline reads."""
SIDE_STEP = 16
"""Pixels: pipelines take multiples of 8 or 16 at least."""


@dataclass(frozen=True)
class PipelineRequest:
    """What a user asks for."""

    folder: Path
    output: Path
    wish: Wish = field(default_factory=Wish)
    base: ExportRequest = field(default_factory=lambda: ExportRequest(""))
    """Target, device, limits and the like of each component's export."""
    precision: str = "fp32"
    precisions: Mapping[str, str] = field(default_factory=dict)
    """By component."""
    max_latents: float | None = None
    """The largest relative error of a prompt's latents after a step: quantized components are
    planned more exactly until it holds.  None: what their own plans allow."""
    own_prompts: int = 0
    """Of the wish's: the others are there so that the batch varies, and are left out where the
    pipeline fails on several."""
    eager: tuple[str, ...] = ()
    """Components that stay as they are."""
    variant: str = ""
    overwrite: bool = False
    allow_fallback: bool = False
    """Whether components that stay eager, or are engines of TorchScript, are as asked."""


@dataclass(frozen=True)
class PipelineExport:
    """What an export ended in."""

    folder: Path
    """The pipeline of engines, or what was rejected."""
    record: PipelineRecord

    @property
    def failed(self) -> tuple[str, ...]:
        """Components that were to become engines and did not."""
        parts = self.record.components.items()
        return tuple(name for name, part in parts if part.outcome == "failed")

    @property
    def is_whole(self) -> bool:
        lacking = any(each.consent == "missing" for each in self.record.downgrades)
        return not lacking and self.record.check.outcome != "rejected"


@dataclass(frozen=True)
class Rehearsal:
    """What the eager pipeline did."""

    calls: Calls
    first: Calls
    """Of the run in the size that was asked for, alone."""
    wish: Wish
    """With one prompt, where the pipeline fails on the two that nobody gave."""
    made: Made
    noisy: Made
    dtype: torch.dtype
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths that were recorded."""
    fixed: str = ""
    """Why there is one size alone; empty where there is another."""


def export_pipeline(request: PipelineRequest, steps: Steps | None = None) -> PipelineExport:
    """Export the components of a pipeline, and compare the pipeline of engines with eager.

    Raises:
        EnginecastError: see the tree in `enginecast.errors`; a component that fails does not raise.
    """
    steps = steps or Steps()
    require_original(request.folder)
    folder = open_pipeline(request.folder, request.variant)
    if request.output.resolve().is_relative_to(folder.path.resolve()):
        raise UsageError(f"-o {request.output}: it is within the pipeline's own folder")
    named = [("--component", name) for name in request.precisions]
    for option, name in (*named, *(("--eager", name) for name in request.eager)):
        if name not in folder.models:
            is_part = name in folder.parts
            what = "has no weights" if is_part else "is not a component of the pipeline"
            raise UsageError(
                f"{option} {name}: it {what}",
                hint=f"Components with weights: {', '.join(folder.models)}.",
            )
        if option == "--component" and name in request.eager:
            raise UsageError(f"--component {name} and --eager {name} exclude each other")
    asked = {request.precision, *request.precisions.values()}
    said = "--optimize size is for" if request.base.optimize == "size" else ""
    said = said if request.base.max_error is None else "--max-error limits"
    said = said if request.max_latents is None else "--max-error latents limits"
    if said and not asked & QUANTIZED.keys():
        raise UsageError(
            f"{said} a quantization plan, and nothing is quantized here",
            hint=f"It goes with --component NAME={'|'.join(QUANTIZED)}.",
        )
    for precision in asked:
        _asked(request, folder.path, precision).resolve()  # before the work
    where = {"marker": RECORD, "what": "pipeline of engines"}
    with stage(request.output, overwrite=request.overwrite, **where) as staging:
        with steps("run the eager pipeline"):
            rehearsal = _rehearse(folder, request, staging.folder, steps)
        gc.collect()
        shutil.copy(folder.path / INDEX, staging.folder)
        for name in folder.parts.keys() - set(folder.models):
            folder.copy(name, staging.folder / name)
        lacking: list[Downgrade] = []
        if rehearsal.fixed:
            lacking.append(Downgrade(kind="sizes", text=rehearsal.fixed, consent="not needed"))
        found = {
            name: _component(folder, name, rehearsal, request, staging.folder, steps)
            for name in folder.models
        }
        check = _within_limit(folder, rehearsal, request, found, staging.folder, steps)
        components = {name: outcome for name, (outcome, _) in found.items()}
        lacking += chain.from_iterable(each for _, each in found.values())
        made = PipelineRecord(
            pipeline=folder.kind.__name__,
            versions=versions(),
            recording=asdict(rehearsal.wish),
            sizes=rehearsal.sizes,
            components=components,
            check=check,
            downgrades=tuple(lacking),
        )
        write_record(staging.folder, made)
        published = staging.publish_folders(rejected=check.outcome == "rejected")
        return PipelineExport(published, made)


def _within_limit(
    folder: PipelineFolder,
    ran: Rehearsal,
    request: PipelineRequest,
    found: dict[str, tuple[ComponentOutcome, list[Downgrade]]],
    output: Path,
    steps: Steps,
) -> CheckOutcome:
    """Compare the pipelines; while latents are off by more than is allowed, plan what is quantized
    more exactly, which `found` gets.
    """
    allowed = request.max_latents
    for attempt in range(MOST_PLANS):
        components = {name: outcome for name, (outcome, _) in found.items()}
        with steps("compare the pipelines"):
            check = _check(request, components, ran, output)
        if allowed is None or check.outcome == "not run":
            return check
        errors = [math.inf if each is None else each for each in check.prompts]
        worst, planned = max(errors, default=0.0), _plans(components)
        if worst <= allowed or not planned or attempt == MOST_PLANS - 1:
            break
        number = errors.index(worst) + 1
        steps.say(f"latents of prompt {number} are off by {worst:.2g}; {allowed:.2g} is allowed")
        for name, limit in planned.items():
            smaller = limit * max(0.1, min(0.7, 0.8 * allowed / worst))
            steps.say(f"{name} is planned again: rows within {smaller:.2g}, not {limit:.2g}")
            for entry in components[name].engines:
                shutil.rmtree(output / name / entry)
            exact = replace(request, base=replace(request.base, max_error=smaller))
            found[name] = _component(folder, name, ran, exact, output, steps)
    if allowed is not None and worst > allowed and check.outcome != "rejected":
        reason = f"latents are off by {worst:.2g}, and --max-error allows {allowed:.2g}"
        check = msgspec.structs.replace(check, outcome="rejected", reasons=(reason,))
    return check


def _plans(components: Mapping[str, ComponentOutcome]) -> dict[str, float]:
    """The limits of rows that the plans of quantized components have."""
    limits = {
        name: [e.max_error for e in part.engines.values() if e.max_error is not None]
        for name, part in components.items()
    }
    return {name: min(each) for name, each in limits.items() if each}


def _rehearse(
    folder: PipelineFolder, request: PipelineRequest, output: Path, steps: Steps
) -> Rehearsal:
    """Run the eager pipeline: as asked, once more with noise, and in another size.

    What engines need beside them of the components that ran is written into `output`.
    """
    dtype = _eager_dtype(folder, steps)
    pipe, wish = folder.load(dtype=dtype), request.wish
    failed: Exception | None = None
    for prompts in dict.fromkeys((wish.prompts, wish.prompts[: max(1, request.own_prompts)])):
        wish = replace(wish, prompts=prompts)
        try:
            calls, first, made, others, fixed = _recorded(pipe, wish, steps)
            break
        except SourceError:
            raise
        except Exception as error:  # its components raise any kind
            failed = failed or error
    else:
        assert failed is not None  # nothing ran
        if isinstance(failed, EnginecastError):
            raise failed
        raise SourceError(
            f"the eager {type(pipe).__name__} fails: {type(failed).__name__}: {first_line(failed)}",
            hint="Its components may not fit each other; run it in diffusers.",
        ) from failed
    if failed is not None:
        steps.say(f"{type(pipe).__name__} fails on two prompts, and is exported for one")
    if request.max_latents is not None and not made.latents:
        raise UsageError(
            f"--max-error latents: {type(pipe).__name__} hands out no latents",
            hint="Limit the rows of a component instead: --max-error 0.05.",
        )
    with with_noise(pipe):
        noisy = generate(pipe, wish)
    for name in folder.models:
        if _stays(folder, name, calls, request) is None:
            save_empty(getattr(pipe, name), output / name)
    sizes = (made.pictures.shape[-2:], *others)
    return Rehearsal(calls, first, wish, made, noisy, dtype, sizes, fixed)


def _recorded(
    pipe: Any, wish: Wish, steps: Steps
) -> tuple[Calls, Calls, Made, list[tuple[int, int]], str]:
    """Run the pipeline as asked, and in another size: all calls, those of the first run, what it
    made, other sizes and why there are none.

    Raises:
        SourceError: it gives values that are not finite.
        Exception: the pipeline fails.
    """
    with record(pipe) as calls:
        with record(pipe) as first:
            made = generate(pipe, wish)
            _run_other_texts(pipe, wish, first, steps)
        if not all(each.isfinite().all() for each in (*made.latents, made.pictures)):
            raise SourceError(
                f"the eager {type(pipe).__name__} gives values that are not finite",
                hint="Nothing can be compared with them; run it in diffusers.",
            )
        height, width = made.pictures.shape[-2:]
        others, fixed = _in_another_size(pipe, wish, height, width, steps)
    return calls, first, made, others, fixed


def _run_other_texts(pipe: Any, wish: Wish, first: Calls, steps: Steps) -> None:
    """Run the pipeline on short texts, and if these make other sizes, on ones that are too long: so
    that an engine takes prompts of all lengths, where they are not padded to one.
    """
    words = [prompt.split() or ["a"] for prompt in wish.prompts]
    short = tuple(" ".join(text[: 1 + number]) for number, text in enumerate(words))
    long = tuple(" ".join(text * max(1, MOST_WORDS // len(text))) for text in words)
    for texts in (short, long):
        before = first.sizes
        try:
            generate(pipe, replace(wish.briefly(), prompts=texts))
        except Exception as error:  # its components raise any kind
            steps.log(f"other texts: {type(error).__name__}: {first_line(error)}")
        if first.sizes == before:
            return


def _in_another_size(
    pipe: Any, wish: Wish, height: int, width: int, steps: Steps
) -> tuple[list[tuple[int, int]], str]:
    """Run the pipeline in another size; in coarser steps where it wants that. Or why it cannot."""
    why = "it is not a multiple of the pipeline's step"
    for times in (1, 2, 4):
        other = other_size(pipe, height, width, times)
        if other == (height, width):
            break
        try:
            made = generate(pipe, wish.sized(*other).briefly())
        except Exception as error:  # its components raise any kind
            why = first_line(error)
        else:
            if made.pictures.shape[-2:] == other:  # pipelines round sizes
                return [other], ""
    why = f"the size is fixed at {height} x {width}: {why}"
    steps.say(why)
    return [], why


def _eager_dtype(folder: PipelineFolder, steps: Steps) -> torch.dtype:
    """fp32, which engines are compared with; the stored dtype where that does not fit in memory."""
    elements: dict[torch.dtype, int] = {}
    for name in folder.models:
        if not folder.foreign(name):
            options = ComponentOptions(variant=folder.variant_of(name))
            source = open_source(str(folder.path / name), component=options)
            for dtype, count in source.weight_elements().items():
                elements[dtype] = elements.get(dtype, 0) + count
    needed = sum(4 * count for dtype, count in elements.items() if dtype != torch.float32)
    there = available()
    if not elements or there is None or needed <= there:
        return torch.float32
    stored = max(elements, key=lambda dtype: elements[dtype])
    steps.say(
        f"the eager pipeline runs in {str(stored).removeprefix('torch.')}: fp32 takes"
        f" {needed / 1e9:.1f} GB, and {there / 1e9:.1f} GB are free"
    )
    return stored


def other_size(pipe: Any, height: int, width: int, times: int = 1) -> tuple[int, int]:
    """Another size that the pipeline takes: in small steps from the first, its sides unlike each
    other.

    Args:
        times: steps are so many of the smallest ones.
    """
    places = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    factor = next((n for n in (getattr(pipe, place, None) for place in places) if n), 8)
    denoiser = pipe.components.get("unet") or pipe.components.get("transformer")
    config = getattr(denoiser, "config", {})
    levels, patch = config.get("block_out_channels"), config.get("patch_size")
    patch = patch[-1] if isinstance(patch, (list, tuple)) else patch
    cells = 2 ** (len(levels) - 1) if levels else patch or 1
    step = times * math.lcm(SIDE_STEP, factor * cells)
    first, second = _coprime(height // step), _coprime(width // step)
    others = second if second[0] != first[0] or height != width else second[1:]
    return (
        first[0] * step if height % step == 0 else height,
        others[0] * step if width % step == 0 else width,
    )


def _coprime(count: int) -> list[int]:
    """Numbers without a common divisor with `count`, those near its half first: the sizes between
    are then possible step by step.
    """
    found = [n for n in range(1, count + 3) if n != count and math.gcd(n, count) == 1]
    return sorted(found, key=lambda n: abs(n - count / 2))


def _component(
    folder: PipelineFolder,
    name: str,
    ran: Rehearsal,
    request: PipelineRequest,
    output: Path,
    steps: Steps,
) -> tuple[ComponentOutcome, list[Downgrade]]:
    """Export a component, or copy it where it stays eager; and what the engines lack."""
    kind, reason = folder.parts[name][1], _stays(folder, name, ran.calls, request)
    if reason is not None:
        folder.copy(name, output / name)
        return ComponentOutcome(kind=kind, outcome="eager", reason=reason), []
    precision = request.precisions.get(name, request.precision)
    steps.say(f"{name}: {kind}, {precision}")
    engines: dict[str, EngineOutcome] = {}
    found: list[Downgrade] = []
    consent: Literal["given", "missing"] = "given" if request.allow_fallback else "missing"
    try:
        for called in _entries(name, ran.calls):
            entry = called.partition(".")[2]
            options = ComponentOptions(folder.variant_of(name), entry)
            asked = replace(
                _asked(request, folder.path / name, precision),
                output=output / name / (entry or "forward"),
                options=ModelOptions(component=options),
                example=recorded_of(called, ran, steps, found),
            )
            engines[entry or "forward"], downgrades = _engine(asked, steps)
            for each in downgrades:
                # Options of `enginecast export` are none of a pipeline's.
                text = f"{called}: {each.text.partition('; --dynamic')[0]}"
                each = msgspec.structs.replace(each, text=text, option="")
                if each.consent != "not needed":
                    own = {"option": f"--eager {name}", "consent": consent}
                    each = msgspec.structs.replace(each, **own)
                found.append(each)
    except Exception as error:  # the others go on, whatever it is
        if isinstance(error, VerificationError) and precision != "fp32":
            wider = "bf16, or fp32 on a GPU without bf16" if precision == "fp16" else "fp32"
            reason = f"{error.message}; to try: --component {name}={wider}"
        elif isinstance(error, EnginecastError):
            reason = " ".join(part for part in (error.message, error.hint) if part)
        else:
            steps.log(traceback.format_exc())
            reason = f"a defect of enginecast: {type(error).__name__}: {first_line(error)}"
        steps.say(f"{name} stays eager: {reason}")
        shutil.rmtree(output / name)
        folder.copy(name, output / name)
        text = f"{name} stays eager: {reason}"
        lost = Downgrade(kind="component", text=text, option=f"--eager {name}", consent=consent)
        return ComponentOutcome(kind=kind, outcome="failed", reason=reason), [lost]
    made = ComponentOutcome(kind=kind, outcome="engine", precision=precision, engines=engines)
    return made, found


def recorded_of(
    called: str, ran: Rehearsal, steps: Steps, lacking: list[Downgrade] | None = None
) -> Recorded:
    """The calls in both sizes, or those in one, where sizes are numbers of the call; which
    `lacking` gets.
    """
    try:
        return ran.calls[called]
    except UsageError as error:
        found = ran.first[called]
        text = f"{called}: the size is fixed: {error.message}"
        steps.say(text)
        if lacking is not None:
            lacking.append(Downgrade(kind="sizes", text=text, consent="not needed"))
        return found


def _entries(name: str, calls: Calls) -> list[str]:
    return [called for called in calls if called.partition(".")[0] == name]


def _stays(folder: PipelineFolder, name: str, calls: Calls, request: PipelineRequest) -> str | None:
    """Why a component stays eager; None: it becomes an engine."""
    if name in request.eager:
        return "as asked"
    if not _entries(name, calls):
        return "the recorded run does not call it"
    library = folder.foreign(name)
    return f"a class of {library}" if library else None


def _asked(request: PipelineRequest, model: Path, precision: str) -> ExportRequest:
    limits: dict[str, Any] = {} if precision in QUANTIZED else dict(NO_PLAN)
    # The record of the pipeline says what needs consent.
    return replace(
        request.base, model=str(model), precision=precision, allow_fallback=True, **limits
    )


def _engine(request: ExportRequest, steps: Steps) -> tuple[EngineOutcome, tuple[Downgrade, ...]]:
    """Export in the sizes that were recorded, and else in those of the first run alone; with what
    the engine lacks.

    Raises:
        VerificationError: it does not agree with eager.
    """
    recorded = request.example
    assert isinstance(recorded, Recorded)

    def exported(
        dynamic: list[str], *notes: str, **options: Any
    ) -> tuple[EngineOutcome, tuple[Downgrade, ...]]:
        model = replace(request.options, dynamic=dynamic, **options)
        done = export(replace(request, options=model), Steps(steps.console))
        verdict = done.report.verdict
        if verdict.outcome == "rejected":
            raise VerificationError(f"rejected: {some(verdict.reasons, 1)}")
        assert done.bundle is not None  # it was not rejected
        plan = done.bundle.manifest.quantization
        sizes = (Downgrade(kind="sizes", text=each, consent="not needed") for each in notes)
        outcome = engine_outcome(verdict, plan, (*notes, *done.report.notes))
        return outcome, (*sizes, *done.report.downgrades)

    ranges, fixed = recorded.dynamic(), recorded.fixed()
    if ranges == fixed:
        return exported(fixed)
    try:
        return exported(ranges, fallback="rewrite")
    except MissingError:
        raise
    except EnginecastError as error:
        note = f"sizes are fixed at those of the first run: {first_line(error)}"
        steps.say(note)
        shutil.rmtree(f"{request.output}.rejected", ignore_errors=True)
        return exported(fixed, note)


def _check(
    request: PipelineRequest,
    components: Mapping[str, ComponentOutcome],
    eager: Rehearsal,
    output: Path,
) -> CheckOutcome:
    """Run the pipeline of engines, and compare it with what the eager one did."""
    made = [engine for part in components.values() for engine in part.engines.values()]
    if not made:
        return CheckOutcome(outcome="not run", reasons=("no component is an engine",))
    try:
        how = {"threads": request.base.threads, "allow_code": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EnginecastWarning)  # the outcome says it
            pipe = with_engines(output, components, **how)
            found = generate(pipe, eager.wish)
    except MissingError as error:
        return CheckOutcome(outcome="not run", reasons=(error.message,))
    except EnginecastError as error:
        return CheckOutcome(outcome="rejected", reasons=(error.message,))
    allowed = request.max_latents
    return whole_outcome(eager.made, eager.noisy, found, made, eager.dtype, allowed)
