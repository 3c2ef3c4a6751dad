"""Sizes that vary, as torch.export has them, put into the words of `--dynamic`.

    {"x": {0: Dim("batch", min=2, max=8)}}      x:0=batch:2..8
    ({0: "batch:1..8"}, [None, 77])             x:0=batch:1..8  y:0=K  y:1=77
    {"x": {2: 8 * Dim("rows", max=16)}}         x:2=rows:8..128/8

K is the size of the example.  A `Dim` without an end gets that of the default range of its
dimension, and so do `Dim.DYNAMIC` and `Dim.AUTO`; the last is narrowed to what the code takes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.export import Dim

from enginecast.capture.inputs.calls import Call, Slot, items_of
from enginecast.capture.inputs.given import GuessedRange
from enginecast.capture.inputs.specs import BATCH, LARGEST_BATCH, SEQUENCE, DimSpec, InputSpec
from enginecast.errors import UsageError

Dynamic = str | Sequence[Any] | Mapping[str, Any] | Mapping[int, Any]
"""Texts of `--dynamic`; or for each input, by name or by position, its dimensions: a dict of some,
or a tuple or list of all.  A dimension is a `torch.export.Dim` or one of its hints, a number, a
text that follows the `=` of `--dynamic`, or None."""
FORMS = (
    "Give texts such as 'x:0=1..64', or the dimensions of each input, by name or by position:"
    ' {"x": {0: torch.export.Dim("batch", max=64)}}.'
)
_LEADING = {BATCH: 0, SEQUENCE: 1}
"""Names that the project gives by itself, and the dimensions that have them."""
_MOST = 2**31 - 1


@dataclass
class _Place:
    """A dimension, and what was said of it."""

    input: str
    axis: int
    said: Any
    dim: DimSpec | None
    """By default; None: there is no example."""

    def __str__(self) -> str:
        return f"{self.input}:{self.axis}"

    def wrong(self, what: str, hint: str = FORMS) -> UsageError:
        return UsageError(f"dynamic: {self}: {what}", hint=hint)

    @property
    def size(self) -> int:
        """In the example."""
        if self.dim is None or (self.dim.name is not None and self.dim.given is None):
            raise self.wrong(
                f"{_shown(self.said)} is the size of an example, and this model comes without one",
                "Give a number.",
            )
        return self.dim.size if self.dim.given is None else self.dim.given

    @property
    def least(self) -> int:
        """Of the default range."""
        return 1 if self.dim is None or self.dim.name is None else max(self.dim.minimum, 1)

    @property
    def most(self) -> int:
        if self.dim is None:
            raise self.wrong(
                f"{_shown(self.said)} has no largest size, and this model comes without an example",
                'Give it one: Dim("NAME", max=512).',
            )
        if self.dim.name is None:
            return max(LARGEST_BATCH, self.dim.size)
        return self.dim.maximum


@dataclass
class _Symbol:
    """A `Dim`, with the places that have its size."""

    factor: int
    """Of the one that it is derived from."""
    places: list[_Place] = field(default_factory=list)


def dynamic_texts(
    dynamic: Dynamic, call: Call | None = None, specs: Sequence[InputSpec] = ()
) -> tuple[str, ...]:
    """What `--dynamic` would have.

    Args:
        dynamic: of any form.
        call: the example, where there is one: how its inputs stand in the arguments.
        specs: its inputs, with the default ranges.

    Raises:
        UsageError: it has another form, or says what ranges cannot: that a size is a multiple of
            another one.
    """
    if isinstance(dynamic, str):
        return (dynamic,)
    if isinstance(dynamic, Sequence) and all(isinstance(each, str) for each in dynamic):
        return tuple(dynamic)
    if not isinstance(dynamic, (Mapping, Sequence)):
        raise UsageError(f"dynamic: got a {type(dynamic).__name__}", hint=FORMS)
    dims = {spec.name: spec.dims for spec in specs}
    places = list(_places(dynamic, None if call is None else call.arguments, dims))
    symbols: dict[str, _Symbol] = {}
    for place in places:
        if isinstance(place.said, Dim):
            name, factor = _derived(place)
            known = symbols.setdefault(name, _Symbol(factor))
            if known.factor != factor:
                other = known.places[0]
                raise place.wrong(
                    f"{_shown(place.said)}, and {other} is {_shown(other.said)}: a size can be"
                    " equal to another one, or vary by itself, but not be a multiple of another",
                    "Give each a Dim of its own; the export finds out what the model's code needs.",
                )
            known.places.append(place)
    tied = {id(place): text for name, s in symbols.items() for place, text in _tied(name, s)}
    texts = (tied[id(place)] if id(place) in tied else _text(place) for place in places)
    return tuple(text for text in texts if text)


def _places(
    dynamic: Any, arguments: Mapping[str, Any] | None, dims: Mapping[str, tuple[DimSpec, ...]]
) -> Iterator[_Place]:
    """The dimensions of which something is said, input by input."""
    if arguments is None:
        if not isinstance(dynamic, Mapping) or not all(isinstance(key, str) for key in dynamic):
            raise UsageError(
                "dynamic: expected inputs by name, for this model comes without an example",
                hint='Such as {"input_ids": {1: torch.export.Dim("tokens", max=128)}}.',
            )
        for name, shape in dynamic.items():
            yield from _of_input(name, shape, None)
        return
    if isinstance(dynamic, Mapping) and dynamic and all(isinstance(key, int) for key in dynamic):
        dynamic = [dynamic]  # of the only input
    yield from _within(dynamic, arguments, "", dims)


def _within(
    said: Any, held: Any, path: str, dims: Mapping[str, tuple[DimSpec, ...]]
) -> Iterator[_Place]:
    """What is said of a tensor, or of what a container holds."""
    if isinstance(held, Slot):
        yield from _of_input(held.name, said, dims[held.name])
        return
    items = items_of(held)
    if items is None:
        if said is not None:
            raise UsageError(f"dynamic: {path}: expected None, because {held!r} is not a tensor")
        return
    for key, shape in _by_key(said, items, path, dims):
        if key in items:
            yield from _within(shape, items[key], f"{path}.{key}" if path else key, dims)
        else:
            yield from _of_input(key, shape, dims[key])


def _by_key(
    said: Any, items: Mapping[str, Any], path: str, dims: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """What is said of each item of a container; nothing of all, if it is None."""
    where = f"dynamic: {path}" if path else "dynamic"
    own = items_of(said)
    if said is None:
        yield from ((key, None) for key in items)
    elif isinstance(said, Mapping) or (own is not None and not isinstance(said, (tuple, list))):
        for key, shape in (own or {}).items():
            if key not in items and (path or key not in dims):
                expected = ", ".join(items)
                raise UsageError(f"{where}: no input {key!r}; expected one of {expected}")
            yield key, shape
    elif isinstance(said, (tuple, list)):
        if len(said) > len(items):  # those of arguments that the example gives as None
            said = [shape for shape in said if shape is not None]
        if len(said) > len(items):
            raise UsageError(
                f"{where}: got the shapes of {len(said)} inputs, expected {len(items)}:"
                f" {', '.join(items)}"
            )
        yield from zip(items, said, strict=False)
    else:
        raise UsageError(f"{where}: got {_shown(said)}", hint=FORMS)


def _of_input(name: str, said: Any, dims: Sequence[DimSpec] | None) -> Iterator[_Place]:
    """The dimensions of an input of which something is said."""
    rank = None if dims is None else len(dims)
    if said is None:
        said = dict.fromkeys(range(len(dims or ())))
    elif isinstance(said, (tuple, list)):
        if rank not in (None, len(said)):
            raise UsageError(f"dynamic: {name}: got {len(said)} dimensions, expected {rank}")
        said = dict(enumerate(said))
    if not isinstance(said, Mapping) or not all(type(axis) is int for axis in said):
        raise UsageError(f"dynamic: {name}: got {_shown(said)}", hint=FORMS)
    for axis, size in said.items():
        place = axis + rank if rank is not None and axis < 0 else axis
        if place < 0 or (rank is not None and place >= rank):
            expected = "0 and more" if rank is None else f"0 to {rank - 1}"
            raise UsageError(f"dynamic: {name}: no dimension {axis}; expected {expected}")
        yield _Place(name, place, size, None if dims is None else dims[place])


def _derived(place: _Place) -> tuple[str, int]:
    """The name of a `Dim`, and by which number it is a multiple of it."""
    dim: Any = place.said
    root = getattr(dim, "root", None)
    if root is None:
        return str(dim.__name__), 1
    factor = dim.fn(1) - dim.fn(0)
    if dim.fn(0) or dim.fn(3) != 3 * factor or factor < 1:
        raise place.wrong(
            f"{_shown(dim)}: a size can be a multiple of a number, but not of this form",
            "Give it a Dim of its own; the export finds out what the model's code needs.",
        )
    return str(root.__name__), int(factor)


def _tied(name: str, symbol: _Symbol) -> Iterator[tuple[_Place, str]]:
    """The places of a `Dim`, which have one size."""
    places, step = symbol.places, symbol.factor
    first = places[0]
    ends = [_ends(place.said, step) for place in places]
    if any(end != ends[0] for end in ends):
        raise first.wrong(f"{name} has other ends elsewhere", "Use one Dim for all of them.")
    low, high = ends[0]
    low = max(-(-place.least // step) for place in places) if low <= 1 else low
    high = max(1, *(place.most // step for place in places)) if high is None else high
    if name in _LEADING and any(place.axis != _LEADING[name] for place in places):
        name = f"dim_{name}"  # another dimension may be called so by default
    for place in places:
        yield place, f"{place}={name}:{_ranged(low, high, step)}"


def _text(place: _Place) -> str:
    """What is said of one dimension alone; empty: it stays as it is by default."""
    said = place.said
    if isinstance(said, str):
        return f"{place}={said}"
    if type(said) is int:
        return f"{place}={said}"
    hint = getattr(getattr(said, "type", None), "name", "")
    if said is None or hint == "STATIC":
        return f"{place}={place.size}"
    if hint not in ("AUTO", "DYNAMIC"):
        raise place.wrong(f"got {_shown(said)}")
    low, high = _ends(said)
    is_bare = low <= 1 and high is None
    if hint == "AUTO" and is_bare and (place.dim is None or place.dim.name is not None):
        return ""
    range_ = _ranged(place.least if low <= 1 else low, place.most if high is None else high)
    text = f"{place}={range_}"
    return GuessedRange(text) if hint == "AUTO" else text


def _ends(dim: Any, step: int = 1) -> tuple[int, int | None]:
    """Least and greatest size; 0 or 1, and None: those of the default range."""
    root = dim if step == 1 else dim.root
    low, high = (getattr(root, name, None) for name in ("min", "max"))
    return int(low or 0), int(high) if isinstance(high, int) and high < _MOST else None


def _ranged(low: int, high: int, step: int = 1) -> str:
    return f"{low}..{high}" if step == 1 else f"{low * step}..{high * step}/{step}"


def _shown(said: Any) -> str:
    if isinstance(said, Dim):
        root = getattr(said, "root", None)
        return f"Dim({said.__name__!r})" if root is None else str(said)
    hint = getattr(getattr(said, "type", None), "name", "")
    return f"Dim.{hint}" if hint else repr(said)
