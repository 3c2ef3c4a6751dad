"""What the user asks for (`ExportRequest`), and what it means for each engine (`EngineConfig`).

Each option of `enginecast export` stands here once, or beside what it is for (`ComponentOptions`,
the targets' options); see `enginecast.option_fields`.  Importing it does not import torch.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from enginecast.cache.encoders.request import layers_in, named_outputs, offer, part_of
from enginecast.capture.inputs.given import (
    ProfileRange,
    given_prompts,
    parse_dynamic,
    parse_values,
    require_inputs,
)
from enginecast.capture.sources.huggingface.component_options import DEFAULTS, ComponentOptions
from enginecast.errors import InputError, SpecError, UsageError
from enginecast.exporters.registry import DEFAULT, OPTIONS, TARGETS, options_of, target_of
from enginecast.exporters.registry import REGISTRY as REGISTERED
from enginecast.option_fields import (
    Option,
    parse_target_options,
    require_choices,
    said_target_option,
    takes_old_names,
)
from enginecast.passes.ir.spec import spelled_out
from enginecast.passes.presets import QUANTIZED, require_precision
from enginecast.passes.presets import computed_dtype as dtype_of_preset
from enginecast.passes.registry import build, require_passes
from enginecast.runtime.bundle.manifest import Precision
from enginecast.runtime.sessions.session import PROVIDERS
from enginecast.verification.accepted_excess import parse_accept

if TYPE_CHECKING:
    from torch import nn

    from enginecast.capture.tracing.attempt import Fallback
    from enginecast.exporters.target import Target
    from enginecast.passes.ir.base import Pass
    from enginecast.passes.ir.quantization_plan import QuantizationPlan

_KEEPS = "fp8-storage"
"""The precision in which weights of a checkpoint in fp8 stay what they are."""
_ARCH = re.compile(r"sm\d{2,3}a?|gfx\d{3,4}[a-z]?")
_planned = partial(Option, commands=("export", "inspect"))
_exported = partial(Option, heading="Verification", commands=("export",))

SKIP_FIELDS: Mapping[str, tuple[str, str]] = {
    "unify-dtype": ("keep", "keep_classes"),
    "plan-fp8": ("skip_modules_pattern", "skip_modules_classes"),
    "plan-int8": ("skip_modules_pattern", "skip_modules_classes"),
}
"""Passes that leave modules alone on request, and the options that say so."""


def parse_max_error(text: str) -> float:
    """The error of a row that a text allows: "0.02", or a cosine, "cos=0.997".

    An error relative to the row's length of e leaves a cosine of sqrt(1 - e^2) at least.
    """
    kind, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if kind not in ("", "cos") or not 0 < value < 1:
        raise UsageError(
            f"--max-error {text}: expected a number between 0 and 1, or a cosine: cos=0.997"
        )
    return value if not kind else math.sqrt(1 - value**2)


@takes_old_names
@dataclass(frozen=True)
class ModelOptions:
    """What a user says of a model, its inputs and its capture."""

    HEADING: ClassVar[str] = "Model and inputs"

    random_weights: Annotated[
        int | None, Option("Use random weights, for a folder with only a config.", "SEED")
    ] = None
    allow_code: Annotated[bool, Option("Allow files that can run code when loaded.")] = False
    inputs: Annotated[Path | None, Option("Inputs (safetensors).", "FILE")] = None
    """Examples by name."""
    prompts: Annotated[Path | None, Option("Prompts, one per line.", "FILE")] = None
    """They join the verification inputs."""
    dynamic: Annotated[
        Sequence[str],
        Option(
            "Range of a dimension; NAME:DIM=SYMBOL[:MIN..MAX] ties dimensions; repeatable.",
            "NAME:DIM=MIN..MAX[/STEP]",
        ),
    ] = ()
    values: Annotated[
        Sequence[str], Option("Range of an integer input; repeatable.", "NAME=MIN..MAX")
    ] = ()
    outputs: Annotated[
        Sequence[str], Option("Outputs to keep, in order; repeatable.", "NAME,...")
    ] = ()
    """Empty: all."""
    for_pipeline: Annotated[
        str | None,
        Option(
            "Make what a diffusion pipeline reads of its text encoder: flux:text_encoder_2.",
            "PIPELINE[:PART]",
            flag="for",
            commands=("export",),
        ),
    ] = None
    """A row of `cache/encoders/pipelines.json`: outputs, longest text, and the form of texts."""
    hidden_states: Annotated[
        Sequence[int | str],
        Option("Add a hidden state as an output; repeatable.", "INDEX", flag="hidden-state"),
    ] = ()
    keep_quantized: Annotated[
        bool,
        _planned(
            "Keep fp8 weights and their scales as the checkpoint has them.",
            heading="Precision and passes",
        ),
    ] = False
    """Else they are widened, and quantized anew where the precision says so."""
    thorough: Annotated[
        bool, _exported("Verify on the longest texts even if the model is large.")
    ] = False
    fallback: Annotated[
        "Fallback | None",
        _planned(
            "How far to go if torch.export refuses: none, rewrite, specialise, torchscript.",
            "NAME",
            choices=("none", "rewrite", "specialise", "torchscript"),
            heading="Verification",
        ),
    ] = None
    """None: as far as "torchscript", which then needs a user's consent."""
    component: ComponentOptions = DEFAULTS
    """Variant, entry and sizes, for the folder of a component of a diffusion pipeline."""
    allow_unverified_branches: Annotated[
        bool, _exported("Publish even if no input reaches some path of a branch.")
    ] = False
    kv_cache: Annotated[
        bool,
        Option(
            "For text generation: make the engine a step of `generate`, with the KV cache as inputs"
            " and outputs; and one of the encoder, where there is one."
        ),
    ] = False
    stateful: Annotated[
        bool, Option("Make the buffers that the model writes to inputs and outputs.")
    ] = False

    def check(self) -> None:
        """Refuse files that cannot be read, and texts that are in no grammar; without torch.

        Raises:
            UsageError: names the option.
        """
        if self.inputs is not None:
            require_inputs(self.inputs)
        if self.prompts is not None:
            given_prompts(self.prompts)
        for text in self.dynamic:
            list(map(parse_dynamic, text.split(",")))
        for text in self.values:
            parse_values(text)

    def __post_init__(self) -> None:
        require_choices(self)
        if self.for_pipeline is not None and self.kv_cache:
            raise UsageError("--for does not go with --kv-cache, whose engine continues texts")
        if self.stateful and self.kv_cache:
            raise UsageError("--stateful does not go with --kv-cache, whose state is the cache")

    @property
    def furthest(self) -> "Fallback":
        """How far to go if torch.export refuses."""
        return self.fallback or "torchscript"


@dataclass(frozen=True)
class EngineConfig:
    """What was decided for one engine."""

    target: str
    precision: Precision
    """What the engine computes in, and eager beside it: fp32, fp16 or bf16."""
    pipeline: str
    device: str
    """What the engine is for."""
    runs_here: bool
    """Whether this machine has a provider that runs it."""
    arch: str | None = None
    """GPU architecture that the user named, such as sm90; goes into the manifest."""
    quantized: str = ""
    """The precision as it was asked for, when it quantizes, such as "int8-storage"; else empty."""
    plan: Path | None = None
    """A quantization plan that was given."""
    options: Any = None
    """An instance of the target's own `options`; None: it has none."""
    also: tuple[str, ...] = ()
    """Targets of further engines in the bundle, made from the same program."""
    keep: tuple[str, ...] = ()
    """Modules whose outputs the engine file gives, too."""

    @property
    def engines(self) -> tuple["EngineConfig", ...]:
        """One for each engine of the bundle, this one first."""
        return (self, *(_beside(self, target) for target in self.also))

    @property
    def lowering(self) -> str:
        """The passes that follow the pipeline: those of the target, as a spec."""
        return target_of(self.target).lowering(self.device, arch=self.arch, options=self.options)

    @property
    def asked_precision(self) -> str:
        """The precision as a user calls it."""
        return self.quantized or self.precision

    @property
    def providers(self) -> tuple[str, ...]:
        return PROVIDERS[self.device]

    @property
    def engine_providers(self) -> tuple[str, ...]:
        """Providers that the engine is known to suit."""
        return target_of(self.target).providers(self.precision, self.device)


IDS = "input_ids"


def _as_read_by(pipeline: str, model: "str | nn.Module", options: ModelOptions) -> ModelOptions:
    """The options with the outputs and the longest text that a pipeline reads; what they say
    themselves stays.

    Raises:
        UsageError: no such pipeline, or the model is no folder of a text encoder.
    """
    part = part_of(pipeline)
    config = Path(model) / "config.json" if isinstance(model, str) else None
    if config is None or not config.is_file():
        raise UsageError(
            f"--for {pipeline}: expected the folder of its text encoder, {part.model}",
            hint="Export the component: MODEL is the folder with its config.json and weights.",
        )
    dynamic, outputs = tuple(options.dynamic), options.outputs
    if part.max_length is not None and not any(text.startswith(f"{IDS}:1=") for text in dynamic):
        dynamic = (*dynamic, f"{IDS}:1=1..{part.max_length}")
    if not outputs and not options.hidden_states:
        try:
            said = json.loads(config.read_bytes())
        except ValueError:
            said = {}  # which opening the model refuses
        outputs = named_outputs(part.outputs, layers_in(said))
    return replace(options, outputs=outputs, dynamic=dynamic)


@dataclass(frozen=True)
class ExportRequest:
    """What a user asks for: a model, and what to make of it."""

    HEADING: ClassVar[str] = "Precision and passes"

    model: "str | nn.Module"
    """A Hugging Face folder, `package.module:factory`, a `.pt2` file, or a module."""
    output: str | os.PathLike[str] = ""
    """The bundle's folder; it must not exist."""
    target: Annotated[
        str,
        _planned(
            f"Runtime for the engine: {', '.join(TARGETS)}, or a plugin's.",
            "NAME",
            heading="Target",
        ),
    ] = DEFAULT
    """"aotinductor": machine code; "torchscript": the model as it is, without passes."""
    precision: Annotated[
        str | None,
        Option(
            "A preset pipeline: fp32 (default), fp16, bf16, mixed; int8, fp8; int8-storage,"
            " int4-storage, fp8-storage, for TensorRT nvfp4-storage, mxfp8-storage (weights only).",
            "NAME",
        ),
    ] = None
    """Also what is measured; "mixed" is fp16 with the residual stream in fp32.  None: fp32, or what
    the pipeline's unify-dtype or the plan says."""
    pipeline: Annotated[
        str | None,
        Option("Use these passes instead of a preset; '@fp16,my-pass' adds to one.", "SPEC"),
    ] = None
    device: Annotated[
        str | None, Option("Device the engine runs on.", "cpu|cuda", heading="Target")
    ] = None
    """What the engine is for; None: the CPU, or a GPU for a precision that the CPU provider lacks,
    and for a quantized one or machine code with `arch`."""
    arch: Annotated[
        str | None, _planned("GPU architecture, such as sm90.", "NAME", heading="Target")
    ] = None
    skip_modules_pattern: Annotated[
        Sequence[str], Option("Modules to leave unchanged (regex); repeatable.", "RE")
    ] = ()
    """They stay in fp32, or are not quantized."""
    skip_modules_classes: Annotated[
        Sequence[str], Option("Module classes to leave unchanged; repeatable.", "NAME")
    ] = ()
    max_error: Annotated[
        float | None,
        _planned(
            "Error limit per output row, for quantization or a 16-bit engine: relative (0.02) or"
            " least cosine (cos=0.997).",
            "X",
            parse=parse_max_error,
        ),
    ] = None
    """Largest relative L2 error of a row of an output: a quantization plan stays within it, and no
    other engine may exceed it either, whatever eager's own error is."""
    optimize: Annotated[
        Literal["speed", "size"],
        _planned(
            "What a quantization plan is for: speed keeps layers that no form makes faster, size"
            " stores their weights in few bits.",
            "speed|size",
            choices=("speed", "size"),
            kind=str,
        ),
    ] = "speed"
    """A form that is slower than what it replaces is taken for its size alone."""
    plan: Annotated[
        str | os.PathLike[str] | None,
        _planned("Use this quantization plan (JSON).", "FILE", kind=Path | None),
    ] = None
    also: Annotated[
        Sequence[str],
        _exported("Add a second engine: onnxruntime or openvino.", "NAME", heading="Target"),
    ] = ()
    target_options: Annotated[
        Any,
        _planned(
            "Option of the target; repeatable; see --help-target.",
            "KEY=VALUE",
            heading="Target",
            flag="target-option",
            kind=list[str] | None,
        ),
    ] = None
    """An instance of the target's own `options`, such as `TensorRTOptions`, or texts KEY=VALUE;
    None: the defaults."""
    options: ModelOptions = field(default_factory=ModelOptions)
    """Weights, inputs, dynamic dimensions."""
    example: Any = None
    """Inputs, by name or by position, or recorded calls, for a module."""
    threads: Annotated[int | None, _exported("Threads per operator.", "N", least=1, most=4096)] = (
        None
    )
    """When the engine is verified."""
    overwrite: Annotated[bool, _exported("Replace an output that exists.", heading="")] = False
    command: str = ""
    """The command line, for the report; empty: asked from Python."""
    allow_fallback: Annotated[
        bool, _exported("Accept engines that lack something that was asked for.")
    ] = False
    drop_guilty: Annotated[bool, _exported("Skip rewrites that lose too much accuracy.")] = False
    keep_output: Annotated[
        Sequence[str],
        _exported(
            "Let the engine file give what leaves this module, too, so that no kernel computes"
            " across its end; repeatable.",
            "MODULE",
        ),
    ] = ()
    """Where a runtime fuses wrongly.  `run` does not return it."""
    accept: Annotated[
        Sequence[str],
        _exported(
            "Accept an error beyond its limit, and record it; repeatable.", "OUTPUT[/CASE][=X]"
        ),
    ] = ()

    def __post_init__(self) -> None:
        if isinstance(self.target_options, list | tuple):
            made = _target_options(self.target, self.target_options)
            object.__setattr__(self, "target_options", made)
        if self.options.for_pipeline is not None:
            made = _as_read_by(self.options.for_pipeline, self.model, self.options)
            object.__setattr__(self, "options", made)
        # What the profiles of an engine leave out, nobody can run.
        for name, number, least, most in getattr(self.target_options, "sizes", tuple)():
            text = (
                f"{name}:{number}={least}..{most}" if least < most else f"{name}:{number}={least}"
            )
            dynamic = (*self.options.dynamic, ProfileRange(text))
            object.__setattr__(self, "options", replace(self.options, dynamic=dynamic))

    @property
    def offer(self) -> str:
        """A line that offers what the pipeline around a model's folder reads; empty: nothing."""
        asked = self.options.outputs or self.options.hidden_states or self.options.kv_cache
        if self.options.for_pipeline is not None or asked or not isinstance(self.model, str):
            return ""
        return offer(self.model, "exports")

    def check(self) -> None:
        """Refuse what is wrong whatever the model is: all of it that can be told without torch.

        Raises:
            UsageError, InputError: an unknown name, or a file that is not there.
            SpecError: the pipeline is not in the grammar, or names an unknown pass.
        """
        require_choices(self)
        for text in self.accept:
            parse_accept(text)
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"threads: expected at least 1, got {self.threads}")
        if self.device not in (None, "cpu", "cuda"):
            raise UsageError(f"--device {self.device}: expected cpu or cuda")
        if self.arch is not None and not _ARCH.fullmatch(self.arch):
            expected = "a GPU architecture such as sm90 or gfx942"
            raise UsageError(f"--arch {self.arch}: expected {expected}")
        for name in (self.target, *self.also):
            REGISTERED.require(name)
        if self.precision is not None and self.target in TARGETS:
            require_precision(self.precision)
        if self.pipeline is not None:
            require_passes(self.pipeline)
        if self.plan is not None and not Path(self.plan).is_file():
            raise InputError(f"--plan {self.plan}: cannot be read: no such file")
        self.options.check()

    def resolve(self) -> EngineConfig:
        """Decide the export, or say why it cannot be.

        Raises:
            UsageError: a target, precision or device that does not exist, is not built, or does
                not fit.
            SpecError: the pipeline cannot be read.
            InputError: the plan cannot be read.
            PassError: a GPU architecture lacks what is planned.
            MissingError: a device that was asked for and is not there.
        """
        from enginecast.passes.quantize.plan.file import read_plan
        from enginecast.passes.quantize.plan.planning import PlanPass, check_arch

        self.check()
        target = target_of(self.target)
        options = self.options
        turns = "--kv-cache" if options.kv_cache else "--stateful" if options.stateful else ""
        if turns and "program" not in target.takes:
            raise UsageError(
                f"{turns} does not fit --target {target.name}", hint="Use --target onnxruntime."
            )
        self._check_engines(target)
        if "program" not in target.takes:
            return self._without_passes(target)
        given = None if self.plan is None else read_plan(Path(self.plan))
        passes = build(self.pipeline or "", target.pipeline)
        computed = None if self.pipeline is None else _checked_dtype(passes)
        is_own = self.pipeline is not None and self.pipeline == spelled_out(  # it names no preset
            self.pipeline, target.pipeline
        )
        made = _quantized_by(passes)
        asked = dtype_of_preset(self.precision) if self.precision is not None else computed
        if computed is not None and asked not in (computed, made):
            raise UsageError(
                f"--precision {self.precision} does not fit the pipeline, which computes in"
                f" {made or computed}",
                hint="Leave --precision out, or change the pipeline's unify-dtype.",
            )
        usual = _KEEPS if options.keep_quantized else "fp32"
        name = self.precision or computed or (given.format if given is not None else usual)
        arch = self.arch or (given.arch if given is not None and given.arch != "cpu" else None)
        quantized = name if name in QUANTIZED else made
        device = self.device or target.default_device(name if is_own else quantized or name, arch)
        target.check_device(device)
        self._check_quantized(quantized, given, is_own=is_own)
        if turns and quantized:
            raise UsageError(
                f"{turns} does not go with --precision {quantized}: consecutive calls of a"
                " quantized engine are not compared yet",
                hint="Use --precision fp32, fp16 or bf16.",
            )
        if quantized and device == "cuda" and not is_own:
            target.pipeline(quantized, device=device)  # what does not go together, on no GPU does
            arch = arch or target.arch_of(self.target_options)
            arch = arch or _arch_of_this_machine(quantized, target.architectures)
        presets = partial(
            target.pipeline,
            device=device,
            arch=arch if device == "cuda" else None,
            max_error=self.max_error,
        )
        text = presets(name) if self.pipeline is None else spelled_out(self.pipeline, presets)
        text = self._for_size(text) if self.optimize == "size" else text
        text = self._with_skips(text)
        for pass_ in build(text):
            if isinstance(pass_, PlanPass):
                check_arch(pass_.options)  # before the work, and not after the capture
        is_extended = self.pipeline is not None and not is_own
        precision = _checked_dtype(build(text)) if is_extended else target.computes(name, device)
        return EngineConfig(
            self.target,
            cast(Precision, precision),  # `pipeline` refused any other
            text,
            device,
            target.runs_here(precision, device, asked=self.device is not None),
            arch,
            quantized,
            None if self.plan is None else Path(self.plan),
            self.target_options or (target.options and target.options()),
            tuple(self.also),
            tuple(self.keep_output),
        )

    def _check_engines(self, target: "Target") -> None:
        """Refuse options of another target, and engines that do not go together."""
        from enginecast.exporters.target import Target

        options = self.target_options
        if options is not None and not (target.options and isinstance(options, target.options)):
            for owner in REGISTERED.sorted_out(Target)[0].values():
                if owner.options is type(options):
                    raise UsageError(
                        f"--target {target.name} takes no options of --target {owner.name}",
                        hint=f"They go with --target {owner.name} alone.",
                    )
            raise UsageError(f"--target {target.name} takes no {type(options).__name__}")
        if self.also and self.keep_output:
            raise UsageError("--keep-output does not go with --also: it is for one engine")
        if len(set(self.also)) < len(self.also):
            raise UsageError(f"--also {self.also[-1]}: given twice")
        for other in self.also:
            if other not in REGISTERED.known() or not target_of(other).is_second:
                fit = [name for name in TARGETS if target_of(name).is_second]
                raise UsageError(f"--also {other}: expected {' or '.join(fit)}")
            if not target.accepts_second or other == target.name:
                fit = [name for name in TARGETS if target_of(name).accepts_second]
                fit = [name for name in fit if name != other]
                raise UsageError(
                    f"--also {other} does not fit --target {target.name}",
                    hint=f"It puts a second engine beside that of --target {' or '.join(fit)}.",
                )

    def _check_quantized(
        self, quantized: str, given: "QuantizationPlan | None", *, is_own: bool
    ) -> None:
        """Refuse options of a plan where there is none."""
        if self.options.keep_quantized and (quantized != _KEEPS or given is not None):
            asked = "--plan" if given is not None else f"--precision {quantized or 'fp32'}"
            raise UsageError(
                f"--keep-quantized does not go with {asked}: it stores weights in fp8, as they are",
                hint=f"Use --precision {_KEEPS}, or leave --keep-quantized out.",
            )
        if self.options.keep_quantized and self.max_error is not None:
            raise UsageError("--max-error does not go with --keep-quantized, which rounds nothing")
        if self.max_error is not None and is_own:
            raise UsageError(
                "--max-error goes with --precision, and the pipeline is your own",
                hint="For a plan in a pipeline, write plan-int8{max_error=0.05}.",
            )
        if self.max_error is not None and not 0 < self.max_error < 1:
            raise UsageError(
                f"--max-error {self.max_error:g}: expected a number between 0 and 1, or a cosine:"
                " cos=0.997"
            )
        if self.optimize == "size" and (not quantized or is_own):
            raise UsageError(
                "--optimize size is for a quantization plan, and none is made here",
                hint=f"It goes with --precision {', '.join(QUANTIZED)}; in a pipeline, write"
                " plan-int8{min_gain=0}.",
            )
        formats = {QUANTIZED[quantized].format} if quantized else set()
        if given is not None and given.format not in formats:
            other = f"--precision {quantized}" if quantized else "a pipeline that does not quantize"
            raise UsageError(
                f"--plan: a plan of {given.format} does not fit {other}",
                hint=f"Use --precision {given.format}, or leave --precision out.",
            )

    def _without_passes(self, target: "Target") -> EngineConfig:
        """The model as it is: passes rewrite programs of torch.export, and here there is none."""
        precision = self.precision or "fp32"
        text = target.pipeline(precision)
        skips = (*self.skip_modules_pattern, *self.skip_modules_classes)
        unfit = "--pipeline" if self.pipeline is not None else "--skip-modules-..." if skips else ""
        unfit = unfit or ("--keep-output" if self.keep_output else "")
        if unfit:
            raise UsageError(
                f"{unfit} does not fit --target {target.name}: passes rewrite programs of"
                " torch.export, and this engine is made from the module itself",
                hint="Leave it out, or use --target onnxruntime.",
            )
        device = self.device or target.default_device(precision, self.arch)
        here = target.runs_here(precision, device, asked=self.device is not None)
        kind = cast(Precision, precision)
        return EngineConfig(target.name, kind, text, device, here, self.arch)

    @staticmethod
    def _for_size(text: str) -> str:
        """The pipeline with plans that take forms which are not faster."""
        from enginecast.passes.ir.options import spec_from_pass
        from enginecast.passes.ir.spec import render
        from enginecast.passes.quantize.plan.planning import PlanPass

        passes = (
            replace(pass_, min_gain=0.0) if isinstance(pass_, PlanPass) else pass_
            for pass_ in build(text)
        )
        return render([spec_from_pass(pass_) for pass_ in passes])

    def _with_skips(self, text: str) -> str:
        """The pipeline with --skip-modules-pattern and --skip-modules-classes in its passes."""
        from enginecast.passes.ir.options import spec_from_pass
        from enginecast.passes.ir.spec import render

        skips = (tuple(self.skip_modules_pattern), tuple(self.skip_modules_classes))
        if not any(skips):
            return text
        for pattern in self.skip_modules_pattern:
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"--skip-modules-pattern {pattern}: not a regular expression: {error}"
                ) from error
        passes = build(text)
        names = {pass_.name for pass_ in passes} & set(SKIP_FIELDS)
        # A module that is not quantized is computed in the dtype that all else is computed in.
        names = names - {"unify-dtype"} or names
        if not names:
            raise UsageError(
                "--skip-modules-pattern and --skip-modules-classes keep modules in fp32, and this"
                " pipeline computes everything in fp32",
                hint="They go with --precision fp16, bf16, mixed, int8 or fp8.",
            )
        chosen = []
        for pass_ in passes:
            if pass_.name in names:
                more = zip(SKIP_FIELDS[pass_.name], skips, strict=True)
                added = {name: (*getattr(pass_, name), *new) for name, new in more}
                pass_ = replace(pass_, **added)
            chosen.append(spec_from_pass(pass_))
        return render(chosen)


def _target_options(target: str, texts: Sequence[str]) -> Any:
    """The options of a target, from texts; None: none is given.

    Raises:
        UsageError: they do not fit the target.
    """
    owner = options_of(target)
    if owner is None and texts:
        have = ", ".join(name for name in OPTIONS if name != target)
        raise UsageError(
            f"{said_target_option(texts[0])}: --target {target} has no options",
            hint=f"Targets with options: {have}.",
        )
    return parse_target_options(owner, texts, target) if texts else None


def _beside(config: EngineConfig, target: str) -> EngineConfig:
    """A second engine runs on its one device; or where the first does not: on any GPU, and on the
    CPU where that can.
    """
    second = target_of(target)
    second.check_precision(config.asked_precision)
    config = replace(config, arch=None, options=None, also=(), target=target)
    if second.only_device is not None:
        here = second.runs_here(config.precision, second.only_device, asked=False)
        return replace(config, device=second.only_device, runs_here=here)
    here = second.runs_here(config.precision, "cuda", asked=False)
    device = "cuda" if here or config.precision == "bf16" else "cpu"
    return replace(config, device=device, runs_here=here or device == "cpu")


def _quantized_by(passes: "Sequence[Pass]") -> str:
    """The precision whose plan a pipeline carries out; empty when it does not quantize."""
    from enginecast.passes.quantize.plan.planning import PlanPass

    names = {pass_.name for pass_ in passes}
    plans = [pass_ for pass_ in passes if isinstance(pass_, PlanPass)]
    fitting = [name for name, kind in QUANTIZED.items() if kind.rewrites in names]
    for name in fitting:
        defaults = {"mode": "w8a8", "bits": 8, "block": 0}
        options = {**defaults, **QUANTIZED[name].options}
        if any(all(getattr(p, k, defaults[k]) == v for k, v in options.items()) for p in plans):
            return name
    return next(iter(fitting), "")


def computed_dtype(passes: "Sequence[Pass]") -> str:
    """What a program computes in after these passes: "fp16", "bf16", or else "fp32"."""
    from enginecast.passes.unify_dtype import UnifyDtype

    found = [pass_.to for pass_ in passes if isinstance(pass_, UnifyDtype)]
    return found[-1] if found and found[-1] != "fp64" else "fp32"


def _checked_dtype(passes: "Sequence[Pass]") -> str:
    from enginecast.passes.unify_dtype import UnifyDtype

    if any(isinstance(pass_, UnifyDtype) and pass_.to == "fp64" for pass_ in passes):
        raise SpecError("unify-dtype{to=fp64} is for references, not for engines")
    return computed_dtype(passes)


def _arch_of_this_machine(precision: str, architectures: str) -> str:
    import torch

    if not torch.cuda.is_available():
        raise UsageError(
            f"--precision {precision} for a GPU depends on its architecture",
            hint=f"Name it: --arch {architectures}, ...",
        )
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"
