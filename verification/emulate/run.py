"""Run a program in the arithmetic of a target: real rounding, overflow and saturation on the CPU.

Every value of a low dtype is a `Twin`: what the target stores, and what the same program has in
fp32.  Both are computed node by node, side by side, so that an overflow, a clamp or a loss is seen
at the op where it happens, and in about twice the memory that `passes.ir.interpret` needs.

An op whose result is fp16, bf16 or fp8 reads its inputs exactly, computes in fp32, and is rounded
once; where the profile says that a kernel rounds on the way, `kernels` has it.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_aggregate

from enginecast.errors import VerificationError
from enginecast.passes.ir.blocks import is_structured, run_structured
from enginecast.passes.ir.edit import aten, value
from enginecast.passes.ir.effects import is_metadata_check
from enginecast.passes.ir.interpret import Run, named, run_check
from enginecast.passes.ir.traits import Trait, has
from enginecast.verification.boundaries import is_scaled
from enginecast.verification.eager.outputs import Case, as_arrays, mask_of
from enginecast.verification.emulate.data import Emulation, overflow_sentence
from enginecast.verification.emulate.kernels import (
    FP8,
    LOW,
    QUANTIZED,
    Twin,
    is_low,
    kernel_of,
    quantized,
    round_to,
)
from enginecast.verification.emulate.profiles import Profile
from enginecast.verification.emulate.record import Recorder
from enginecast.verification.floor import LIMIT
from enginecast.verification.metrics import Comparison, output_names, pool_output
from enginecast.verification.reference import Reference

RANGE_CLAMP = 0.98
"""A clamp to both ends of the dtype's range, or to almost all of it (transformers clamps to 1,000
less), has no meaning in fp32."""


def emulate(
    program: ExportedProgram,
    cases: Mapping[str, Mapping[str, Tensor]],
    profile: Profile,
    *,
    names: Sequence[str] | None = None,
    masks: Sequence[Tensor | None] | None = None,
) -> tuple[list[dict[str, Tensor]], Emulation]:
    """Run a program on several cases as a target would compute it.

    Args:
        program: after all passes, with its casts.
        cases: inputs by placeholder name, by name of the case.
        names: of the tensor outputs, in order; None: `interpret.output_names`.
        masks: attention mask [B, S] of each case: signal to noise ratios leave its rows with 0 out.

    Returns:
        The outputs of each case by name, and what was found on the way.

    Raises:
        InputError: an input is missing, or `names` does not fit the number of outputs.
    """
    recorder = Recorder(program, tuple(cases), masks or [None] * len(cases))
    with torch.no_grad():
        results = _Emulated(program, list(cases.values()), profile, recorder).results()
    return [named(found, names) for found in results], recorder.result(profile)


class _Emulated(Run):
    def __init__(
        self,
        program: ExportedProgram,
        cases: Sequence[Mapping[str, Tensor]],
        profile: Profile,
        recorder: Recorder,
    ) -> None:
        super().__init__(program, cases, None)
        self._profile = profile
        self._recorder = recorder

    def evaluate(self, node: Node, case: int) -> Any:
        if node.op == "placeholder":
            fed = super().evaluate(node, case)
            return Twin(fed) if is_low(fed) else fed
        if node.op != "call_function":
            return self.run_node(node)
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        if is_structured(node):
            return run_structured(node, args, partial(self.run_block, case=case), _apply)
        if has(node, Trait.CHECKS):
            low = map_aggregate((args, kwargs), _low)
            return run_check(node, case, lambda: node.target(*low[0], **low[1]))  # type: ignore[operator]
        if node.target is operator.getitem and is_structured(node.args[0]):
            found = args[0][args[1]]
        elif node.target in QUANTIZED:
            low, plain = (map_aggregate(args, half) for half in (_low, _plain))
            found = quantized(node, low, plain)
        else:
            found = self._call(node, args, kwargs)
        if isinstance(found, Twin) and not is_scaled(node):
            if node in self._weights:
                self._recorder.see_weight(node, found.low, found.plain)
            else:
                self._recorder.see(case, node, found)
        return found

    def user_outputs(self, node: Node, own: dict[Node, Any]) -> list[Any]:
        return [_low(found) for found in super().user_outputs(node, own)]

    def _call(self, node: Node, args: Any, kwargs: Any) -> Any:
        assert callable(node.target)
        twins = [found for found in _leaves((args, kwargs)) if isinstance(found, Twin)]
        low_args, low_kwargs = map_aggregate((args, kwargs), _low)
        if not _is_emulated(node):
            found = node.target(*low_args, **low_kwargs)
            return Twin(found) if _has_low(found) else found
        if not twins and not _has_low(value(node)):
            return node.target(*args, **kwargs)
        low = self._stored(node, args, kwargs)
        if all(twin.exact for twin in twins):
            if has(node, Trait.EXACT) and twins:
                return Twin(low)
            if twins and not _has_low(value(node)):
                return low
        return Twin(low, self._plain(node, args, kwargs, low_args))

    def _stored(self, node: Node, args: Any, kwargs: Any) -> Any:
        """What the target stores."""
        assert callable(node.target)
        low_args, low_kwargs = map_aggregate((args, kwargs), _low)
        floats = [t for t in _leaves((low_args, low_kwargs)) if _is_float(t)]
        if has(node, Trait.EXACT) and not any(t.dtype in FP8 for t in floats):
            return node.target(*low_args, **low_kwargs)
        kernel = kernel_of(node, self._profile)
        is_low = _has_low(value(node)) and floats and all(t.dtype in LOW for t in floats)
        if kernel is not None and is_low:
            return _rounded(kernel(*low_args, **low_kwargs), node)
        wide_args, wide_kwargs = map_aggregate((args, kwargs), _wide)
        return _rounded(node.target(*wide_args, **wide_kwargs), node)

    def _plain(self, node: Node, args: Any, kwargs: Any, low_args: Any) -> Any:
        """The same in fp32."""
        assert callable(node.target)
        plain_args, plain_kwargs = map_aggregate((args, kwargs), _plain)
        if has(node, Trait.CLAMPS) and _is_range_clamp(low_args):
            return plain_args[0]
        return node.target(*plain_args, **plain_kwargs)


def _apply(op: Callable[..., Any], *values: Any) -> Any:
    """Call an op that moves values, or reads one, on both halves of twins."""
    twins = [found for found in _leaves(values) if isinstance(found, Twin)]
    low = op(*map_aggregate(values, _low))
    if not twins or not isinstance(low, Tensor):
        return low
    return (
        Twin(low) if all(t.exact for t in twins) else Twin(low, op(*map_aggregate(values, _plain)))
    )


def _is_range_clamp(args: Sequence[Any]) -> bool:
    tensor, bounds = args[0], args[1:3]
    if not is_low(tensor) or len(bounds) < 2 or any(bound is None for bound in bounds):
        return False
    limit = RANGE_CLAMP * torch.finfo(tensor.dtype).max
    sizes = [torch.as_tensor(bound, dtype=torch.float64).abs().min().item() for bound in bounds]
    return min(sizes) >= limit


def _rounded(found: Any, node: Node) -> Any:
    """Round each result to the dtype that the program gives it."""
    wanted = value(node)
    if isinstance(found, Tensor):
        return _to(found, wanted)
    if isinstance(found, tuple | list):
        return type(found)(_to(f, w) for f, w in zip(found, wanted, strict=True))
    return found


def _to(found: Any, wanted: Any) -> Any:
    if not _is_float(found) or not isinstance(wanted, Tensor) or found.dtype == wanted.dtype:
        return found
    return round_to(found, wanted.dtype) if wanted.dtype in LOW else found.to(wanted.dtype)


def _is_emulated(node: Node) -> bool:
    """Whether an op may be computed from other dtypes: none of sizes, functions, bits, checks."""
    if is_metadata_check(node) or node.target is aten.view.dtype:
        return False
    gives_tensors = isinstance(value(node), Tensor | tuple | list)
    # Of Python's operators, getitem alone takes tensors.
    is_op = isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
    return is_op and gives_tensors


def _is_float(found: Any) -> bool:
    return isinstance(found, Tensor) and found.is_floating_point()


def _has_low(found: Any) -> bool:
    return any(is_low(f) for f in _leaves(found))


def _leaves(nested: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(nested, found.append)
    return found


def _low(found: Any) -> Any:
    return found.low if isinstance(found, Twin) else found


def _wide(found: Any) -> Any:
    return found.wide if isinstance(found, Twin) else _fp32(found)


def _plain(found: Any) -> Any:
    return found.plain if isinstance(found, Twin) else _fp32(found)


def _fp32(found: Any) -> Any:
    return torch.float32 if isinstance(found, torch.dtype) and found in LOW else found


@dataclass(frozen=True)
class TrueDtypeRun:
    """The final program run in the target's arithmetic."""

    measured: Comparison
    """Hand it to `judge` as `emulated`."""
    problems: tuple[str, ...]
    """Where values stop being finite or leave fp16's range, when the outputs are wrong."""
    emulation: Emulation
    """What was found, module by module."""


def true_dtype_check(
    program: ExportedProgram,
    cases: Sequence[Case],
    reference: Reference,
    profile: Profile,
    names: Sequence[str] | None = None,
) -> TrueDtypeRun:
    """Run the final program in the arithmetic of a target, over all cases.

    Raises:
        VerificationError: a shape differs.
    """
    masks = [mask_of(case, reference.mask_input) for case in cases]
    inputs = {case.name: case.inputs for case in cases}
    outputs, emulation = emulate(program, inputs, profile, names=names, masks=masks)
    measured = {}
    for case, found in zip(reference.cases, outputs, strict=True):
        try:
            measured[case.name] = reference.compare(case, as_arrays(found))
        except VerificationError as error:
            raise VerificationError(
                f"case {case.name!r}, as {profile.name} computes: {error.message}", hint=error.hint
            ) from error
    floor, overflow = reference.floor, emulation.overflow
    problems: tuple[str, ...] = ()
    broken = [case for case, found in measured.items() if any(m.nonfinite for m in found.values())]
    if broken and overflow is not None:
        sentence = overflow_sentence(overflow)
        problems = (f"case {overflow.case!r}, as {emulation.profile} computes: {sentence}",)
    elif broken:
        sentence = "values stop being finite in the fp32 part of the program"
        problems = (f"case {broken[0]!r}: {sentence}",)
    elif floor.culprit and any(
        pool_output(measured, name).relative > LIMIT * floor.of(name)
        for name in output_names(floor.cases)
    ):
        problems = (floor.culprit,)
    return TrueDtypeRun(measured, problems, emulation)
