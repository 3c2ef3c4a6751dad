"""Compare a published engine with eager over its declared ranges, on values of many kinds.

Nothing here comes from `enginecast.verification`: a defect there must not hide here.  An element is wrong
where eager in the engine's dtype and in fp64 agree with each other to well within its difference
from both, and where eager does not itself move as far when its inputs move by a rounding.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from adversary.case import Case

Array = NDArray[Any]
Run = Callable[[Mapping[str, Array]], Sequence[Array]]
Draw = Callable[[Sequence[int], np.random.Generator], Array]
RELATIVE = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2}
"""Of an element's own size; eager's own error comes on top."""
OF_ROW = {"fp32": 2e-7, "fp16": 2e-3, "bf16": 2e-2, "int8": 5e-2}
"""Of the largest element of its row."""
OWN = {"fp32": 20.0, "fp16": 6.0, "bf16": 6.0, "int8": 20.0}
"""How often eager's own error in a row an element may be off by."""
TIES = {"fp32": 0.0, "fp16": 0.02, "bf16": 0.05, "int8": 0.05}
"""Share of integers and booleans that may be decisions between two values a rounding apart."""
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
LARGEST = 300_000
"""Elements of one input."""
BETWEEN = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    12,
    15,
    16,
    17,
    31,
    32,
    33,
    37,
    50,
    63,
    64,
    65,
    100,
    127,
    128,
    129,
)


class TurnedAwayError(Exception):
    """The engine says that it does not take these inputs."""


@dataclass(frozen=True)
class Taken:
    """What an engine declares of one input."""

    dtype: str
    shape: tuple[int | str, ...]
    low: float | None = None
    high: float | None = None


@dataclass
class Judged:
    """What came of an engine."""

    compared: int = 0
    turned_away: int = 0
    """Inputs within the declared ranges that the engine says it does not take."""
    wrong: str = ""
    """The first difference; empty: none."""
    seen: set[str] = field(default_factory=set)


def judge(
    case: Case,
    run: Run,
    taken: Mapping[str, Taken],
    symbols: Mapping[str, tuple[int, int]],
    kinds: Mapping[str, Draw] | None = None,
) -> Judged:
    """Run both side by side, in the same order, until the engine is wrong.

    Args:
        kinds: what floats are drawn as, by name; None: `KINDS`.
    """
    kinds = kinds or KINDS
    judged = Judged()
    dtype = LOW.get(case.precision)
    given, double = case.make(), _doubled(case)
    given = given.to(dtype) if dtype else given
    wide = any(found.dtype == "float64" for found in taken.values())
    epsilon = 1.2e-16 if wide else 6e-8  # of the inputs as the engine takes them
    for what, feeds in _feeds(case, taken, symbols, kinds):
        wanted = _eager(given, _cast(feeds, dtype) if dtype else feeds)
        exact = _exactly(double, feeds) if double else None
        if wanted is None:
            continue
        try:
            found = run({name: tensor.numpy() for name, tensor in feeds.items()})
        except TurnedAwayError as error:
            judged.turned_away += 1
            if what == "example":
                judged.wrong = f"example: turned away: {error}"
                return judged
            continue
        except Exception as error:
            judged.wrong = f"{what}: the engine does not run: {type(error).__name__}: {error}"
            return judged
        judged.compared += 1
        judged.wrong = _difference(case, feeds, epsilon, found, wanted, exact or wanted)
        if judged.wrong:
            judged.wrong = f"{what}: {judged.wrong}"
            return judged
    return judged


def _doubled(case: Case) -> nn.Module | None:
    module = case.make()
    if any(tensor.is_complex() for tensor in module.state_dict().values()):
        return None  # `double` would leave their imaginary parts out
    return module.double()


def _exactly(module: nn.Module, feeds: Mapping[str, Tensor]) -> list[Array] | None:
    """The outputs in fp64; constants that the code makes are fp64, too, where it fails otherwise."""
    wide = _cast(feeds, torch.float64)
    found = _eager(module, wide)
    if found is not None:
        return found
    torch.set_default_dtype(torch.float64)
    try:
        return _eager(module, wide)
    finally:
        torch.set_default_dtype(torch.float32)


def _cast(feeds: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in feeds.items()}


def _eager(module: nn.Module, feeds: Mapping[str, Tensor]) -> list[Array] | None:
    """The outputs; None where eager does not run."""
    copies = {name: tensor.clone() for name, tensor in feeds.items()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return flat(module(**copies))
    except Exception:
        return None


def flat(result: Any) -> list[Array]:
    """Tensors and numbers in the order of the result."""
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor | int | float)]
    return [_array(leaf) for leaf in leaves]


def _array(leaf: Any) -> Array:
    if not isinstance(leaf, Tensor):
        return np.asarray(leaf)
    tensor = leaf.detach()
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    return np.array(tensor.resolve_conj().resolve_neg().numpy())


def _difference(
    case: Case,
    feeds: Mapping[str, Tensor],
    epsilon: float,
    found: Sequence[Array],
    wanted: Sequence[Array],
    exact: Sequence[Array],
) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} outputs, eager has {len(wanted)}"
    for index, (one, two, three) in enumerate(zip(found, wanted, exact, strict=True)):
        one = _of_pairs(one) if two.dtype.kind == "c" else one
        if one.shape != two.shape:
            return f"output {index} has shape {one.shape}, eager {two.shape}"
        if _kind(one) != _kind(two):
            return f"output {index} is {one.dtype}, eager {two.dtype}"
        if three.shape != two.shape or not two.size:
            continue
        is_float = _kind(two) in "fc"
        said = (
            _inexact(case, feeds, epsilon, index, one, two, three)
            if is_float
            else _exact(case, feeds, index, one, two, three)
        )
        if said:
            return f"output {index}: {said}"
    return ""


def _of_pairs(array: Array) -> Array:
    """Engines give complex numbers as real and imaginary parts in a last dimension of 2."""
    if array.dtype.kind != "f" or array.shape[-1:] != (2,):
        return array
    values: Array = array[..., 0] + 1j * array[..., 1]
    return values


def _kind(array: Array) -> str:
    kind = "f" if array.dtype.name == "bfloat16" else array.dtype.kind
    return "i" if kind == "u" else kind


def _exact(
    case: Case, feeds: Mapping[str, Tensor], index: int, one: Array, two: Array, three: Array
) -> str:
    """Integers and booleans: equal wherever eager agrees with itself."""
    off = (one != two) & (two == three)
    if off.any():
        for other in _nearby(case, feeds, index, 2e-7):
            off &= other == two if other.shape == two.shape else False
    return "" if off.mean() <= TIES[case.precision] else _say(off, one, two)


def _inexact(
    case: Case,
    feeds: Mapping[str, Tensor],
    epsilon: float,
    index: int,
    one: Array,
    two: Array,
    three: Array,
) -> str:
    one, two, three = (
        array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
        for array in (one, two, three)
    )
    with np.errstate(all="ignore"):
        odd = ~np.isfinite(two) & ((two == three) | (np.isnan(two) & np.isnan(three)))
        strange = odd & ~((np.isnan(one) & np.isnan(two)) | (one == two))
        normal = np.isfinite(two) & np.isfinite(three)
        size = _by_row(np.where(normal, np.abs(three), 0))
        own = _by_row(np.where(normal, np.abs(two - three), 0))
        share = np.nanmax(np.where(size > 0, own / size, 0), initial=0)
        relative = RELATIVE[case.precision] * np.abs(three) + OF_ROW[case.precision] * size
        allowed = (
            OWN[case.precision] * np.maximum(own, share * size) + relative + max(case.floor, 1e-37)
        )
        off = normal & ~((np.abs(one - three) <= allowed) | (np.abs(one - two) <= allowed))
        if off.any():
            allowed += 50 * _condition(case, feeds, epsilon, index, three)
            off &= ~(np.abs(one - three) <= allowed)
    return _say(off | strange, one, two)


def _by_row(values: Array) -> Array:
    return values.max(-1, keepdims=True) if values.ndim else values


def _condition(
    case: Case, feeds: Mapping[str, Tensor], epsilon: float, index: int, three: Array
) -> Array:
    """How far eager moves when its inputs move by a rounding, unless it jumps."""
    moved = []
    for size in (epsilon, epsilon / 64):
        far = np.zeros(three.shape)
        for other in _nearby(case, feeds, index, size):
            if other.shape == three.shape:
                far = np.fmax(far, np.abs(other - three))
        moved.append(_by_row(far))
    return np.where(moved[1] <= moved[0] / 8, moved[0], 0)


def _nearby(case: Case, feeds: Mapping[str, Tensor], index: int, size: float) -> Iterator[Array]:
    """One output of eager in fp64 on inputs that differ by `size`, relative."""
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        module = _doubled(case)
        if module is None:
            return
        near = {
            name: tensor * (1 + size * (2 * torch.rand(tensor.shape, generator=generator) - 1))
            if tensor.is_floating_point()
            else tensor
            for name, tensor in _cast(feeds, torch.float64).items()
        }
        result = _exactly(module, near)
        if result is not None and index < len(result):
            yield result[index]


def _say(off: Array, one: Array, two: Array) -> str:
    if not off.any():
        return ""
    place = tuple(int(at[0]) for at in np.nonzero(off)) if off.ndim else ()
    return f"{int(off.sum())} of {off.size}, at {list(place)} {one[place]!s}, eager {two[place]!s}"


def _feeds(
    case: Case,
    taken: Mapping[str, Taken],
    symbols: Mapping[str, tuple[int, int]],
    kinds: Mapping[str, Draw],
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Inputs by what they are: the example, kinds of values, sizes, the example again."""
    yield "example", case.inputs()
    base = _sizes_of(case, taken)
    sizes = list(_sizes(base, symbols))
    for kind in kinds:
        yield kind, _draw(case, taken, base, kind, kinds[kind])
    for at, found in enumerate(sizes):
        kind = "random" if at % 3 else tuple(kinds)[at // 3 % len(kinds)]
        if _fits(taken, found):
            yield f"{kind} at {found}", _draw(case, taken, found, kind, kinds[kind])
    yield "example again", case.inputs()


def _sizes_of(case: Case, taken: Mapping[str, Taken]) -> dict[str, int]:
    return {
        dim: size
        for name, declared in taken.items()
        for dim, size in zip(declared.shape, case.example[name].shape, strict=True)
        if isinstance(dim, str)
    }


def _sizes(
    base: Mapping[str, int], symbols: Mapping[str, tuple[int, int]]
) -> Iterator[dict[str, int]]:
    """Each symbol alone over its range, all at an end, and some mixtures."""
    used = {name: symbols[name] for name in base if name in symbols}
    if not used:
        return
    choices = {}
    for name, (low, high) in used.items():
        near = {low, low + 1, (low + high) // 2, high - 1, high, *BETWEEN}
        choices[name] = [size for size in sorted(near) if low <= size <= high]
        for size in choices[name]:
            yield {**base, name: size}
    for end in (0, -1):
        yield {**base, **{name: found[end] for name, found in choices.items()}}
    random = np.random.default_rng(3)
    if len(used) > 1:
        for _ in range(10):
            yield {**base, **{name: int(random.choice(found)) for name, found in choices.items()}}


def _fits(taken: Mapping[str, Taken], sizes: Mapping[str, int]) -> bool:
    shapes = [[sizes.get(str(dim), dim) for dim in declared.shape] for declared in taken.values()]
    return all(np.prod(np.array(shape, dtype=float)) <= LARGEST for shape in shapes)


def _mixed(shape: Sequence[int], random: np.random.Generator) -> Array:
    values: Array = random.standard_normal(shape) * np.exp(3 * random.standard_normal(shape))
    return values


KINDS: dict[str, Draw] = {
    "random": lambda shape, random: random.standard_normal(shape),
    "zeros": lambda shape, random: np.zeros(shape),
    "tiny": lambda shape, random: 1e-4 * random.standard_normal(shape),
    "minute": lambda shape, random: 1e-9 * random.standard_normal(shape),
    "large": lambda shape, random: 1e3 * random.standard_normal(shape),
    "shifted": lambda shape, random: 100 + random.standard_normal(shape),
    "integral": lambda shape, random: random.integers(-4, 5, shape).astype(float),
    "halves": lambda shape, random: random.integers(-9, 10, shape) / 2,
    "negative": lambda shape, random: -np.abs(random.standard_normal(shape)),
    "positive": lambda shape, random: np.abs(random.standard_normal(shape)) + 0.01,
    "ones": lambda shape, random: np.ones(shape),
    "mixed": _mixed,
}


def _draw(
    case: Case, taken: Mapping[str, Taken], sizes: Mapping[str, int], kind: str, draw: Draw
) -> dict[str, Tensor]:
    random = np.random.default_rng(list(f"{kind}{sorted(sizes.items())}".encode()))
    feeds = {}
    for name, declared in taken.items():
        shape = [sizes.get(str(dim), dim) for dim in declared.shape]
        example = case.example[name]
        feeds[name] = _values(declared, [int(s) for s in shape], example, kind, draw, random)
    return feeds


def _values(
    taken: Taken,
    shape: Sequence[int],
    example: Tensor,
    kind: str,
    draw: Draw,
    random: np.random.Generator,
) -> Tensor:
    if example.dtype == torch.bool:
        share = {"zeros": 0.0, "ones": 1.0, "positive": 1.0, "tiny": 0.1}.get(kind, 0.5)
        return torch.from_numpy(np.asarray(random.random(shape) < share))
    if example.is_floating_point():
        return torch.from_numpy(np.asarray(draw(shape, random))).to(example.dtype)
    least = (
        taken.low
        if taken.low is not None
        else min(-3.0, float(example.min() if example.numel() else 0))
    )
    most = (
        taken.high
        if taken.high is not None
        else max(5.0, float(example.max() if example.numel() else 0))
    )
    least, most = max(least, -(2.0**40)), min(most, 2.0**40)
    ends = {"zeros": least, "ones": min(max(1, least), most), "positive": most}
    if kind in ends:
        values = np.full(shape, int(ends[kind]))
    elif kind in ("tiny", "integral"):
        within = max(least, -4), min(most, 4)
        within = within if within[0] <= within[1] else (least, most)
        values = random.integers(int(within[0]), int(within[1]) + 1, shape)
    else:
        values = random.integers(int(least), int(most) + 1, shape)
    return torch.from_numpy(np.asarray(values)).to(example.dtype)
