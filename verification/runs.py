"""Cached runs of one program: the results of each case are computed once."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from torch import Tensor
from torch.export import ExportedProgram

from enginecast.passes.ir.interpret import AssertionFailedError
from enginecast.verification.boundaries import Snapshot, snapshots

Inputs = Mapping[str, Tensor]


class Runs:
    """Runs a program and caches its results for watched cases.

    Args:
        make: makes the program before its first run.
        names: names of its outputs.
        mask_input: input that marks valid rows; None: every row counts.
    """

    def __init__(
        self,
        make: Callable[[], ExportedProgram],
        names: Sequence[str],
        mask_input: str | None = None,
    ) -> None:
        self._make = make
        self._names = tuple(names)
        self._mask_input = mask_input
        self._watched: list[Inputs] = []
        self._kept: dict[int, tuple[Inputs, Snapshot]] = {}

    @cached_property
    def program(self) -> ExportedProgram:
        """The program that is run."""
        return self._make()

    def watch(self, cases: Sequence[Inputs]) -> None:
        """Cache the program's results for these cases, from their next run on."""
        self._watched = list(cases)

    def outputs(self, cases: Sequence[Inputs]) -> list[Mapping[str, Tensor]]:
        """The outputs for each case.

        Raises:
            AssertionFailedError: with the index of the case in `cases`.
        """
        asked = {id(inputs) for inputs in cases}
        is_watched = any(id(inputs) in asked for inputs in self._watched)
        watched = self._new(self._watched) if is_watched else []
        others = [
            inputs for inputs in self._new(cases) if not any(case is inputs for case in watched)
        ]
        try:
            found = iter(self._run(watched, others))
        except AssertionFailedError as error:
            failed = [*watched, *others][error.case]
            place = next((i for i, inputs in enumerate(cases) if inputs is failed), error.case)
            raise AssertionFailedError(error.message, place, hint=error.hint) from error
        kept = (self._kept.get(id(inputs)) for inputs in cases)
        return [(next(found) if known is None else known[1]).outputs for known in kept]

    def snapshots(self, cases: Sequence[Inputs]) -> list[Snapshot]:
        """The outputs for each case, and those of each module."""
        self._run(self._new(cases), [])
        return [self._kept[id(inputs)][1] for inputs in cases]

    def _new(self, cases: Sequence[Inputs]) -> list[Inputs]:
        return [inputs for inputs in cases if id(inputs) not in self._kept]

    def _run(self, watched: Sequence[Inputs], others: Sequence[Inputs]) -> list[Snapshot]:
        """Run watched and other cases together, since each run reads all weights, and cache the
        watched ones.

        Returns:
            Of the others.
        """
        if not watched and not others:
            return []
        both, name = [*watched, *others], self._mask_input
        masks = [None if name is None else inputs[name] for inputs in both]
        made = snapshots(self.program, both, names=self._names, masks=masks, watched=len(watched))
        for inputs, snapshot in zip(watched, made, strict=False):
            self._kept[id(inputs)] = (inputs, snapshot)
        return made[len(watched) :]
