"""Patterns over graphs that read like algebra, and report where and why they did not match.

    @pattern
    def gelu(x: Value) -> Pattern:
        core = erf(x / math.sqrt(2)).at("under erf").site()
        return (x * 0.5) * (core + 1)

    match = gelu.match(node)        # node: the erf
    match.node("x"), match.root     # what x is, and the product

A pattern is a function over placeholders: a `Value` binds a node, a `Number` a number that stands
in the graph, each the same one wherever it occurs.  Sums and products match either order.  `op`
makes a call of any other op, `either` tries alternatives in order, `casts` looks through casts
between floats, `repeat` matches a step any number of times, `where` adds a predicate with its
reason.

The site, the node that a pass looks at, may stand anywhere in a pattern: what it reads is matched
first, then what reads it, up to the root.  Every alternative is tried.  When none matches, the
attempt that got farthest says why: `NoMatch` has the sentence, which `at`, `once` and `otherwise`
put into the words of the pass.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self, TypeGuard

from torch.fx import Node

from enginecast.passes.ir.edit import aten
from enginecast.passes.ir.match import (
    NoMatch,
    is_call,
    is_float_cast,
    is_inert,
    op_name,
    real_users,
)
from enginecast.passes.ir.traits import Trait, has, is_identity
from enginecast.public import listing

__all__ = [
    "ANYTHING",
    "Match",
    "NoMatch",
    "Number",
    "Pattern",
    "Value",
    "casts",
    "either",
    "identities",
    "op",
    "pattern",
    "repeat",
    "through",
]
__dir__ = listing(__all__)

Reason = str | Callable[[Node], str]
"""Why a node does not match; in a text, {op} is the op that was found."""

DIGITS = 1e-7
"""Relative tolerance of a constant: about the rounding of fp32."""


@dataclass(frozen=True)
class Match:
    """The nodes that a pattern matched."""

    root: Node
    """The last node of the pattern."""
    bound: Mapping[str, Any]

    def node(self, name: str) -> Node:
        found = self.bound[name]
        assert isinstance(found, Node)
        return found

    def get(self, name: str) -> Node | None:
        """The node with this name; None if the matched alternative lacks it."""
        return self.node(name) if name in self.bound else None

    def number(self, name: str) -> float:
        return float(self.bound[name])

    def every(self, name: str) -> tuple[Any, ...]:
        """The nodes of an `each` placeholder, from the innermost step outwards."""
        return tuple(self.bound.get(name, ()))


@dataclass(frozen=True)
class _State:
    """The state of an attempt: bound names, and the number of matched nodes."""

    bound: Mapping[str, Any]
    steps: int = 0

    def bind(self, name: str, found: Any) -> "_State":
        return replace(self, bound={**self.bound, name: found})

    def step(self) -> "_State":
        return replace(self, steps=self.steps + 1)


class _Search:
    """Remembers the attempt that matched the most nodes; of equal ones, the last."""

    def __init__(self, site: Node) -> None:
        self.site = site
        self.steps = -1
        self.miss = NoMatch(site, f"{op_name(site)} does not match")

    def fail(self, state: _State, node: object, reason: Reason) -> None:
        if state.steps >= self.steps:
            node = node if isinstance(node, Node) else self.site
            text = reason if isinstance(reason, str) else reason(node)
            self.steps, self.miss = state.steps, NoMatch(node, text.replace("{op}", op_name(node)))


@dataclass(frozen=True, eq=False)
class Pattern(ABC):
    """A pattern for a node; every method returns a changed copy."""

    _: KW_ONLY
    label: str = ""
    repeats: bool = False
    is_site: bool = False
    place: str = ""
    reason: str = ""
    readers: str | None = None
    conditions: tuple[tuple[Callable[[Node], bool], Reason], ...] = ()

    def named(self, label: str) -> Self:
        """Bind the node to a name."""
        return replace(self, label=label)

    def each(self) -> Self:
        """Bind the name to another node in every step of a `repeat`: see `Match.every`."""
        return replace(self, repeats=True)

    def site(self) -> Self:
        """Mark the node where matching begins."""
        return replace(self, is_site=True)

    def at(self, place: str) -> Self:
        """Set the node's position for messages: "under tanh"."""
        return replace(self, place=place)

    def otherwise(self, reason: str) -> Self:
        """Set the message for another op or value in this position."""
        return replace(self, reason=reason)

    def once(self, place: str) -> Self:
        """Match only if exactly one node reads it; `place` is its position for the message."""
        return replace(self, readers=place)

    def where(self, predicate: Callable[[Node], bool], reason: Reason) -> Self:
        """Match only if the predicate holds."""
        return replace(self, conditions=(*self.conditions, (predicate, reason)))

    def __add__(self, other: "Pattern | float") -> "Pattern":
        return Call((aten.add.Tensor,), (self, _pattern(other)), True, "a sum")

    def __mul__(self, other: "Pattern | float") -> "Pattern":
        return Call((aten.mul.Tensor,), (self, _pattern(other)), True, "a product")

    def __truediv__(self, other: "Pattern | float") -> "Pattern":
        return Call((aten.div.Tensor,), (self, _pattern(other)), False, "a quotient")

    def __pow__(self, exponent: float) -> "Pattern":
        return Call((aten.pow.Tensor_Scalar,), (self, Number(exponent)), False, "a power")

    __radd__, __rmul__ = __add__, __mul__

    def match(self, site: Node) -> Match:
        """Match the pattern around a node.

        Raises:
            NoMatch: with the reason of the attempt that got farthest.
        """
        search = _Search(site)
        for root, state in self.upward(site, _State({}), search):
            return Match(root, state.bound)
        raise search.miss

    def find(self, site: object) -> Match | None:
        """Match the pattern around a node; None if it does not match."""
        try:
            return self.match(site) if isinstance(site, Node) else None
        except NoMatch:
            return None

    @property
    def parts(self) -> tuple["Pattern", ...]:
        """The patterns that this one consists of."""
        return ()

    @property
    def has_site(self) -> bool:
        return self.is_site or any(part.has_site for part in self.parts)

    def downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        """Every way in which `found` and what it reads match."""
        for after in self._downward(candidate, state, search):
            yield from self._bound(candidate, after, search)

    def upward(self, site: Node, state: _State, search: _Search) -> Iterator[tuple[Node, _State]]:
        """Every node at which this matches, when the site within it is `site`."""
        if self.is_site or not self.has_site:
            yield from ((site, after) for after in self.downward(site, state, search))
            return
        for root, after in self._upward(site, state, search):
            yield from ((root, last) for last in self._bound(root, after, search))

    @abstractmethod
    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]: ...

    def _upward(self, site: Node, state: _State, search: _Search) -> Iterator[tuple[Node, _State]]:
        for part in self.parts:
            if part.has_site:
                yield from part.upward(site, state, search)

    def _bound(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        """Yield the state with the label bound, unless it is bound to something else."""
        if not self.label:
            yield state
        elif self.repeats:
            yield state.bind(self.label, (*state.bound.get(self.label, ()), candidate))
        elif state.bound.get(self.label, candidate) == candidate:
            yield state.bind(self.label, candidate)
        else:
            search.fail(
                state, candidate, self.reason or f"{{op}} is another value than {self.label}"
            )

    def _holds(self, node: Node, state: _State, search: _Search) -> bool:
        """Whether the predicates hold and no other node reads it."""
        for predicate, reason in self.conditions:
            if not predicate(node):
                search.fail(state, node, reason)
                return False
        users = real_users(node)
        if self.readers is not None and len(users) != 1:
            names = ", ".join(user.name for user in users[:3])
            search.fail(state, node, f"{{op}} {self.readers} has {len(users)} users ({names})")
            return False
        return True


@dataclass(frozen=True, eq=False)
class Value(Pattern):
    """A placeholder for a node."""

    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        if not isinstance(candidate, Node):
            search.fail(state, candidate, self.reason or f"a number stands for {self.label}")
        elif self._holds(candidate, state, search):
            yield state


@dataclass(frozen=True, eq=False)
class Number(Pattern):
    """A placeholder for a number in the graph, or one particular number."""

    exactly: float | None = None

    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        if isinstance(candidate, int | float) and self.is_near(candidate):
            yield state

    def is_near(self, found: float) -> bool:
        return self.exactly is None or abs(found - self.exactly) <= DIGITS * abs(self.exactly)


@dataclass(frozen=True, eq=False)
class Anything(Pattern):
    """An argument of any kind, such as a list of dims: predicates look at it."""

    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        yield state


@dataclass(frozen=True, eq=False)
class Call(Pattern):
    """A call of one of several ops; arguments after the operands are left to predicates."""

    targets: tuple[Any, ...]
    operands: tuple[Pattern, ...]
    commutes: bool = False
    noun: str = ""

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return self.operands

    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        if _calls(candidate, self.targets):
            yield from self._matched(candidate, state, search)
        else:
            search.fail(state, candidate, self._expected)

    def _upward(self, site: Node, state: _State, search: _Search) -> Iterator[tuple[Node, _State]]:
        for operand in self.operands:
            for child, below in operand.upward(site, state, search) if operand.has_site else ():
                users = real_users(child)
                fitting = [user for user in users if _calls(user, self.targets)]
                if not fitting:
                    names = ", ".join(map(op_name, users)) or "nothing"
                    search.fail(below, child, self._expected.replace("{op}", names))
                for user in fitting:
                    found = self._matched(user, below, search, (operand, child))
                    yield from ((user, after) for after in found)

    def _matched(
        self, node: Node, state: _State, search: _Search, known: tuple[Pattern, Node] | None = None
    ) -> Iterator[_State]:
        """Match the operands of a call of the right op, one of which may have matched already."""
        state = state.step()
        if not self._holds(node, state, search):
            return
        orders = self._orders(node)
        if known is not None:
            orders = [order for order in orders if known in order]
            for order in orders:
                order.remove(known)
        if not orders or node.kwargs.get("alpha", 1) != 1:
            search.fail(state, node, self._expected)
            return
        for order in orders:
            # Numbers come last: where what they scale differs, that says better what is wrong.
            order.sort(key=lambda pair: isinstance(pair[0], Number))
            yield from self._operands(node, order, state, search)

    def _orders(self, node: Node) -> list[list[tuple[Pattern, Any]]]:
        """Pairs of operand patterns and arguments, in each order; if some orders match numbers to
        numbers, only those.
        """
        args = (*node.args, *[None] * (len(self.operands) - len(node.args)))
        given = [args, args[1::-1]] if self.commutes else [args]
        orders = [list(zip(self.operands, found, strict=False)) for found in given]
        fitting = [
            order
            for order in orders
            if all(isinstance(p, Number) == isinstance(a, int | float) for p, a in order)
        ]
        return fitting or orders

    def _operands(
        self, node: Node, pairs: list[tuple[Pattern, Any]], state: _State, search: _Search
    ) -> Iterator[_State]:
        if not pairs:
            yield state
            return
        (pattern, argument), *rest = pairs
        if isinstance(pattern, Number) and not isinstance(argument, int | float):
            search.fail(state, node, pattern.reason or self._expected)
        elif isinstance(pattern, Number) and not pattern.is_near(argument):
            text = f"{{op}} {self.place} has {argument:.10g}, expected {pattern.exactly:.10g}"
            search.fail(state, node, text)
        for after in pattern.downward(argument, state, search):
            yield from self._operands(node, rest, after, search)

    @property
    def _expected(self) -> str:
        """The message for another op in this position."""
        numbers = [o.exactly for o in self.operands if isinstance(o, Number) and o.exactly]
        noun = f"{self.targets[0]} with the number {numbers[0]:.10g}" if numbers else self.noun
        return self.reason or f"{{op}} {self.place}, expected {noun or self.targets[0]}"


@dataclass(frozen=True, eq=False)
class Either(Pattern):
    """Alternatives, in order."""

    options: tuple[Pattern, ...]

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return self.options

    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        for option in self.options:
            for after in option.downward(candidate, state, search):
                if not isinstance(candidate, Node) or self._holds(candidate, after, search):
                    yield after

    def _upward(self, site: Node, state: _State, search: _Search) -> Iterator[tuple[Node, _State]]:
        for root, after in super()._upward(site, state, search):
            if self._holds(root, after, search):
                yield root, after


@dataclass(frozen=True, eq=False)
class Through(Pattern):
    """A pattern behind any number of pass-through ops; `where` and `once` apply to those ops."""

    inner: Pattern
    passes: Callable[[Node], bool]

    @property
    def parts(self) -> tuple[Pattern, ...]:
        return (self.inner,)

    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        while isinstance(candidate, Node) and self.passes(candidate):
            if not self._holds(candidate, state, search):
                return
            candidate = candidate.args[0]
        yield from self.inner.downward(candidate, state, search)

    def _upward(self, site: Node, state: _State, search: _Search) -> Iterator[tuple[Node, _State]]:
        waiting = list(self.inner.upward(site, state, search))
        while waiting:
            node, below = waiting.pop(0)
            yield node, below
            for user in real_users(node):
                if self.passes(user) and self._holds(user, below.step(), search):
                    waiting.append((user, below.step()))


@dataclass(frozen=True, eq=False)
class Repeat(Pattern):
    """A step applied repeatedly to a base, as often as it matches."""

    base: Pattern
    step: Callable[[Pattern], Pattern]

    def _downward(self, candidate: object, state: _State, search: _Search) -> Iterator[_State]:
        for option in (self.step(self), self.base):
            yield from option.downward(candidate, state, search)


ANYTHING = Anything()


def pattern(function: Callable[..., Pattern]) -> Pattern:
    """The pattern of a function: its parameters become placeholders of the annotated kinds."""
    kinds = inspect.get_annotations(function, eval_str=True)
    names = inspect.signature(function).parameters
    return function(*(kinds[name](label=name) for name in names))


def op(*targets: Any) -> Callable[..., Pattern]:
    """A constructor for call patterns of any of these ops, or of ops with these traits."""
    return lambda *operands: Call(targets, tuple(map(_pattern, operands)))


def either(*options: Pattern) -> Pattern:
    """The first of several patterns that matches."""
    return Either(options)


def casts(inner: Pattern) -> Pattern:
    """A pattern behind any casts between floats and inert ops."""
    return Through(inner, lambda node: is_float_cast(node) or is_inert(node))


def identities(inner: Pattern) -> Pattern:
    """A pattern behind ops that return their input, perhaps copied, but no active dropout."""
    return Through(inner, is_identity)


def through(inner: Pattern, *targets: Any) -> Pattern:
    """A pattern behind any number of calls of these ops, or of ops with these traits."""
    return Through(inner, lambda node: _calls(node, targets))


def repeat(base: Pattern, step: Callable[[Pattern], Pattern]) -> Pattern:
    """A pattern with a step applied to it any number of times."""
    return Repeat(base, step)


def _pattern(operand: Pattern | float) -> Pattern:
    return operand if isinstance(operand, Pattern) else Number(operand)


def _calls(node: object, targets: tuple[Any, ...]) -> TypeGuard[Node]:
    return any(has(node, t) if isinstance(t, Trait) else is_call(node, t) for t in targets)
