"""The verification inputs: corners of the ranges, the user's inputs, and inputs that take the other
paths of branches.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from enginecast.capture.control_flow.cover.branches import Unverified, cover
from enginecast.capture.control_flow.detect.recorder import record
from enginecast.capture.inputs.derive.decoder import prompt_inputs
from enginecast.capture.inputs.examples import (
    MARKED,
    Case,
    perturbed,
    sample,
    sizes_with,
    telling,
    verification_inputs,
)
from enginecast.capture.inputs.given import tokenize
from enginecast.capture.inputs.specs import InputSpec
from enginecast.capture.python.locations import (
    SourceLocation,
    Spot,
    is_library_code,
    is_model_code,
)
from enginecast.capture.sources.decoder import DecoderSource
from enginecast.capture.sources.encoder_decoder import CrossDecoderSource
from enginecast.capture.sources.source import Source
from enginecast.capture.tracing.answers.recorded_reads import Guard
from enginecast.capture.tracing.sizes.shapes import OtherSizes, SizeCheck
from enginecast.compiler.fit_values import error_of
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError, EnginecastError, UsageError
from enginecast.passes.ir.blocks import Block, all_blocks
from enginecast.passes.ir.edit import value
from enginecast.passes.ir.interpret import Run
from enginecast.passes.ir.source import module_path, source_line
from enginecast.runtime.size_checks import holds
from enginecast.verification.eager import shape_only_outputs
from enginecast.verification.runs import Runs

SEED = 0
"""Seed of the verification inputs, fixed so that equal calls give equal bundles."""
GIVEN = ("given ", "example ")
"""Prefixes of the names of cases whose values a person chose."""
DRAWS = 8
"""Most draws of one case until the model accepts it."""
FAILS = (EnginecastError, IndexError, RuntimeError, ValueError)
"""Errors that a program raises for values or sizes it does not accept."""


def choose_cases(
    source: Source,
    specs: Sequence[InputSpec],
    given: Mapping[str, Tensor],
    prompts: Sequence[str] | None,
    parameters: int,
    steps: Steps,
) -> tuple[Case, ...]:
    """The verification inputs, those of the user first.

    Args:
        specs: the inputs, with the ranges that the program kept.
        parameters: parameter count of the model, which limits the work; 0: no limit.

    Raises:
        UsageError: the user's values do not fit the inputs.
    """
    cases = verification_inputs(specs, SEED, parameters=parameters)
    if given:
        cases = [Case("given inputs", dict(given)), *cases]
    cases = [*_example_case(source, specs, steps), *_recorded_cases(source, specs), *cases]
    if prompts is not None and not isinstance(source, CrossDecoderSource):  # its encoder reads them
        # A step of a language model is fed other rows than a tokenizer pads.
        side = "right" if isinstance(source, DecoderSource) else source.padding_side
        encoded = tokenize(prompts, source, specs, side)
        if isinstance(source, DecoderSource):
            ids, mask = encoded[source.ids], encoded[source.mask]
            encoded = prompt_inputs(source, specs, ids, mask)
        lacking = [spec.name for spec in specs if spec.name not in encoded]
        if lacking:
            raise UsageError(
                f"--prompts gives no values for {', '.join(lacking)}",
                hint="Give all inputs as tensors: --inputs FILE.safetensors.",
            )
        cases = [Case("given prompts", encoded), *cases]
    return tuple(_within(specs, case) for case in cases)


def with_other_sizes(
    specs: Sequence[InputSpec], cases: Sequence[Case], others: Sequence[OtherSizes]
) -> tuple[Case, ...]:
    """Add one case for each size that the guards exclude and that takes another path."""
    added = []
    for other in others:
        place = f" ({other.place})" if other.place else ""
        inputs = sample(specs, sizes_with(specs, other.sizes), SEED)
        sizes = ", ".join(f"{name} {size}" for name, size in other.sizes.items())
        added.append(Case(f"sizes that the code tells apart: {sizes}{place}", inputs))
    return (*cases, *added)


def allowed(
    specs: Sequence[InputSpec], cases: Sequence[Case], checks: Sequence[SizeCheck]
) -> tuple[Case, ...]:
    """The cases whose sizes an engine accepts, and every case of the user's."""
    return tuple(
        case
        for case in cases
        if case.name.startswith(GIVEN)
        or all(holds(check.condition, sizes_of(specs, case)) for check in checks)
    )


def that_eager_takes(
    source: Source, program: ExportedProgram, specs: Sequence[InputSpec], cases: Sequence[Case]
) -> tuple[Case, ...]:
    """Redraw the random cases that eager raises an error for.

    This matters where values decide sizes, or must fit one another: a selection may have to return
    at least one row. A case that eager accepts in no draw stays as it is; one that was to have the
    marks of the example is left out, for their number may not fit its sizes.
    """
    is_bound = any(spec.marks or not spec.is_free for spec in specs)
    if not is_bound and not any(map(_sized_by_values, program.graph.nodes)):
        return tuple(cases)
    module = source.eager(torch.float32)
    taken = (case if case.name.startswith(GIVEN) else _taken(module, specs, case) for case in cases)
    return tuple(case for case in taken if case is not None)


def _sized_by_values(node: Node) -> bool:
    found = value(node)
    sizes = found.shape if isinstance(found, Tensor) else [found]
    return any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in sizes)


def _taken(module: nn.Module, specs: Sequence[InputSpec], case: Case) -> Case | None:
    sizes, is_marked = sizes_of(specs, case), case.name.startswith(MARKED)
    drawn = (
        sample(specs, sizes, SEED + DRAWS * 1000 + draw, is_marked=is_marked)
        for draw in range(DRAWS)
    )
    for inputs in chain([case.inputs], drawn):
        if not error_of(module, inputs):  # else at values that nobody promised it takes
            return case if inputs is case.inputs else Case(case.name, inputs)
    return None if is_marked else case


def sizes_of(specs: Sequence[InputSpec], case: Case) -> dict[str, int]:
    """Of a case, those that vary, by their names."""
    return {
        dim.name: size
        for spec in specs
        for dim, size in zip(spec.dims, case.inputs[spec.name].shape, strict=True)
        if dim.name is not None
    }


def in_example_values(cases: Sequence[Case], example: Mapping[str, Tensor]) -> tuple[Case, ...]:
    """The cases with their floats drawn from the example's values, for a model that accepts no
    others: its inputs may be probabilities.
    """
    generator = torch.Generator().manual_seed(SEED)

    def drawn(name: str, tensor: Tensor) -> Tensor:
        held = example.get(name)
        if held is None or not held.numel() or not tensor.is_floating_point():
            return tensor
        places = torch.randint(held.numel(), tensor.shape, generator=generator)
        return held.flatten()[places].to(tensor.dtype)

    return tuple(
        case
        if all(tensor is example.get(name) for name, tensor in case.inputs.items())
        else Case(case.name, {name: drawn(name, t) for name, t in case.inputs.items()})
        for case in cases
    )


def with_telling_values(
    runs: Runs,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    names: Sequence[str],
    told: Collection[str] = (),
    plain: Runs | None = None,
) -> tuple[Case, ...]:
    """Add one case for each output that is zero in all cases and need not be: agreement on zeros
    alone proves little.

    Args:
        runs: cached runs of the program in fp64.
        names: names of its outputs.
        told: outputs that are known to be nonzero in one of the cases.
        plain: cached runs of the program as captured. Inputs for which its outputs have other sizes
            than in fp64, such as box scores that are equal in fp32 alone, are not used: they show
            only rounding.
    """
    if set(names) <= set(told):
        return tuple(cases)
    zero = set(names) - set(told) - shape_only_outputs(runs.program, names)
    added = []
    for case in cases[:LOOKED_AT]:
        if not zero:
            return tuple(cases)
        try:
            zero -= _telling(runs, case.inputs)
        except FAILS:  # the reference says so, and names the case
            return tuple(cases)
    bases = [case.inputs for case in cases]
    for inputs in islice(telling(specs, bases, SEED), MOST_TRIALS):
        if not zero:
            break
        try:
            shown = zero & _telling(runs, inputs)
        except FAILS:
            continue  # at values that nobody promised it takes
        if shown and (plain is None or _of_equal_sizes(runs, plain, inputs)):
            added.append(Case(f"{', '.join(sorted(shown))} other than zero", dict(inputs)))
            zero -= shown
    return (*cases, *added)


def _of_equal_sizes(runs: Runs, others: Runs, inputs: Mapping[str, Tensor]) -> bool:
    """Whether two programs return outputs of the same sizes; true where the second does not run."""
    try:
        [[one], [other]] = runs.outputs([inputs]), others.outputs([inputs])
    except FAILS:
        return True
    return all(one[name].shape == found.shape for name, found in other.items())


def _telling(runs: Runs, inputs: Mapping[str, Tensor]) -> set[str]:
    [outputs] = runs.outputs([inputs])
    return telling_outputs(outputs)


def telling_outputs(outputs: Mapping[str, Tensor]) -> set[str]:
    """The outputs that hold a finite nonzero number."""
    return {
        name for name, found in outputs.items() if bool((found.isfinite() & (found != 0)).any())
    }


@dataclass(frozen=True)
class Covered:
    """Verification inputs that take both paths of each branch, where such inputs were found."""

    inputs: tuple[InputSpec, ...]
    """The inputs, with value ranges that include the added cases."""
    cases: tuple[Case, ...]
    verified: tuple[str, ...]
    """Notes on branches seen on both paths, and on library branches that were not."""
    unverified: tuple[Unverified, ...]
    """Branches of the model with a path that no input took."""
    watched: tuple[Case, ...] = ()
    """For a program with control-flow subgraphs: a few cases that together run every subgraph that
    any case runs."""


def cover_branches(
    source: Source,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    places: Collection[SourceLocation],
    settled: Collection[Spot] = (),
) -> Covered:
    """Run the model in fp32 to find inputs for the branch paths that `cases` do not take."""
    found = cover(source.eager(), specs, cases, places, SEED, settled)
    verified = [f"both paths verified: {', '.join(found.verified)}"] if found.verified else []
    verified += [f"in a library, so it does not reject the engine: {u}" for u in found.in_libraries]
    inputs = tuple(widened(spec, found.cases) for spec in specs)
    return Covered(inputs, (*cases, *found.cases), tuple(verified), found.unverified)


def along_guards(
    source: Source, cases: Sequence[Case], guards: Sequence[Guard], steps: Steps
) -> tuple[Case, ...]:
    """The cases for which the model, run in fp32, takes the path of its specialized program.

    Raises:
        CaptureError: no case takes that path, or a loop does not end.
    """
    module = source.eager()
    taken = [(guard.read.place, guard.read.value) for guard in guards]
    places = {place for place, _ in taken}
    kept: list[Case] = []
    left: list[Case] = []
    for case in cases:
        paths = [  # none of a case that the model does not take
            [(read.place, read.value) for read in reads if read.place in places]
            for reads in record(module, [case.inputs])
        ]
        (kept if paths == [taken] else left).append(case)
    if not kept:
        raise CaptureError(
            "no verification input takes the path of the specialized program",
            hint="Give inputs that do: --inputs FILE.safetensors.",
        )
    if left:
        names = ", ".join(repr(case.name) for case in left)
        steps.say(f"the engine will refuse inputs that take another path, such as {names}")
    return tuple(kept)


def widened(spec: InputSpec, cases: Sequence[Case]) -> InputSpec:
    """`spec` with its value range extended to the values of `cases`: the example's range was a
    guess.
    """
    if spec.low is None or spec.high is None or spec.kind != "tensor":
        return spec
    values = [case.inputs[spec.name] for case in cases if case.inputs[spec.name].numel()]
    low = min([spec.low, *(int(value.min()) for value in values)])
    high = max([spec.high, *(int(value.max()) for value in values)])
    return replace(spec, low=low, high=high)


def _example_case(source: Source, specs: Sequence[InputSpec], steps: Steps) -> list[Case]:
    """The example that came with the model, if the program accepts its sizes."""
    given = source.example()
    if not specs or any(spec.name not in given for spec in specs):
        return []
    example = {spec.name: given[spec.name].to(spec.dtype) for spec in specs}
    check_values(example, specs, "the example")
    known = (name for name, call in source.recorded.items() if _is_of(call, given))
    case = Case(next(known, "example inputs"), example)
    try:
        _check_sizes(specs, case)
    except UsageError as error:
        steps.say(f"not verified on the example: {error.message}")
        return []
    return [case]


def _recorded_cases(source: Source, specs: Sequence[InputSpec]) -> Iterator[Case]:
    """The recorded calls whose sizes the program accepts; the example is one of them."""
    example = source.example()
    for name, call in source.recorded.items():
        if _is_of(call, example):
            continue
        inputs = {spec.name: call[spec.name].to(spec.dtype) for spec in specs}
        if all(
            size in dim.sizes
            for spec in specs
            for size, dim in zip(inputs[spec.name].shape, spec.dims, strict=True)
        ):
            yield Case(name, inputs)


def _is_of(call: Mapping[str, Tensor], example: Mapping[str, Tensor]) -> bool:
    """Whether the example is one of the recorded calls."""
    return all(call[name] is tensor for name, tensor in example.items())


def check_values(given: Mapping[str, Tensor], specs: Sequence[InputSpec], origin: str) -> None:
    """Refuse ids outside of the model's tables, before they reach a kernel, and rows of padding
    alone.
    """
    for spec in specs:
        tensor = given[spec.name]
        if spec.kind == "attention_mask" and not tensor.any():
            raise UsageError(
                f"{origin}: {spec.name}: 0 everywhere, so that all of the input is padding",
                hint="Nothing can be compared or calibrated on it: give at least one token.",
            )
        if spec.low is None or spec.high is None or not tensor.numel():
            continue
        least, most = tensor.min().item(), tensor.max().item()
        if least < spec.low or most > spec.high:
            wrong = least if least < spec.low else most
            raise UsageError(
                f"{origin}: {spec.name}: expected values in {spec.low}..{spec.high}, got {wrong}"
            )


def _within(specs: Sequence[InputSpec], case: Case) -> Case:
    """The case cut to the largest batch: a prompt file may have more rows."""
    limits = {spec.name: spec.dims[0].maximum for spec in specs if spec.dims}
    inputs = {n: t[: limits[n]] if n in limits else t for n, t in case.inputs.items()}
    case = replace(case, inputs=inputs)
    _check_sizes(specs, case)
    return case


def _check_sizes(specs: Sequence[InputSpec], case: Case) -> None:
    """Refuse sizes that the program, narrowed to the model's own limits, does not accept."""
    for spec in specs:
        sizes = case.inputs[spec.name].shape
        for index, (size, dim) in enumerate(zip(sizes, spec.dims, strict=True)):
            if size not in dim.sizes:
                raise UsageError(
                    f"the {case.name} have {size} in dimension {index} of {spec.name}, "
                    f"the program takes {dim.shown}",
                    hint=f"Fix it for them: --dynamic {spec.name}:{index}={size}.",
                )


Path = GraphModule
"""A path through a program, identified by the graph module of its block."""
LOOKED_AT = 4
"""Cases in which outputs are checked for nonzero values."""
MOST_TRIALS = 60
"""Most runs of the program in search of paths that no case takes."""
WATCHED = 2
"""Cases that every pass is compared on, besides those that take paths of their own."""


def cover_paths(
    program: ExportedProgram,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    known: Sequence[str] = (),
    trials: int = MOST_TRIALS,
) -> Covered:
    """Find cases for the paths of a program that `cases` do not take, and choose the cases that
    passes are compared on.

    Args:
        known: places, as "model.py:26", whose paths were already searched in the source.
        trials: most runs in search of other cases.
    """
    every = _paths(program)
    taken = _paths_taken(program, [case.inputs for case in cases])
    added = list(_search(program, specs, cases, every, frozenset().union(*taken), trials))
    cases = (*cases, *(case for case, _ in added))
    taken += [found for _, found in added]
    seen = _of_libraries(program).union(*taken)
    missing = [lost for path, lost in every.items() if path not in seen]
    places = dict.fromkeys(path.place for path in every.values() if path.place not in known)
    both = f"every path of the program verified: {', '.join(places)}"
    return Covered(
        inputs=tuple(widened(spec, [case for case, _ in added]) for spec in specs),
        cases=cases,
        verified=(both,) if places and not missing else (),
        unverified=tuple(lost for lost in missing if lost.place not in known),
        watched=tuple(_watched(cases, taken)),
    )


def _of_libraries(program: ExportedProgram) -> set[Path]:
    """The paths through blocks of library code, whose unverified branches reject no model."""
    found = set()
    for node, block in all_blocks(program):
        files = [place.file for place in SourceLocation.in_text(node.meta.get("stack_trace") or "")]
        models = [file for file in files if is_model_code(file)]
        if models and is_library_code(models[-1]):
            found.add(block.module)
    return found


def _search(
    program: ExportedProgram,
    specs: Sequence[InputSpec],
    cases: Sequence[Case],
    every: Mapping[Path, Unverified],
    seen: frozenset[Path],
    trials: int,
) -> Iterator[tuple[Case, frozenset[Path]]]:
    bases: list[Mapping[str, Tensor]] = [case.inputs for case in cases]
    for inputs in islice(perturbed(specs, bases, SEED), trials):
        if every.keys() <= seen:
            return
        try:
            [found] = _paths_taken(program, [inputs])
        except Exception:  # at values that nobody promised it takes
            continue
        new = [every[path].place for path in found - seen if path in every]
        if new:
            yield Case(f"other path at {', '.join(dict.fromkeys(new))}", dict(inputs)), found
        seen |= found


def _watched(cases: Sequence[Case], taken: Sequence[frozenset[Path]]) -> Iterator[Case]:
    seen: set[Path] = set()
    for index, (case, found) in enumerate(zip(cases, taken, strict=True)):
        if index < WATCHED or not found <= seen:
            seen |= found
            yield case


def _paths_taken(
    program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]
) -> list[frozenset[Path]]:
    """The blocks that each case runs; raises if the program does not accept a case."""
    run = _Recorded(program, cases)
    with torch.no_grad():
        run.results()
    return [frozenset(taken) for taken in run.taken]


def _paths(program: ExportedProgram) -> dict[Path, Unverified]:
    """Every path of the program, with the message for it if no case takes it."""
    found = {}
    for node, block in all_blocks(program):
        place = source_line(node) or module_path(node) or node.name
        if block.path in ("true", "false"):
            found[block.module] = Unverified(place, f"cond never took the {block.path} path")
        elif block.path == "body":
            found[block.module] = Unverified(place, "the body of while_loop never ran")
    return found


class _Recorded(Run):
    def __init__(self, program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(program, cases)
        self.taken: list[set[Path]] = [set() for _ in cases]

    def run_block(self, block: Block, values: list[Any], case: int) -> list[Any]:
        self.taken[case].add(block.module)
        return super().run_block(block, values, case)
