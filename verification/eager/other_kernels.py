"""The error of other kernels in a reference: the program with noise, or with other sums."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.utils import _pytree as pytree

from enginecast.errors import EnginecastError, VerificationError
from enginecast.library_names import aten
from enginecast.passes.ir.interpret import Run, named
from enginecast.passes.ir.traits import Trait, has
from enginecast.verification.eager.kernel_noise import (
    WORK,
    affordable,
    noisy_outputs,
    ordered_outputs,
)
from enginecast.verification.eager.outputs import Case, as_arrays
from enginecast.verification.floor import LARGEST_FLOOR
from enginecast.verification.metrics import Array, Outputs
from enginecast.verification.reference import Reference, ReferenceCase

FEW = 16
"""An output with fewer numbers in a case: two samples of their error are a matter of luck."""
ROUNDS = 4
"""How many rounds of samples such outputs get, in cases that are small enough."""


def with_losses(reference: Reference, outputs: Outputs, factor: float = 1.0) -> Reference:
    """The reference with its losses raised to a run's error at each element, times a factor.

    At the edges, it is the distance from eager's own outputs.
    """

    def worse(case: ReferenceCase, by_eager: Collection[str]) -> ReferenceCase:
        losses = {}
        for name, exact in case.reference.items():
            wanted = case.outputs[name] if name in by_eager else exact
            found = outputs.get(case.name, {}).get(name)
            if found is None or wanted.dtype.kind in "biu" or found.shape != wanted.shape:
                continue
            with np.errstate(all="ignore"):
                lost = np.abs(found.astype(np.float64) - wanted.astype(np.float64)) * factor
            lost = np.where(np.isfinite(lost), lost, 0.0).astype(np.float32)
            losses[name] = np.maximum(lost, case.losses.get(name, lost))
        return replace(case, losses={**case.losses, **losses})

    return replace(
        reference,
        cases=tuple(worse(case, reference.floor.by_eager) for case in reference.cases),
        edges=tuple(worse(case, case.outputs) for case in reference.edges),
    )


def _samples(
    run: Callable[..., list[list[dict[str, Tensor]]]],
    program: ExportedProgram,
    cases: Sequence[Case],
    names: Sequence[str],
) -> list[Outputs]:
    """Outputs of the program as other kernels may compute them."""
    try:
        samples = run(program, [case.inputs for case in cases], names)
    except (EnginecastError, IndexError, RuntimeError, ValueError):
        return []  # values decide what it runs, and noise decides otherwise
    return [
        {case.name: as_arrays(found) for case, found in zip(cases, sample, strict=True)}
        for sample in samples
    ]


def noisy(
    program: ExportedProgram,
    cases: Sequence[Case],
    names: Sequence[str],
    work: float,
    seed: int = 0,
) -> list[Outputs]:
    """Outputs of the program with kernel noise, for the cases that are small enough."""
    parameters = sum(tensor.numel() for tensor in program.state_dict.values())
    some = [cases[i] for i in affordable([case.inputs for case in cases], parameters, work)]
    return _samples(partial(noisy_outputs, seed=seed), program, some, names)


def with_samples(reference: Reference, samples: Sequence[Outputs]) -> Reference:
    """The reference with the error of other kernels in its cases and edges: the largest of all
    samples.
    """
    floor = reference.floor
    kernels = {case: dict(found) for case, found in (floor.kernels or {}).items()}
    for outputs in samples:
        for case in reference.cases:
            if case.name not in outputs:
                continue
            try:
                found = reference.compare(case, outputs[case.name])
            except VerificationError:  # noise decides a size
                continue
            known = kernels.setdefault(case.name, {})
            for name, metrics in found.items():
                if name not in known or metrics.relative > known[name].relative:
                    known[name] = replace(metrics, part=None)
        reference = with_losses(reference, outputs)
    return replace(reference, floor=replace(floor, kernels=kernels))


def with_all_kernels(
    reference: Reference,
    program: ExportedProgram,
    cases: Sequence[Case],
    edges: Sequence[Case],
    names: Sequence[str],
) -> Reference:
    """The reference with the error of other kernels, including cases that were too large to run
    with noise; where an output holds few numbers, with that of more samples.

    Args:
        program: as captured, with the names of its outputs.
        cases: those of the reference, which must be in fp32.
        edges: inputs of its edge cases.
    """
    known = {*(reference.floor.kernels or {}), *(e.name for e in reference.edges if e.losses)}
    unknown = {case.name for case in (*reference.cases, *reference.edges)} - known
    for some in (cases, edges):
        left = [case for case in some if case.name in unknown]
        reference = with_samples(reference, noisy(program, left, names, math.inf))
    has_few = any(a.size < FEW for case in reference.cases for a in case.losses.values())
    for seed in range(1, ROUNDS if has_few else 1):
        for some in (cases, edges):
            samples = noisy(program, some, names, WORK, seed)
            reference = with_samples(reference, _of_size(samples, few=True))
    ordered = [
        sample
        for some in (cases, edges)
        for sample in _samples(ordered_outputs, program, some, names)
    ]
    reference = with_samples(reference, _of_size(ordered, few=False))
    terms: Mapping[str, Mapping[str, float]] = {}
    every = [*cases, *edges]
    # As for noise, and a sum of something else than numbers of one kind.
    with suppress(EnginecastError, IndexError, RuntimeError, ValueError, TypeError):
        found = output_terms(program, [case.inputs for case in every], names)
        terms = {case.name: sizes for case, sizes in zip(every, found, strict=True)}
    kernels = {
        case: {
            name: replace(metrics, terms=terms.get(case, {}).get(name, 0.0))
            for name, metrics in outputs.items()
        }
        for case, outputs in (reference.floor.kernels or {}).items()
    }
    few = _of_size(ordered, few=True)
    return replace(
        reference,
        cases=tuple(_with_orders(case, few, terms.get(case.name, {})) for case in reference.cases),
        edges=tuple(_with_orders(case, few, terms.get(case.name, {})) for case in reference.edges),
        floor=replace(reference.floor, kernels=kernels),
    )


def _of_size(samples: Sequence[Outputs], *, few: bool) -> list[Outputs]:
    """The outputs of samples that hold few numbers, or those that do not."""
    return [
        {
            case: {name: found for name, found in outputs.items() if (found.size < FEW) is few}
            for case, outputs in sample.items()
        }
        for sample in samples
    ]


def _with_orders(
    case: ReferenceCase, samples: Sequence[Outputs], terms: Mapping[str, float]
) -> ReferenceCase:
    """The case with outputs whose sums were in other orders.

    What an order changes by more than `LARGEST_FLOOR` of the terms is not an order's.
    """
    orders = {}
    for name, plain in case.outputs.items():
        several = [s[case.name][name] for s in samples if name in s.get(case.name, {})]
        exact = case.reference[name]
        if exact.dtype.kind != "f" or not several or several[0].shape != exact.shape:
            continue
        size = terms.get(name, 0.0) / math.sqrt(max(exact.size, 1))
        most = LARGEST_FLOOR["fp32"] * np.maximum(np.abs(exact), size)
        is_finite = bool(np.isfinite(exact).all())
        wanted: Array = (exact if is_finite else plain).astype(np.float64)
        off = np.subtract(np.stack(several), wanted, dtype=np.float64)
        orders[name] = wanted + np.clip(off, -most, most)
    return replace(case, orders=orders)


_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.rsub.Scalar})
_FOLLOWED = _SUMS | {aten.mul.Tensor, aten.div.Tensor, aten.neg.default}
_ADDING = frozenset(
    {
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim),
        *(aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default),
        *(aten.addmm.default, aten.baddbmm.default, aten.dot.default, aten.mv.default),
        *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.einsum.default),
    }
)


def output_terms(
    program: ExportedProgram, inputs: Sequence[Mapping[str, Tensor]], names: Sequence[str]
) -> list[dict[str, float]]:
    """For each case, the L2 norm of each output of floats with magnitudes in place of the terms of
    its last sums.

    A mean over numbers that cancel is small beside them, and its error follows from them: relative
    to the mean it may have any size in a correct engine.
    """
    run = _Terms(program, inputs)
    with torch.no_grad():
        results = run.results()
    specs = program.graph_signature.output_specs
    by_name = {node.name: node for node in program.graph.nodes}
    nodes = [by_name.get(spec.arg.name) for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    found = []
    for terms, given in zip(run.terms, results, strict=True):
        sizes = [terms.get(node, one) for node, one in zip(nodes, given, strict=True)]  # type: ignore[arg-type]
        tensors = named(sizes, names)
        found.append(
            {n: float(t.double().norm()) for n, t in tensors.items() if t.is_floating_point()}
        )
    return found


class _Terms(Run):
    """A run that keeps the magnitude of each value between the last sums and the outputs."""

    def __init__(self, program: ExportedProgram, cases: Sequence[Mapping[str, Tensor]]) -> None:
        super().__init__(program, cases)
        self.terms: list[dict[Node, Tensor]] = [{} for _ in cases]
        (output,) = (node for node in program.graph.nodes if node.op == "output")
        # The nodes between the outputs and the last sums, these included.
        waiting, found = list(output.all_input_nodes), set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += node.all_input_nodes if _is_followed(node) else []
        self._followed = found

    def evaluate(self, node: Node, case: int) -> Any:
        found = super().evaluate(node, case)
        if node in self._followed and isinstance(found, Tensor) and found.is_floating_point():
            self.terms[case][node] = self._magnitude(node, found, self.terms[case])
        return found

    def _magnitude(self, node: Node, found: Tensor, terms: Mapping[Node, Tensor]) -> Tensor:
        if not _is_followed(node) and node.target not in _ADDING:
            return found.abs()
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        sizes = pytree.tree_map(_size, args)
        if _is_followed(node):
            pairs = zip(node.args, sizes, strict=True)
            sizes = [terms.get(a, size) if isinstance(a, Node) else size for a, size in pairs]
        if node.target in _SUMS:
            return torch.add(sizes[0], sizes[1], alpha=abs(kwargs.get("alpha", 1)))
        assert callable(node.target)
        size: Tensor = node.target(*sizes, **kwargs)
        return size.abs()


def _size(value: Any) -> Any:
    is_float = isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())
    return abs(value) if is_float else value


def _is_followed(node: Node) -> bool:
    return node.target in _FOLLOWED or has(node, Trait.MOVES)
