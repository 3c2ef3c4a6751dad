"""What each op does to rows of tokens: it keeps them apart, mixes them without any influence from
padding, or is unknown.
"""

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
    BOUNDS,
    COMPARISONS,
    ONE,
    UNSURE,
    ZERO,
    Fact,
    Interval,
    Side,
    Unproved,
    alike,
    chosen,
    is_masked,
    is_small,
    nonzero,
    position,
    wide,
)
from enginecast.passes.ir.edit import aten, first_input, shape_of, value
from enginecast.passes.ir.effects import draws, named_arguments
from enginecast.passes.ir.match import is_call, op_name
from enginecast.passes.ir.traits import Trait, has, is_identity

Facts = Fact | tuple[Fact, ...]
"""Of a value: of a tensor, or of each of several."""
Given = dict[str, Any]
"""The arguments of a call by name, with facts in place of nodes."""
Rule = Callable[[Node, Given], Facts]

_ROUNDED = ("add", "sub", "rsub", "mul", "div")
_FILLINGS = {"ones": 1, "ones_like": 1, "new_ones": 1, "zeros": 0, "zeros_like": 0, "new_zeros": 0}
_SIZES = frozenset(["size", "sizes", "shape", "repeats", "split_size", "split_sizes"])
"""Arguments that decide sizes, and nothing else."""


@dataclass(frozen=True)
class Labels:
    """Sizes of the program that are those of the mask."""

    names: Mapping[Any, str]
    """Expression of a size -> its label in a `Fact`; no "b": there is one row."""
    longest: float

    def of(self, tensor: Tensor) -> tuple[str, ...]:
        """A label for each dimension.

        Raises:
            Unproved: some size is made of these, and none of them.
        """
        labels = []
        sizes: Sequence[Any] = tensor.shape
        for size in sizes:
            if self.concerns(size) and size.node.expr not in self.names:
                raise Unproved(f"a size is {size.node.expr}, expected one of the mask's sizes")
            labels.append(self.names[size.node.expr] if self.concerns(size) else "")
        if sum("t" in label for label in labels) > 2:
            raise Unproved("it has more than two dimensions of tokens")
        return tuple(labels)

    def concerns(self, size: Any) -> bool:
        """Whether a number depends on the sizes of the mask, or on what a tensor holds."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return False
        watched = {symbol for each in self.names for symbol in each.free_symbols}
        return bool(size.node.expr.free_symbols & watched) or bool(free_unbacked_symbols(size))


class Rules:
    """Facts about the values of one program, from those about what they are computed from.

    A method `op_NAME` is the rule of one op; what is done for all ops of a kind is chosen by trait.
    """

    def __init__(self, labels: Labels, side: Side, known: Mapping[Node, Facts]) -> None:
        self._labels, self._side, self._known = labels, side, known

    def of(self, node: Node) -> Facts:
        """What is known of a node's value.

        Raises:
            Unproved: why nothing is.
        """
        name, result = op_name(node).partition(".")[0], value(node)
        if name in _FILLINGS or name in ("full", "full_like", "new_full"):
            filling: Any = _FILLINGS.get(name)
            if filling is None:
                filling = node.args[1] if len(node.args) > 1 else node.kwargs["fill_value"]
                filling = value(filling) if isinstance(filling, Node) else filling
            if not isinstance(filling, int | float):
                raise Unproved("it is filled with a computed number")
            return alike(self._labels.of(result), (float(filling), float(filling)))
        if name == "arange":
            return self._arange(node)
        if name == "eye" and self._labels.of(result) == ("t", "t"):
            return Fact(("t", "t"), ONE, (ZERO, ZERO), UNSURE)
        given = self._arguments(node)
        if draws(node):
            raise Unproved("it draws random numbers")
        facts = _facts(given.values())
        rule: Rule | None = getattr(self, f"op_{name}", None)
        if rule is None:
            if is_identity(node) or has(node, Trait.CASTS):
                rule = self._cast
            elif has(node, Trait.RESHAPES):
                rule = self._reshaped
            elif has(node, Trait.PERMUTES):
                rule = self._permuted
            elif has(node, Trait.ALONG):
                rule = self._along
            elif has(node, Trait.ELEMENTWISE):
                rule = self._elementwise
        if rule is not None:
            found = rule(node, given)
            is_position = isinstance(found, Fact) and found.steps is not None
            if not is_position and rule not in (self._elementwise, self.op_index):
                self.require_still(*facts)
            return found
        if not any(any(fact.labels) for fact in facts):
            return self._without_tokens(result)
        raise Unproved(f"{name} is not known to keep tokens apart")

    def require_still(self, *facts: Fact) -> None:
        """Refuse positions in the batch, and of tokens where columns on the left may be cut."""
        if any(fact.counts_rows for fact in facts):
            raise Unproved("it depends on the position of a row in the batch")
        if self._side == "any" and any(fact.moves for fact in facts):
            raise Unproved("it depends on the position of a token")

    # What a rule is given.

    def _arguments(self, node: Node) -> Given:
        """The arguments by name, facts in place of nodes.

        Raises:
            Unproved: a number depends on how many tokens there are.
        """

        def fact_of(argument: Any) -> Any:
            if isinstance(argument, list | tuple):
                return [fact_of(each) for each in argument]
            if isinstance(argument, Node):
                return self._known.get(argument, value(argument))
            return argument

        facts = {key: fact_of(argument) for key, argument in named_arguments(node).items()}
        sizes = _SIZES | ({"end"} if is_call(node, aten.slice.Tensor) else set())
        for key in facts.keys() - sizes:
            if any(map(self._labels.concerns, _flat([facts[key]]))):
                raise Unproved("it computes with the number of tokens, or one read from a tensor")
        return facts

    def _without_tokens(self, result: Any) -> Facts:
        """What is computed from nothing that has tokens."""
        if not isinstance(result, Tensor):
            return tuple(self._without_tokens(each) for each in result)  # type: ignore[misc]
        labels = self._labels.of(result)
        if any("t" in label for label in labels):
            raise Unproved("it is computed from sizes")
        return alike(labels, ANYTHING)

    def _arange(self, node: Node) -> Fact:
        labels = self._labels.of(value(node))
        sizes = map(value, node.all_input_nodes)
        if not any(labels) and not any(map(self._labels.concerns, sizes)):
            return alike(labels, ANYTHING)
        from_zero = is_call(node, aten.arange.start) and _is_number(node.args[0], 0)
        if not (is_call(node, aten.arange.default) or from_zero) or len(node.args) > 2:
            raise Unproved("positions do not start at 0")
        return self._position(labels, (1,), 0, value(node).dtype)

    def _position(
        self, labels: tuple[str, ...], steps: tuple[int, ...], offset: int, dtype: torch.dtype
    ) -> Fact:
        """A sum of indices, as a dtype holds it; no longer one where that may round or wrap."""
        fact = position(labels, steps, offset, self._side, self._labels.longest)
        is_float = dtype.is_floating_point
        most = 2 / torch.finfo(dtype).eps if is_float else float(torch.iinfo(dtype).max)
        highest = max(sum(step for step in steps if step * sign > 0) * sign for sign in (1, -1))
        if highest * self._labels.longest + abs(offset) <= most:
            return fact
        self.require_still(fact)
        return alike(labels, ANYTHING)

    # Elements in their places.

    def _elementwise(self, node: Node, given: Given) -> Fact:
        name = op_name(node).partition(".")[0]
        labels, dtype = self._labels.of(value(node)), value(node).dtype
        alpha = given.pop("alpha", 1)
        numbers = int | float | torch.SymInt | torch.SymFloat
        facts = [
            each if isinstance(each, Fact) else _number(each)
            for each in given.values()
            if isinstance(each, Fact | numbers)
        ]
        for fact in facts:
            _require_broadcast(fact.labels, labels)
        if name in ("add", "sub", "rsub") and alpha == 1:
            total = self._sum(labels, name, facts, dtype)
            if total is not None:
                return total
        is_plain = alpha == 1 and given.get("rounding_mode") is None
        known = BOUNDS.get(name)
        if name.startswith(("bitwise", "__")) and dtype is not torch.bool:
            known = None

        def bounds(*ends: Interval) -> Interval:
            """In the dtype that holds the result."""
            if not is_plain:
                return ANYTHING
            if known is not None:
                result = known(*ends)
            elif has(node, Trait.BOUNDED):
                result = (-1.0, 1.0)
            elif has(node, Trait.GROWS):
                result = None if ends[:1] == (None,) else ANYTHING
            else:
                result = None if all(map(is_small, ends)) else ANYTHING
            units = name == "mul" and any(set(wide(end)) <= {-1.0, 0.0, 1.0} for end in ends)
            whole = name != "div" and all(_is_whole(each, dtype) for each in (*ends, result))
            return _held(result, dtype, is_exact=name not in _ROUNDED or units or whole)

        if name in COMPARISONS:
            difference = self._sum(labels, "sub", facts, torch.int64)
            if difference is not None:
                facts = [difference, _number(0)]
                if bounds(difference.span, ZERO) in (ZERO, ONE):  # for every position there is
                    return _by_region(labels, bounds, facts)
        self.require_still(*facts)
        return _by_region(labels, bounds, facts)

    def _sum(
        self, labels: tuple[str, ...], name: str, facts: Sequence[Fact], dtype: torch.dtype
    ) -> Fact | None:
        """A sum of positions; None where it is of something else."""
        left, right = reversed(facts) if name == "rsub" else facts
        steps, offset = [0] * len(labels), 0
        for fact, sign in ((left, 1), (right, 1 if name == "add" else -1)):
            if fact.steps is not None:
                for dim, step in enumerate(fact.steps):
                    steps[len(labels) - len(fact.labels) + dim] += sign * step
                offset += sign * fact.offset
                continue
            low, high = wide(fact.span)
            if low != high or any(fact.labels) or not low.is_integer():
                return None
            offset += sign * int(low)
        if left.steps is None and right.steps is None:
            return None
        return self._position(labels, tuple(steps), offset, dtype)

    def _cast(self, node: Node, given: Given) -> Fact:
        [fact, *_] = _facts(given.values())
        dtype = value(node).dtype
        if dtype == value(first_input(node)).dtype:
            return fact
        if fact.steps is not None and dtype is not torch.bool:
            return self._position(fact.labels, fact.steps, fact.offset, dtype)
        return _by_region(
            fact.labels, lambda one: _held(one, dtype, is_exact=_is_whole(one, dtype)), [fact]
        )

    def op_clamp(self, node: Node, given: Given) -> Fact:
        fact, low, high = given["self"], given.get("min"), given.get("max")
        limits = (-math.inf if low is None else low, math.inf if high is None else high)
        if not all(isinstance(limit, int | float) for limit in limits):
            raise Unproved("its limits are computed")

        def clamped(one: Interval) -> Interval:
            first, last = (min(max(bound, limits[0]), limits[1]) for bound in wide(one))
            return None if one is None and is_small((first, last)) else (first, last)

        return _by_region(fact.labels, clamped, [fact])

    op_clamp_min = op_clip = op_clamp

    # Elements in other places.

    def _reshaped(self, node: Node, given: Given) -> Fact:
        [fact, *_] = _facts(given.values())
        labels = self._labels.of(value(node))
        if _runs(first_input(node), fact.labels) != _runs(node, labels):
            raise Unproved("it reshapes tokens into something else")
        tokens = iter(fact.tokens)
        pads = tuple(fact.pads[next(tokens)] if "t" in label else fact.span for label in labels)
        reshaped = replace(fact, labels=labels, pads=pads, steps=None, offset=0)
        if fact.steps is None:
            return reshaped
        moved = [step for step, label in zip(fact.steps, fact.labels, strict=True) if label]
        if len(moved) != sum(map(bool, labels)):
            raise Unproved("it reshapes positions")
        rest = iter(moved)
        steps = tuple(next(rest) if label else 0 for label in labels)
        return replace(reshaped, steps=steps, offset=fact.offset)

    def _permuted(self, node: Node, given: Given) -> Fact:
        sizes = list(range(2, 2 + len(given["self"].labels)))
        turned = node.target(torch.empty(sizes, device="meta"), *node.args[1:], **node.kwargs)  # type: ignore[operator]
        return _in_order(given["self"], [sizes.index(size) for size in turned.shape])

    def op_expand(self, node: Node, given: Given) -> Fact:
        fact, labels = given["self"], self._labels.of(value(node))
        _require_broadcast(fact.labels, labels)
        steps = None if fact.steps is None else (0,) * (len(labels) - len(fact.steps)) + fact.steps
        return replace(_by_region(labels, lambda one: one, [fact]), steps=steps, offset=fact.offset)

    op_expand_as = op_broadcast_to = op_expand

    def op_repeat(self, node: Node, given: Given) -> Fact:
        fact, repeats = given["self"], given["repeats"]
        first = len(repeats) - len(fact.labels)
        for label, count in zip(fact.labels, repeats[first:], strict=True):
            if label and count != 1:
                raise Unproved("it repeats tokens")
        return _by_region(self._labels.of(value(node)), lambda one: one, [fact])

    def op_tril(self, node: Node, given: Given) -> Fact:
        fact, labels = given["self"], given["self"].labels
        if labels[-2:] != ("t", "t"):
            raise Unproved("it is a triangle whose sizes are not those of the tokens")
        steps = (*[0] * (len(labels) - 2), -1, 1)
        away = position(
            labels, steps, -given.get("diagonal", 0), self._side, self._labels.longest
        )  # of a column from the diagonal
        is_lower = is_call(node, aten.tril.default)
        kept = _by_region(labels, COMPARISONS["le" if is_lower else "ge"], [away, _number(0)])
        return _by_region(labels, lambda k, one: chosen(k, one, ZERO), [kept, fact])

    op_triu = op_tril

    def op_index(self, node: Node, given: Given) -> Fact:
        fact, indices = given["self"], given["indices"]
        labels = self._labels.of(value(node))
        places_read = [one for one in indices if one is not None]
        if any(value(one).dtype in (torch.bool, torch.uint8) for one in node.all_input_nodes[1:]):
            raise Unproved("it selects rows by a mask")
        self.require_still(fact)
        if not any(fact.labels):  # a table
            self.require_still(*places_read)
            return alike(labels, fact.span)
        full = len(indices) == len(fact.labels) == len(places_read)
        width = max(len(one.labels) for one in places_read)
        # The dimension of the result along which an index runs, one by one from 0.
        along = [(one.index_along, width - len(one.labels)) for one in places_read]
        places = [None if dim is None else dim + first for dim, first in along]
        meets = [
            label == (labels[place] if place is not None else None) or _is_number(size, 1)
            for label, place, size in zip(
                fact.labels, places, shape_of(first_input(node)), strict=False
            )
        ]
        known = [place for place in places if place is not None]
        if not full or width != len(labels) or not all(meets) or len(set(known)) != len(known):
            raise Unproved("it selects rows by computed indices")
        pads = tuple(
            fact.pads[places.index(dim)] if dim in places else fact.here
            for dim in range(len(labels))
        )
        return Fact(labels, fact.here, pads, fact.span)

    def op_gather(self, node: Node, given: Given) -> Fact:
        fact, places = given["self"], given["index"]
        dim = given["dim"] % len(fact.labels)
        pairs = enumerate(zip(fact.labels, places.labels, strict=True))
        if fact.labels[dim] or any(one != other for at, (one, other) in pairs if at != dim):
            raise Unproved("it selects rows by computed indices")
        return alike(places.labels, fact.span)

    def op_embedding(self, node: Node, given: Given) -> Fact:
        if any(given["weight"].labels):
            raise Unproved("its table is computed from tokens")
        return alike(self._labels.of(value(node)), given["weight"].span)

    # Along dimensions.

    def _along(self, node: Node, given: Given) -> Facts:
        name = op_name(node).partition(".")[0]
        facts = _facts([given.get("self"), given.get("tensors")])
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

        def kept(result: Tensor) -> Fact:
            """With the tokens of the operands, in their order."""
            labels = self._labels.of(result)
            for fact in facts:
                if [x for x in fact.labels if x] != [x for x in labels if x]:
                    raise Unproved("it mixes values with tokens and without")
            bounds = [(f.here, f.span, [f.pads[dim] for dim in f.tokens]) for f in facts]
            moves = has(node, Trait.MOVES, Trait.JOINS) and not any(f.steps for f in facts)
            if moves and all(each == bounds[0] for each in bounds):
                here, span, pads = bounds[0]
                rest = iter(pads)
                of_dims = tuple(next(rest) if "t" in label else span for label in labels)
                return Fact(labels, here, of_dims, span)
            return alike(labels, _ordinary(facts))

        results = value(node)
        return kept(results) if isinstance(results, Tensor) else tuple(map(kept, results))

    def _along_tokens(self, node: Node, name: str, given: Given, fact: Fact, dim: int) -> Facts:
        """What mixes tokens, where padding has no part in it."""
        result = value(node)
        labels = self._labels.of(result if isinstance(result, Tensor) else result[0])
        pad = fact.pads[dim]
        if name in ("softmax", "_softmax"):
            if not is_masked(pad, fact.here):
                raise Unproved(_leak(pad, fact.here))
            return Fact(
                labels,
                UNSURE,
                tuple(ZERO if at == dim else UNSURE for at in range(len(labels))),
                UNSURE,
            )
        # Where padding is on the right, the first token is valid.
        right = self._side == "right"
        from_first = given.get("start") is None or _is_number(given.get("start"), 0)
        neutral = {
            "sum": pad == ZERO,
            "any": pad is not None and nonzero(pad) == ZERO,
            "all": pad is not None and nonzero(pad) == ONE,
            "amax": len(fact.tokens) == 1 and is_masked(pad, fact.here),
            "cumsum": pad == ZERO or right,
            "slice": right and from_first and _is_number(given.get("end"), 1),
            "select": right and _is_number(given.get("index"), 0),
        }
        if not neutral.get(name, False):
            raise Unproved(f"{name} takes padding along with the tokens")
        return alike(labels, UNSURE if name in ("any", "all") else _ordinary([fact]))

    def op_slice(self, node: Node, given: Given) -> Facts:
        fact: Fact = given["self"]
        labels = self._labels.of(value(node))
        dim = given.get("dim", 0) % len(labels)
        start = 0 if given["start"] is None else given["start"]
        if not isinstance(start, int):
            raise Unproved("it starts at a computed position")
        by_one = _is_number(given["step"], 1)
        if fact.labels[dim] and labels[dim] == fact.labels[dim] and start == 0 and by_one:
            return fact
        if not fact.labels[dim] and labels[dim] == "t":  # a table of positions
            if self._side == "any" or start < 0 or not by_one:
                raise Unproved("it depends on the position of a token")
            return alike(labels, fact.span)
        if fact.labels[dim] or labels[dim]:
            return self._along(node, given)
        return replace(fact, labels=labels)

    def op_layer_norm(self, node: Node, given: Given) -> Fact:
        count = len(given["normalized_shape"])
        if any(given["input"].labels[-count:]):
            raise Unproved("a norm mixes tokens")
        return self._computed(node)

    op_rms_norm = op_layer_norm

    def op_group_norm(self, node: Node, given: Given) -> Fact:
        if any(given["input"].labels[1:]):
            raise Unproved("a norm mixes tokens")
        return self._computed(node)

    def op_batch_norm(self, node: Node, given: Given) -> Fact:
        if given["training"] or given.get("running_mean") is None:
            raise Unproved("a norm mixes rows of the batch")
        return self._computed(node, given["input"])

    # Products.

    def op_linear(self, node: Node, given: Given) -> Fact:
        if given["input"].labels[-1]:
            return self._product(node, given["input"], _in_order(given["weight"], [1, 0]))
        if any(given["weight"].labels):
            raise Unproved("its weight is computed from tokens")
        return self._computed(node, given["input"])

    def op_addmm(self, node: Node, given: Given) -> Fact:
        if any(given["self"].labels):
            raise Unproved("addmm adds a value with tokens")
        return self._product(node, given["mat1"], given["mat2"])

    def op_matmul(self, node: Node, given: Given) -> Fact:
        left, right = _facts(given.values())
        return self._product(node, left, right)

    op_mm = op_bmm = op_matmul

    def _product(self, node: Node, left: Fact, right: Fact) -> Fact:
        self.require_still(left, right)
        if len(left.labels) < 2 or len(right.labels) < 2:
            if any(left.labels[-1:]) or any(right.labels[:1]) or any(right.labels[1:]):
                raise Unproved("a product with a vector of tokens")
            return self._computed(node, left, right)
        labels = self._labels.of(value(node))
        _require_broadcast((*left.labels[:-1], ""), (*labels[:-1], ""))
        _require_broadcast(
            (*right.labels[:-2], "", right.labels[-1]), (*labels[:-2], "", labels[-1])
        )
        inner = left.labels[-1], right.labels[-2]
        if any(inner):
            pads = (left.pads[-1], right.pads[-2]) if inner == ("t", "t") else ()
            _require_contracted(inner, pads)
        found = self._computed(node, left, right)
        # Where a row or a column is one of zeros, so is that of the product.
        first = len(left.labels) - len(labels)
        rows = [
            ZERO if dim + first in left.tokens and left.pads[dim + first] == ZERO else found.span
            for dim in range(len(labels) - 1)
        ]
        last = ZERO if right.pads[-1] == ZERO else found.span
        return replace(found, pads=(*rows, last))

    def op_einsum(self, node: Node, given: Given) -> Fact:
        equation, facts = given["equation"].replace(" ", ""), given["tensors"]
        inputs, arrow, output = equation.partition("->")
        terms = inputs.split(",")
        if "." in equation or not arrow or any(len(set(term)) != len(term) for term in terms):
            raise Unproved(f"einsum {equation!r} is not known to keep tokens apart")
        self.require_still(*facts)
        for letter in dict.fromkeys("".join(terms)):
            dims = [(f, t.index(letter)) for t, f in zip(terms, facts, strict=True) if letter in t]
            names = [fact.labels[dim] for fact, dim in dims]
            if any(names) and letter not in output:
                pads = [f.pads[dim] if "t" in f.labels[dim] else None for f, dim in dims]
                _require_contracted(names, pads)
            if len(set(names)) > 1:
                raise Unproved("a product of tokens with something else")
        return self._computed(node, *facts)

    def op_scaled_dot_product_attention(self, node: Node, given: Given) -> Fact:
        query, key, values = (given[name] for name in ("query", "key", "value"))
        labels = self._labels.of(value(node))
        for one in (query, key, values):
            if one.labels[-1]:
                raise Unproved("attention over tokens as features")
            _require_broadcast(one.labels[:-2], labels[:-2])
        if not key.labels[-2]:
            return self._computed(node, values)
        if key.labels[-2] != "t" or query.labels[-2] not in ("t", ""):
            raise Unproved("attention mixes rows of the batch")
        bias = given.get("attn_mask")
        if bias is None:
            if not given.get("is_causal") or self._side != "right" or query.labels[-2] != "t":
                raise Unproved("attention sees padding: it has no mask")
            return self._computed(node, values)
        if not bias.labels or bias.labels[-1] != "t":
            raise Unproved("attention sees padding: its mask is not of the tokens")
        _require_broadcast(bias.labels[:-2], labels[:-2])
        mask: Any = node.kwargs["attn_mask"] if "attn_mask" in node.kwargs else node.args[3]
        pad, here = bias.pads[-1], bias.here
        if value(mask).dtype is torch.bool:
            if (nonzero(pad), nonzero(here)) != (ZERO, ONE):
                raise Unproved("attention may see padding: its mask is not known to be false there")
        elif not is_masked(pad, here):
            raise Unproved(_leak(pad, here))
        elif not (is_small(query.span) and is_small(key.span)):  # no score is known to be ordinary
            raise Unproved(_leak(ANYTHING, here))
        return self._computed(node, values)

    def op_convolution(self, node: Node, given: Given) -> Fact:
        fact = given["input"]
        if fact.labels[0] not in ("b", "", "bt") or any(fact.labels[1:]):
            raise Unproved("a convolution mixes tokens with their neighbors")
        if any(given["weight"].labels):
            raise Unproved("its weight is computed from tokens")
        return self._computed(node, fact)

    op_conv1d = op_conv2d = op_conv3d = op_convolution

    def _computed(self, node: Node, *facts: Fact) -> Fact:
        """What a model computes from these: ordinary numbers, unless one of them is not."""
        return alike(self._labels.of(value(node)), _ordinary(facts))


def _ordinary(facts: Sequence[Fact]) -> Interval:
    return None if all(is_small(fact.span) for fact in facts) else ANYTHING


def _number(given: Any) -> Fact:
    """A number: a symbolic one may be anything."""
    is_known = isinstance(given, int | float)
    return alike((), (float(given), float(given)) if is_known else ANYTHING)


def _require_broadcast(given: Sequence[str], labels: Sequence[str]) -> None:
    """Refuse a value whose tokens do not meet the result's."""
    first = len(labels) - len(given)
    for dim, label in enumerate(given):
        if label and label != labels[first + dim]:
            raise Unproved("it combines tokens with something else")


def _require_contracted(inner: Sequence[str], pads: Sequence[Interval]) -> None:
    """Refuse a product whose sum over tokens takes padding along."""
    if any("b" in label for label in inner):
        raise Unproved("a product mixes rows of the batch")
    if ZERO not in pads or not all(math.isfinite(end) for pad in pads for end in wide(pad)):
        raise Unproved("a product takes padding along with the tokens")


def _by_region(
    labels: tuple[str, ...], compute: Callable[..., Interval], facts: Sequence[Fact]
) -> Fact:
    """What an elementwise function gives, wherever something is known of its operands."""

    def at_pad(fact: Fact, dim: int) -> Interval:
        """Where the token of a dimension of the result is padding, all others the same."""
        own = dim - len(labels) + len(fact.labels)
        return fact.pads[own] if own in fact.tokens else fact.here

    return Fact(
        labels,
        here=compute(*(fact.here for fact in facts)),
        pads=tuple(
            compute(*(at_pad(fact, dim) for fact in facts)) if "t" in label else ANYTHING
            for dim, label in enumerate(labels)
        ),
        span=compute(*(fact.span for fact in facts)),
    )


def _in_order(fact: Fact, order: Sequence[int]) -> Fact:
    """Permuted: dimension `order[i]` becomes dimension i."""
    return replace(
        fact,
        labels=tuple(fact.labels[dim] for dim in order),
        pads=tuple(fact.pads[dim] for dim in order),
        steps=None if fact.steps is None else tuple(fact.steps[dim] for dim in order),
    )


def _is_number(given: Any, number: int) -> bool:
    """Whether a number is known to be this one; asking a symbolic one would decide it."""
    return isinstance(given, int) and given == number


def _held(bounds: Interval, dtype: torch.dtype, *, is_exact: bool) -> Interval:
    """Bounds as a dtype holds them: cut to integers, wrapped, or rounded."""
    if bounds is None:
        return None
    if dtype is torch.bool:
        return nonzero(bounds)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        fits = all(info.min <= bound <= info.max for bound in bounds)
        return (float(int(bounds[0])), float(int(bounds[1]))) if fits else ANYTHING
    step = 0.0 if is_exact else torch.finfo(dtype).eps
    low, high = (0.0 if math.isinf(bound) else step * abs(bound) for bound in bounds)
    return bounds[0] - low, bounds[1] + high


def _is_whole(bounds: Interval, dtype: torch.dtype) -> bool:
    """Whether bounds are integers that a dtype holds exactly."""
    if not dtype.is_floating_point:
        return True
    most = 1 / torch.finfo(dtype).eps
    return all(float(bound).is_integer() and abs(bound) <= most for bound in wide(bounds))


def _runs(node: Node, labels: Sequence[str]) -> list[Any]:
    """Labels in order, and between them how many elements the dimensions without one have."""
    runs: list[Any] = [1]
    for label, size in zip(labels, value(node).shape, strict=True):
        for letter in label:
            runs += [letter, 1]
        if not label:
            runs[-1] = runs[-1] * (size if isinstance(size, int) else size.node.expr)
    return runs


def _leak(pad: Interval, here: Interval) -> str:
    """Why a softmax takes padding along, whose scores are within these bounds."""
    if pad is not None and -1e8 < pad[1] < 0:
        return f"attention sees padding: {pad[1]:g} does not mask a large score"
    if pad is not None and pad[1] < 0:
        return "attention may see nothing but padding"
    return "attention sees padding: no mask outweighs every score there"


def _flat(values: Any) -> list[Any]:
    return [one for each in values for one in (each if isinstance(each, list) else [each])]


def _facts(values: Any) -> list[Fact]:
    return [each for each in _flat(values) if isinstance(each, Fact)]
