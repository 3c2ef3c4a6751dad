"""Measure the values that an emulated run stores, op by op, and summarize them by module."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.edit import weight_specs
from enginecast.passes.ir.source import module_path, module_paths, source_line
from enginecast.passes.ir.traits import Trait, has
from enginecast.verification.boundaries import FILL, fill_values, leaving, sample, valid_rows
from enginecast.verification.emulate.data import OPS, Emulation, Overflow, StoredValues, WeightLoss
from enginecast.verification.emulate.kernels import LOW, Twin, widened
from enginecast.verification.emulate.profiles import Profile
from enginecast.verification.metrics import sqnr_db

SAMPLE = 1 << 13
"""Elements of a value that shares and ratios are taken from."""
TIGHT_BITS = 2.0
"""Ops with less headroom are named one by one."""
NEAR_LIMIT = 0.98
"""Of the largest finite value: transformers clamps to 1,000 less than 65,504."""
WEIGHT_LOSS = 1e-6
"""Share of a weight's energy that is worth naming: a relative error of 1e-3, twice fp16's unit
roundoff."""


@dataclass
class _Tally:
    """One op, over all cases."""

    node: Node
    dtype: torch.dtype
    max_abs: float = 0.0
    overflow: int = 0
    clamped: int = 0
    sampled: int = 0
    tiny: int = 0
    lost: float = 0.0
    energy: float = 0.0
    noise: float | None = None
    signal: float = 0.0

    @property
    def relative(self) -> float | None:
        """Relative L2 error of what leaves a module; None for what does not."""
        if self.noise is None:
            return None
        if self.noise == 0.0:
            return 0.0
        return math.sqrt(self.noise / self.signal) if self.signal else math.inf


@dataclass
class Recorder:
    """Hand it every value of a run, then ask for the result."""

    program: ExportedProgram
    cases: Sequence[str]
    masks: Sequence[Tensor | None]
    _tallies: dict[Node, _Tally] = field(default_factory=dict)
    _weights: dict[str, WeightLoss] = field(default_factory=dict)
    _overflow: Overflow | None = None

    def __post_init__(self) -> None:
        self._leaving = dict(leaving(self.program))
        for node in self.program.graph.output_node().all_input_nodes:
            if node.op == "call_function":
                self._leaving[node] = (*self._leaving.get(node, ()), "")
        self._fills = fill_values(self.program)

    def see(self, case: int, node: Node, found: Twin) -> None:
        """Measure the value of a node in one case."""
        low = found.low
        leaves = node in self._leaving
        if not isinstance(low, Tensor) or low.dtype not in LOW or not low.numel():
            return
        if _hands_on(node) and not leaves:
            return
        tally = self._tallies.setdefault(node, _Tally(node, low.dtype))
        self._see_range(tally, case, low, found)
        if leaves:
            plain = found.plain
            mask = self.masks[case]
            low, plain = valid_rows(low, mask), valid_rows(plain, mask)
            kept, wanted = (
                widened(sample(low.reshape(-1), SAMPLE)),
                sample(plain.reshape(-1), SAMPLE),
            )
            usable = torch.isfinite(wanted) & (wanted.abs() < FILL)
            if tally.node in self._fills:
                usable &= wanted > -torch.finfo(tally.dtype).max / 2
            wanted = torch.where(usable, wanted, 0.0)
            # An infinity counts as noise of the value's own size: the ratio stays a number.
            kept = torch.where(usable & torch.isfinite(kept), kept, 0.0)
            tiny, lost, energy = _tiny(kept, wanted, tally.dtype)
            tally.tiny += tiny
            tally.sampled += int(torch.count_nonzero(wanted))
            tally.lost += lost
            tally.energy += energy
            noise = float(torch.linalg.vector_norm(kept - wanted, dtype=torch.float64)) ** 2
            tally.noise = (tally.noise or 0.0) + noise
            tally.signal += energy

    def see_weight(self, node: Node, low: Any, plain: Any) -> None:
        """Measure a weight that was cast."""
        if not isinstance(low, Tensor) or low.dtype not in LOW or not low.numel():
            return
        # Names of the weights that a weight expression is made of.
        specs = weight_specs(self.program)
        found: dict[str, None] = {}
        waiting: list[Node] = [node]
        while waiting:
            current = waiting.pop()
            if current.op == "placeholder" and current.graph is not self.program.graph:
                found[str(current.target)] = None  # of the expression of a deferred weight
            elif current.op == "placeholder" and current.name in specs:
                found[str(specs[current.name].target)] = None
            waiting += reversed(current.all_input_nodes)
        names = list(found)
        if _hands_on(node) or not names or not isinstance(plain, Tensor):
            return
        overflow = 0
        if math.isinf(_largest(low)):
            overflow = int((~torch.isfinite(widened(low)) & torch.isfinite(plain)).sum())
        kept, wanted = widened(sample(low.reshape(-1), SAMPLE)), sample(plain.reshape(-1), SAMPLE)
        tiny, lost, energy = _tiny(kept, wanted, low.dtype)
        loss = lost / energy if energy else 0.0
        if overflow or loss > WEIGHT_LOSS:
            count = int(torch.count_nonzero(wanted))
            self._weights[names[0]] = WeightLoss(
                name=", ".join(names),
                dtype=_name(low.dtype),
                max_abs=_largest(plain),
                overflow=overflow,
                subnormal=tiny / max(count, 1),
                energy_lost=loss,
            )

    def result(self, profile: Profile) -> Emulation:
        """What was found, in order of execution."""
        modules = {"", *(path for node in self._tallies for path in module_paths(node))}
        by_module: dict[str, list[_Tally]] = {}
        for node, tally in self._tallies.items():
            for path in dict.fromkeys((module_path(node), *self._leaving.get(node, ()))):
                if path in modules:
                    by_module.setdefault(path, []).append(tally)
        ops = [_summed(module_path(node), [tally]) for node, tally in self._tallies.items()]
        tight = [
            op
            for op in ops
            if op.overflow
            or op.clamped
            or (op.headroom_bits is not None and op.headroom_bits < TIGHT_BITS)
        ]
        return Emulation(
            profile=profile.name,
            about=profile.about,
            cases=tuple(self.cases),
            modules=tuple(_summed(path, found) for path, found in by_module.items()),
            ops=tuple(tight[:OPS]),
            weights=tuple(self._weights.values()),
            overflow=self._overflow,
        )

    def _see_range(self, tally: _Tally, case: int, low: Tensor, found: Twin) -> None:
        limit = torch.finfo(low.dtype).max
        largest = _largest(low)
        if largest < limit / 2:  # neither infinite nor NaN, and no fill value of a mask
            tally.max_abs = max(tally.max_abs, largest)
            return
        stored, plain = widened(low), found.plain
        if tally.node in self._fills:
            counted = plain > -limit / 2
            stored, plain = torch.where(counted, stored, 0.0), torch.where(counted, plain, 0.0)
        finite = torch.isfinite(stored)
        sizes = torch.where(finite, stored, 0.0).abs()
        tally.max_abs = max(tally.max_abs, float(sizes.max()))
        wanted = plain.abs()
        clamped = finite & (sizes >= NEAR_LIMIT * limit) & (wanted > limit) & (wanted < torch.inf)
        tally.clamped += int(clamped.sum())
        lost = ~finite & (wanted < FILL)
        count = int(lost.sum())
        tally.overflow += count
        beyond = float(torch.where(lost | clamped, wanted, 0.0).max())
        tally.max_abs = max(tally.max_abs, beyond)
        if count and self._overflow is None:
            given = [n for n in tally.node.all_input_nodes if n.op == "placeholder"]
            self._overflow = Overflow(
                module=module_path(tally.node),
                source=source_line(tally.node) or "".join(f"(input {n.name!r})" for n in given),
                op=_op(tally.node),
                dtype=_name(low.dtype),
                case=self.cases[case],
                elements=count,
                largest=float(torch.where(lost, wanted, 0.0).max()),
                max_finite=limit,
            )


def _summed(path: str, tallies: Sequence[_Tally]) -> StoredValues:
    worst = max(tallies, key=lambda t: (t.overflow > 0, t.max_abs / torch.finfo(t.dtype).max))
    limit = torch.finfo(worst.dtype).max
    ratios = [t.relative for t in tallies if t.relative is not None]
    energy = sum(t.energy for t in tallies)
    return StoredValues(
        module=path,
        source=source_line(worst.node),
        op=_op(worst.node),
        dtype=_name(worst.dtype),
        max_abs=worst.max_abs,
        headroom_bits=math.log2(limit / worst.max_abs) if worst.max_abs else None,
        overflow=sum(t.overflow for t in tallies),
        clamped=sum(t.clamped for t in tallies),
        subnormal=sum(t.tiny for t in tallies) / max(sum(t.sampled for t in tallies), 1),
        energy_lost=sum(t.lost for t in tallies) / energy if energy else 0.0,
        sqnr_db=sqnr_db(max(ratios)) if ratios else None,
    )


def _tiny(kept: Tensor, wanted: Tensor, dtype: torch.dtype) -> tuple[int, float, float]:
    """How many nonzero values are stored below the normal range, their squared error, and the
    energy of all."""
    is_tiny = (kept.abs() < torch.finfo(dtype).tiny) & (wanted != 0)
    wanted = wanted.double()
    error = torch.where(is_tiny, kept.double() - wanted, 0.0)
    return int(is_tiny.sum()), float((error * error).sum()), float((wanted * wanted).sum())


def _largest(tensor: Tensor) -> float:
    """Largest magnitude; infinite when some element is infinite or NaN."""
    if tensor.element_size() == 1:
        tensor = tensor.float()
    low, high = (float(bound) for bound in torch.aminmax(tensor))
    return max(-low, high, 0.0) if math.isfinite(low) and math.isfinite(high) else math.inf


def _hands_on(node: Node) -> bool:
    """Whether the values were measured where they were computed; parts of a list were not."""
    return has(node, Trait.MOVES, Trait.JOINS) and node.target is not operator.getitem


def _op(node: Node) -> str:
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return str(node.target).removesuffix(".default") if node.op == "call_function" else node.op


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
