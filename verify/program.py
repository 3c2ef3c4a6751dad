"""Level 1: runs the program after every pass and compares it with what it was and with an fp64
reference."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.export import ExportedProgram

from enginecast.errors import VerificationError
from enginecast.passes.base import Pass
from enginecast.passes.ir_text import print_ir
from enginecast.passes.pipeline import PassRun
from enginecast.verify.boundaries import Snapshot, snapshots
from enginecast.verify.comparison import Comparison, Floor, compare, output_names, pool_output
from enginecast.verify.emulate import emulate
from enginecast.verify.emulate_profiles import Profile
from enginecast.verify.emulation_data import Emulation, overflow_sentence
from enginecast.verify.floor import Case, reference_program
from enginecast.verify.metrics import Array
from enginecast.verify.promise import CaseRuns, Rules, as_array
from enginecast.verify.report_data import PassCheck
from enginecast.verify.verdict import LIMIT


class Observer:
    """Compares the program with what it was, after every pass; hand it to `run_pipeline`.

    Two programs are run per case at the start (fp64 reference, captured program) and one after
    every pass that changed anything.

    Args:
        program: as captured, before any pass; not altered.
        cases: one or two; more make every pass slower and find little more.
        names: of the outputs.
        floor: eager in the target dtype over the same cases; judges passes that change precision.
            Without it those are only checked for values that are not finite.
        mask_input: input that marks valid rows; None: every row counts.
        masked: outputs whose rows follow the mask.
        start: the program as it stands before the first pass that is looked at; None: `program`.

    A broken promise is recorded in `checks`, and what comes after it is checked all the same.
    """

    def __init__(
        self,
        program: ExportedProgram,
        cases: Sequence[Case],
        *,
        names: Sequence[str] | None = None,
        floor: Floor | None = None,
        mask_input: str | None = None,
        masked: frozenset[str] = frozenset(),
        start: ExportedProgram | None = None,
    ) -> None:
        self.names = None if names is None else tuple(names)
        self.cases = tuple(cases)
        self.masks = [mask_of(case, mask_input) for case in self.cases]
        self.rules = Rules(floor, masked)
        self._reference = self._run(reference_program(program))
        start = program if start is None else start
        self._before, self._state = self._run(start), _State.of(start)
        self.checks: list[PassCheck] = []

    def __call__(self, pass_: Pass, program: ExportedProgram, run: PassRun) -> None:
        """Check one pass; the next is compared with what this one left."""
        self.accept(self.look(pass_, program, run))

    def look(self, pass_: Pass, program: ExportedProgram, run: PassRun) -> "Look":
        """Check one pass; the next is compared with what was there before."""
        start = time.perf_counter()
        state = _State.of(program)
        after = self._before if state.is_same(self._state) else self._run(program)
        runs = [
            CaseRuns(case.name, mask, *snapshots)
            for case, mask, *snapshots in zip(
                self.cases, self.masks, self._reference, self._before, after, strict=True
            )
        ]
        check = self.rules.check(pass_, run, runs, time.perf_counter() - start)
        return Look(check, runs, after, state)

    def accept(self, look: "Look") -> None:
        """Take the program that was looked at as the one to compare the next with."""
        self._before, self._state = look.after, look.state
        self.checks.append(look.check)

    def _run(self, program: ExportedProgram) -> list[Snapshot]:
        inputs = [case.inputs for case in self.cases]
        return snapshots(program, inputs, names=self.names, masks=self.masks)


@dataclass(frozen=True)
class Look:
    """What was found in a program after a pass."""

    check: PassCheck
    runs: Sequence[CaseRuns]
    after: list[Snapshot]
    state: "_State"


@dataclass(frozen=True)
class _State:
    """What a program computes: its graph, and which weights stand behind it at which version."""

    text: str
    weights: tuple[tuple[str, Tensor, int], ...]

    @classmethod
    def of(cls, program: ExportedProgram) -> "_State":
        named = (*program.state_dict.items(), *program.constants.items())
        weights = ((name, t, t._version) for name, t in named if isinstance(t, Tensor))
        return cls(print_ir(program), tuple(weights))

    def is_same(self, other: "_State") -> bool:
        """Whether nothing changed, whatever a pass says of what it did."""
        return (
            self.text == other.text
            and len(self.weights) == len(other.weights)
            and all(
                (name, version) == (other_name, other_version) and tensor is other_tensor
                for (name, tensor, version), (other_name, other_tensor, other_version) in zip(
                    self.weights, other.weights, strict=True
                )
            )
        )


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
    references: Mapping[str, Mapping[str, Array]],
    *,
    floor: Floor,
    profile: Profile,
    names: Sequence[str] | None = None,
    mask_input: str | None = None,
    masked: frozenset[str] = frozenset(),
) -> TrueDtypeRun:
    """Run the final program in the arithmetic of a target, over all cases.

    Args:
        program: after all passes.
        references: case name -> output name -> fp64 array.
        floor: eager in the same dtype.
        profile: the target's arithmetic.
        names: of the outputs.
        mask_input: input that marks valid rows.
        masked: outputs whose rows follow the mask.
    """
    masks = [mask_of(case, mask_input) for case in cases]
    inputs = {case.name: case.inputs for case in cases}
    outputs, emulation = emulate(program, inputs, profile, names=names, masks=masks)
    measured = {}
    for case, mask, found in zip(cases, masks, outputs, strict=True):
        arrays = {name: as_array(tensor) for name, tensor in found.items()}
        mask_array = None if mask is None else as_array(mask)
        try:
            measured[case.name] = compare(
                arrays, references[case.name], attention_mask=mask_array, masked=masked
            )
        except VerificationError as error:
            raise VerificationError(
                f"case {case.name!r}, as {profile.name} computes: {error.message}", hint=error.hint
            ) from error
    return TrueDtypeRun(measured, tuple(_problems(measured, floor, emulation)), emulation)


def _problems(measured: Comparison, floor: Floor, emulation: Emulation) -> Iterator[str]:
    broken = [case for case, found in measured.items() if any(m.nonfinite for m in found.values())]
    if broken and emulation.overflow is not None:
        told = overflow_sentence(emulation.overflow)
        yield f"case {emulation.overflow.case!r}, as {emulation.profile} computes: {told}"
    elif broken:
        yield f"case {broken[0]!r}: values stop being finite in the fp32 part of the program"
    elif floor.culprit and _beyond(measured, floor):
        yield floor.culprit


def mask_of(case: Case, mask_input: str | None) -> Tensor | None:
    """The attention mask of a case."""
    return None if mask_input is None else case.inputs[mask_input]


def _beyond(measured: Comparison, floor: Floor) -> bool:
    return any(
        pool_output(measured, name).relative > LIMIT * pool_output(floor.cases, name).relative
        for name in output_names(floor.cases)
    )
