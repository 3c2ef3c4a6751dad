"""Ties: places where a program chooses among values that are equal, or differ only by rounding.

`topk` of a detector's scores decides which boxes come next, and in which order.  Where two scores
are equal, or nearer than rounding, torch, fp64 and an engine may each take another one, and none of
them is wrong; but from there on all that is compared differs.

So an engine that was rejected tells what it chose.  Each choice has to be one that the program
could have made: every value chosen is as good as the one that the program takes there, up to twice
the limit of every verdict times what fp32 loses in that row.  Then the reference is made anew with
these choices given, and the engine is judged by it as by any other: all that follows from a choice
has to be right.

Where the choices come from does not matter for that: an engine agrees where there are choices that
the program could have made, with which the program gives what the engine gives.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    InputKind,
    InputSpec,
    TensorArgument,
)
from torch.fx import Node

from enginecast.errors import EnginecastError
from enginecast.library_names import aten
from enginecast.passes.ir.edit import (
    add_outputs,
    erase_dead,
    free_name,
    insert,
    insert_item,
    structural_copy,
    tracked_outputs,
    value,
)
from enginecast.passes.ir.interpret import interpret
from enginecast.passes.ir.source import source_line
from enginecast.verification.eager.make_reference import edge_reference, make_reference
from enginecast.verification.eager.outputs import (
    Case,
    NamedInputs,
    as_array,
    reference_outputs,
    reference_program,
)
from enginecast.verification.floor import KERNELS, LIMIT, UNIT_ROUNDOFF
from enginecast.verification.metrics import Array, Comparison
from enginecast.verification.reference import Reference, ReferenceCase
from enginecast.verification.runs import Runs

PAIRS = frozenset(
    {
        *(aten.topk.default, aten.sort.default, aten.sort.stable),
        *(aten.max.dim, aten.min.dim),
    }
)
"""Ops that return the selected values and their positions."""
PLACES = frozenset({aten.argmax.default, aten.argmin.default, aten.argsort.default})
"""Ops that return the positions alone."""
FIRST = frozenset({aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default})
"""Ops for which torch guarantees the first of equal values."""
_LARGEST = {aten.max.dim: True, aten.min.dim: False, aten.argmax.default: True}
ALIKE, FEW, FAR = 4.0, 4, 1000.0
"""The error of fp32 at two compared values is taken from values of the row up to `ALIKE` times as
large, and from its `FEW` smallest values where these are at most `FAR` times as large."""
Choices = Mapping[str, Mapping[str, Array]]
"""Case -> choice node -> positions along its dimension."""


@dataclass(frozen=True)
class ChoiceNode:
    """A node that selects positions along one dimension, such as `topk` or `argmax`."""

    node: Node
    dim: int
    largest: bool
    is_ordered: bool
    """Whether torch guarantees the order of the selected values."""
    keeps_dim: bool
    takes_first: bool
    """Whether torch guarantees the first of equal values."""

    @property
    def source(self) -> Node:
        """The values it chooses from."""
        found = self.node.args[0]
        assert isinstance(found, Node)
        return found


@dataclass(frozen=True)
class TieReference:
    """A reference that was computed with an engine's own choices at ties."""

    reference: Reference | None
    """None if the engine made the program's own choices, or one that is wrong."""
    notes: tuple[str, ...]
    """Where the engine chose differently from the program, or why that is wrong."""


def choice_nodes(program: ExportedProgram) -> dict[str, ChoiceNode]:
    """The choice nodes of a program by name, without those in control-flow subgraphs."""
    found = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target not in PAIRS | PLACES:
            continue
        given = _arguments(node)
        if given.get("dim", -1) is None:
            continue
        found[node.name] = ChoiceNode(
            node,
            given.get("dim", -1),
            _LARGEST.get(node.target, bool(given.get("largest", given.get("descending", False)))),
            bool(given.get("sorted", True)),
            bool(given.get("keepdim", "keepdim" not in given)),
            bool(given["stable"]) if "stable" in given else node.target in FIRST,
        )
    return found


def _arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, with their defaults."""
    names = node.target._schema.arguments  # type: ignore[union-attr]
    found = {argument.name: argument.default_value for argument in names}
    found |= {argument.name: value for argument, value in zip(names, node.args, strict=False)}
    return found | dict(node.kwargs)


def with_choice_outputs(program: ExportedProgram, names: Sequence[str]) -> ExportedProgram:
    """A copy of the program with the choices of the named nodes as additional outputs."""
    copy = structural_copy(program)
    nodes = {node.name: node for node in copy.graph.nodes}
    added = []
    for name in names:
        node = nodes[name]
        with copy.graph.inserting_after(node):
            added.append(
                insert_item(copy.graph, node, 1, like=node) if node.target in PAIRS else node
            )
    add_outputs(copy, added)
    return copy


def with_choice_inputs(program: ExportedProgram, names: Sequence[str]) -> ExportedProgram:
    """A copy of the program that takes the choices of the named nodes as additional inputs.

    Its additional outputs are the values that these nodes choose from.
    """
    copy = structural_copy(program)
    found, graph = choice_nodes(copy), copy.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1:]
    sources = []
    for name in names:
        each, node = found[name], found[name].node
        place = graph.inserting_after(last[0]) if last else graph.inserting_before(node)
        with place:
            free = free_name(copy, f"{name}_given")
            places = graph.placeholder(free)
        last = [places]
        fake = value(node)
        places.meta["val"] = fake[1] if node.target in PAIRS else fake
        copy.graph_signature.input_specs.append(
            InputSpec(InputKind.USER_INPUT, TensorArgument(places.name), None)
        )
        sources.append(each.source)
        with tracked_outputs(copy):
            if node.target in PLACES:
                node.replace_all_uses_with(places)
                continue
            for user in list(node.users):
                if user.target is not operator.getitem:
                    continue
                chosen = places
                if user.args[1] == 0:  # the values: taken at the places
                    with graph.inserting_before(user):
                        if not each.keeps_dim:
                            chosen = insert(
                                graph, aten.unsqueeze.default, (places, each.dim), like=user
                            )
                        taken = (each.source, each.dim, chosen)
                        chosen = insert(graph, aten.gather.default, taken, like=user)
                        if not each.keeps_dim:
                            chosen = insert(graph, aten.squeeze.dim, (chosen, each.dim), like=user)
                user.replace_all_uses_with(chosen)
    add_outputs(copy, sources)
    erase_dead(graph)
    copy.graph_module.recompile()
    return copy


def tie_reference(
    program: ExportedProgram,
    cases: Sequence[Case],
    edges: Sequence[Case],
    outputs: Sequence[str],
    choices: Choices,
    before: Reference,
) -> TieReference:
    """Compute the reference of an fp32 engine again with its choices, if those are allowed.

    Args:
        program: as captured.
        cases: those of the reference.
        edges: inputs of its edge cases.
        outputs: names of the program's outputs.
        choices: of the engine, in every case and edge case.
        before: the reference by which it was rejected.
    """
    names = list(next(iter(choices.values()), {}))
    found = choice_nodes(program)
    own: dict[str, dict[str, Array]] = {}
    """The program's own choices."""
    asked = with_choice_outputs(program, names)
    for case in (*cases, *edges):
        chosen = list(interpret(asked, case.inputs).values())[-len(names) :]
        own[case.name] = {name: as_array(t) for name, t in zip(names, chosen, strict=True)}
    if all(np.array_equal(choices[c][name], own[c][name]) for c in own for name in names):
        return TieReference(None, ())
    sources = [f"{name} chooses from" for name in names]
    try:
        made, added = _made(program, cases, edges, (*outputs, *sources), choices, before)
    except (EnginecastError, IndexError, RuntimeError, ValueError) as error:
        return TieReference(None, (f"the program does not run with the engine's choices: {error}",))
    if {case.name for case in made.edges} != {case.name for case in edges}:
        return TieReference(None, ("not all edges run with the engine's choices",))
    notes, wrong = [], []
    for name, source in zip(names, sources, strict=True):
        note, worse = _ties_at(found[name], source, made, choices, own)
        notes += note
        wrong += worse
    if wrong:
        return TieReference(None, tuple(wrong))
    return TieReference(_without(made, added, set(sources)), tuple(notes))


def _made(
    program: ExportedProgram,
    cases: Sequence[Case],
    edges: Sequence[Case],
    outputs: Sequence[str],
    choices: Choices,
    before: Reference,
) -> tuple[Reference, set[str]]:
    """The reference with the engine's choices, and the names of the inputs that hold them."""
    names = list(next(iter(choices.values()), {}))
    given = with_choice_inputs(program, names)
    inputs = list(given.graph_signature.user_inputs)[-len(names) :]

    def fed(case: Case) -> NamedInputs:
        added = {
            place: torch.from_numpy(np.ascontiguousarray(choices[case.name][name]))
            for place, name in zip(inputs, names, strict=True)
        }
        return NamedInputs(case.name, {**case.inputs, **added})

    def eager(_: torch.dtype) -> nn.Module:
        return nn.Module()  # the captured program, which was compared with it, is run instead

    def forward(_: nn.Module, feeds: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return interpret(given, feeds, names=outputs)

    exact = partial(reference_outputs, Runs(partial(reference_program, given), outputs))
    made = make_reference(
        given,
        eager,
        [fed(case) for case in cases],
        dtype="fp32",
        names=outputs,
        forward=forward,
        mask_input=before.mask_input,
        exact=exact,
        work=math.inf,  # it is too late for less
    )
    fed_edges = [fed(case) for case in edges]
    other = edge_reference(eager, fed_edges, forward, exact, given, outputs, work=math.inf)
    made = replace(made, masked=before.masked, guarded=before.guarded, edges=other)
    return made, set(inputs)


def _ties_at(
    each: ChoiceNode,
    source: str,
    made: Reference,
    choices: Choices,
    own: Choices,
) -> tuple[list[str], list[str]]:
    """Notes on where the engine chose differently from the program, and what is wrong there."""
    name = each.node.name
    place = source_line(each.node) or name
    ties, rows, widest, wrong = 0, 0, 0.0, list[str]()
    for case in (*made.cases, *made.edges):
        chosen = choices[case.name][name]
        if np.array_equal(chosen, own[case.name][name]):
            continue
        shape = case.reference[source].shape
        count = shape[each.dim] if shape else 1
        exist = ((chosen.astype(np.int64) >= 0) & (chosen.astype(np.int64) < count)).all()
        if chosen.shape != own[case.name][name].shape or not exist:
            wrong.append(f"{place}, case {case.name!r}: the engine chose places that do not exist")
            continue
        if _passes_over(each, case, source, chosen):
            wrong.append(
                f"{place}, case {case.name!r}: a value that the engine chose is not the first of"
                " equal ones, which torch promises"
            )
            continue
        off, allowed = _worse(each, case, source, chosen)
        if (off > allowed).any():
            at = np.unravel_index(int(np.argmax(off - allowed)), off.shape)
            wrong.append(
                f"{place}, case {case.name!r}: the engine chose a value that is worse by"
                f" {off[at]:.2g} than the right one; rounding allows {allowed[at]:.2g}"
            )
        ties += 1
        rows += int(np.atleast_1d(chosen != own[case.name][name]).any(axis=-1).sum())
        widest = max(widest, float(off.max(initial=0.0)))
    if not ties:
        return [], wrong
    apart = f"at most {widest:.2g} apart, which is within rounding" if widest else "equal ones"
    note = (
        f"ties at {place}: in {rows} rows of {ties} cases the engine chose different values"
        f" from eager, {apart}; it was compared with the model run with its choices"
    )
    return [note], wrong


def _passes_over(each: ChoiceNode, case: ReferenceCase, source: str, chosen: Array) -> bool:
    """Whether the engine skipped the first of equal values where torch guarantees that one.

    Only rows without rounding errors count, such as masks or ids.
    """
    values, exact = case.outputs[source], case.reference[source]
    if not each.takes_first or not values.ndim:
        return False
    dim = each.dim % values.ndim
    places = chosen if each.keeps_dim else np.expand_dims(chosen, dim)
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    order = tensor.sort(dim=dim, descending=each.largest, stable=True).indices.numpy()
    first = np.take(order, range(places.shape[dim]), axis=dim)
    same = values == exact
    if values.dtype.kind == "f":
        same |= np.isnan(values) & np.isnan(exact)
    is_exact = same.all(axis=dim, keepdims=True)
    got = np.take_along_axis(values, places.astype(np.int64), dim)
    ties = got == np.take_along_axis(values, first, dim)
    return bool((is_exact & ties & (places != first)).any())


def _worse(
    each: ChoiceNode, case: ReferenceCase, source: str, chosen: Array
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How much worse each chosen value is than the right one, in fp32 or fp64, and the limit."""
    exact = case.reference[source]
    off = np.zeros(0)
    sides = [side.astype(np.float64) for side in (case.outputs[source], exact)]
    dim = each.dim % max(exact.ndim, 1)
    places = chosen if each.keeps_dim else np.expand_dims(chosen, dim)
    count = places.shape[dim]
    near = np.zeros(0)
    for side in sides:
        got = np.take_along_axis(side, places.astype(np.int64), dim)
        best = np.sort(side, axis=dim)
        best = np.flip(best, axis=dim) if each.largest else best
        best = np.take(best, range(count), axis=dim)
        if not each.is_ordered:
            got = np.sort(got, axis=dim)
            got = np.flip(got, axis=dim) if each.largest else got
        with np.errstate(invalid="ignore"):
            apart = np.where(
                (got == best) | (np.isnan(got) & np.isnan(best)), 0, np.abs(got - best)
            )
        apart = np.where(np.isnan(apart), np.inf, apart)
        off = np.maximum(off, apart) if off.size else apart
        larger = np.fmax(*(np.where(np.isfinite(each), np.abs(each), 0.0) for each in (got, best)))
        near = np.maximum(near, larger) if near.size else larger
    repeated = (np.diff(np.sort(places, axis=dim), axis=dim) == 0).any(axis=dim, keepdims=True)
    off = np.where(repeated, np.inf, off)
    if exact.dtype.kind in "biu":
        return off, np.zeros_like(off)
    lost = case.losses.get(source)
    lost = np.abs(sides[0] - sides[1]) if lost is None else lost.astype(np.float64)
    finite = np.where(np.isfinite(lost), lost, 0.0).astype(np.float64)
    sizes = np.where(np.isfinite(sides[1]), np.abs(sides[1]), 0.0)
    allowed = (
        2 * LIMIT * np.maximum(_lost_near(near, sizes, finite, dim), UNIT_ROUNDOFF["fp32"] * near)
    )
    size = sizes.max(axis=dim, keepdims=True, initial=0.0)
    return off, np.broadcast_to(np.minimum(allowed, KERNELS * size), off.shape)


def _lost_near(
    near: NDArray[np.float64],
    sizes: NDArray[np.float64],
    lost: NDArray[np.float64],
    dim: int,
) -> NDArray[np.float64]:
    """The error of fp32 at the compared values, taken from values of about their size in the row.

    The error of much larger values says nothing about these: a row may hold scores of 1 beside
    ones that a mask has set to -1e9, or moved by as much.  A single value may have no error by
    luck, so that a few of the smallest count as well.

    Args:
        near: magnitudes of the values that are compared, [..., chosen, ...].
        sizes: magnitudes of all values, [..., count, ...].
        lost: the error of fp32 at each of them, of the same shape.
        dim: the dimension along which values are chosen.
    """
    ends = [np.moveaxis(array, dim, -1) for array in (near, sizes, lost)]
    rows = [
        np.broadcast_to(e, (*ends[1].shape[:-1], e.shape[-1])).reshape(-1, e.shape[-1])
        for e in ends
    ]
    found = np.zeros_like(rows[0])
    for index, (wanted, row, own) in enumerate(zip(*rows, strict=True)):
        order = row.argsort()
        ascending, most = row[order], np.maximum.accumulate(own[order])
        few = ascending[min(FEW, len(row)) - 1]
        limit = np.maximum(ALIKE * wanted, np.minimum(few, FAR * wanted))
        places = np.searchsorted(ascending, limit, side="right") - 1
        found[index] = np.where(places >= 0, most[places], 0.0)
    return np.moveaxis(found.reshape(ends[0].shape), -1, dim)


def _without(reference: Reference, inputs: set[str], outputs: set[str]) -> Reference:
    """The reference without the inputs and outputs that were added for the choices."""

    def kept(found: Mapping[str, Array], names: set[str]) -> dict[str, Array]:
        return {name: array for name, array in found.items() if name not in names}

    def plain(cases: Sequence[ReferenceCase]) -> Iterator[ReferenceCase]:
        for case in cases:
            parts = (case.outputs, case.reference, case.losses)
            yield ReferenceCase(
                case.name, kept(case.inputs, inputs), *(kept(part, outputs) for part in parts)
            )

    def measured(found: Comparison | None) -> Comparison | None:
        if found is None:
            return None
        return {c: {n: m for n, m in o.items() if n not in outputs} for c, o in found.items()}

    floor = reference.floor
    floor = replace(
        floor,
        cases=measured(floor.cases) or {},
        kernels=measured(floor.kernels),
        by_eager={n: e for n, e in floor.by_eager.items() if n not in outputs},
    )
    return replace(
        reference,
        cases=tuple(plain(reference.cases)),
        edges=tuple(plain(reference.edges)),
        floor=floor,
    )
