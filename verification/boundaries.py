"""Record the outputs of each module while a program runs, to compare two programs of one model."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.blocks import all_blocks, block_name
from enginecast.passes.ir.edit import (
    is_float,
    value,
    weight_expressions,
    weight_specs,
    weight_tensor,
)
from enginecast.passes.ir.interpret import Feed, interpret_cases
from enginecast.passes.ir.scaled_values import scale_of, without_scale
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.traits import Trait, has
from enginecast.verification.metrics import ratio

SAMPLE = 1 << 16
"""Elements kept of a boundary: enough for an L2 norm, little enough to keep hundreds of boundaries
in memory."""
PART = 1 << 18
"""Elements of a boundary that are digested at a time: they stay in the processor's cache."""
MASKING = 6e4
"""Nobody masks with less in fp16, whose range ends at 65,504."""
_SMALL_CONSTANT = 64
FILLED = (Trait.MOVES, Trait.GATHERS, Trait.JOINS, Trait.CASTS, Trait.ARITHMETIC, Trait.LITERAL)
"""What a fill value goes through, or where it comes in."""
FILL = 1e37
"""Larger magnitudes are fill values of masks, not activations."""


@dataclass(frozen=True, eq=False)
class Boundary:
    """A float tensor that leaves a module."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: bytes
    """Digest of all elements; equal for equal values (-0 counts as 0)."""
    sample: Tensor
    """Evenly spaced elements of the valid rows, [n], in the tensor's dtype or a wider one."""
    max_abs: float
    """Largest magnitude of the finite elements of the valid rows."""
    nonfinite: int
    """Elements of the valid rows that are infinite or NaN."""
    source: str
    """file:line of the user's model code."""
    node: str
    """Name of the node that computes it; fx never gives one twice in a graph."""
    module: str
    """Path of the innermost module that it leaves."""
    _distances: WeakKeyDictionary["Boundary", float] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False
    )
    """Cache of distances: most boundaries are compared again after passes that did not change
    them."""

    def distance(self, wanted: "Boundary") -> float:
        """Relative L2 distance of the sample from another's, over elements finite in both."""
        if self.digest == wanted.digest:
            return 0.0
        if wanted not in self._distances:
            left, right = self.sample.double(), wanted.sample.double()
            if self.nonfinite or wanted.nonfinite:
                usable = torch.isfinite(left) & torch.isfinite(right)
                left, right = left[usable], right[usable]
            self._distances[wanted] = ratio(float((left - right).norm()), float(right.norm()))
        return self._distances[wanted]


@dataclass(frozen=True)
class Snapshot:
    """One run of a program."""

    outputs: Mapping[str, Tensor]
    boundaries: Mapping[str, tuple[Boundary, ...]]
    """Module path -> values that left it, in order of execution; the last one is the module's
    result. Modules are in the order in which they end."""


def is_scaled(node: Node) -> bool:
    """Whether a value fills its dtype's range by construction, so that there is no headroom to
    measure.
    """
    return has(node, Trait.FULL_RANGE)


def leaving(program: ExportedProgram) -> dict[Node, tuple[str, ...]]:
    """For each float value that leaves modules, the paths of those modules, innermost first.

    A value leaves a module when a node outside of the module, or the output, reads it.  What a
    block of a branch or a loop returns leaves that block: "encoder.cond[true]".
    """
    weights = weight_expressions(program)
    found: dict[Node, tuple[str, ...]] = {}
    for node in program.graph.nodes:
        if node.op != "call_function" or node in weights or not is_float(node):
            continue
        readers = [
            "" if user.op == "output" else module_path(user)
            for user in node.users
            if user.op == "output" or isinstance(value(user), Tensor | tuple | list)
        ]
        left = tuple(
            p
            for p in enclosing_modules(module_path(node))
            if any((r != p and not r.startswith(p + ".")) for r in readers)
        )
        if left:
            found[node] = left
    for node, block in all_blocks(program):
        path = ".".join(part for part in (module_path(node), block_name(node, block)) if part)
        for result in block.results:
            if isinstance(result, Node) and result.op == "call_function" and is_float(result):
                found[result] = (path,)
    return found


def snapshots(
    program: ExportedProgram,
    cases: Sequence[Mapping[str, Tensor]],
    *,
    names: tuple[str, ...] | None = None,
    masks: Sequence[Tensor | None] | None = None,
    feed: Feed | None = None,
    watched: int | None = None,
) -> list[Snapshot]:
    """Run a program once over all cases; record its outputs and those of each module.

    Args:
        watched: number of leading cases with recorded modules; of others, only outputs are kept.
            None: all.
        masks: attention mask [B, S] of each case; rows with 0 are left out of samples and ranges.
        feed: replaces values for their readers; the computed values are recorded.
    """
    paths = leaving(program)
    masks = [None] * len(cases) if masks is None else masks
    found: list[dict[str, dict[Node, Boundary]]] = [{} for _ in cases]

    def keep(case: int, node: Node, tensor: Tensor) -> None:
        if watched is not None and case >= watched:
            return
        if node in paths and not is_scaled(node):
            # The boundary record of a value; one scaled by a pass is recorded at its original
            # scale.
            mask = masks[case]
            scale = scale_of(node)
            dtype = tensor.dtype
            tensor = without_scale(tensor, scale)
            flat = valid_rows(tensor, mask).reshape(-1)
            max_abs, nonfinite = _extent(flat)
            boundary = Boundary(
                shape=tuple(tensor.shape),
                dtype=dtype,
                digest=_digest(tensor),
                sample=sample(flat, SAMPLE).clone(),
                max_abs=max_abs,
                nonfinite=nonfinite,
                source=source_line(node),
                node=node.name,
                module=module_path(node),
            )
            kept = found[case]
            for path in paths[node]:
                values = kept.pop(path, {})
                values.pop(node, None)  # of an iteration before
                kept[path] = values | {node: boundary}  # a module stands where it ends

    outputs = interpret_cases(program, cases, names=names, watch=keep, feed=feed)
    return [
        Snapshot(results, {path: tuple(values.values()) for path, values in kept.items()})
        for results, kept in zip(outputs, found, strict=True)
    ]


def renamed(
    found: Sequence[Snapshot],
    values: Mapping[str, str],
    program: ExportedProgram,
    others: Mapping[str, str],
) -> list[Snapshot]:
    """The snapshots of one program under the names of an equivalent one; values that leave a module
    only in the second are missing.

    Args:
        values: digest of each node of the first program, by name.
        program: the second program.
        others: digest of each node of the second program, by name.
    """
    made = []
    paths = {node: left for node, left in leaving(program).items() if not is_scaled(node)}
    for snapshot in found:
        known = {
            values.get(each.node): each
            for boundaries in snapshot.boundaries.values()
            for each in boundaries
        }
        kept: dict[str, dict[Node, Boundary]] = {}
        for node, left in paths.items():
            boundary = known.get(others.get(node.name, ""))
            if boundary is None:
                continue
            here = replace(
                boundary, node=node.name, source=source_line(node), module=module_path(node)
            )
            for path in left:
                kept[path] = kept.pop(path, {}) | {node: here}
        boundaries = {path: tuple(by_node.values()) for path, by_node in kept.items()}
        made.append(Snapshot(snapshot.outputs, boundaries))
    return made


def isolated(
    before: ExportedProgram,
    after: ExportedProgram,
    cases: Sequence[Mapping[str, Tensor]],
    *,
    names: tuple[str, ...] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> list[Snapshot]:
    """Run every module of `after` on its inputs from `before`.

    So an error shows only in the module where it arises.

    A value that leaves a module is recorded as computed; its readers get the value of `before`. A
    value that `before` lacks, such as the inner sum of a fused norm, is passed on unchanged.

    Args:
        before: a program before one pass.
        after: a copy of it after that pass; untouched nodes keep their FX names.
    """
    counterparts = _counterparts(before, after)
    wanted = set(counterparts.values())
    values: list[dict[str, Tensor]] = [{} for _ in cases]

    def keep(case: int, node: Node, tensor: Tensor) -> None:
        # Nodes within a block have names of their own.
        if node.name in wanted and node.graph is before.graph:
            values[case][node.name] = tensor.clone()  # a later op may write into it

    def feed(case: int, node: Node, tensor: Tensor) -> Tensor:
        given = values[case].get(counterparts.get(node.name, ""))
        if given is None or given.shape != tensor.shape:
            return tensor
        return given.to(tensor.dtype)

    interpret_cases(before, cases, names=names, watch=keep)
    return snapshots(after, cases, names=names, masks=masks, feed=feed)


def _counterparts(before: ExportedProgram, after: ExportedProgram) -> dict[str, str]:
    """For each value that leaves a module after a pass, the name of its counterpart before it.

    A name in both programs is the same place, since fx never reuses a name in a graph. A
    replacement is in the same module and on the same source line.
    """
    old = {node.name: node for node in leaving(before) if node.graph is before.graph}
    new = {node.name: node for node in leaving(after) if node.graph is after.graph}
    every = {node.name for node in before.graph.nodes}
    found = {name: name for name in new if name in every}
    gone = _by_location(node for name, node in old.items() if name not in new)
    made = _by_location(node for name, node in new.items() if name not in found)
    for location, nodes in made.items():
        if len(nodes) == len(gone.get(location, ())):
            found |= {n.name: o.name for n, o in zip(nodes, gone[location], strict=True)}
    return found


def _by_location(nodes: Iterable[Node]) -> dict[tuple[str, str], list[Node]]:
    found: dict[tuple[str, str], list[Node]] = defaultdict(list)
    for node in nodes:
        found[module_path(node), source_line(node)].append(node)
    return found


def largest_values(
    program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[Node, float], list[dict[str, Tensor]]]:
    """Run a program over all cases, and keep the largest finite magnitude of each float value.

    Memory stays near that of one layer. Fill values of masks (beyond 1e37) do not count.

    Args:
        program: in fp32, whose values do not leave their range.

    Returns:
        The magnitudes by node, in order of execution, for inputs and nodes that depend on them; and
        the outputs of each case.
    """
    found: dict[Node, float] = {}

    def keep(_: int, node: Node, tensor: Tensor) -> None:
        if tensor.is_floating_point() and tensor.numel():
            found[node] = max(found.get(node, 0.0), _largest(tensor))

    for node in program.graph.find_nodes(op="placeholder"):
        for number, case in enumerate(cases):
            if node.name in case:
                keep(number, node, case[node.name])
    return found, interpret_cases(program, cases, watch=keep)


def _largest(tensor: Tensor) -> float:
    low, high = (bound.item() for bound in torch.aminmax(tensor))
    largest = max(-low, high)
    if largest < FILL:  # false for NaN, too
        return float(largest)
    sizes = tensor.abs()
    return float(torch.where(sizes < FILL, sizes, 0.0).max())


def fill_values(program: ExportedProgram) -> set[Node]:
    """Nodes that hold fill values of masks: large negative numbers that say "not here".

    They sit at the end of a dtype's range by design, and adding a bias to one may take it to -inf:
    that is neither an overflow of the model nor lack of headroom. Views, casts and elementwise
    arithmetic carry them on.
    """
    specs = weight_specs(program)
    found: set[Node] = set()
    for node in program.graph.nodes:
        if not is_float(node):
            continue
        if node.op == "placeholder" and node.name in specs:
            # Small constants are looked into.
            small = 0 < value(node).numel() <= _SMALL_CONSTANT
            if small and bool((weight_tensor(program, specs[node.name]).float() <= -MASKING).any()):
                found.add(node)
        elif has(node, *FILLED) and not has(node, Trait.CLAMPS):  # a clamp bounds values
            given = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, int | float)]
            inherited = any(source in found for source in node.all_input_nodes)
            # True is 1, and NaN compares as false.
            if inherited or any(number <= -MASKING for number in given):
                found.add(node)
    return found


def is_module_output(node: Node) -> bool:
    """Whether a value is read outside of its module, or is an output.

    Inner values may be large: the square in a norm and the cube in a GELU exceed fp16's range
    without harm.
    """
    path = module_path(node)
    return any(user.op == "output" or module_path(user) != path for user in node.users)


def valid_rows(tensor: Tensor, mask: Tensor | None) -> Tensor:
    """The valid rows of a tensor [B, S, ...] under a mask [B, S]; other tensors unchanged."""
    follows = mask is not None and tensor.shape[: mask.ndim] == mask.shape
    return tensor[mask != 0] if follows else tensor


def sample(flat: Tensor, count: int) -> Tensor:
    """About `count` elements, evenly spaced.

    An odd step visits every channel in turn, whatever power of two the hidden size is.
    """
    return flat[:: -(-flat.numel() // count) | 1]


def _extent(flat: Tensor) -> tuple[float, int]:
    """Largest finite magnitude, and the number of non-finite elements."""
    if not flat.numel():
        return 0.0, 0
    low, high = (bound.item() for bound in torch.aminmax(flat))  # NaN and infinities come through
    if math.isfinite(low) and math.isfinite(high):
        return float(max(-low, high)), 0
    finite = torch.isfinite(flat)
    return float(torch.where(finite, flat, 0.0).abs().max()), int((~finite).sum())


def _digest(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    buffer = torch.empty(min(PART, flat.numel()), dtype=flat.dtype)
    digest = xxhash.xxh3_128()
    for part in flat.split(PART) if flat.numel() else ():
        if part.is_floating_point():
            part = torch.add(part, 0.0, out=buffer[: part.numel()])  # -0.0 + 0.0 is 0.0
            if part.aminmax().min.isnan():
                part.masked_fill_(part.isnan(), torch.nan)  # of all the bits that mean NaN
        values: Any = part.view(torch.uint8).numpy()
        digest.update(values)
    return digest.digest()


def enclosing_modules(path: str) -> list[str]:
    """The module and the modules around it, innermost first, without the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[: n + 1]) for n in reversed(range(len(parts)))]
