"""Find what a rejected engine chose at ties, and compute the reference with these choices."""

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from enginecast.compiler.engines.checks import Check, Judged, Running
from enginecast.compiler.engines.rebuild import Rebuild
from enginecast.compiler.engines.rewrite import LoweredProgram
from enginecast.errors import EnginecastError
from enginecast.runtime.bundle.manifest import Output
from enginecast.verification.eager.choices import (
    TieReference,
    choice_nodes,
    tie_reference,
    with_choice_outputs,
)
from enginecast.verification.engine import as_declared
from enginecast.verification.reference import Reference


@dataclass(frozen=True)
class Ties(Check):
    """A rejected engine is judged by a reference with its own choices at ties: its program is
    lowered again with the choices as outputs.
    """

    rebuild: Rebuild
    engine: LoweredProgram

    def reconsider(self, running: Running, judged: Judged) -> Judged:
        rejected, criteria = judged.verdict, running.criteria
        if rejected.outcome != "rejected" or criteria.problems:
            return judged
        found = self.tie_reference(criteria.reference)
        if found.reference is None:
            reasons = (*rejected.reasons, *found.notes)
            return Judged(msgspec.structs.replace(rejected, reasons=reasons))
        again = replace(criteria, reference=found.reference)
        verdict = again.judge(running.engine, running.wrong)
        if verdict.outcome == "rejected":
            more = (*found.notes, f"with these, too: {verdict.reasons[0]}")
            reasons = (*rejected.reasons, *more)
            return Judged(msgspec.structs.replace(rejected, reasons=reasons))
        reasons = (*verdict.reasons, *found.notes)
        return Judged(msgspec.structs.replace(verdict, reasons=reasons), found.reference)

    def tie_reference(self, reference: Reference) -> TieReference:
        """The reference with the engine's choices, if those are allowed.

        Args:
            reference: the one by which the engine was rejected.
        """
        captured = self.rebuild.model.captured.program
        there = choice_nodes(self.engine.program)
        names = [name for name in choice_nodes(captured) if name in there]
        if not names or reference.floor.dtype != "fp32" or reference.floor.rounding:
            return TieReference(None, ())
        stored = {edge.name for edge in reference.edges}
        edges = [case for case in self.rebuild.model.edge_cases if case.name in stored]
        cases = [*self.rebuild.model.cases, *edges]
        try:
            # Run the engine's program, lowered with its choices as outputs.
            outputs = [f"{name}_chosen" for name in names]
            program = with_choice_outputs(self.engine.program, names)
            added = [Output(name=output, dtype="int64", shape=()) for output in outputs]
            with self.rebuild.opened(program, added) as (engine, opened):
                choices = {}
                for case in cases:
                    feeds = {n: t.numpy() for n, t in case.inputs.items()}
                    results = opened.run_to_host(as_declared(engine, feeds), outputs)
                    choices[case.name] = {
                        name: results[output].astype(np.int64)
                        for name, output in zip(names, outputs, strict=True)
                    }
        except EnginecastError as error:
            return TieReference(None, (f"whether values tie is not known: {error.message}",))
        return tie_reference(
            captured,
            self.rebuild.model.cases,
            edges,
            self.rebuild.model.output_names,
            choices,
            reference,
        )
