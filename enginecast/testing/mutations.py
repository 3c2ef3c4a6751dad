"""Put faults into what a pass wrote, and see whether the comparison notices them.

A comparison that no fault can fail says nothing.  Each mutant is the rewritten program with one
fault at a place that the pass made or changed: a result that is off by a hundredth, two operands
swapped, a number that is another one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.edit import aten, insert, same_shape, structural_copy, value
from enginecast.testing.compare import Comparison
from enginecast.testing.outcome import Outcome

Check = Callable[[Outcome], object]
"""A test's own comparison; raises AssertionError when it notices a fault."""
OFF = 0.01
"""How far a fault is off."""
COMMUTE = frozenset(
    {aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default}
    | {aten.eq.Tensor, aten.ne.Tensor, aten.logical_and.default, aten.logical_or.default}
)


@dataclass(frozen=True, eq=False)
class Mutant:
    """The rewritten program with one fault."""

    fault: str
    """In words: "silu_default (aten.silu.default): its result is off by 1%"."""
    program: ExportedProgram

    def __repr__(self) -> str:
        return f"Mutant({self.fault})"


@dataclass(frozen=True)
class MutationReport:
    """Which faults a comparison noticed."""

    noticed: tuple[str, ...]
    """The faults that failed it."""
    survived: tuple[str, ...]
    """Those that it did not notice."""

    def __repr__(self) -> str:
        return f"MutationReport({len(self.noticed)} noticed, {len(self.survived)} survived)"


def check_mutations(
    outcome: Outcome,
    check: Check | None = None,
    *,
    cases: Sequence[Tensor | tuple[Tensor, ...]] = (),
    most: int = 24,
) -> MutationReport:
    """Fail unless a comparison notices every fault that is put into the rewritten program.

    Args:
        outcome: of `run_passes`.
        check: the comparison, which raises AssertionError; None: `compare` on `cases`.
        cases: as `compare` has them.
        most: mutants that are tried, spread over the places.

    Raises:
        AssertionError: the passes changed nothing; or the comparison fails without a fault, or
            passes with one: names the faults that it does not notice.
    """
    judge = check or Comparison(outcome.captured, cases).check
    judge(outcome)
    made = list(mutants(outcome))
    assert made, "the passes changed nothing in which a fault could be put"
    step = max(1, -(-len(made) // most))
    noticed, survived = [], []
    for mutant in made[::step]:
        try:
            judge(replace(outcome, program=mutant.program))
        except AssertionError:
            noticed.append(mutant.fault)
        else:
            survived.append(mutant.fault)
    assert not survived, "the comparison does not notice that " + "; or that ".join(survived)
    return MutationReport(tuple(noticed), tuple(survived))


def mutants(outcome: Outcome) -> Iterator[Mutant]:
    """The rewritten program, once with each fault.

    Args:
        outcome: of `run_passes`.
    """
    for node in _changed(outcome):
        for fault, edit in _faults(node):
            program = structural_copy(outcome.program)
            edit(next(one for one in program.graph.nodes if one.name == node.name))
            program.graph_module.recompile()
            yield Mutant(f"{node.name} ({node.target}): {fault}", program)


def _changed(outcome: Outcome) -> list[Node]:
    """The calls that the passes made, or gave other arguments."""
    before = {_signature(node) for node in outcome.captured.program.graph.nodes}
    return [
        node
        for node in outcome.program.graph.nodes
        if node.op == "call_function" and _signature(node) not in before
    ]


def _signature(node: Node) -> tuple[str, ...]:
    return node.name, str(node.target), str(node.args), str(node.kwargs)


def _faults(node: Node) -> Iterator[tuple[str, Callable[[Node], None]]]:
    found = value(node)
    if isinstance(found, Tensor) and found.is_floating_point() and node.users:
        yield f"its result is off by {OFF:.0%}", _distort
    for place, argument in enumerate(node.args):
        if isinstance(argument, float):
            other = argument + OFF * max(abs(argument), 1.0)
            yield (
                f"argument {place} is {other:.4g}, not {argument:.4g}",
                partial(_put, place=place, value=other),
            )
    tensors = [place for place, argument in enumerate(node.args) if isinstance(argument, Node)]
    if len(tensors) > 1 and node.target not in COMMUTE and _alike(node, *tensors[:2]):
        yield "its operands are swapped", partial(_swap, left=tensors[0], right=tensors[1])


def _alike(node: Node, left: int, right: int) -> bool:
    """Whether two arguments are different values of one shape and dtype."""
    first, second = node.args[left], node.args[right]
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return False
    one, other = value(first), value(second)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    return one.dtype == other.dtype and same_shape(one.shape, other.shape)


def _distort(node: Node) -> None:
    """Add a part of its size to a value: a norm would take back a factor or a shift."""
    with node.graph.inserting_after(node):
        size = insert(node.graph, aten.abs.default, (node,), like=node, replaces=True)
    with node.graph.inserting_after(size):
        off = insert(
            node.graph, aten.add.Tensor, (node, size), {"alpha": OFF}, like=node, replaces=True
        )
    node.replace_all_uses_with(off, delete_user_cb=lambda user: user not in (size, off))


def _put(node: Node, place: int, value: float) -> None:
    node.update_arg(place, value)


def _swap(node: Node, left: int, right: int) -> None:
    first, second = node.args[left], node.args[right]
    node.update_arg(left, second)
    node.update_arg(right, first)
