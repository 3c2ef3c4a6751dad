"""Try the sizes that a program is to accept, and find those at which eager behaves differently.

A guard tells of the sizes that a model's code asked about in a way that torch sees. It does not see
a size that is printed, tested for its type, or compared with one, which a trace takes for any size.

Code that was rewritten, since it decides by values, does not run without them: there the same sizes
are tried with values (see `enginecast.compiler.ranges.sizes`).
"""

import inspect
import re
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram

from enginecast.capture.control_flow.converters.restructure import user_functions
from enginecast.capture.inputs.examples import SMALL
from enginecast.capture.inputs.specs import DimSpec, InputSpec, named_dims
from enginecast.capture.python.locations import SourceLocation, is_model_code, is_user_code
from enginecast.capture.python.quiet import quiet_torch
from enginecast.capture.tracing.sizes.fingerprint import Walk, Walker
from enginecast.capture.tracing.sizes.shapes import OtherSizes, output_shapes
from enginecast.passes.ir.blocks import all_nodes

WALKED = 2500
"""Operators that a sweep runs, about; each takes a third of a millisecond."""
FEWEST, MOST = 5, 32
"""Sizes that are tried."""
MENTIONED = 16
"""Numbers in the model's code and attributes that are tried as sizes, by dimension."""
LONGEST_TEXT = 16
"""Letters of a text in the code in which numbers are looked for: longer ones are prose."""
UNKNOWN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
    NotImplementedError,
)
"""What code raises that reads values, which fake tensors do not have."""
Sizes = Mapping[str, int]
Delta = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...], bool]


@dataclass(frozen=True)
class Sweep:
    """A sweep of one model's sizes.

    Args:
        walker: of the model and its program.
        specs: with the ranges that are swept.
        traced: sizes of the trace.
    """

    walker: Walker
    specs: Sequence[InputSpec]
    traced: Sizes

    def find(self) -> tuple[OtherSizes, ...]:
        """The sizes nearest to those of the trace at which eager computes something else; none
        where eager does not run without values.
        """
        with quiet_torch():
            try:
                # What eager computes, and whole numbers in the code that it goes through and in the
                # user's modules.
                found: dict[int, None] = {}
                seen: set[CodeType] = set()

                def note(frame: FrameType, event: str, argument: Any) -> None:
                    code = frame.f_code
                    if event != "call" or code in seen:
                        return
                    seen.add(code)
                    if is_model_code(code.co_filename):
                        found.update(dict.fromkeys(_in_code(code, frame.f_globals)))

                walk = self.walker.eager(self.traced, observer=note)
                found.update(dict.fromkeys(_in_attributes(self.walker.module)))
                eager, mentioned = walk, list(found)
                if eager.writes:
                    eager = self._eager(self.traced, writes=True)
                first = self._pair(self.traced, eager)
            except Exception:  # the model's own code, which reads values
                return ()
            if first is None:
                return ()
            count = max(FEWEST, min(MOST, WALKED // (len(first[0].steps) + 1)))
            plan = list(_plan(named_dims(self.specs), self.traced, mentioned))
            return tuple(self._search(plan[:count], first))

    def _search(self, plan: Iterable[Sizes], first: tuple[Walk, Walk]) -> Iterator[OtherSizes]:
        dims = named_dims(self.specs)
        bounds = {name: (dim.minimum, dim.maximum) for name, dim in dims.items()}
        for sizes in plan:
            if any(not bounds[name][0] <= size <= bounds[name][1] for name, size in sizes.items()):
                continue  # beyond what was found already
            if not self._differs(sizes, first):
                continue
            changed = {name for name, size in sizes.items() if size != self.traced[name]}
            if len(changed) == 1:
                [name] = changed
                step = dims[name].step
                sizes = self._nearest(name, sizes[name], step, first)
                low, high = bounds[name]
                beyond = sizes[name] > self.traced[name]
                bounds[name] = (low, sizes[name] - step) if beyond else (sizes[name] + step, high)
            place = self._place(sizes, first[0].writes)
            found = {name: sizes[name] for name in sorted(changed)}
            yield OtherSizes(str(place) if place else "", found)

    def _nearest(self, name: str, size: int, step: int, first: tuple[Walk, Walk]) -> dict[str, int]:
        """The size of one dimension nearest to the traced one that differs, by bisection."""
        good, bad = self.traced[name], size
        beside = bad + (step if bad < good else -step)
        while abs(bad - good) > step:
            # The end of a range is mostly alone, as one is.
            middle = beside if size == bad else (good + bad) // (2 * step) * step
            if self._differs({**self.traced, name: middle}, first):
                bad = middle
            else:
                good = middle
        return {**self.traced, name: bad}

    def _differs(self, sizes: Sizes, first: tuple[Walk, Walk]) -> bool:
        """Whether eager computes something else than the program, or raises an error."""
        try:
            eager = self._eager(sizes, writes=first[0].writes)
            if eager.writes and eager.names != first[0].names:
                return True  # a copy may have become an alias
            pair = self._pair(sizes, eager)
        except UNKNOWN:
            return False
        except Exception:
            return True
        if pair is None:
            return False
        captured = pair[1]
        declared = output_shapes(self.walker.program, tuple(self.specs), sizes)
        for shape, wanted in zip(eager.shapes, declared, strict=False):
            # None: a size that the values decide
            pairs = zip(shape, wanted, strict=False)
            fits = all(there in (size, None) for size, there in pairs)
            if len(declared) == len(eager.shapes) and not (fits and len(shape) == len(wanted)):
                return True
        return eager.outputs != captured.outputs and delta(*pair) != delta(*first)

    def _eager(self, sizes: Sizes, *, writes: bool) -> Walk:
        """Eager at these sizes; copies count where it writes.

        Args:
            writes: whether it does at other sizes, as it is likely to do at these.
        """
        eager = self.walker.eager(sizes, copies_count=writes)
        if eager.writes == writes:
            return eager
        return self.walker.eager(sizes, copies_count=eager.writes)

    def _pair(self, sizes: Sizes, eager: Walk) -> tuple[Walk, Walk] | None:
        """Eager and the program at these sizes; None where the program has no such walk."""
        try:
            return eager, self.walker.captured(sizes, copies_count=eager.writes)
        except Exception:
            if dict(sizes) == dict(self.traced):
                return None
            raise

    def _place(self, sizes: Sizes, writes: bool) -> SourceLocation | None:
        """The line of model code at which eager leaves the program, as far as that shows."""
        try:
            eager = self._eager(sizes, writes=writes)
            captured = self.walker.captured(sizes, copies_count=eager.writes)
        except Exception as error:
            frames = traceback.walk_tb(error.__traceback__)
            places = [
                SourceLocation(frame.f_code.co_filename, line)
                for frame, line in frames
                if is_model_code(frame.f_code.co_filename)
            ]
            return places[-1] if places else None
        step = eager.leaves(captured)
        return step.place if step else None


def untold(
    module: nn.Module, program: ExportedProgram, specs: Sequence[InputSpec], traced: Sizes
) -> tuple[OtherSizes, ...]:
    """Sizes at which to compare values, where the code does not run without them."""
    count = sum(1 for _ in all_nodes(program))
    most = max(FEWEST, min(MOST, WALKED // (count + 1)))
    changed = (
        {name: size for name, size in sizes.items() if size != traced[name]}
        for sizes in telling_sizes(module, specs, traced, most)
    )
    return tuple(OtherSizes("", sizes, is_seen=False) for sizes in changed)


def telling_sizes(
    module: nn.Module, specs: Sequence[InputSpec], traced: Sizes, most: int = MOST
) -> list[dict[str, int]]:
    """All sizes, of which one or more are not those of the trace, the most telling first."""
    mentioned: dict[int, None] = {}
    for function in user_functions(module):
        waiting = [function.__code__]
        while waiting:  # those of the functions within it, too
            code = waiting.pop()
            waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
            mentioned |= dict.fromkeys(_in_code(code, function.__globals__))
        held = inspect.getclosurevars(function).nonlocals.values()
        mentioned |= dict.fromkeys(_whole(held))
    mentioned |= dict.fromkeys(_in_attributes(module))
    return list(islice(_plan(named_dims(specs), traced, list(mentioned)), most))


def delta(eager: Walk, captured: Walk) -> Delta:
    """The operators that only one of two walks runs."""
    only = []
    for left, right in ((eager, captured), (captured, eager)):
        known = {step.number for step in right.steps}
        counts = Counter(step.name for step in left.steps if step.number not in known)
        only.append(tuple(sorted(counts.items())))
    return only[0], only[1], eager.writes


def _plan(
    dims: Mapping[str, DimSpec], traced: Sizes, mentioned: Sequence[int]
) -> Iterator[dict[str, int]]:
    """Sizes to try, the most telling first."""
    varying = {name: dim for name, dim in dims.items() if dim.minimum < dim.maximum}
    corners = [
        {name: dim.minimum for name, dim in varying.items()},
        {name: dim.maximum for name, dim in varying.items()},
    ]
    alone = [
        [{name: size} for size in _candidates(dim, mentioned)] for name, dim in varying.items()
    ]
    turns = [sizes for turn in zip_longest(*alone) for sizes in turn if sizes is not None]
    seen: set[tuple[tuple[str, int], ...]] = {tuple(traced.items())}
    for sizes in (*turns[: 2 * len(varying)], *corners, *turns[2 * len(varying) :]):
        full = {**traced, **sizes}
        if tuple(full.items()) not in seen:
            seen.add(tuple(full.items()))
            yield full


def _candidates(dim: DimSpec, mentioned: Sequence[int]) -> list[int]:
    """Sizes of one dimension, the most telling first."""
    within = dim.sizes
    known = [n for n in mentioned if n in within and n > SMALL][:MENTIONED]
    powers = [2**k for k in range(4, 20)]
    small = range(1, SMALL + 1)
    beside = [n + step for n in powers for step in (0, 1, -1)]
    order = [dim.minimum, dim.maximum, 2, 3, 10, *known, *(n + 1 for n in known), *small, *beside]
    order += [size * dim.step for size in small]
    return [size for size in dict.fromkeys(order) if size in within]


def _in_code(code: CodeType, known: Mapping[str, Any]) -> Iterator[int]:
    return _whole([*code.co_consts, *(known.get(name) for name in code.co_names)])


def _in_attributes(module: nn.Module) -> Iterator[int]:
    """Whole numbers in the attributes of the user's modules."""
    for part in module.modules():
        code = getattr(getattr(type(part), "forward", None), "__code__", None)
        if code is not None and is_user_code(code.co_filename):
            yield from _whole(vars(part).values())


def _whole(values: Iterable[Any], depth: int = 2) -> Iterator[int]:
    for value in values:
        if type(value) is int and value > 1:
            yield value
        elif isinstance(value, str) and len(value) <= LONGEST_TEXT:
            yield from (int(digits) for digits in re.findall(r"\d{1,4}", value) if int(digits) > 1)
        elif isinstance(value, (tuple, list, set, frozenset, dict, range)) and depth:
            yield from _whole(list(value)[:MOST], depth - 1)
