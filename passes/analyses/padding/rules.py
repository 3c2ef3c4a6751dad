"""What each op does to rows of tokens: it keeps them apart, mixes them without any influence from
padding, or is unknown.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from enginecast.passes.analyses.padding.facts import (
    ANYTHING,
    ONE,
    ZERO,
    Fact,
    Interval,
    Side,
    Unproved,
    both,
    chosen,
    comparison,
    either,
    greatest,
    inverted,
    is_masked,
    is_small,
    least,
    magnitude,
    negative,
    nonzero,
    of_constant,
    over,
    plus,
    position,
    times,
    wide,
)
from enginecast.passes.ir.edit import aten, first_input, shape_of, value
from enginecast.passes.ir.effects import draws
from enginecast.passes.ir.match import is_call, op_name
from enginecast.passes.ir.traits import Trait, has, is_identity

Found = Fact | tuple[Fact, ...]
Given = dict[str, Any]
"""The arguments of a call by name, with facts in place of nodes."""
Rule = Callable[[Node, Given], Found]

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_ROUNDED = ("add", "sub", "rsub", "mul", "div")
_INTERVALS: Mapping[str, Callable[..., Interval]] = {
    "add": plus,
    "sub": lambda a, b: plus(a, negative(b)),
    "rsub": lambda a, b: plus(b, negative(a)),
    "mul": times,
    "div": over,
    "neg": negative,
    "abs": magnitude,
    "where": chosen,
    "masked_fill": lambda a, mask, filling: chosen(mask, filling, a),
    "logical_not": inverted,
    "bitwise_not": inverted,
    "minimum": least,
    "maximum": greatest,
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), both),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), either),
    **{name: comparison(name) for name in _COMPARISONS},
}
"""Bounds of what an elementwise op gives; `bitwise` of booleans alone."""
_UNBOUNDED = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "logit", "pow", "reciprocal"),
        *("rsqrt", "tan"),
    }
)
"""Of these, small numbers may make large ones."""
_ALONG = frozenset(
    {
        *("_log_softmax", "_softmax", "all", "amax", "amin", "any", "argmax", "argmin", "argsort"),
        *("cat", "chunk", "cummax", "cumprod", "cumsum", "flip", "glu", "linalg_vector_norm"),
        *("log_softmax", "logsumexp", "max", "mean", "min", "narrow", "norm", "prod", "roll"),
        *("select", "slice", "softmax", "sort", "split", "split_with_sizes", "stack", "std", "sum"),
        *("topk", "unbind", "unflatten", "unsafe_chunk", "unsafe_split", "var"),
    }
)
"""What happens along some dimensions, and to each place along the others alike."""
_FILLINGS = {"ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0}
_SIZES = frozenset(["size", "sizes", "shape", "repeats", "split_size", "split_sizes"])
"""Arguments that decide sizes, and nothing else."""


@dataclass(frozen=True)
class Labels:
    """Sizes of the program that are those of the mask."""

    tokens: Any
    batch: Any
    """None: there is one row."""
    longest: float

    def of(self, tensor: Tensor) -> tuple[str, ...]:
        """A label for each dimension.

        Raises:
            Unproved: some size is made of these, and none of them.
        """
        found = tuple(self._label(size) for size in tensor.shape)
        if _tokens(found) > 2:
            raise Unproved("it has more than two dimensions of tokens")
        return found

    def _label(self, size: Any) -> str:
        if not self.concerns(size):
            return ""
        expression = size.node.expr
        if expression == self.tokens:
            return "t"
        if self.batch is not None and expression == self.batch:
            return "b"
        if self.batch is not None and expression == self.batch * self.tokens:
            return "bt"
        raise Unproved(f"a size is {expression}, expected one of the mask's sizes")

    def concerns(self, size: Any) -> bool:
        """Whether a number depends on the sizes of the mask, or on what a tensor holds."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return False
        watched = set(self.tokens.free_symbols)
        watched |= set() if self.batch is None else set(self.batch.free_symbols)
        found = size.node.expr.free_symbols
        return bool(found & watched) or bool(free_unbacked_symbols(size))


class Rules:
    """Facts about the values of one program, from those about what they are computed from."""

    def __init__(self, labels: Labels, side: Side, known: Mapping[Node, Found]) -> None:
        self._labels, self._side, self._known = labels, side, known

    def of(self, node: Node) -> Found:
        """What is known of a node's value.

        Raises:
            Unproved: why nothing is.
        """
        name, found = op_name(node).partition(".")[0], value(node)
        if name in _FILLINGS or name in ("full", "full_like", "new_full"):
            return self._filled(node, name)
        if name == "arange":
            return self._arange(node)
        if name == "eye" and self._labels.of(found) == ("t", "t"):
            return Fact(("t", "t"), ONE, (ZERO, ZERO), (0.0, 1.0))
        given = self._arguments(node)
        if draws(node):
            raise Unproved("it draws random numbers")
        facts = [fact for fact in _flat(given.values()) if isinstance(fact, Fact)]
        rule: Rule | None = getattr(self, f"op_{name}", None) or self._by_trait(node, name)
        if rule is not None:
            result = rule(node, given)
            if rule not in (self._elementwise, self.op_index) and not _is_position(result):
                self.require_still(*facts)
            return result
        if not any(any(fact.labels) for fact in facts):
            return self._plain(found)
        raise Unproved(f"{name} is not known to keep tokens apart")

    def _by_trait(self, node: Node, name: str) -> Rule | None:
        """What is done for ops of one kind alike."""
        if is_identity(node) or has(node, Trait.CASTS):
            return self._cast
        if has(node, Trait.RESHAPES):
            return self._reshaped
        if name in _ALONG:
            return self._along
        return self._elementwise if has(node, Trait.ELEMENTWISE) else None

    # What a rule is given.

    def _arguments(self, node: Node) -> Given:
        """The arguments by name, facts in place of nodes.

        Raises:
            Unproved: a number depends on how many tokens there are.
        """
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        named = {one.name: one.default_value for one in schema if one.has_default_value()}
        given = {one.name: each for one, each in zip(schema, node.args, strict=False)}
        named = {**given, **{key: named[key] for key in named if key not in given}, **node.kwargs}
        found = {key: self._fact(each) for key, each in named.items()}
        sizes = _SIZES | ({"end"} if is_call(node, aten.slice.Tensor) else set())
        for key in found.keys() - sizes:
            if any(map(self._labels.concerns, _flat([found[key]]))):
                raise Unproved("it computes with the number of tokens, or one read from a tensor")
        return found

    def _fact(self, given: Any) -> Any:
        if isinstance(given, list | tuple):
            return [self._fact(one) for one in given]
        if isinstance(given, Node):
            return self._known.get(given, value(given))
        return given

    def _plain(self, found: Any) -> Found:
        """What is computed from nothing that has tokens."""
        if isinstance(found, Tensor):
            labels = self._labels.of(found)
            if any("t" in label for label in labels):
                raise Unproved("it is computed from sizes")
            return Fact(labels, span=ANYTHING, here=ANYTHING)
        return tuple(self._plain(one) for one in found)  # type: ignore[misc]

    def _filled(self, node: Node, name: str) -> Fact:
        filling: Any = _FILLINGS.get(name)
        if filling is None:
            filling = node.args[1] if len(node.args) > 1 else node.kwargs["fill_value"]
            filling = value(filling) if isinstance(filling, Node) else filling
        if not isinstance(filling, int | float):
            raise Unproved("it is filled with a computed number")
        return of_constant(float(filling), float(filling), self._labels.of(value(node)))

    def _arange(self, node: Node) -> Fact:
        found = value(node)
        labels = self._labels.of(found)
        starts_at_zero = node.target is aten.arange.default
        if node.target is aten.arange.start:
            starts_at_zero = _is_number(node.args[0], 0)
        if not any(labels) and not any(
            map(self._labels.concerns, map(value, node.all_input_nodes))
        ):
            return Fact(labels, span=ANYTHING, here=ANYTHING)
        if not starts_at_zero or len(node.args) > 2:
            raise Unproved("positions do not start at 0")
        return self._position(labels, (1,), 0, found.dtype)

    def _position(
        self, labels: tuple[str, ...], steps: tuple[int, ...], offset: int, dtype: torch.dtype
    ) -> Fact:
        """A sum of indices, as a dtype holds it; no longer one where that may round or wrap."""
        found = position(labels, steps, offset, self._side, self._labels.longest)
        is_float = dtype.is_floating_point
        most = 2 / torch.finfo(dtype).eps if is_float else float(torch.iinfo(dtype).max)
        highest = max(sum(step for step in steps if step * sign > 0) * sign for sign in (1, -1))
        if highest * self._labels.longest + abs(offset) <= most:
            return found
        self.require_still(found)
        return of_constant(*ANYTHING, labels)

    # Elements in their places.

    def _elementwise(self, node: Node, given: Given) -> Fact:
        name = op_name(node).partition(".")[0]
        name = {"min": "minimum", "max": "maximum"}.get(name, name)
        labels = self._labels.of(value(node))
        operands = [one for key, one in given.items() if key not in ("alpha", "rounding_mode")]
        numbers = Fact | int | float | torch.SymInt | torch.SymFloat
        facts = [_as_fact(one) for one in operands if isinstance(one, numbers)]
        for fact in facts:
            _require_broadcast(fact.labels, labels)
        alpha = given.get("alpha", 1)
        if name in ("add", "sub", "rsub") and alpha == 1:
            found = self._sum(labels, name, facts, value(node).dtype)
            if found is not None:
                return found
        plain = alpha == 1 and given.get("rounding_mode") is None
        compute = self._stored(name, node) if plain else lambda *_: ANYTHING
        compared = None
        if name in _COMPARISONS:
            compared = self._sum(labels, "sub", facts, torch.int64)
        if compared is not None:
            facts = [compared, of_constant(0.0, 0.0, ())]
            if compute(compared.span, ZERO) in (ZERO, ONE):  # for every position there is
                return _by_region(labels, compute, facts)
        self.require_still(*facts)
        return _by_region(labels, compute, facts)

    def _compute(self, name: str, node: Node) -> Callable[..., Interval]:
        known = _INTERVALS.get(name)
        if known is not None and not (
            name.startswith(("bitwise", "__")) and value(node).dtype is not torch.bool
        ):
            return known
        if has(node, Trait.BOUNDED):
            return lambda *_: (-1.0, 1.0)
        explosive = name in _UNBOUNDED

        def unknown(*given: Interval) -> Interval:
            tame = given[:1] == (None,) if explosive else all(map(is_small, given))
            return None if tame else ANYTHING

        return unknown

    def _stored(self, name: str, node: Node) -> Callable[..., Interval]:
        """The bounds of what an op gives, in the dtype that holds it."""
        compute, dtype = self._compute(name, node), value(node).dtype

        def stored(*given: Interval) -> Interval:
            found = compute(*given)
            units = name == "mul" and any(set(wide(one)) <= {-1.0, 0.0, 1.0} for one in given)
            whole = name != "div" and all(_is_whole(one, dtype) for one in (*given, found))
            return _held(found, dtype, is_exact=name not in _ROUNDED or units or whole)

        return stored

    def _sum(
        self, labels: tuple[str, ...], name: str, facts: Sequence[Fact], dtype: torch.dtype
    ) -> Fact | None:
        """A sum of positions; None where it is of something else."""
        left, right = reversed(facts) if name == "rsub" else facts
        signs = (1, 1) if name == "add" else (1, -1)
        steps, offset = [0] * len(labels), 0
        for fact, sign in zip((left, right), signs, strict=True):
            if fact.steps is not None:
                for dim, step in enumerate(fact.steps):
                    steps[len(labels) - len(fact.labels) + dim] += sign * step
                offset += sign * fact.offset
            elif fact.span is not None and fact.span[0] == fact.span[1] and not any(fact.labels):
                if not float(fact.span[0]).is_integer():
                    return None
                offset += sign * int(fact.span[0])
            else:
                return None
        if left.steps is None and right.steps is None:
            return None
        return self._position(labels, tuple(steps), offset, dtype)

    def _cast(self, node: Node, given: Given) -> Fact:
        fact: Fact = _first_fact(given)
        dtype = value(node).dtype
        if dtype == value(first_input(node)).dtype:
            return fact
        if fact.steps is not None and dtype is not torch.bool:
            return self._position(fact.labels, fact.steps, fact.offset, dtype)

        def cast(one: Interval) -> Interval:
            return _held(one, dtype, is_exact=_is_whole(one, dtype))

        return _by_region(fact.labels, cast, [fact])

    def op_clamp(self, node: Node, given: Given) -> Fact:
        fact, low, high = given["self"], given.get("min"), given.get("max")
        self.require_still(fact)
        limits = (-math.inf if low is None else low, math.inf if high is None else high)
        if not all(isinstance(limit, int | float) for limit in limits):
            raise Unproved("its limits are computed")

        def clamped(one: Interval) -> Interval:
            first, last = (min(max(bound, limits[0]), limits[1]) for bound in wide(one))
            return None if one is None and is_small((first, last)) else (first, last)

        return _by_region(fact.labels, clamped, [fact])

    def op_clamp_min(self, node: Node, given: Given) -> Fact:
        return self.op_clamp(node, given)

    def op_clip(self, node: Node, given: Given) -> Fact:
        return self.op_clamp(node, given)

    def op_min(self, node: Node, given: Given) -> Found:
        if node.target is aten.min.other:
            return self._elementwise(node, given)
        return self._along(node, given)

    def op_max(self, node: Node, given: Given) -> Found:
        if node.target is aten.max.other:
            return self._elementwise(node, given)
        return self._along(node, given)

    # Elements in other places.

    def _reshaped(self, node: Node, given: Given) -> Fact:
        fact = _first_fact(given)
        labels = self._labels.of(value(node))
        if _runs(first_input(node), fact.labels) != _runs(node, labels):
            raise Unproved("it reshapes tokens into something else")
        pads = fact.pads
        found = replace(fact, labels=labels, pads=pads, steps=None, offset=0)
        if fact.steps is None:
            return found
        at = [dim for dim, label in enumerate(labels) if label]
        moved = [step for step, label in zip(fact.steps, fact.labels, strict=True) if label]
        if len(at) != len(moved):
            raise Unproved("it reshapes positions")
        steps = [0] * len(labels)
        for dim, step in zip(at, moved, strict=True):
            steps[dim] = step
        return replace(found, steps=tuple(steps), offset=fact.offset)

    def _moved(self, node: Node, fact: Fact, order: Sequence[int]) -> Fact:
        """A permutation: dimension `order[i]` becomes dimension i."""
        labels = tuple(fact.labels[dim] for dim in order)
        pads = tuple(fact.pad(dim) for dim in order if "t" in fact.labels[dim])
        steps = None if fact.steps is None else tuple(fact.steps[dim] for dim in order)
        return replace(fact, labels=labels, pads=pads, steps=steps)

    def op_permute(self, node: Node, given: Given) -> Fact:
        fact = given["self"]
        return self._moved(node, fact, [dim % len(fact.labels) for dim in given["dims"]])

    def op_transpose(self, node: Node, given: Given) -> Fact:
        fact = given["self"]
        order = list(range(len(fact.labels)))
        left, right = given["dim0"] % len(order), given["dim1"] % len(order)
        order[left], order[right] = right, left
        return self._moved(node, fact, order)

    def op_swapaxes(self, node: Node, given: Given) -> Fact:
        return self.op_transpose(node, {**given, "dim0": given["axis0"], "dim1": given["axis1"]})

    def op_t(self, node: Node, given: Given) -> Fact:
        return self._moved(node, given["self"], range(len(given["self"].labels))[::-1])

    def op_mT(self, node: Node, given: Given) -> Fact:  # noqa: N802 - the op's name
        return self.op_transpose(node, {**given, "dim0": -2, "dim1": -1})

    def op_expand(self, node: Node, given: Given) -> Fact:
        fact, labels = given["self"], self._labels.of(value(node))
        _require_broadcast(fact.labels, labels)
        first = len(labels) - len(fact.labels)
        steps = None if fact.steps is None else (0,) * first + fact.steps
        return replace(_by_region(labels, lambda one: one, [fact]), steps=steps, offset=fact.offset)

    def op_expand_as(self, node: Node, given: Given) -> Fact:
        return self.op_expand(node, given)

    def op_broadcast_to(self, node: Node, given: Given) -> Fact:
        return self.op_expand(node, given)

    def op_repeat(self, node: Node, given: Given) -> Fact:
        fact, repeats = given["self"], given["repeats"]
        first = len(repeats) - len(fact.labels)
        for label, count in zip(fact.labels, repeats[first:], strict=True):
            if label and count != 1:
                raise Unproved("it repeats tokens")
        self.require_still(fact)
        return _by_region(self._labels.of(value(node)), lambda one: one, [fact])

    def op_tril(self, node: Node, given: Given) -> Fact:
        return self._triangle(node, given, lower=True)

    def op_triu(self, node: Node, given: Given) -> Fact:
        return self._triangle(node, given, lower=False)

    def _triangle(self, node: Node, given: Given, *, lower: bool) -> Fact:
        fact, diagonal = given["self"], given.get("diagonal", 0)
        labels = fact.labels
        if labels[-2:] != ("t", "t"):
            raise Unproved("it is a triangle whose sizes are not those of the tokens")
        rows, columns = ((0,) * (len(labels) - 2) + last for last in ((1, 0), (0, 1)))
        steps = tuple(c - r for c, r in zip(columns, rows, strict=True))
        away = position(labels, steps, -diagonal, self._side, self._labels.longest)
        compare = comparison("le" if lower else "ge")
        kept = _by_region(labels, compare, [away, of_constant(0.0, 0.0, ())])
        return _by_region(labels, lambda k, one: chosen(k, one, ZERO), [kept, fact])

    def op_index(self, node: Node, given: Given) -> Fact:
        fact, indices = given["self"], given["indices"]
        labels = self._labels.of(value(node))
        found = [one for one in indices if one is not None]
        masks = (torch.bool, torch.uint8)
        if any(value(one).dtype in masks for one in node.all_input_nodes[1:]):
            raise Unproved("it selects rows by a mask")
        self.require_still(fact)
        if not any(fact.labels):  # a table
            self.require_still(*found)
            return Fact(labels, fact.span, (fact.span,) * _tokens(labels), fact.span)
        full = len(indices) == len(fact.labels) == len(found)
        width = max(len(one.labels) for one in found)
        places = [_place(one, width) for one in found]
        dims = zip(fact.labels, places, shape_of(first_input(node)), strict=False)
        meets = [
            label == (labels[place] if place is not None else None) or _is_number(size, 1)
            for label, place, size in dims
        ]
        known = [place for place in places if place is not None]
        if not full or width != len(labels) or not all(meets) or len(set(known)) != len(known):
            raise Unproved("it selects rows by computed indices")
        pads: list[Interval] = []
        for place in (dim for dim, label in enumerate(labels) if "t" in label):
            pads.append(fact.pad(places.index(place)) if place in places else fact.here)
        return Fact(labels, fact.here, tuple(pads), fact.span)

    def op_gather(self, node: Node, given: Given) -> Fact:
        fact, places = given["self"], given["index"]
        dim = given["dim"] % len(fact.labels)
        self.require_still(places)
        pairs = enumerate(zip(fact.labels, places.labels, strict=True))
        if fact.labels[dim] or any(one != other for at, (one, other) in pairs if at != dim):
            raise Unproved("it selects rows by computed indices")
        return Fact(places.labels, fact.span, (fact.span,) * _tokens(places.labels), fact.span)

    def op_embedding(self, node: Node, given: Given) -> Fact:
        if any(given["weight"].labels):
            raise Unproved("its table is computed from tokens")
        self.require_still(given["indices"])
        span = given["weight"].span
        labels = self._labels.of(value(node))
        return Fact(labels, span, (span,) * _tokens(labels), span)

    # Along dimensions.

    def _along(self, node: Node, given: Given) -> Found:
        name = op_name(node).partition(".")[0]
        facts = [one for one in _flat([given.get("self"), given.get("tensors")]) if one is not None]
        rank = len(facts[0].labels) + (name == "stack")
        dims = given.get("dim", given.get("dims"))
        dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
        dims = [dim % rank for dim in dims]
        self.require_still(*facts)
        touched = {facts[0].labels[dim] for dim in dims} if name != "stack" else set()
        if touched == {"t"} and len(dims) == 1:
            return self._along_tokens(node, name, given, facts[0], dims[0])
        if touched - {""}:
            what = "rows of the batch" if "b" in touched else "tokens"
            raise Unproved(f"{name} mixes {what}")
        results = value(node)
        if isinstance(results, Tensor):
            return self._kept(node, results, facts)
        return tuple(self._kept(node, one, facts) for one in results)

    def _kept(self, node: Node, result: Tensor, facts: Sequence[Fact]) -> Fact:
        """A result whose tokens are those of the operands, in their order."""
        labels = self._labels.of(result)
        for fact in facts:
            if [x for x in fact.labels if x] != [x for x in labels if x]:
                raise Unproved("it mixes values with tokens and without")
        count = _tokens(labels)
        if has(node, Trait.MOVES, Trait.JOINS) and not any(fact.steps for fact in facts):
            here, span = facts[0].here, facts[0].span
            pads = facts[0].pads
            if all((f.here, f.span, f.pads) == (here, span, pads) for f in facts):
                return Fact(labels, here, pads, span)
        known = None if all(is_small(fact.span) for fact in facts) else ANYTHING
        return Fact(labels, known, (known,) * count, known)

    def _along_tokens(self, node: Node, name: str, given: Given, fact: Fact, dim: int) -> Found:
        """What mixes tokens, where padding has no part in it."""
        pad, labels = fact.pad(dim), self._labels.of(_first(value(node)))
        only = len(fact.tokens) == 1
        if name in ("softmax", "_softmax"):
            if not is_masked(pad, fact.here):
                raise Unproved(_leaks(pad, fact.here))
            pads = tuple(ZERO if d == dim else (0.0, 1.0) for d in fact.tokens)
            return Fact(labels, (0.0, 1.0), pads, (0.0, 1.0))
        neutral = {
            "sum": pad == ZERO,
            "any": pad is not None and nonzero(pad) == ZERO,
            "all": pad is not None and nonzero(pad) == ONE,
            "amax": only and is_masked(pad, fact.here),
            "cumsum": pad == ZERO or self._side == "right",
            "slice": self._is_first(given, 0, 1),
            "select": self._is_first(given, 0, None),
        }
        if not neutral.get(name, False):
            raise Unproved(f"{name} takes padding along with the tokens")
        if name == "any" or name == "all":
            bounds: Interval = (0.0, 1.0)
        else:
            bounds = None if is_small(fact.span) else ANYTHING
        return Fact(labels, bounds, (bounds,) * _tokens(labels), bounds)

    def _is_first(self, given: Given, at: int, end: int | None) -> bool:
        """Whether the first token alone is taken, which is valid where padding is on the right."""
        if self._side != "right":
            return False
        if end is None:
            return _is_number(given.get("index"), at)
        start = given.get("start")
        return (start is None or _is_number(start, at)) and _is_number(given.get("end"), end)

    def op_slice(self, node: Node, given: Given) -> Found:
        fact: Fact = given["self"]
        labels = self._labels.of(value(node))
        dim = given.get("dim", 0) % len(labels)
        start = 0 if given["start"] is None else given["start"]
        if not isinstance(start, int):
            raise Unproved("it starts at a computed position")
        whole = start == 0 and _is_number(given["step"], 1)
        if fact.labels[dim] and labels[dim] == fact.labels[dim] and whole:
            return fact
        if not fact.labels[dim] and labels[dim] == "t":  # a table of positions
            if self._side == "any" or start < 0 or not _is_number(given["step"], 1):
                raise Unproved("it depends on the position of a token")
            count = _tokens(labels)
            return Fact(labels, fact.span, (fact.span,) * count, fact.span)
        if fact.labels[dim] or labels[dim]:
            return self._along(node, given)
        return replace(fact, labels=labels)

    def op_layer_norm(self, node: Node, given: Given) -> Fact:
        fact = given["input"]
        count = len(given["normalized_shape"])
        if any(fact.labels[len(fact.labels) - count :]):
            raise Unproved("a norm mixes tokens")
        self.require_still(fact)
        return self._ordinary(node)

    def op_rms_norm(self, node: Node, given: Given) -> Fact:
        return self.op_layer_norm(node, given)

    def op_group_norm(self, node: Node, given: Given) -> Fact:
        if any(given["input"].labels[1:]):
            raise Unproved("a norm mixes tokens")
        return self._ordinary(node)

    def op_batch_norm(self, node: Node, given: Given) -> Fact:
        if given["training"] or given.get("running_mean") is None:
            raise Unproved("a norm mixes rows of the batch")
        return self._ordinary(node, given["input"])

    # Products.

    def op_linear(self, node: Node, given: Given) -> Fact:
        if given["input"].labels[-1]:
            return self._product(node, given["input"], self.op_t(node, {"self": given["weight"]}))
        if any(given["weight"].labels):
            raise Unproved("its weight is computed from tokens")
        return self._ordinary(node, given["input"])

    def op_addmm(self, node: Node, given: Given) -> Fact:
        if any(given["self"].labels):
            raise Unproved("addmm adds a value with tokens")
        return self._product(node, given["mat1"], given["mat2"])

    def op_matmul(self, node: Node, given: Given) -> Fact:
        return self._product(node, given["self"], given["other"])

    def op_mm(self, node: Node, given: Given) -> Fact:
        return self._product(node, given["self"], given["mat2"])

    def op_bmm(self, node: Node, given: Given) -> Fact:
        return self._product(node, given["self"], given["mat2"])

    def _product(self, node: Node, left: Fact, right: Fact) -> Fact:
        self.require_still(left, right)
        if len(left.labels) < 2 or len(right.labels) < 2:
            if any(left.labels[-1:]) or any(right.labels[:1]) or any(right.labels[1:]):
                raise Unproved("a product with a vector of tokens")
            return self._ordinary(node, left, right)
        labels = self._labels.of(value(node))
        _require_broadcast((*left.labels[:-1], ""), (*labels[:-1], ""))
        _require_broadcast(
            (*right.labels[:-2], "", right.labels[-1]), (*labels[:-2], "", labels[-1])
        )
        inner = left.labels[-1], right.labels[-2]
        if any(inner):
            self._require_contracted(
                inner,
                (left.pad(len(left.labels) - 1), right.pad(len(right.labels) - 2))
                if inner == ("t", "t")
                else (),
            )
        found = self._ordinary(node, left, right)
        pads = tuple(
            ZERO if _is_zero(left, right, dim, len(labels)) else found.span for dim in found.tokens
        )
        return replace(found, pads=pads)

    def _require_contracted(self, inner: Sequence[str], pads: Sequence[Interval]) -> None:
        if any("b" in label for label in inner):
            raise Unproved("a product mixes rows of the batch")
        if ZERO not in pads or any(map(math.isinf, itertools.chain(*map(wide, pads)))):
            raise Unproved("a product takes padding along with the tokens")

    def op_einsum(self, node: Node, given: Given) -> Fact:
        equation = given["equation"].replace(" ", "")
        facts = given["tensors"]
        if "." in equation or "->" not in equation:
            raise Unproved(f"einsum {equation!r} is not known to keep tokens apart")
        self.require_still(*facts)
        inputs, _, output = equation.partition("->")
        terms = inputs.split(",")
        where: dict[str, list[tuple[str, Interval]]] = {}
        for term, fact in zip(terms, facts, strict=True):
            if len(set(term)) != len(term):
                raise Unproved(f"einsum {equation!r} is not known to keep tokens apart")
            for dim, letter in enumerate(term):
                label = fact.labels[dim]
                where.setdefault(letter, []).append(
                    (label, fact.pad(dim) if "t" in label else None)
                )
        for letter, uses in where.items():
            names = [label for label, _ in uses]
            if any(names) and letter not in output:
                self._require_contracted(names, [pad for _, pad in uses])
            if len(set(names)) > 1:
                raise Unproved("a product of tokens with something else")
        return self._ordinary(node, *facts)

    def op_scaled_dot_product_attention(self, node: Node, given: Given) -> Fact:
        query, key, values = (given[name] for name in ("query", "key", "value"))
        labels = self._labels.of(value(node))
        for one in (query, key, values):
            if one.labels[-1]:
                raise Unproved("attention over tokens as features")
            _require_broadcast(one.labels[:-2], labels[:-2])
        if not key.labels[-2]:
            return self._ordinary(node, values)
        if key.labels[-2] != "t" or query.labels[-2] not in ("t", ""):
            raise Unproved("attention mixes rows of the batch")
        bias = given.get("attn_mask")
        if bias is None:
            if not given.get("is_causal") or self._side != "right" or query.labels[-2] != "t":
                raise Unproved("attention sees padding: it has no mask")
            return self._ordinary(node, values)
        self._require_masked(node, bias, labels, is_small(query.span) and is_small(key.span))
        return self._ordinary(node, values)

    def _require_masked(
        self, node: Node, bias: Fact, labels: tuple[str, ...], ordinary: bool
    ) -> None:
        """Refuse attention whose mask lets padding in; `ordinary`: its scores are ordinary."""
        if not bias.labels or bias.labels[-1] != "t":
            raise Unproved("attention sees padding: its mask is not of the tokens")
        _require_broadcast(bias.labels[:-2], labels[:-2])
        pad, here = bias.pad(len(bias.labels) - 1), bias.here
        is_bool = value(_argument(node, "attn_mask", 3)).dtype is torch.bool
        if not ((nonzero(pad), nonzero(here)) == (ZERO, ONE) if is_bool else is_masked(pad, here)):
            raise Unproved(_leaks(pad, here, is_bool))
        if not is_bool and not ordinary:
            raise Unproved(_leaks(ANYTHING, here))

    def op_convolution(self, node: Node, given: Given) -> Fact:
        fact = given["input"]
        if fact.labels[0] not in ("b", "", "bt") or any(fact.labels[1:]):
            raise Unproved("a convolution mixes tokens with their neighbors")
        if any(given["weight"].labels):
            raise Unproved("its weight is computed from tokens")
        return self._ordinary(node, fact)

    op_conv1d = op_conv2d = op_conv3d = op_convolution

    def _ordinary(self, node: Node, *facts: Fact) -> Fact:
        """What a model computes from these: ordinary numbers, unless one of them is not."""
        labels = self._labels.of(value(node))
        known = None if all(is_small(fact.span) for fact in facts) else ANYTHING
        return Fact(labels, known, (known,) * _tokens(labels), known)

    def require_still(self, *facts: Fact) -> None:
        """Refuse positions in the batch, and those of tokens where columns on the left may be cut
        off.
        """
        if any(fact.counts_rows for fact in facts):
            raise Unproved("it depends on the position of a row in the batch")
        if self._side == "any" and any(fact.moves for fact in facts):
            raise Unproved("it depends on the position of a token")


def _as_fact(one: Any) -> Fact:
    if isinstance(one, Fact):
        return one
    plain = isinstance(one, int | float)
    return of_constant(float(one), float(one), ()) if plain else Fact((), ANYTHING, (), ANYTHING)


def _require_broadcast(given: Sequence[str], labels: Sequence[str]) -> None:
    """Refuse a value whose tokens do not meet the result's."""
    first = len(labels) - len(given)
    for dim, label in enumerate(given):
        if label and label != labels[first + dim]:
            raise Unproved("it combines tokens with something else")


def _by_region(
    labels: tuple[str, ...], compute: Callable[..., Interval], facts: Sequence[Fact]
) -> Fact:
    """What an elementwise function gives, wherever something is known of its operands."""

    def at(dim: int) -> Interval:
        return compute(*(_at_pad(fact, dim - len(labels) + len(fact.labels)) for fact in facts))

    return Fact(
        labels,
        here=compute(*(fact.here for fact in facts)),
        pads=tuple(at(dim) for dim, label in enumerate(labels) if "t" in label),
        span=compute(*(fact.span for fact in facts)),
    )


def _at_pad(fact: Fact, dim: int) -> Interval:
    """A value where the token of one dimension of the result is padding, all others the same."""
    if dim >= 0 and dim in fact.tokens:
        return fact.pad(dim)
    return fact.here


def _is_zero(left: Fact, right: Fact, dim: int, rank: int) -> bool:
    """Whether a product's row or column is one of zeros."""
    if dim == rank - 1:
        return right.pad(len(right.labels) - 1) == ZERO
    at = dim - rank + len(left.labels)
    return at in left.tokens and left.pad(at) == ZERO


def _is_number(found: Any, wanted: int) -> bool:
    """Whether a number is known to be this one; asking a symbolic one would decide it."""
    return isinstance(found, int) and found == wanted


def _place(index: Fact, width: int) -> int | None:
    """The dimension of a result along which an index runs, one by one from 0."""
    along = index.index_along()
    return None if along is None else width - len(index.labels) + along


def _held(one: Interval, dtype: torch.dtype, *, is_exact: bool) -> Interval:
    """Bounds as a dtype holds them: cut to integers, wrapped, or rounded."""
    if one is None:
        return None
    if dtype is torch.bool:
        return nonzero(one)
    if not dtype.is_floating_point:
        if not all(torch.iinfo(dtype).min <= bound <= torch.iinfo(dtype).max for bound in one):
            return ANYTHING
        return float(int(one[0])), float(int(one[1]))
    off = 0.0 if is_exact else torch.finfo(dtype).eps
    low, high = (0.0 if math.isinf(bound) else off * abs(bound) for bound in one)
    return one[0] - low, one[1] + high


def _is_whole(one: Interval, dtype: torch.dtype) -> bool:
    """Whether bounds are integers that a dtype holds exactly."""
    if not dtype.is_floating_point:
        return True
    most = 1 / torch.finfo(dtype).eps
    return all(float(bound).is_integer() and abs(bound) <= most for bound in wide(one))


def _runs(node: Any, labels: Sequence[str]) -> list[Any]:
    """Labels in order, and between them how many elements the dimensions without one have."""
    found: list[Any] = [1]
    for label, size in zip(labels, value(node).shape, strict=True):
        if label:
            found += [one for letter in label for one in (letter, 1)]
        else:
            found[-1] = found[-1] * (size if isinstance(size, int) else size.node.expr)
    return found


def _leaks(pad: Interval, here: Interval, is_bool: bool = False) -> str:
    if is_bool:
        return "attention may see padding: its mask is not known to be false there"
    if pad is not None and -1e8 < pad[1] < 0:
        return f"attention sees padding: {pad[1]:g} does not mask a large score"
    if pad is not None and pad[1] < 0:
        return "attention may see nothing but padding"
    return "attention sees padding: no mask outweighs every score there"


def _is_position(found: Found) -> bool:
    return isinstance(found, Fact) and found.steps is not None


def _tokens(labels: Sequence[str]) -> int:
    return sum("t" in label for label in labels)


def _first(found: Any) -> Tensor:
    return found if isinstance(found, Tensor) else found[0]


def _first_fact(given: Given) -> Fact:
    return next(one for one in given.values() if isinstance(one, Fact))


def _argument(node: Node, name: str, place: int) -> Node:
    return node.kwargs[name] if name in node.kwargs else node.args[place]  # type: ignore[return-value]


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for one in values:
        found += one if isinstance(one, list) else [one]
    return found
