"""Find which inputs hold values that must fit one another, and draw those as the example has them.

Offsets rise from 0, as many tokens are placeholders as an image has rows, probabilities sum to 1:
on random values eager raises an error, which says nothing of sizes.  Each input then gets the
freest way to draw its values (see `enginecast.capture.inputs.fitting`) with which eager runs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.capture.inputs.examples import Case, sample
from enginecast.capture.inputs.fitting import is_sorted
from enginecast.capture.inputs.specs import Draws, InputSpec, sizes_of
from enginecast.capture.sources.base.source import Source
from enginecast.compiler.ranges.eager import Eager
from enginecast.library_names import aten

SEED = 70_000
TRIES = 3
"""Draws that eager must run on, where values need not be drawn from the example."""
SURE = 8
"""The same where some do: one draw in three may fit by chance."""
MOST_MARKS = 16
"""Values of an input that are tried as marks."""
HEAVY = 300_000_000
"""Parameters from which on a model is not run for inputs that are floats alone."""
FROM_EXAMPLE: tuple[Draws, ...] = ("values", "shuffled", "rows", "samples")
COMPARES = frozenset({aten.eq.Scalar, aten.ne.Scalar})
SEARCHES = {aten.searchsorted.Tensor: 0, aten.bucketize.Tensor: 1}
"""Ops that want sorted values, and which argument holds these."""
MOVES = frozenset(
    {
        *(aten.alias.default, aten.clone.default, aten.to.dtype, aten._to_copy.default),
        *(aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim),
        *(aten.slice.Tensor, aten.expand.default, aten.flatten.using_ints),
    }
)
"""Ops that keep values as they are."""
SAID: Mapping[Draws, str] = {
    "marked": "are {marks} as often as in the example",
    "sorted": "are sorted, as in the example",
    "between": "are sorted, with the ends of the example",
    "values": "are values of the example",
    "shuffled": "are rows of the example in another order within the row",
    "rows": "are rows of the example",
    "samples": "are samples of the example",
    "kept": "are those of the example",
}


def fit_values(
    source: Source, specs: tuple[InputSpec, ...], example: Mapping[str, Tensor]
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """The inputs, with values drawn as in the example where eager refuses random ones.

    Args:
        example: the inputs that the specs were made from; empty: nothing is tried.

    Returns:
        The inputs, and a sentence on each that is not drawn at random.
    """
    names = [spec.name for spec in specs if _is_unknown(spec)]
    floats_alone = all(spec.dtype.is_floating_point for spec in specs)
    is_heavy = sum(source.weight_elements().values()) > HEAVY
    if not names or any(s.name not in example for s in specs) or (floats_alone and is_heavy):
        return specs, ()
    eager, sizes = Eager(source.eager()), sizes_of(specs, example)

    def error(specs: Sequence[InputSpec]) -> str:
        """That of the first draw that eager refuses; empty if there is none."""
        tries = SURE if any(spec.draws != "any" for spec in specs) else TRIES
        if all(spec.dtype.is_floating_point and spec.is_free for spec in specs):
            tries = 1  # what is wrong with one draw of floats is wrong with most
        errors = (eager.error(sample(specs, sizes, SEED + n)) for n in range(tries))
        return next(filter(None, errors), "")

    why = error(specs)
    if not why:
        return specs, ()
    held = [replace(s, held=example[s.name]) if s.name in names else s for s in specs]
    found = tuple(replace(spec, draws="kept") if spec.name in names else spec for spec in held)
    if error(found):  # not because of the values
        return specs, ()
    for index, spec in enumerate(held):
        if spec.name in names:
            before, after = found[:index], found[index + 1 :]
            tried = ((*before, each, *after) for each in _freest_first(spec))
            found = next((specs for specs in tried if not error(specs)), found)
    notes = (
        _note(spec, f"the model refuses random ones ({why})") for spec in found if not spec.is_free
    )
    # A range is not searched if values cannot be replaced one by one.
    settled = (
        spec if spec.is_searched or spec.origin == "asked" else replace(spec, origin="known")
        for spec in found
    )
    return tuple(settled), tuple(notes)


def _is_unknown(spec: InputSpec) -> bool:
    """Whether nothing is known of an input's values but the example."""
    is_known = spec.kind in ("attention_mask", "position_ids", "image") or spec.reserved
    return not is_known and (spec.kind == "tensor" or spec.origin != "known")


def _freest_first(spec: InputSpec) -> Iterator[InputSpec]:
    """An input with each way to draw its values but the last."""
    assert spec.held is not None
    yield spec
    is_whole = not (spec.dtype.is_floating_point or spec.dtype.is_complex)
    if is_whole and spec.held.ndim:
        counts = Counter(spec.held.flatten().tolist()).most_common(MOST_MARKS)
        yield from (
            replace(spec, draws="marked", marks=frozenset({int(value)})) for value, _ in counts
        )
    if is_sorted(spec.held):
        yield replace(spec, draws="between" if is_whole else "sorted")
    yield from (replace(spec, draws=draws) for draws in FROM_EXAMPLE)


def _note(spec: InputSpec, why: str) -> str:
    is_bool = spec.dtype == torch.bool
    marks = " or ".join(str(bool(mark) if is_bool else mark) for mark in sorted(spec.marks))
    return (
        f"the compared values of {spec.name} {SAID[spec.draws].format(marks=marks)}: {why}; "
        "--inputs FILE.safetensors compares on others"
    )


def note_uses(
    program: ExportedProgram, specs: tuple[InputSpec, ...], example: Mapping[str, Tensor]
) -> tuple[tuple[InputSpec, ...], tuple[str, ...]]:
    """The inputs with what the program's ops want of their values, where the example has it.

    What is compared with a number marks tokens, such as those of an image: random values hold none
    of them, or too many, so that some cases have as many as the example.

    Returns:
        The inputs, and a sentence on each that is not drawn at random.
    """
    numbers: dict[str, set[int]] = {}
    searched: set[str] = set()
    for node in program.graph.nodes:
        if node.target in COMPARES and type(node.args[1]) is int:
            numbers.setdefault(_origin(node.args[0]), set()).add(node.args[1])
        if node.target in SEARCHES:
            searched.add(_origin(node.args[SEARCHES[node.target]]))
    found, notes = [], []
    for spec in specs:
        held = example.get(spec.name)
        if held is not None and held.ndim and spec.is_free and _is_unknown(spec):
            marks = numbers.get(spec.name, set()) & set(held.flatten().tolist())
            if marks and spec.is_whole:
                spec = replace(spec, marks=frozenset(marks), held=held)
            if spec.name in searched and is_sorted(held):
                spec = replace(spec, draws="sorted", held=held)
                notes.append(_note(spec, "the model searches in them"))
        found.append(spec)
    return tuple(found), tuple(notes)


def _origin(node: Node) -> str:
    """The input that a value is; empty if it is computed."""
    while node.target in MOVES:
        node = node.all_input_nodes[0]
    return node.name if node.op == "placeholder" else ""


def in_example_values(cases: Sequence[Case], example: Mapping[str, Tensor]) -> tuple[Case, ...]:
    """The cases with their floats drawn from the example's values, for a model that accepts no
    others: its inputs may be probabilities.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str, tensor: Tensor) -> Tensor:
        held = example.get(name)
        if held is None or not held.numel() or not tensor.is_floating_point():
            return tensor
        places = torch.randint(held.numel(), tensor.shape, generator=generator)
        return held.flatten()[places].to(tensor.dtype)

    return tuple(
        case
        if all(tensor is example.get(name) for name, tensor in case.inputs.items())
        else Case(case.name, {name: drawn(name, t) for name, t in case.inputs.items()})
        for case in cases
    )
