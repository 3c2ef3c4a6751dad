"""How large values get over the calibration inputs, and a bound for any input, from the weights
alone.

A root-mean-square norm gives a row no longer than sqrt(size), whatever it reads; a linear gives no
element longer than a row of its weight times that; attention averages the values; a gate is at most
what goes through it.  So what a block writes into the stream has a bound, and the stream that of
their sum.  No input comes near it: every step is taken at its worst.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.analyses.norms import is_statistic, normalized
from enginecast.passes.ir.edit import arguments, aten, first_input, value, weight_value
from enginecast.passes.ir.interpret import interpret_cases
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.traits import Trait, has, is_identity


@dataclass(frozen=True)
class Bound:
    """Bounds over all rows of a value along its last dimension."""

    largest: float
    """Largest possible magnitude of an element."""
    length: float
    """Largest possible L2 norm of a row."""


UNKNOWN = Bound(math.inf, math.inf)
LEAST_EXPONENT = -13
"""Of `frexp`: that of fp16's smallest normal number."""
LADDER = 64
"""Powers of two that are counted apart, from fp16's smallest normal number on."""


def largest_for_any_input(
    program: ExportedProgram, weights: set[Node], nodes: Iterable[Node]
) -> float | None:
    """A bound on the magnitude of all elements of these values; None if some op has no bound.

    Weights are read one at a time.

    Args:
        program: with decomposed or fused norms.
    """
    bounds = _Bounds(program, weights)
    largest = max((bounds.of(node).largest for node in nodes), default=math.inf)
    return largest if math.isfinite(largest) else None


class _Bounds:
    """Bounds by node, computed once each."""

    def __init__(self, program: ExportedProgram, weights: set[Node]) -> None:
        self._program = program
        self._weights = weights
        self._known: dict[Node, Bound] = {}
        found = map(normalized.find, filter(is_statistic, program.graph.nodes))
        self._norms = {norm.root for norm in found if norm is not None}

    def of(self, node: Node) -> Bound:
        """The bound of a value; `UNKNOWN` where nothing is known."""
        needed: set[Node] = set()  # a norm depends on none
        waiting = [node]
        while waiting:
            here = waiting.pop()
            if here in self._known or here in needed:
                continue
            needed.add(here)
            if is_call(here, aten.rms_norm.default):
                waiting += [weight for weight in here.args[2:3] if isinstance(weight, Node)]
            elif here not in self._norms and here not in self._weights:
                waiting += here.all_input_nodes
        for source in sorted(needed):  # in graph order
            bound = self._bound(source)
            self._known[source] = bound if math.isfinite(bound.largest) else UNKNOWN
        return self._known[node]

    def _bound(self, node: Node) -> Bound:
        width = _width(node)
        if width is None:
            return UNKNOWN
        if node in self._weights:
            weight = weight_value(self._program, node)
            weight = weight.abs() if weight.is_complex() else weight.float()
            if not weight.numel():
                return Bound(0.0, 0.0)
            return Bound(float(weight.abs().max()), float(weight.norm(dim=-1).max()))
        found = self._of_call(node, width)
        # Two bounds of one row: the elements bound its length, and its length the elements.
        length = min(found.length, found.largest * math.sqrt(width))
        return Bound(min(found.largest, length), length)

    def _of_call(self, node: Node, width: int) -> Bound:
        args = arguments(node)
        if node in self._norms or is_call(node, aten.rms_norm.default):
            whole = Bound(math.sqrt(width), math.sqrt(width))
            weight = None if node in self._norms else (*args, None)[2]
            return whole if weight is None else _of_product(whole, self._at(weight))
        if has(node, Trait.BOUNDED):
            return Bound(1.0, math.inf)
        if has(node, Trait.CASTS) or is_identity(node):
            return self._at(args[0])
        if has(node, Trait.NOT_LARGER) and not has(node, Trait.GATHERS, Trait.JOINS, Trait.RANDOM):
            found = self._at(args[0])
            # Rows may be cut otherwise.
            return Bound(found.largest, math.inf) if has(node, Trait.MOVES) else found
        if is_call(node, aten.embedding.default):
            return self._at(args[0])
        if is_call(node, aten.linear.default):
            source, weight, *bias = (self._at(a) for a in args if a is not None)
            added = sum(bound.largest for bound in bias)
            return Bound(weight.length * source.length + added, math.inf)
        if is_call(node, aten.mul.Tensor):
            return _of_product(*(self._across(a, width) for a in args))
        if is_call(node, aten.add.Tensor) and node.kwargs.get("alpha", 1) == 1:
            left, right = (self._across(a, width) for a in args)
            return Bound(left.largest + right.largest, left.length + right.length)
        if is_call(node, aten.scaled_dot_product_attention.default):
            return self._at(args[2])
        if is_call(node, aten.matmul.default):
            weights = args[0]
            while has(weights, Trait.CASTS) or is_identity(weights):
                weights = first_input(weights)
            # Attention that is spelled out: rows of a softmax add up to one.
            return self._at(args[1]) if is_call(weights, aten.softmax.int) else UNKNOWN
        if is_call(node, aten.cat.default):
            return Bound(max(self._at(a).largest for a in args[0]), math.inf)
        return UNKNOWN

    def _at(self, node: Node) -> Bound:
        return self._known.get(node, UNKNOWN)

    def _across(self, operand: Node | float, width: int) -> Bound:
        """The bound of rows of this width that an operand is broadcast to."""
        if isinstance(operand, Node) and _width(operand) == width:
            return self._at(operand)
        largest = self._at(operand).largest if isinstance(operand, Node) else abs(operand)
        return Bound(largest, largest * math.sqrt(width))


def _width(node: Node) -> int | None:
    """The size of the last dimension, if it is fixed."""
    fake = value(node)
    last = fake.shape[-1] if isinstance(fake, Tensor) and fake.ndim else None
    return last if isinstance(last, int) else None


def _of_product(left: Bound, right: Bound) -> Bound:
    length = min(left.largest * right.length, right.largest * left.length)
    return Bound(left.largest * right.largest, length)


@dataclass
class Magnitudes:
    """How large the elements of a value get over all inputs, and how small."""

    largest: float = 0.0
    numbers: int = 0
    """How many elements there are, where they are counted."""
    _by_power: Tensor = field(default_factory=lambda: torch.zeros(LADDER, dtype=torch.int64))

    def add(self, tensor: Tensor, *, counted: bool) -> bool:
        """Count what one run gives; whether all of it is finite."""
        low, high = (float(bound) for bound in torch.aminmax(tensor))
        is_finite = math.isfinite(low) and math.isfinite(high)
        if not is_finite:
            tensor = tensor[tensor.isfinite()]
            low, high = (float(b) for b in torch.aminmax(tensor)) if tensor.numel() else (0.0, 0.0)
        self.largest = max(self.largest, -low, high)
        if counted:
            exponents = torch.frexp(tensor).exponent - LEAST_EXPONENT
            normal = exponents[(exponents >= 0) & (tensor != 0)].clamp(max=LADDER - 1)
            self._by_power += normal.flatten().bincount(minlength=LADDER)
            self.numbers += tensor.numel()
        return is_finite

    def subnormal(self, power: int) -> float:
        """Share of the elements that are normal numbers of fp16, and are not if they are scaled by
        2^-power."""
        return int(self._by_power[:power].sum()) / self.numbers if self.numbers else 0.0


def magnitudes(
    program: ExportedProgram,
    cases: Sequence[Mapping[str, Tensor]],
    watched: Set[Node],
    counted: Set[Node] = frozenset(),
) -> dict[Node, Magnitudes]:
    """Run the program over all cases and keep how large the watched values get.

    Rows that a mask leaves out count as well: an infinity there is a NaN once attention multiplies
    it by zero.

    Args:
        program: computes in fp32, so that nothing is cut off.
        watched: nodes; those that give no tensor are left out of the result.
        counted: nodes whose small elements are counted, too.

    Raises:
        PassError: a watched value is not finite, and in no case are all outputs.
    """
    sizes: dict[Node, Magnitudes] = {}
    lost: list[Node] = []

    def keep(_: int, node: Node, tensor: Tensor) -> None:
        if node not in watched or not tensor.numel():
            return
        if not sizes.setdefault(node, Magnitudes()).add(tensor, counted=node in counted):
            lost.append(node)

    for node in program.graph.find_nodes(op="placeholder"):
        for number, case in enumerate(cases):
            if node.name in case:
                keep(number, node, case[node.name])
    found = interpret_cases(program, cases, watch=keep)
    # Rows that attend to nothing, or the mean of no token, are NaN in some cases, as in eager.
    sound = (
        all(bool(t.isfinite().all()) for t in case.values() if t.is_floating_point())
        for case in found
    )
    if lost and not any(sound):
        place = f"{module_path(lost[0]) or 'the model itself'} {source_line(lost[0])}".strip()
        raise PassError(
            f"values at {place} are already non-finite in fp32",
            hint="Look for inputs that the model cannot handle: no precision can represent these"
            " values.",
        )
    return sizes
