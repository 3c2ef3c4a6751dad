"""Find the block in which rows of a batch part from what they are alone, and what helps."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch.export import ExportedProgram

from enginecast.compiler.engines.checks import Check, Examined, Judged, Running
from enginecast.compiler.engines.rebuild import Rebuild, boundaries
from enginecast.compiler.engines.rewrite import rewrite
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.compiler.steps import Steps
from enginecast.errors import EnginecastError, VerificationError
from enginecast.passes.ir.options import spec_from_pass
from enginecast.passes.ir.source import source_line
from enginecast.passes.ir.spec import render
from enginecast.passes.registry import build
from enginecast.verification.eager.make_reference import MIXED
from enginecast.verification.eager.outputs import as_arrays
from enginecast.verification.engine import as_declared, row_errors, rows_apart
from enginecast.verification.metrics import Array, distance
from enginecast.verification.reference import Reference
from enginecast.verification.rows import RowError
from enginecast.verification.runs import Runs

Unfused = Callable[[], tuple[str, ExportedProgram] | None]


@dataclass(frozen=True)
class RowsApart(Check):
    """Names the smallest block of a rejected engine that computes a row wrongly in a batch and
    right alone, and a variant that does not: an engine that also returns what leaves the block, so
    that nothing is fused across its end, or one without fused attention.
    """

    rebuild: Rebuild
    program: Callable[[], ExportedProgram] | ExportedProgram
    """As it was lowered."""
    unfused: Unfused
    """The program without fused attention, and the pipeline that makes it; None: it has none."""
    searches: bool = True
    """Whether to look for the block; not in one of several engines, which have one program."""

    def examine(self, running: Running) -> Examined:
        """Compare rows on the fp32 twin: nothing else here runs them in a batch."""
        reference = running.criteria.reference
        if not running.is_twin or running.wrong:
            return Examined()
        _, found = row_errors(running.engine, reference)
        if not found:
            return Examined()
        again = self._mixing(reference, found[0])
        return Examined(reference=again) if again else Examined((found[0].reason,))

    def reconsider(self, running: Running, judged: Judged) -> Judged:
        criteria, verdict = running.criteria, judged.verdict
        reference = judged.reference or criteria.reference
        if verdict.outcome != "rejected" or criteria.problems or running.is_twin:
            return judged
        found = rows_apart(running.engine, reference)
        if not found:
            return judged
        error, rows = found[0], reference.rows
        assert rows is not None  # it has batches
        if again := self._mixing(reference, error):
            return Judged(
                replace(criteria, reference=again).judge(running.engine, running.wrong), again
            )
        if not self.searches:
            return judged
        try:
            program = self.program
            program = program if isinstance(program, ExportedProgram) else program()
            search = _Search(self.rebuild, program, reference, rows.inputs)
            said = search.said(error, self.unfused)
        except EnginecastError as wrong:
            said = f"the block that parts is not known: {wrong.message}"
        rest = [reason for reason in verdict.reasons if reason != error.reason]
        changed = msgspec.structs.replace(verdict, reasons=(f"{error.reason}; {said}", *rest))
        return replace(judged, verdict=changed)

    def _mixing(self, reference: Reference, error: RowError) -> Reference | None:
        """The reference without rows, where the model itself mixes them; else None."""
        rows = reference.rows
        assert rows is not None  # it has batches
        if not _depend_on_each_other(self.rebuild.model.exact, rows.inputs, error):
            return None
        why = f"in the model, rows depend on each other in a batch of {error.batch}"
        return replace(reference, rows=replace(rows, outputs=(), why=why))


def _row(inputs: Mapping[str, Array], rows: Sequence[str], row: int) -> dict[str, Array]:
    """A row of a batch alone."""
    return {n: a[row : row + 1] if n in rows else a for n, a in inputs.items()}


def _depend_on_each_other(exact: Runs, rows: Sequence[str], error: RowError) -> bool:
    """Whether the row is another one alone in the model itself, too, in fp64; or the model takes no
    such batch.
    """
    cases = (error.feeds, _row(error.feeds, rows, error.row))
    given = [{n: torch.from_numpy(a.copy()) for n, a in case.items()} for case in cases]
    try:
        together, alone = map(as_arrays, exact.outputs(given))
    except (EnginecastError, IndexError, RuntimeError, ValueError):
        return True
    row = together[error.output][error.row : error.row + 1]
    return distance(row, alone[error.output]) > MIXED


@dataclass(frozen=True)
class _Search:
    """The search for a block, which builds one engine for each question."""

    rebuild: Rebuild
    program: ExportedProgram
    reference: Reference
    rows: Sequence[str]
    """The inputs that have them."""

    def said(self, error: RowError, unfused: Unfused) -> str:
        """Where rows part, and what helps."""
        blocks = boundaries(self.program)
        names = list(blocks)
        heals, first = self._tried(names, error)
        if heals:
            return self._kept(blocks, error)
        where = "first in the outputs: what leaves its modules is right"
        if first is not None:
            where = f"first at {self._place(first, blocks[first][0])}"
        variant = unfused()
        if variant is not None:
            pipeline, program = variant
            with self.rebuild.opened(program, ()) as (engine, _):
                if not rows_apart(engine, self.reference):
                    return (
                        f"{where}; without fused attention the rows agree: --pipeline '{pipeline}'"
                    )
        return f"{where}, and keeping outputs of modules does not help"

    def _kept(self, blocks: Mapping[str, tuple[str, ...]], error: RowError) -> str:
        """The block whose output has to be kept, where keeping those of all helps: the last of the
        shortest row of blocks that does.
        """
        names = list(blocks)
        low, high = 0, len(names)
        while high - low > 1:
            middle = (low + high) // 2
            heals, _ = self._tried(names[:middle], error)
            low, high = (low, middle) if heals else (middle, high)
        module = blocks[names[high - 1]][0]
        where = f"first at {self._place(names[high - 1], module)}"
        heals, _ = self._tried([n for n, paths in blocks.items() if module in paths], error)
        if heals:
            return f"{where}; keeping its output makes the rows agree: --keep-output {module}"
        modules = dict.fromkeys(blocks[name][0] for name in names[:high])
        options = " ".join(f"--keep-output {each}" for each in modules)
        return f"{where}; keeping the outputs before it, too, makes the rows agree: {options}"

    def _place(self, name: str, module: str) -> str:
        node = next(node for node in self.program.graph.nodes if node.name == name)
        return f"{module!r} {source_line(node)}".strip()

    def _tried(self, names: Sequence[str], error: RowError) -> tuple[bool, str | None]:
        """Whether an engine that returns the values of nodes computes all rows right; else the
        first of these values with a row that is not what it is alone.
        """
        single = _row(error.feeds, self.rows, error.row)
        with self.rebuild.keeping(self.program, names) as (engine, session, kept):
            if not rows_apart(engine, self.reference):
                return True, None
            outputs = [one.name for one in kept]
            whole, alone = (
                session.run_to_host(as_declared(engine, inputs), outputs)
                for inputs in (error.feeds, single)
            )
        # Between what a verdict allows and what was found: values inside may lose more.
        limit = math.sqrt(error.limit * min(error.error, 1.0))
        for name, output in zip(names, outputs, strict=True):
            found, wanted = whole[output], alone[output]
            is_of_rows = found.shape[:1] == (error.batch,) and wanted.shape[:1] == (1,)
            if is_of_rows and distance(found[error.row : error.row + 1], wanted) > limit:
                return False, name
        return False, None


def lowered(
    model: Prepared, config: EngineConfig, reference: Reference, steps: Steps
) -> ExportedProgram:
    """The program that an engine was made from, with the passes of its pipeline run again.

    Raises:
        VerificationError: a pass is wrong.
    """
    passes = build(config.pipeline)
    again = rewrite(model, passes, reference, steps, target=config.target, engines=(config,))
    if not again.engines or again.failures:
        raise VerificationError("; ".join(again.failures) or "the model is no reference")
    return again.engines[0].program


def without_fused_attention(
    model: Prepared, config: EngineConfig, reference: Reference, steps: Steps
) -> tuple[str, ExportedProgram] | None:
    """A pipeline without `fuse-attention`, and the lowered program that it makes; None: there is no
    such pass in it, or its program is wrong.
    """
    passes = build(config.pipeline)
    left = [spec_from_pass(pass_) for pass_ in passes if pass_.name != "fuse-attention"]
    if len(left) == len(passes):
        return None
    pipeline = render(left)
    try:
        return pipeline, lowered(model, replace(config, pipeline=pipeline), reference, steps)
    except EnginecastError:
        return None
