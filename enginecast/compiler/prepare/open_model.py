"""From a MODEL argument to a source, and to the inputs that its program will take."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from enginecast.cache.encoders.request import part_of
from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.given import apply_dynamic, parse_dynamic, read_inputs
from enginecast.capture.inputs.specs import (
    InputSpec,
    captured_dtype,
    from_example,
    sizes_of,
    with_held_marks,
)
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.calls.recorded import with_sizes
from enginecast.capture.sources.generation.decoder import TEXT_GENERATION
from enginecast.capture.sources.generation.encoder_decoder import as_generating
from enginecast.capture.sources.huggingface.text_encoders import beside
from enginecast.capture.sources.huggingface.transformers_folder import TOKENIZER_FILES
from enginecast.capture.sources.open_source import open_source
from enginecast.capture.sources.stateful import with_state
from enginecast.capture.tracing.sizes.look_alikes import settle_sizes
from enginecast.compiler.prepare.cases import SEED, check_values
from enginecast.compiler.ranges.eager import Eager
from enginecast.compiler.request import EngineConfig, ModelOptions
from enginecast.errors import UsageError
from enginecast.passes.ir.quantization_plan import QuantizationPlan
from enginecast.passes.quantize.plan.file import check_model, read_plan
from enginecast.runtime.bundle.manifest import TextForm

FORM = TextForm.__struct_fields__
CALLS = 8
"""Of a model with state, in turn."""


def open_model(
    model: str | nn.Module,
    options: ModelOptions,
    example: Any = None,
) -> Source:
    """Open a MODEL, with the call of its class where that is known, and sizes of images in it.

    Raises:
        SourceError: the model cannot be read.
        UsageError: an option does not fit the kind of model.
    """
    source = open_source(
        model,
        random_weights=options.random_weights,
        allow_code=options.allow_code,
        example=example,
        component=options.component,
    )
    if options.for_pipeline is not None:
        part = part_of(options.for_pipeline)
        source.text_form = TextForm(**{name: getattr(part, name) for name in FORM})
        source.pads = part.padding_side
        for place in beside(Path(str(model))):
            if not source.tokenizer_files:
                files = (place / name for name in TOKENIZER_FILES)
                source.tokenizer_files = tuple(file for file in files if file.is_file())
    if options.kv_cache:
        return as_generating(source, TEXT_GENERATION)
    read = {} if options.inputs is None else read_inputs(options.inputs)
    source = with_sizes(source.as_called(), read)
    if not options.stateful:
        return source
    specs, given, _ = input_specs(source, options.inputs, ())
    return with_state(source, calls_in_turn(source, specs, given))


def given_plan(config: EngineConfig, source: Source) -> QuantizationPlan | None:
    """The quantization plan that a user gave for this model."""
    if config.plan is None:
        return None
    given = read_plan(config.plan)
    check_model(given, source.fingerprint(), config.plan)
    return given


class ModelInputs(NamedTuple):
    """The inputs that a program of a model will take."""

    specs: tuple[InputSpec, ...]
    given: dict[str, Tensor]
    """Those of a safetensors file."""
    notes: tuple[str, ...] = ()
    """What a user should know of their sizes."""


def input_specs(source: Source, inputs: Path | None, dynamic: Sequence[str]) -> ModelInputs:
    """The inputs that a program of `source` will take, and those of a safetensors file."""
    if source.given_program() is not None:
        return ModelInputs((), {})
    asked = [parse_dynamic(type(text)(part)) for text in dynamic for part in text.split(",")]
    if state := tuple(source.state_inputs()):
        specs, given, notes = input_specs(source.without_state(), inputs, ())
        given = {**given, **source.start} if given else {}
        return ModelInputs(apply_dynamic((*specs, *state), asked), given, notes)
    if inputs is None:
        parameters = source.forward_signature.parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            source.check_arguments(source.example(), "the example")
        specs, given = source.inputs(), {}
    elif source.takes_file:
        specs, given = _given_inputs(source, inputs)
    else:
        raise UsageError(
            f"--inputs {inputs} does not fit --kv-cache: its inputs belong together",
            hint="Give texts to generate from: --prompts FILE.",
        )
    options = source.of_part(asked, specs)
    if source.given_script() is not None:
        return ModelInputs(apply_dynamic(specs, options), given)
    settled = settle_sizes(source, specs, given or source.example(), options)
    return ModelInputs(settled.specs, given, settled.notes)


def calls_in_turn(
    source: Source, specs: Sequence[InputSpec], given: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Inputs of calls by which the state of a model is found: those of the user or the example
    first, and drawn ones of the same sizes.
    """
    known, sizes = dict(given) or source.example(), example_sizes(specs)
    if not known:
        return [sample(specs, sizes, SEED + n) for n in range(CALLS)]
    first = {spec.name: known[spec.name].to(spec.dtype) for spec in specs}
    sizes |= sizes_of(specs, first)  # which a buffer may share
    return [first, *(sample(specs, sizes, SEED + n) for n in range(1, CALLS))]


def _given_inputs(source: Source, file: Path) -> tuple[tuple[InputSpec, ...], dict[str, Tensor]]:
    fixed = source.call.fixed if source.call is not None else {}
    given = {name: tensor for name, tensor in read_inputs(file).items() if name not in fixed}
    for name, tensor in given.items():
        if not tensor.numel():
            raise UsageError(
                f"--inputs {file}: {name}: expected values, got shape {list(tensor.shape)}"
            )
    source.check_arguments(given, f"--inputs {file}")
    # A safetensors file sorts by name, and the model's forward does not.
    order = [name for name in source.forward_arguments if name in given]
    order += [name for name in given if name not in order]
    given = {name: given[name].to(captured_dtype(given[name])) for name in order}
    specs = source.require(
        from_example(given, source.config, no_batch=bool(fixed) or source.is_one_image)
    )
    specs = _as_taken(source, specs, given)
    check_values(given, specs, f"--inputs {file}")
    return specs, given


def _as_taken(
    source: Source, specs: tuple[InputSpec, ...], given: Mapping[str, Tensor]
) -> tuple[InputSpec, ...]:
    """The inputs; masks of tokens mark those of the given inputs alone, where eager takes no others
    but these.
    """
    held = with_held_marks(specs, given)
    if held is specs:
        return specs
    eager = Eager(source.eager())
    takes = [eager.takes(sample(each, example_sizes(each), SEED)) for each in (specs, held)]
    return held if takes == [False, True] else specs
