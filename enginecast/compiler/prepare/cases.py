"""The verification inputs: corners of the ranges, the user's inputs, and inputs that take the other
paths of branches.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from enginecast.capture.control_flow.cover.branches import Unverified, cover
from enginecast.capture.control_flow.detect.recorder import record
from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.capture.inputs.examples import (
    MARKED,
    Case,
    perturbed,
    sample,
    sizes_with,
    telling,
    verification_inputs,
)
from enginecast.capture.inputs.specs import InputSpec, sizes_of
from enginecast.capture.python.locations import (
    SourceLocation,
    Spot,
    is_library_code,
    is_model_code,
)
from enginecast.capture.sources.base.source import Source
from enginecast.capture.tracing.answers.recorded_reads import Guard
from enginecast.capture.tracing.sizes.shapes import OtherSizes, SizeCheck
from enginecast.compiler.ranges.eager import FAILS, Eager
from enginecast.compiler.steps import Steps
from enginecast.errors import CaptureError, UsageError
from enginecast.passes.ir.blocks import Block, all_blocks
from enginecast.passes.ir.edit import value
from enginecast.passes.ir.interpret import Run
from enginecast.passes.ir.source import module_path, source_line
from enginecast.runtime.size_checks import holds
from enginecast.verification.eager.make_reference import shape_only_outputs
from enginecast.verification.reference import GIVEN_PROMPTS
from enginecast.verification.runs import Runs

SEED = 0
"""Seed of the verification inputs, fixed so that equal calls give equal bundles."""
GIVEN = ("given ", "example ")
"""Prefixes of the names of cases whose values a person chose."""
DRAWS = 8
"""Most draws of one case until the model accepts it."""


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
    example, ahead = source.example(), list[Case]()

    def of(name: str, tensors: Mapping[str, Tensor]) -> Case:
        return Case(name, {spec.name: tensors[spec.name].to(spec.dtype) for spec in specs})

    # The example that came with the model may be one of the recorded calls.
    same = [n for n, c in source.recorded.items() if all(c[m] is t for m, t in example.items())]
    if specs and all(spec.name in example for spec in specs):
        case = of(same[0] if same else "example inputs", example)
        check_values(case.inputs, specs, "the example")
        wrong = _wrong_size(specs, case)
        if wrong is None:
            ahead.append(case)
        else:
            steps.say(f"not verified on the example: {wrong.message}")
    recorded = (of(name, call) for name, call in source.recorded.items() if name not in same)
    ahead += [case for case in recorded if _wrong_size(specs, case) is None]
    cases = [*ahead, *cases]
    encoded = None if prompts is None else source.encode(prompts, specs)
    if encoded is not None:
        lacking = [spec.name for spec in specs if spec.name not in encoded]
        if lacking:
            raise UsageError(
                f"--prompts gives no values for {', '.join(lacking)}",
                hint="Give all inputs as tensors: --inputs FILE.safetensors.",
            )
        cases = [Case(GIVEN_PROMPTS, encoded), *cases]
    # A prompt file may have more rows than the largest batch.
    limits = {spec.name: spec.dims[0].maximum for spec in specs if spec.dims}
    for index, case in enumerate(cases):
        cut = {n: t[: limits[n]] if n in limits else t for n, t in case.inputs.items()}
        cases[index] = replace(case, inputs=cut)
        if wrong := _wrong_size(specs, cases[index]):
            raise wrong
    return tuple(cases)


def _wrong_size(specs: Sequence[InputSpec], case: Case) -> UsageError | None:
    """What to say of a size that the program, narrowed to the model's own limits, does not take."""
    for spec in specs:
        sizes = case.inputs[spec.name].shape
        for index, (size, dim) in enumerate(zip(sizes, spec.dims, strict=True)):
            if size not in dim.sizes:
                return UsageError(
                    f"the {case.name} have {size} in dimension {index} of {spec.name}, "
                    f"the program takes {dim.shown}",
                    hint=f"Fix it for them: --dynamic {spec.name}:{index}={size}.",
                )
    return None


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
        or all(holds(check.condition, sizes_of(specs, case.inputs)) for check in checks)
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
    eager, kept = Eager(source.eager()), list[Case]()
    for case in cases:
        if case.name.startswith(GIVEN):
            kept.append(case)
            continue
        sizes, is_marked = sizes_of(specs, case.inputs), case.name.startswith(MARKED)
        seeds = (SEED + DRAWS * 1000 + draw for draw in range(DRAWS))
        drawn = (sample(specs, sizes, seed, is_marked=is_marked) for seed in seeds)
        tried = chain([case.inputs], drawn)
        inputs = next((each for each in tried if eager.takes(each)), None)
        if inputs is None and is_marked:
            continue
        # What it takes in no draw is at values that nobody promised it takes.
        is_drawn = inputs is not case.inputs
        kept.append(Case(case.name, inputs) if inputs is not None and is_drawn else case)
    return tuple(kept)


def _sized_by_values(node: Node) -> bool:
    found = value(node)
    sizes = found.shape if isinstance(found, Tensor) else [found]
    return any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in sizes)


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
            [outputs] = runs.outputs([case.inputs])
        except FAILS:  # the reference says so, and names the case
            return tuple(cases)
        zero -= telling_outputs(outputs)
    bases = [case.inputs for case in cases]
    for inputs in islice(telling(specs, bases, SEED), MOST_TRIALS):
        if not zero:
            break
        try:
            [outputs] = runs.outputs([inputs])
        except FAILS:
            continue  # at values that nobody promised it takes
        shown = zero & telling_outputs(outputs)
        if not shown:
            continue
        try:
            [others] = [{}] if plain is None else plain.outputs([inputs])
        except FAILS:
            others = {}  # it is the wider one that counts
        if all(outputs[name].shape == found.shape for name, found in others.items()):
            added.append(Case(f"{', '.join(sorted(shown))} other than zero", dict(inputs)))
            zero -= shown
    return (*cases, *added)


def telling_outputs(outputs: Mapping[str, Tensor]) -> set[str]:
    """The outputs that hold a finite nonzero number."""
    return {
        name for name, found in outputs.items() if bool((found.isfinite() & (found != 0)).any())
    }


UNVERIFIED = "--allow-unverified-branches"
INPUTS = "--inputs FILE"
"""Options that accept a path that no input took, and that bring inputs for it."""


def accepted_branch(text: str) -> Downgraded:
    """A note on a path that was not compared with eager, which a user allowed."""
    return Downgraded(text, "branch", UNVERIFIED, is_asked=True)


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
    verified += [
        Downgraded(f"in a library, so it does not reject the engine: {each}", "branch", INPUTS)
        for each in found.in_libraries
    ]
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
    every = {}  # each path, with the message for it if no case takes it
    seen = set[Path]()
    for node, block in all_blocks(program):
        place = source_line(node) or module_path(node) or node.name
        if block.path in ("true", "false"):
            every[block.module] = Unverified(place, f"cond never took the {block.path} path")
        elif block.path == "body":
            every[block.module] = Unverified(place, "the body of while_loop never ran")
        files = [place.file for place in SourceLocation.in_text(node.meta.get("stack_trace") or "")]
        models = [file for file in files if is_model_code(file)]
        if models and is_library_code(models[-1]):  # which rejects no model
            seen.add(block.module)
    taken = _paths_taken(program, [case.inputs for case in cases])
    reached, added = frozenset[Path]().union(*taken), list[Case]()
    for inputs in islice(perturbed(specs, [case.inputs for case in cases], SEED), trials):
        if every.keys() <= reached:
            break
        try:
            [found] = _paths_taken(program, [inputs])
        except Exception:  # at values that nobody promised it takes
            continue
        new = [every[path].place for path in found - reached if path in every]
        if new:
            added.append(Case(f"other path at {', '.join(dict.fromkeys(new))}", dict(inputs)))
            taken.append(found)
        reached |= found
    seen = seen.union(*taken)
    missing = [lost for path, lost in every.items() if path not in seen]
    places = dict.fromkeys(path.place for path in every.values() if path.place not in known)
    both = f"every path of the program verified: {', '.join(places)}"
    watched, met = list[Case](), set[Path]()
    for index, (case, found) in enumerate(zip((*cases, *added), taken, strict=True)):
        if index < WATCHED or not found <= met:
            met |= found
            watched.append(case)
    return Covered(
        inputs=tuple(widened(spec, added) for spec in specs),
        cases=(*cases, *added),
        verified=(both,) if places and not missing else (),
        unverified=tuple(lost for lost in missing if lost.place not in known),
        watched=tuple(watched),
    )


def _paths_taken(
    program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]
) -> list[frozenset[Path]]:
    """The blocks that each case runs; raises if the program does not accept a case."""
    run = _Recorded(program, cases)
    with torch.no_grad():
        run.results()
    return [frozenset(taken) for taken in run.taken]


class _Recorded(Run):
    def __init__(self, program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(program, cases)
        self.taken: list[set[Path]] = [set() for _ in cases]

    def run_block(self, block: Block, values: list[Any], case: int) -> list[Any]:
        self.taken[case].add(block.module)
        return super().run_block(block, values, case)
