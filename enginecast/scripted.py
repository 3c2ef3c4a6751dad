"""From a MODEL argument to what a TorchScript export needs: inputs, cases, reference, places.

There is no program here.  So nothing proves what sizes an engine takes: the ranges in its manifest
are those that it was compared over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.examples import WORK, Case, example_sizes, sample
from enginecast.capture.given import given_prompts
from enginecast.capture.inputs import InputSpec
from enginecast.capture.narrowing import fix, named_dims
from enginecast.capture.outputs import OutputSpec, run_named
from enginecast.capture.quiet import quiet_torch
from enginecast.capture.recorder import Recorder
from enginecast.capture.shapes import Range
from enginecast.capture.source import Source
from enginecast.capture.wanted import Wanted, parse_wanted
from enginecast.cases import SEED, choose_cases
from enginecast.errors import CaptureError, EnginecastError, UsageError
from enginecast.model_inputs import input_specs
from enginecast.prepare import ModelOptions
from enginecast.steps import Steps
from enginecast.verify.eager_fp64 import fp64_outputs
from enginecast.verify.floor import make_reference
from enginecast.verify.reference import Reference


@dataclass(frozen=True)
class ScriptModel:
    """A model that is going to be scripted and traced."""

    source: Source
    inputs: tuple[InputSpec, ...]
    """With the ranges that the cases cover."""
    cases: tuple[Case, ...]
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def example(self) -> dict[str, Tensor]:
        """What is traced: sizes of two or more, pairwise different."""
        return sample(self.inputs, example_sizes(self.inputs), SEED)

    @property
    def symbols(self) -> dict[str, Range]:
        return {
            dim.name: (dim.minimum, dim.maximum)
            for spec in self.inputs
            for dim in spec.dims
            if dim.name is not None
        }

    @property
    def mask_input(self) -> str | None:
        masks = [spec.name for spec in self.inputs if spec.kind == "attention_mask"]
        return masks[0] if masks else None

    def forward(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a module and name its outputs."""
        return run_named(module, inputs, self.wanted)

    def sizes(self, case: Mapping[str, Any]) -> dict[str, int]:
        """The size of each symbol in a case, whose inputs have a shape."""
        return {
            dim.name: case[spec.name].shape[axis]
            for spec in self.inputs
            for axis, dim in enumerate(spec.dims)
            if dim.name is not None
        }


def prepare_script(
    source: Source, options: ModelOptions, steps: Steps, extra: Sequence[Case] = ()
) -> ScriptModel:
    """Choose the inputs and the cases; every dimension that varies is there in three sizes.

    Args:
        source: the model.
        options: what the user said of it.
        extra: cases that take ways through the model that the others do not.

    Raises:
        UsageError: the model is a program already, or options do not fit.
        CaptureError: a loop of the model does not end.
    """
    if source.given_program() is not None:
        raise UsageError(
            f"{source.name} is a program of torch.export, and TorchScript is made of modules",
            hint="Use --target onnxruntime.",
        )
    prompts = None if options.prompts is None else given_prompts(options.prompts)
    specs, given = input_specs(source, options.inputs, options.dynamic)
    specs = _that_run(source, specs, steps)
    parameters = sum(source.weight_elements().values())
    work = 0 if options.thorough else parameters
    cases = choose_cases(source, specs, given, prompts, work, steps)
    cases = (*cases, *_largest(specs, parameters), *extra)
    model = ScriptModel(source, specs, cases, parse_wanted(options.outputs, options.hidden_states))
    return replace(model, inputs=_covered(model))


def _that_run(source: Source, specs: tuple[InputSpec, ...], steps: Steps) -> tuple[InputSpec, ...]:
    """Fix the dimensions that the model does not take in other sizes, unless the user asked."""
    module = source.eager(torch.float32)
    for name, dim in named_dims(specs).items():
        others = [size for size in (dim.minimum, dim.size + 1) if size <= dim.maximum]
        if dim.asked or all(_runs(module, specs, name, size) for size in others):
            continue
        fitted = fix(specs, (name,))
        assert fitted is not None  # nobody asked for this dimension
        specs = fitted.specs
        for note in fitted.notes:
            steps.say(note)
    return specs


def _runs(module: nn.Module, specs: tuple[InputSpec, ...], name: str, size: int) -> bool:
    inputs = sample(specs, {**example_sizes(specs), name: size}, SEED)
    try:
        with torch.no_grad(), quiet_torch(), Recorder(module, inputs):
            module(**inputs)
    except EnginecastError:
        raise
    except Exception:  # the model's own code, which may not take this size
        return False
    return True


def reference_of_script(model: ScriptModel, dtype: str) -> tuple[Reference, tuple[str, ...]]:
    """What the model itself gives, in fp64 and in `dtype`, and notes on it.

    Raises:
        VerificationError: eager does not run.
    """
    notes: list[str] = []

    def exact(cases: Sequence[Any]) -> Mapping[str, Mapping[str, Any]]:
        outputs, note = fp64_outputs(model.source.eager, cases, model.forward)
        notes.extend([note] if note else [])
        return outputs

    reference = make_reference(
        None,
        model.source.eager,
        model.cases,
        dtype=dtype,
        names=(),
        forward=model.forward,
        mask_input=model.mask_input,
        exact=exact,
    )
    return reference, tuple(notes)


def output_specs(
    model: ScriptModel, reference: Reference, dtypes: Mapping[str, torch.dtype]
) -> tuple[OutputSpec, ...]:
    """Shapes of the outputs over all cases, in symbols where a size goes with one.

    Args:
        dtypes: of the engine's outputs, by name, in order.

    Raises:
        CaptureError: an output has another rank in another case.
    """
    sizes = [model.sizes(case.inputs) for case in reference.cases]
    specs = []
    for name, dtype in dtypes.items():
        shapes = [case.outputs[name].shape for case in reference.cases]
        if len({len(shape) for shape in shapes}) > 1:
            raise CaptureError(
                f"the output {name!r} has {sorted({len(shape) for shape in shapes})} dimensions,"
                " by the input, and an engine's outputs have one number of them",
                hint="Return it in one rank.",
            )
        columns = zip(*shapes, strict=True)
        dims = tuple(_dim(tuple(c), sizes, f"{name}_{axis}") for axis, c in enumerate(columns))
        specs.append(OutputSpec(name, dtype, dims))
    return tuple(specs)


def _dim(found: tuple[int, ...], sizes: Sequence[Mapping[str, int]], other: str) -> int | str:
    """A number, a symbol, a multiple of one, or a name of its own."""
    for symbol in sizes[0]:
        given = tuple(case[symbol] for case in sizes)
        if len(set(given)) == 1:
            continue
        if given == found:
            return symbol
        factor = found[0] // given[0]
        if factor > 1 and all(f == factor * g for f, g in zip(found, given, strict=True)):
            return f"{factor}*{symbol}"
    return found[0] if len(set(found)) == 1 else other


def _largest(specs: Sequence[InputSpec], parameters: int) -> list[Case]:
    """One case for each dimension at its largest, or as large as seconds of work allow."""
    sizes = example_sizes(specs)
    dims = {dim.name: dim for spec in specs for dim in spec.dims if dim.name is not None}
    cases = []
    for index, (name, dim) in enumerate(dims.items()):
        size = dim.maximum
        others = 1
        for other, taken in sizes.items():
            others *= taken if other != name else 1
        while not dim.asked and size > 2 * dim.size and size * others * parameters > WORK:
            size //= 2
        made = sample(specs, {**sizes, name: size}, SEED + 100 + index)
        cases.append(Case(f"largest {name}", made))
    return cases


def _covered(model: ScriptModel) -> tuple[InputSpec, ...]:
    """The inputs with the ranges that the cases span."""
    found = [model.sizes(case.inputs) for case in model.cases]
    return tuple(
        replace(
            spec,
            dims=tuple(
                dim
                if dim.name is None
                else replace(
                    dim,
                    minimum=min(sizes[dim.name] for sizes in found),
                    maximum=max(sizes[dim.name] for sizes in found),
                )
                for dim in spec.dims
            ),
        )
        for spec in model.inputs
    )
