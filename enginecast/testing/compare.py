"""Compare what passes made of a program with eager, by the rules of an export."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from enginecast.capture.inputs.examples import Case
from enginecast.compiler.request import computed_dtype
from enginecast.errors import PassDefectError
from enginecast.passes.ir.interpret import output_names
from enginecast.plugins import defect_of
from enginecast.testing.captured import Captured
from enginecast.testing.outcome import Outcome
from enginecast.verification.eager.captured import capture_failures
from enginecast.verification.eager.make_reference import make_reference
from enginecast.verification.eager.outputs import reference_program
from enginecast.verification.program.observer import PROMISES, Observer
from enginecast.verification.reference import Reference
from enginecast.verification.report.data import PassCheck
from enginecast.verification.runs import Runs


def compare(outcome: Outcome, cases: Sequence[Tensor | tuple[Tensor, ...]] = ()) -> PassCheck:
    """Fail unless the passes kept their promise, on the captured inputs and on `cases`.

    What is compared is what an export compares: the program as captured with eager, and the program
    after the passes with fp64 and with what was there before.  `exact` passes have to be bit-equal,
    `reordered` ones no farther from fp64 than before, and `precision` ones no farther than eager is
    in that dtype, up to `enginecast.verification.floor.LIMIT`.

    Args:
        outcome: of `run_passes`.
        cases: more inputs, each one tensor or a tuple of them; of other sizes and ranges of values.

    Raises:
        AssertionError: with what differs and where.

    Examples:
        >>> import torch
        >>> from enginecast.testing import capture, compare, run_passes
        >>> captured = capture(torch.nn.RMSNorm(8), torch.randn(3, 8))
        >>> compare(run_passes(captured, "canonicalize"), [torch.zeros(3, 8)]).failure
        ''
    """
    return Comparison(outcome.captured, cases).check(outcome)


class Comparison:
    """The same for several outcomes of one captured module: eager and fp64 run once.

    Args:
        captured: of `capture`.
        cases: inputs besides those of the capture; see `compare`.
    """

    def __init__(
        self, captured: Captured, cases: Sequence[Tensor | tuple[Tensor, ...]] = ()
    ) -> None:
        self.captured = captured
        given = [case if isinstance(case, tuple) else (case,) for case in cases]
        self.cases = [
            Case("captured" if index == 0 else f"case {index}", captured.named(inputs))
            for index, inputs in enumerate([captured.inputs, *given])
        ]
        self._references: dict[str, Reference] = {}

    def __repr__(self) -> str:
        return f"Comparison({self.captured}, {len(self.cases)} cases)"

    def check(self, outcome: Outcome) -> PassCheck:
        """Fail unless the passes kept their promise; see `compare`.

        Args:
            outcome: of the captured module.

        Raises:
            AssertionError: with what differs and where.
        """
        found = self.compare(outcome)
        assert not found.failure, found.failure
        return found

    def compare(self, outcome: Outcome) -> PassCheck:
        """The result of the comparison; its `failure` is empty if the promise was kept.

        Raises:
            PassDefectError: what the passes left does not run.
        """
        dtype = computed_dtype([run.pass_ for run in outcome.runs])
        observer = self._observer.fork()
        observer.judge_by(self._reference(dtype))
        loosest = max(reversed(outcome.runs), key=lambda run: PROMISES.index(run.pass_.promise))
        try:
            check = observer.compare(loosest.pass_, outcome.program, loosest).check
        except Exception as error:  # the program does not run
            what = f"looking at the program after pass '{loosest.pass_.name}'"
            module = type(loosest.pass_).__module__
            raise defect_of(module, what, error, PassDefectError) from error
        rewritten = sum(run.rewritten for run in outcome.runs)
        return replace(check, rewritten=rewritten)

    def run_eager(self, dtype: str = "fp32") -> None:
        """Run eager and fp64 now, and not with the first outcome.

        Raises:
            AssertionError: the captured program is not the module.
        """
        self._observer.fork()
        self._reference(dtype)

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return output_names(len(outputs(self.captured.program, *self.captured.inputs)))

    @cached_property
    def _observer(self) -> Observer:
        return Observer(self.captured.program, self.cases, names=self._names)

    @cached_property
    def _exact(self) -> Runs:
        return Runs(partial(reference_program, self.captured.program), self._names)

    def _reference(self, dtype: str) -> Reference:
        """Eager and fp64 for every case; fails where the capture is not the module."""
        if dtype in self._references:
            return self._references[dtype]
        program = self.captured.program
        reference = make_reference(
            program,
            lambda low: copy.deepcopy(self.captured.module).to(low),
            self.cases,
            dtype=dtype,
            names=self._names,
            forward=self._forward,
        )
        wrong = list(capture_failures(Runs(lambda: program, self._names), self.cases, reference))
        assert not wrong, wrong[0]
        self._references[dtype] = reference
        return reference

    def _forward(self, module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, _tensors(module(*inputs.values())), strict=True))


def outputs(program: ExportedProgram, *inputs: Tensor) -> tuple[Tensor, ...]:
    """What a program returns, as a flat tuple.

    Args:
        program: to run.
        inputs: in order.
    """
    with torch.no_grad():
        return _tensors(program.module(check_guards=False)(*inputs))


def same_bits(left: ExportedProgram, right: ExportedProgram, *inputs: Tensor) -> bool:
    """Whether two programs return equal tensors of equal dtypes; each gets inputs of its own.

    Args:
        left: one program.
        right: the other one.
        inputs: of both, in order.
    """
    pairs = zip(
        outputs(left, *(t.clone() for t in inputs)),
        outputs(right, *(t.clone() for t in inputs)),
        strict=True,
    )
    return all(a.dtype == b.dtype and _bits_equal(a, b) for a, b in pairs)


def relative_error(found: Tensor, reference: Tensor) -> float:
    """Root mean square of the error over that of the reference.

    Args:
        found: any shape and float dtype.
        reference: of the same shape.
    """
    difference = (found.double() - reference.double()).square().mean().sqrt()
    return float(difference / reference.double().square().mean().sqrt())


def _bits_equal(left: Tensor, right: Tensor) -> bool:
    if left.is_complex():
        return _bits_equal(torch.view_as_real(left), torch.view_as_real(right))
    if not left.is_floating_point() or left.shape != right.shape:
        return torch.equal(left, right)
    same = (left == right) & (left.signbit() == right.signbit())
    return bool((same | (left.isnan() & right.isnan())).all())


def _tensors(found: object) -> tuple[Tensor, ...]:
    return tuple(leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor))
