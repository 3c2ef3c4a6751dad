"""Find which integers a model accepts, if only an example is known.

An example with `timestep=500` says little about other steps. The part of the model that depends on
the numbers is run on values further and further from the example, until it raises an error, as a
table lookup does, or returns infinities or NaN. If neither happens, the range ends at `FREE`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from enginecast.capture.inputs.examples import example_sizes, sample
from enginecast.capture.inputs.given import apply_values
from enginecast.capture.inputs.specs import InputSpec, named_dims
from enginecast.capture.python.quiet import quiet_torch
from enginecast.compiler.ranges.eager import parameters_of
from enginecast.compiler.ranges.sizes import SEED, furthest
from enginecast.errors import UsageError, first_line
from enginecast.passes.ir.blocks import WHILE_LOOP
from enginecast.passes.ir.interpret import Run, schedule
from enginecast.passes.ir.traits import Trait, has

Inputs = Mapping[str, Tensor]
Whole = Callable[[Sequence[Inputs]], Sequence[Sequence[Tensor]]]
FREE = 1000
"""End of the range of a number that the model does not bound: diffusion steps end there."""
FURTHEST = 1 << 22
"""Largest value searched for a bound: no table has more rows."""
MOST_SIZE = 256
"""Largest value searched if the number may be a size, since memory grows with it."""
MOST_REPEATS = 64
"""Largest value searched if the number may be a loop count, since time grows with it."""
WHOLE = 100_000_000
"""Parameter count up to which the whole model is run to check that the ranges fit together."""


class Probe(Protocol):
    """Runs the part of a model that depends on some inputs."""

    reach: int
    """Largest value searched for a bound."""

    def floats(self, inputs: Inputs) -> list[Tensor]:
        """The float values that depend on the inputs; raises if the model rejects these."""


def resolve_ranges(
    known: tuple[InputSpec, ...],
    texts: Sequence[str],
    probe: Callable[[Inputs, Sequence[str]], Probe],
    whole: Whole,
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """Replace the value ranges that come from an example by those that the model accepts.

    Args:
        known: the inputs.
        texts: the user's ranges, `NAME=MIN..MAX` each.
        probe: makes a `Probe` for some of the inputs.
        whole: runs the whole model on some cases.

    Returns:
        The inputs, and a sentence on each range that the model itself does not bound.

    Raises:
        UsageError: the model rejects a range that the user asked for.
    """
    specs = apply_values(known, texts)
    names = [spec.name for spec in specs if spec.origin != "known" and spec.is_whole]
    if not names:
        return specs, ()
    with quiet_torch(), torch.no_grad():
        specs, notes = _in_sizes(specs, whole)
        base = sample(known, {name: dim.minimum for name, dim in named_dims(specs).items()}, SEED)
        if not _runs(whole, [base]):
            base = sample(known, example_sizes(specs), SEED)
        try:
            search = _Search(base, probe(base, names))
        except Exception as error:  # an op does not take what was drawn: offsets out of order
            for spec in (spec for spec in specs if spec.origin == "asked"):
                raise UsageError(
                    f"--values {spec.name}={spec.low}..{spec.high}: the model cannot be run on"
                    f" values in this range: {first_line(error)}",
                    hint="Leave it out: then the range is that of the example.",
                ) from error
            return specs, (*notes, *map(_note, filter(_is_guess, specs)))
        for spec in specs:
            for value in (spec.low, spec.high) if spec.origin == "asked" else ():
                if spec.is_searched and value is not None and not search.runs(spec, value):
                    raise UsageError(
                        f"--values {spec.name}={spec.low}..{spec.high}: the model fails on {value}"
                    )
        found = tuple(search.widened(spec) for spec in specs)

        def at_least(floor: int) -> tuple[InputSpec, ...]:
            return tuple(
                replace(new, low=max(new.low, min(floor, old.low)))
                if _is_guess(old) and new.low is not None and old.low is not None
                else new
                for new, old in zip(found, specs, strict=True)
            )

        # The widest first: some models reject negative numbers, others zero.
        choices = (found, at_least(0), at_least(1))
        kept = next((each for each in choices if _fit(each, base, whole)), specs)
    said = (
        _note(spec)
        for spec, first in zip(kept, specs, strict=True)
        if _is_guess(first) and not (spec.name in search.bounded and spec.origin == "known")
    )
    return kept, (*notes, *said)


def _in_sizes(
    specs: tuple[InputSpec, ...], whole: Whole
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """Raise default minimum sizes to the smallest ones at which the example's values fit."""
    notes = []
    for name, dim in named_dims(specs).items():
        takes = partial(_takes_size, specs, whole, name)
        if dim.asked or takes(dim.minimum) or not takes(dim.size):
            continue
        least = furthest(takes, dim.size, dim.minimum)
        least += -least % dim.step
        specs = tuple(
            replace(
                spec,
                dims=tuple(replace(d, minimum=least) if d.name == name else d for d in spec.dims),
            )
            for spec in specs
        )
        notes.append(f"{name} takes {least} and more: the values of the example need that")
    return specs, tuple(notes)


def _takes_size(specs: tuple[InputSpec, ...], whole: Whole, name: str, size: int) -> bool:
    inputs = sample(specs, {**example_sizes(specs), name: size}, SEED)
    return _runs(whole, [_filled(specs, inputs, end) for end in (0, 1)])


def _runs(whole: Whole, cases: Sequence[Inputs]) -> bool:
    try:
        whole(cases)
    except Exception:  # the model's own code, which may not take these values
        return False
    return True


def _filled(specs: Sequence[InputSpec], inputs: Inputs, *ends: int) -> dict[str, Tensor]:
    """Inputs with each range of integers at its lower (0) or upper end (1), in turn."""
    whole = (spec for spec in specs if spec.is_whole and spec.is_searched)
    guesses = [spec for spec in whole if spec.kind != "attention_mask" and spec.padding is None]
    filled = {
        spec.name: _full(spec, inputs[spec.name], (spec.low, spec.high)[end])  # type: ignore[arg-type]
        for spec, end in zip(guesses, cycle(ends), strict=False)
    }
    return {**inputs, **filled}


def _full(spec: InputSpec, base: Tensor, value: int) -> Tensor:
    """One value everywhere but where the base has a mark."""
    full = torch.full_like(base, value)
    if spec.draws != "marked":
        return full
    return torch.where(torch.isin(base, torch.tensor(sorted(spec.marks))), base, full)


def _is_guess(spec: InputSpec) -> bool:
    return spec.origin == "example" and spec.is_whole


def _note(spec: InputSpec) -> str:
    why = "the values of the example" if spec.origin == "example" else "the model sets no bound"
    return (
        f"{spec.name} takes values in {spec.low}..{spec.high} ({why}); "
        f"--values {spec.name}=MIN..MAX sets another range"
    )


def _fit(specs: tuple[InputSpec, ...], base: Inputs, whole: Whole) -> bool:
    """Whether the model accepts both ends of all ranges together, and values in between."""
    cases = [_filled(specs, base, 0), _filled(specs, base, 1), _filled(specs, base, 0, 1)]
    cases.append(sample(specs, example_sizes(specs), SEED))
    try:
        outputs = whole([base, *cases])
    except Exception:  # the model's own code, which may not take these values
        return False
    # A large model is not run whole; one that returns NaN for its example proves nothing.
    return not outputs or not _is_finite(outputs[0]) or all(map(_is_finite, outputs))


def _is_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())


class _Search:
    """Finds the ends of a range, one input after another; the others keep their example."""

    def __init__(self, base: Inputs, probe: Probe) -> None:
        self._base = base
        self._probe = probe
        self._is_finite = _is_finite(probe.floats(self._base))
        self.bounded: set[str] = set()
        """Names of the inputs for which the model itself raises an error past both ends."""

    def widened(self, spec: InputSpec) -> InputSpec:
        """`spec` with the range of values that the model accepts."""
        low, high = spec.low, spec.high
        if not _is_guess(spec) or low is None or high is None or not self._base[spec.name].numel():
            return spec
        if not (self.runs(spec, low) and self.runs(spec, high)):
            return spec
        limits = torch.iinfo(spec.dtype)
        reach = self._probe.reach
        runs = partial(self.runs, spec)

        def fits(value: int) -> bool:
            floats = self._floats(spec, value)
            return floats is not None and _is_finite(floats)

        most = min(limits.max, max(high, reach))
        least = max(limits.min, min(low, -reach))
        bottom, top = furthest(runs, low, least), furthest(runs, high, most)
        if bottom > least and top < most:
            self.bounded.add(spec.name)
        free = min(FREE, reach)
        bottom = bottom if bottom > least else max(least, min(low, -free))
        top = top if top < most else min(most, max(high, free))
        if self._is_finite:
            bottom, top = furthest(fits, low, bottom), furthest(fits, high, top)
            if bottom < 0 < low and not fits(0):
                bottom = 1
            elif high < 0 < top and not fits(0):
                top = -1
        return replace(spec, low=bottom, high=top, origin="known")

    def runs(self, spec: InputSpec, value: int) -> bool:
        """Whether the model takes this value everywhere."""
        return self._floats(spec, value) is not None

    def _floats(self, spec: InputSpec, value: int) -> list[Tensor] | None:
        full = _full(spec, self._base[spec.name], value)
        try:
            return self._probe.floats({**self._base, spec.name: full})
        except Exception:  # an index out of range, an assertion, the model's own code
            return None


class ProgramProbe(Run):
    """Runs the nodes of a program that depend on some inputs.

    It stops at matrix products and at rows looked up in weight tables: behind them, nothing is
    indexed by such an input.
    """

    def __init__(self, program: ExportedProgram, base: Inputs, names: Sequence[str]) -> None:
        super().__init__(program, [base])
        order = schedule(program, self._weights)
        reached: dict[Node, None] = {}
        for node in order:
            if node.op == "placeholder" and node.name in names:
                reached[node] = None
            elif node.op == "call_function" and (
                not has(node, Trait.HEAVY) or has(node, Trait.GATHERS)
            ):
                light = (s for s in node.all_input_nodes if not has(s, Trait.HEAVY))
                if any(source in reached for source in light):
                    reached[node] = None
        self._reached = list(reached)
        needed = {s for node in reached for s in node.all_input_nodes} - reached.keys()
        self._around: dict[Node, Any] = {}
        self.reach = min((_reach(node) for node in reached), default=FURTHEST)
        self._record(order, needed)

    def _record(self, order: Sequence[Node], needed: set[Node]) -> None:
        env: dict[Node, Any] = {}
        for node in order:
            if needed <= self._around.keys():
                return
            self.env = env  # a block leaves its own
            env[node] = self.evaluate(node, 0)
            if node in needed:
                self._around[node] = env[node]

    def floats(self, inputs: Inputs) -> list[Tensor]:
        self._feeds[0].update(inputs)
        env = dict(self._around)
        for node in self._reached:
            self.env = env  # a block leaves its own
            env[node] = self.evaluate(node, 0)
        found = (env[node] for node in self._reached)
        return [value for value in found if isinstance(value, Tensor)]


def _reach(node: Node) -> int:
    """How far a bound is searched where a node depends on the values."""
    if node.target is WHILE_LOOP:
        return MOST_REPEATS
    found = node.meta.get("val")
    is_size = free_unbacked_symbols(found.shape if isinstance(found, Tensor) else found)
    return MOST_SIZE if is_size else FURTHEST


class ModuleProbe:
    """Runs a module that was not captured as a program."""

    reach = MOST_SIZE

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def floats(self, inputs: Inputs) -> list[Tensor]:
        result = self._module(**{name: tensor.clone() for name, tensor in inputs.items()})
        return [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]


def of_program(
    program: ExportedProgram, specs: tuple[InputSpec, ...], texts: Sequence[str]
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """`resolve_ranges` with a captured program."""
    parameters = parameters_of(program)

    def whole(cases: Sequence[Inputs]) -> Sequence[Sequence[Tensor]]:
        results = Run(program, cases).results() if parameters <= WHOLE else []
        return [[value for value in found if isinstance(value, Tensor)] for found in results]

    return resolve_ranges(specs, texts, partial(ProgramProbe, program), whole)


def of_module(
    module: nn.Module, specs: tuple[InputSpec, ...], texts: Sequence[str]
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """`resolve_ranges` with a module, if there is no program."""
    probe = ModuleProbe(module)
    return resolve_ranges(specs, texts, lambda *_: probe, lambda cases: [*map(probe.floats, cases)])
