"""Record the calls of a pipeline to its components while it runs."""

import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from enginecast.capture.inputs.calls import Call, call_of, left_out, with_tensors
from enginecast.capture.inputs.derive.diffusion import ONE_BY_ONE, one_by_one
from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.errors import UsageError
from enginecast.public import described, some

METHODS = ("encode", "decode")
"""What pipelines call besides `forward`."""
PACKING = ("return_dict",)
"""Arguments that only say how results are packed; a packed one has names."""
MOST_SIZES = 9
"""Sizes of which calls are kept of a component."""
RECORDED = "recorded call"
"""What the names of calls begin with."""
SPREAD = 4
"""Calls of one size that are kept while it is not known how many there will be."""

SHAPES = "img_shapes"
"""Sizes of the images of each row, of which Qwen-Image's transformer reads the first row's."""
MASKS = {"attention_mask": "input_ids", "encoder_hidden_states_mask": "encoder_hidden_states"}
"""Masks that pipelines leave out where they are all ones, and what has their rows and tokens."""

Place = tuple[str, int]
"""An input, and one of its dimensions."""
Sizes = tuple[int, ...]
"""Of a dimension, in each call."""


@dataclass(frozen=True)
class Recorded:
    """The calls of one component: the first of each size; of the size that was called most, one
    from the middle and the last, too."""

    name: str
    model_class: str
    call: Call
    calls: tuple[Mapping[str, Tensor], ...]
    """The tensors of each call, by the name of the input."""
    names: tuple[str, ...]
    """Of the calls: "recorded call 14 of 28"."""

    def __repr__(self) -> str:
        """The component, how many calls were kept, and the inputs of the one that is traced."""
        inputs = some(f"{name} {described(tensor)}" for name, tensor in self.example.items())
        return f"Recorded({self.name}, {self.model_class}: {len(self.calls)} calls kept; {inputs})"

    @property
    def is_one_image(self) -> bool:
        """Whether no dimension is a batch."""
        return self.model_class in ONE_BY_ONE

    @property
    def by_name(self) -> dict[str, Mapping[str, Tensor]]:
        """The calls by their names."""
        return dict(zip(self.names, self.calls, strict=True))

    @property
    def example(self) -> dict[str, Tensor]:
        """The call that is traced: the first one with the largest batch."""
        rows = [_rows(call) for call in self.calls]
        return dict(self.calls[rows.index(max(rows))])

    @cached_property
    def _varying(self) -> dict[Sizes, list[Place]]:
        """Dimensions that vary; those that always have equal sizes together."""
        found: dict[Sizes, list[Place]] = {}
        for name, tensor in self.calls[0].items():
            for axis in range(tensor.ndim):
                sizes = tuple(call[name].shape[axis] for call in self.calls)
                if len(set(sizes)) > 1:
                    found.setdefault(sizes, []).append((name, axis))
        return found

    @cached_property
    def _tied(self) -> dict[Sizes, tuple[Sizes, ...]]:
        """Sizes that are a multiple of others, or go with the product of two or three others."""
        found: dict[Sizes, tuple[Sizes, ...]] = {}
        for sizes in self._varying:
            others = [other for other in self._varying if other != sizes]
            pairs = [(a, b) for a in others for b in others if a <= b]
            triples = [(a, b, c) for a, b in pairs for c in others if b <= c]
            for factors in [*((a,) for a in others), *pairs, *triples]:
                products = [math.prod(each) for each in zip(*factors, strict=True)]
                if 0 in products:  # an empty text, of which nothing is a multiple
                    continue
                ratios = {size / product for size, product in zip(sizes, products, strict=True)}
                if len(ratios) == 1 and (len(factors) > 1 or min(ratios) > 1):
                    found[sizes] = factors
                    break
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on dimensions that vary together in a way that engines cannot follow."""
        shown = {sizes: _shown(places[0]) for sizes, places in self._varying.items()}
        return tuple(
            Downgraded(
                f"{shown[sizes]} and {' and '.join(shown[factor] for factor in factors)} are fixed:"
                " they vary together in a way that --dynamic cannot say",
                "sizes",
            )
            for sizes, factors in self._tied.items()
        )

    def dynamic(self, asked: Sequence[str] = ()) -> list[str]:
        """The dimensions that vary, as `--dynamic` has them, without those that were asked for."""
        taken = {part.partition("=")[0].strip() for text in asked for part in text.split(",")}
        rows = tuple(_rows(call) for call in self.calls)
        fixed = {sizes for tied, factors in self._tied.items() for sizes in (tied, *factors)}
        found = []
        for sizes, places in self._varying.items():
            names = [_shown(place) for place in places]
            if sizes == rows or taken.intersection(names):
                continue  # rows vary in any case
            if sizes in fixed:
                found += [
                    f"{_shown((n, axis))}={self.example[n].shape[axis]}" for n, axis in places
                ]
                continue
            symbol, step = names[0].replace(":", "_"), math.gcd(*sizes)
            through = f"{min(sizes)}..{max(sizes)}" + (f"/{step}" if step > 1 else "")
            found += [f"{name}={symbol}:{through}" for name in names]
        return found

    def fixed(self) -> list[str]:
        """All dimensions but the rows at the sizes of the example, as `--dynamic` has them."""
        rows = tuple(_rows(call) for call in self.calls)
        return [
            f"{_shown((name, axis))}={self.example[name].shape[axis]}"
            for sizes, places in self._varying.items()
            for name, axis in places
            if sizes != rows
        ]

    def require(self, module: nn.Module) -> None:
        """Refuse a module of another class than the one that was recorded."""
        if type(module).__name__ != self.model_class:
            raise UsageError(
                f"the recording is of {self.name}, a {self.model_class}, and the model is a"
                f" {type(module).__name__}"
            )


@dataclass(frozen=True)
class _Heard:
    """A call; not its module, which may be freed."""

    number: int
    model_class: str
    entry: str
    arguments: dict[str, Any]


@dataclass
class _Series:
    """Calls of one size, from a run of any length: some of them, spread evenly, and the last."""

    count: int = 0
    every: int = 1
    some: list[_Heard] = field(default_factory=list)

    def add(self, heard: _Heard) -> None:
        if self.count % self.every == 0:
            self.some.append(heard)
        if len(self.some) > SPREAD:
            self.some, self.every = self.some[::2], 2 * self.every
        self.last, self.count = heard, self.count + 1

    @property
    def spread(self) -> list[_Heard]:
        """The first call, one from the middle, and the last."""
        half = self.count / 2
        middle = min(range(len(self.some)), key=lambda place: abs(place * self.every - half))
        return [self.some[0], self.some[middle], self.last]


class Calls(Mapping[str, Recorded]):
    """The recorded calls by component: "transformer", "vae.decode"."""

    def __init__(self) -> None:
        self._heard: dict[str, dict[str, _Series]] = {}
        self._counts = Counter[str]()

    def __repr__(self) -> str:
        """Components, and how often each was called."""
        return f"Calls({some(f'{name}: {self._counts[name]}' for name in self)})"

    def __getitem__(self, name: str) -> Recorded:
        if name not in self._heard:
            called = ", ".join(self._heard) or "nothing"
            raise UsageError(
                f"{name!r} was not called while the pipeline was recorded; called: {called}"
            )
        sizes = self._heard[name].values()
        longest = max(sizes, key=lambda series: series.count)
        kept = {call.number: call for call in (*(s.some[0] for s in sizes), *longest.spread)}
        return _together(name, [kept[n] for n in sorted(kept)], self._counts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard)

    def __len__(self) -> int:
        return len(self._heard)

    @property
    def sizes(self) -> int:
        """In how many sizes the components were called."""
        return sum(map(len, self._heard.values()))

    def hear(
        self, name: str, module: nn.Module, entry: str, given: dict[str, Any]
    ) -> Callable[[], None]:
        """Copy a call before it runs, which may write to its arguments; as one for each image, of a
        class whose engines are of one.

        Returns:
            What keeps it among those of its size, to be called when it did not fail.
        """
        arguments = {
            name: value
            for name, value in given.items()
            if name not in PACKING and not left_out(value)
        }
        model_class, known = type(module).__name__, self._heard.get(name, {})
        copies: list[tuple[str, dict[str, Any] | None]] = []
        for each in one_by_one(model_class, arguments):
            size, copied = str(with_tensors(each, lambda t: (t.shape, t.dtype))), None
            if size in known or len(known) < MOST_SIZES:
                copied = with_tensors(each, lambda t: t.detach().to("cpu", copy=True))
            copies.append((size, copied))

        def keep() -> None:
            heard = self._heard.setdefault(name, {})
            for size, copied in copies:
                self._counts[name] += 1
                if copied is not None:
                    call = _Heard(self._counts[name], model_class, entry, copied)
                    heard.setdefault(size, _Series()).add(call)

        return keep


def require_one(example: object) -> None:
    """Refuse recorded calls that are not those of one component.

    Raises:
        UsageError: with what to give instead.
    """
    if isinstance(example, Calls):
        raise UsageError(
            f"example: got a recording of {', '.join(example) or 'nothing'}, expected the calls of"
            " one component",
            hint=f'Give those of one: calls["{next(iter(example), "transformer")}"].',
        )
    if isinstance(example, (list, tuple)) and any(
        isinstance(e, (Calls, Recorded)) for e in example
    ):
        raise UsageError(
            f"example: got {len(example)} recordings, expected one",
            hint="Call the pipeline in all sizes within one `with enginecast.record(pipe)`.",
        )


@contextmanager
def record(pipeline: Any) -> Iterator[Calls]:
    """Record the arguments of every call to a pipeline's components while the block runs.

    Args:
        pipeline: a diffusers pipeline, a module, or a dict of modules by name.

    Yields:
        The calls by component, such as "unet" and "vae.decode": an `example` for `export`. Of each
        component some calls of each size are kept, with their tensors in CPU memory.

    Raises:
        UsageError: nothing in it can be recorded. When an item is read: it was not called, or in
            two ways that differ in more than the values and sizes of tensors.

    Examples:
        >>> import enginecast, torch
        >>> model = torch.nn.Linear(8, 2)
        >>> with enginecast.record({"head": model}) as calls:
        ...     _ = model(torch.randn(3, 8)), model(torch.randn(5, 8))
        >>> calls
        Calls(head: 2)
        >>> enginecast.export(model, "head.bundle", example=calls["head"]).manifest.symbols
        {'batch': (1, 64)}
    """
    calls = Calls()
    with ExitStack() as stack:
        for name, module in _components(pipeline).items():
            running = _Running(calls, name)
            for handle in (
                module.register_forward_pre_hook(running.begin, with_kwargs=True),
                module.register_forward_hook(running.end, always_call=True),
            ):
                stack.callback(handle.remove)
            for method in METHODS:
                plain = getattr(module, method, None)
                if callable(plain):
                    heard = _hearing(calls, f"{name}.{method}", module, method, plain)
                    stack.enter_context(on_instance(module, method, heard))
        yield calls


def _components(pipeline: Any) -> dict[str, nn.Module]:
    if isinstance(pipeline, nn.Module):
        return {type(pipeline).__name__: pipeline}
    found = pipeline if isinstance(pipeline, Mapping) else getattr(pipeline, "components", None)
    modules = {n: part for n, part in (found or {}).items() if isinstance(part, nn.Module)}
    if not modules:
        raise UsageError(
            f"a {type(pipeline).__name__} has no components to record",
            hint="Give a pipeline of diffusers, a module, or modules by name.",
        )
    return modules


class _Running(threading.local):
    """The calls of a module that have begun and not ended, in each thread; it may call itself."""

    def __init__(self, calls: Calls, name: str) -> None:
        self._calls, self._name = calls, name
        self._open: list[Callable[[], None]] = []

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._open.append(_drop)  # for `end`, where what follows fails
        given = by_name(type(module).forward, module, args, kwargs)
        self._open[-1] = self._calls.hear(self._name, module, "forward", given)

    def end(self, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        keep = self._open.pop() if self._open else _drop  # another hook failed before `begin`
        if result is not None:  # None: the call failed
            keep()


def _drop() -> None:
    """What becomes of a call that fails."""


def _hearing(
    calls: Calls, name: str, module: nn.Module, method: str, plain: Callable[..., Any]
) -> Callable[..., Any]:
    def heard(*args: Any, **kwargs: Any) -> Any:
        declared = getattr(type(module), method)
        keep = calls.hear(name, module, method, by_name(declared, module, args, kwargs))
        result = plain(*args, **kwargs)
        keep()
        return result

    return heard


@contextmanager
def on_instance(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


def by_name(
    function: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call by name, in the order of the function."""
    signature = inspect.signature(function)
    bound = signature.bind(module, *args, **kwargs)
    named = dict(list(bound.arguments.items())[1:])
    kinds = signature.parameters
    for name in [n for n in named if kinds[n].kind is inspect.Parameter.VAR_KEYWORD]:
        named.update(named.pop(name))
    return named


def _together(name: str, heard: Sequence[_Heard], count: int) -> Recorded:
    """All calls of a component as one.

    Args:
        count: how many there were.

    Raises:
        UsageError: they differ in more than the values and sizes of tensors.
    """
    given = [call_of(arguments, name) for arguments in _with_inputs(heard)]
    call, tensors = given[0]
    calls: dict[str, Mapping[str, Tensor]] = {}
    for each, (other, found) in zip(heard, given, strict=True):
        if other != call:
            raise UsageError(
                f"{name} was called in two ways: {_difference(call, other)}",
                hint="Whole numbers and text become part of an engine: record calls that agree in"
                " them.",
            )
        odd = next((n for n, t in found.items() if t.dtype != tensors[n].dtype), None)
        odd = odd or next((n for n, t in found.items() if t.ndim != tensors[n].ndim), None)
        if odd is not None:
            raise UsageError(
                f"{name} was called in two ways: {odd} is {_kind(tensors[odd])} and"
                f" {_kind(found[odd])}",
                hint="Record calls of one kind.",
            )
        if not any(
            all(torch.equal(tensor, known[n]) for n, tensor in found.items())
            for known in calls.values()
        ):
            calls[f"{RECORDED} {each.number} of {count}"] = found
    call = replace(call, entry=heard[0].entry)
    return Recorded(name, heard[0].model_class, call, tuple(calls.values()), tuple(calls))


def _with_inputs(heard: Sequence[_Heard]) -> Iterator[dict[str, Any]]:
    """The arguments of each call; fractions that differ from call to call are tensors."""
    given = [{**each.arguments, **alike_rows(each.arguments)} for each in heard]
    for mask, of in MASKS.items():
        dtypes = [each[mask].dtype for each in given if isinstance(each.get(mask), Tensor)]
        for each in given if dtypes else ():
            if mask not in each and isinstance(masked := each.get(of), Tensor):
                each[mask] = torch.ones(masked.shape[:2], dtype=dtypes[0])
    differ = {
        name
        for name, first in given[0].items()
        if all(isinstance(each.get(name), float) for each in given)
        and any(each[name] != first for each in given)
    }
    for each in given:
        yield {n: torch.tensor(value) if n in differ else value for n, value in each.items()}


def alike_rows(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What is the same for all rows of a call, once: so that it says nothing of their number."""
    rows = arguments.get(SHAPES)
    alike = isinstance(rows, list) and rows and all(each == rows[0] for each in rows)
    return {SHAPES: rows[:1]} if rows and alike else {}


def _difference(one: Call, other: Call) -> str:
    for name in dict.fromkeys((*one.arguments, *other.arguments)):
        first, second = one.arguments.get(name), other.arguments.get(name)
        if first != second:
            return f"{name} is {_said(first)} and {_said(second)}"
    return "the order of its arguments differs"


def _said(value: Any) -> str:
    return "not given" if value is None else str(value).replace("Slot(name=", "the tensor(")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _rows(call: Mapping[str, Tensor]) -> int:
    first = next((tensor for tensor in call.values() if tensor.ndim), None)
    return 0 if first is None else first.shape[0]


def _shown(place: Place) -> str:
    return f"{place[0]}:{place[1]}"
