"""Find which dimensions that have one size in the example are one dimension.

The example `x [2, 8]` and `state [2, 2, 8]` does not tell which dimension of `state` is the batch,
and which counts layers.  The model's code does: in other sizes it takes some dimensions alone, some
only together with others, and some not at all.  It is run for this only where dimensions look
alike, and without values if it is large.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from enginecast.capture.control_flow.detect.recorder import Recorder
from enginecast.capture.inputs.given import DynamicOption, apply_dynamic
from enginecast.capture.inputs.specs import (
    BATCH,
    LARGEST_BATCH,
    DimSpec,
    InputSpec,
    named_dims,
    with_example_sizes,
)
from enginecast.capture.outputs.flatten import ALL, run_named
from enginecast.capture.python.preserve_caches import preserving_caches
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.sources.base.source import Source
from enginecast.capture.sources.weights.empty import fake_weights
from enginecast.errors import CaptureError

Place = tuple[str, int]
"""Input and index of a dimension."""
Group = tuple[Place, ...]
"""Dimensions that vary together."""
Shapes = tuple[torch.Size, ...]
"""Of the outputs."""
SMALL = 300_000_000
"""Parameters up to which a model that needs values is run with them."""
QUICK = 20_000_000
"""Parameters up to which it is always: without values, not every operator checks sizes."""
MOST_RUNS = 100
"""Most runs of a model; dimensions that are not settled after these stay as they were guessed."""


@dataclass(frozen=True)
class SettledSizes:
    """Inputs of which the model's code takes the sizes that vary."""

    specs: tuple[InputSpec, ...]
    notes: tuple[str, ...] = ()
    """What a user should know of dimensions that look alike."""


def settle_sizes(
    source: Source,
    specs: tuple[InputSpec, ...],
    example: Mapping[str, Tensor],
    options: Sequence[DynamicOption],
) -> SettledSizes:
    """The inputs with the sizes that a user asked for, where equal sizes of the example are tied as
    far as the model's code needs it.

    Args:
        specs: the inputs, with the default guess: leading dimensions of one size are the batch.
        example: the inputs that sizes were guessed from.
        options: what the user asked for; it is never changed, but what has to vary with it is.

    Raises:
        UsageError: see `apply_dynamic`.
    """
    given = {spec.name: example[spec.name].to(spec.dtype) for spec in specs if spec.name in example}
    if len(given) < len(specs):
        return SettledSizes(apply_dynamic(specs, options))
    code = _Code(source, given)
    try:
        asked = {option.place for option in options}
        batch, fixed = _with_batches(code, specs, asked)
        free = apply_dynamic(_without_pinned(code, batch.specs, options), options)
        wider = _with_companions(code, free, asked)
    except _TooManyRunsError:
        return SettledSizes(apply_dynamic(specs, options))
    dims = {(s.name, index): dim for s in wider.specs for index, dim in enumerate(s.dims)}
    said = (
        f"dimension {place[1]} of {place[0]} is fixed at {dims[place].size}: only in the example it"
        f" equals {BATCH}; --dynamic {_option(place)}=MIN..MAX lets it vary"
        for place in fixed
        if place not in asked and dims[place].name is None
    )
    return SettledSizes(wider.specs, (*batch.notes, *wider.notes, *said))


class _TooManyRunsError(Exception):
    """The model was run `MOST_RUNS` times."""


class _Code:
    """A model's code, run on the example in other sizes."""

    def __init__(self, source: Source, example: Mapping[str, Tensor]) -> None:
        self._source = source
        self._example = example
        self._known: dict[frozenset[tuple[Place, int]], Shapes | None] = {}

    def size(self, place: Place) -> int:
        """Of a dimension in the example."""
        return self._example[place[0]].shape[place[1]]

    def elements(self, place: Place) -> int:
        """Of an input in the example."""
        return self._example[place[0]].numel()

    @property
    def base(self) -> Shapes | None:
        """The shapes of the outputs for the example; None if the code does not run on it."""
        return self.at({})

    def at(self, sizes: Mapping[Place, int]) -> Shapes | None:
        """The shapes of the outputs with some dimensions in other sizes; None where the code raises
        an error.
        """
        changed = frozenset(item for item in sizes.items() if item[1] != self.size(item[0]))
        if changed not in self._known:
            if len(self._known) == MOST_RUNS:
                raise _TooManyRunsError
            inputs = {name: tensor.clone() for name, tensor in self._example.items()}
            for (name, dim), size in changed:  # rows are repeated or cut
                rows = torch.arange(size) % max(inputs[name].shape[dim], 1)
                inputs[name] = inputs[name].index_select(dim, rows)
            self._known[changed] = self._run(inputs)
        return self._known[changed]

    def of(self, group: Iterable[Place], sizes: Iterable[int]) -> Shapes | None:
        """The shapes with a group in the last of the sizes; None unless the code takes them all."""
        group, found = tuple(group), None
        for size in sizes:
            found = self.at(dict.fromkeys(group, size))
            if found is None:
                return None
        return found

    @cached_property
    def _run(self) -> Callable[[Mapping[str, Tensor]], Shapes | None]:
        parameters = sum(self._source.weight_elements().values())
        fake = None if parameters <= QUICK else FakeRuns(self._source).shapes
        if fake and (parameters > SMALL or fake(self._example) is not None):
            return fake

        def with_values(inputs: Mapping[str, Tensor]) -> Shapes | None:
            module = self._source.eager()
            try:
                with Recorder(module, inputs):  # which ends endless loops
                    return _shapes(module, inputs)
            except CaptureError:
                return None

        return with_values


class FakeRuns:
    """Runs a model's code on inputs without values."""

    def __init__(self, source: Source) -> None:
        self._module = source.empty()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        fake_weights(self._module, self._mode)

    def shapes(self, inputs: Mapping[str, Tensor]) -> Shapes | None:
        """The shapes of the outputs; None where the code raises an error."""
        fakes = {name: self._mode.from_tensor(tensor) for name, tensor in inputs.items()}
        with preserving_caches(self._module), self._mode:
            return _shapes(self._module, fakes)


def _shapes(module: nn.Module, inputs: Mapping[str, Tensor]) -> Shapes | None:
    try:
        with torch.no_grad(), quiet_torch(), _Checked():
            outputs = run_named(module, inputs, ALL)
    except Exception:  # the model's own code, or what it returns
        return None
    return tuple(tensor.shape for tensor in outputs.values())


class _Checked(TorchFunctionMode):
    """Refuses keys and values of different lengths, which the attention of CPUs computes with: it
    reads beyond the shorter.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is scaled_dot_product_attention:
            given = {**dict(zip(("query", "key", "value"), args, strict=False)), **(kwargs or {})}
            if given["key"].shape[-2] != given["value"].shape[-2]:
                raise ValueError("keys and values of different lengths")
        return func(*args, **(kwargs or {}))


def _with_batches(
    code: _Code, specs: tuple[InputSpec, ...], asked: set[Place]
) -> tuple[SettledSizes, Sequence[Place]]:
    """The inputs, where only those leading dimensions are one batch that the code needs equal, and
    those leading dimensions that are fixed.

    Args:
        asked: dimensions of which the user said something, which need no note.
    """
    guessed = _places(specs, BATCH)
    kinds = {spec.name: spec.kind for spec in specs}
    known = tuple(place for place in guessed if kinds[place[0]] != "tensor")
    units = [*([known] if known else []), *((p,) for p in guessed if p not in known)]
    size = code.size(guessed[0]) if guessed else 1
    others = _static(specs, code, size)
    if size < 2 or len(units) + len(others) < 2 or code.base is None:
        return SettledSizes(specs), ()
    groups, fixed = _batches(code, units, others, size)
    if not groups:
        return SettledSizes(specs), ()
    first = next((g for g in groups if guessed[0] in g), groups[0])
    names = {place: BATCH for place in first}
    notes = []
    for group in (g for g in groups if g is not first):
        own = f"{group[0][0]}_{group[0][1]}"
        names |= dict.fromkeys(group, own)
        if not asked.intersection(group):
            notes.append(
                f"{_shown(group)} may differ from {BATCH} (as {own}): the model's code does not "
                f"need them to be equal; --dynamic {_option(group[0])}={BATCH} ties them"
            )
    if joined := [place for place in first if place not in (*guessed, *asked)]:
        notes.append(_joined(joined, BATCH))
    widest = max(LARGEST_BATCH, size)
    dims = {p: DimSpec(own, size, 1, widest, given=size) for p, own in names.items()}
    dims |= dict.fromkeys(fixed, DimSpec.static(size))
    return SettledSizes(with_example_sizes(_with(specs, dims)), tuple(notes)), fixed


def _batches(
    code: _Code, units: Sequence[Group], others: Sequence[Place], size: int
) -> tuple[list[Group], list[Place]]:
    """Groups of dimensions that vary, each alone, and those of the units that do not vary.

    Args:
        units: dimensions that were taken for one.
        others: static dimensions of the same size, one of which may be the batch of its input.
    """
    sizes = (size + 1, 2 * size)
    outcomes = {unit: code.of(unit, sizes) for unit in units}
    stuck = [unit for unit in units if outcomes[unit] is None]
    # What changes no output's shape may be read by index, as a height and a width are.
    idle = [unit for unit in units if outcomes[unit] == code.base]
    groups = [unit for unit in units if unit not in stuck and unit not in idle]
    main = max(units, key=lambda unit: max(map(code.elements, unit)))
    lost: list[Group] = []
    taken: set[Place] = set()
    for unit in stuck:
        if unit[0] in taken:
            continue
        rest = [u for u in stuck if u is not unit and u[0] not in taken]
        spare = [u for u in idle if u[0] not in taken]
        found = _together(code, unit, rest, spare, sizes)
        if found is None and (unit is main or not groups):
            found = _together(code, unit, rest, [*spare, *((p,) for p in others)], sizes)
        if found:
            groups.append(found)
            taken |= set(found)
        else:
            lost.append(unit)
    idle = [unit for unit in idle if unit[0] not in taken]
    together = _changing(code, idle, sizes)
    groups += [together] if together else []
    for unit in (unit for unit in idle if unit[0] not in together):
        if code.of(unit, [1]) == code.base:  # it takes fewer, too: no row is read by its index
            groups.append(unit)
        else:
            lost.append(unit)
    if main in lost and main in stuck:  # the export says why
        groups = []
    order = {place: n for n, unit in enumerate(units) for place in unit}
    groups.sort(key=lambda group: min(order.get(place, len(units)) for place in group))
    return groups, [place for unit in lost for place in unit]


def _together(
    code: _Code,
    unit: Group,
    alike: Sequence[Group],
    spare: Sequence[Group],
    sizes: Sequence[int],
) -> Group | None:
    """A smallest group with which a unit varies that does not vary alone; None if there is none.

    Args:
        alike: those that probably vary with it, all of them or some.
        spare: those that may.
    """
    every = (*alike, *spare)
    choices = [*combinations(every, 1), *([tuple(alike)] if len(alike) > 1 else [])]
    for size in sizes:
        for chosen in chain(choices, combinations(every, 2), combinations(every, 3)):
            group = (*unit, *chain.from_iterable(chosen))
            if code.at(dict.fromkeys(group, size)) is not None:
                return _least(code, unit, chosen, size)
    return None


def _least(code: _Code, unit: Group, chosen: Sequence[Group], size: int) -> Group:
    """A unit and those of the chosen that it cannot do without."""
    left = list(chosen)
    for count in (1, 2):
        for some in combinations(chosen, count):
            less = [each for each in left if each not in some]
            group = (*unit, *chain.from_iterable(less))
            if len(less) < len(left) and code.at(dict.fromkeys(group, size)) is not None:
                left = less
    return (*unit, *chain.from_iterable(left))


def _changing(code: _Code, idle: Sequence[Group], sizes: Sequence[int]) -> Group:
    """Of the dimensions that change no output's shape alone, those that do together, such as rows
    of two inputs that are taken in pairs.
    """
    for size in sizes:
        every = code.at({place: size for unit in idle for place in unit})
        if every is not None and every != code.base:
            return tuple(
                place
                for unit in idle
                for place in unit
                if code.at({p: size for u in idle if u is not unit for p in u}) != every
            )
    return ()


def _without_pinned(
    code: _Code, specs: tuple[InputSpec, ...], options: Sequence[DynamicOption]
) -> tuple[InputSpec, ...]:
    """The inputs, where a size that the user fixed is no longer tied to others that the code takes
    in other sizes.
    """
    fixed = {o.place: o.minimum for o in options if o.is_static and not o.is_profile}
    for name in named_dims(specs):
        group = _places(specs, name)
        pinned = {place: fixed[place] for place in group if place in fixed}
        rest = [place for place in group if place not in pinned]
        alike = len(set(pinned.values())) == 1
        if not pinned or (alike and not rest) or any(d.parts for s in specs for d in s.dims):
            continue
        size = code.size(group[0])
        for other in {size, size + 1, 2 * size} - set(pinned.values()):
            if code.at({**dict.fromkeys(rest, other), **pinned}) is not None:
                specs = _with(specs, {p: DimSpec.static(at) for p, at in pinned.items()})
                break
    return with_example_sizes(specs)


def _with_companions(code: _Code, specs: tuple[InputSpec, ...], asked: set[Place]) -> SettledSizes:
    """The inputs, where dimensions vary that the code needs equal to one that the user asked for.

    Args:
        asked: dimensions of which the user said something.
    """
    notes = []
    for name, dim in named_dims(specs).items():
        group = tuple(_places(specs, name))
        size = code.size(group[0])
        # Some other sizes that it may have, the nearest first.
        tried = (size + dim.step, 2 * size, size - dim.step, dim.minimum, dim.fit(3 * size))
        sizes = [n for n in dict.fromkeys(tried) if n in dim.sizes and n > 1 and n != size][:3]
        alike = [(p,) for p in _static(specs, code, size) if p not in asked]
        if not dim.asked or size < 2 or not alike or not sizes or code.base is None:
            continue
        if any(code.of(group, [n]) is not None for n in sizes):
            continue
        found = _together(code, group, alike, (), sizes)
        if found is None:
            continue
        joined = [place for place in found if place not in group]
        specs = _with(specs, dict.fromkeys(joined, dim))
        notes.append(_joined(joined, name))
    return SettledSizes(with_example_sizes(specs), tuple(notes))


def _places(specs: Sequence[InputSpec], name: str) -> list[Place]:
    return [(s.name, n) for s in specs for n, dim in enumerate(s.dims) if dim.name == name]


def _static(specs: Sequence[InputSpec], code: _Code, size: int) -> list[Place]:
    """Dimensions that do not vary, of one size in the example."""
    return [
        (spec.name, n)
        for spec in specs
        for n, dim in enumerate(spec.dims)
        if dim.name is None and code.size((spec.name, n)) == size == dim.size
    ]


def _with(specs: tuple[InputSpec, ...], dims: Mapping[Place, DimSpec]) -> tuple[InputSpec, ...]:
    """The inputs with some dimensions replaced."""
    return tuple(
        replace(s, dims=tuple(dims.get((s.name, n), dim) for n, dim in enumerate(s.dims)))
        for s in specs
    )


def _joined(group: Sequence[Place], name: str) -> str:
    varies = "vary" if len(group) > 1 else "varies"
    return f"{_shown(group)} {varies} with {name}: the model's code needs them to be equal"


def _option(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _shown(group: Iterable[Place]) -> str:
    return " and ".join(map(_option, group))
