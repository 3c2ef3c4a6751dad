"""The engines of a bundle: each lowered from the same program, run, and judged."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from torch.export import ExportedProgram

from enginecast.capture.shapes import symbol_names
from enginecast.describe import describe_inputs
from enginecast.exporters.onnx import Lowered
from enginecast.exporters.order import Order
from enginecast.exporters.targets import target_of
from enginecast.plan import Plan
from enginecast.prepare import Prepared
from enginecast.rewrite import Rewritten, judged_for
from enginecast.runtime.manifest import Manifest, Verdict
from enginecast.runtime.staging import Staging
from enginecast.steps import Steps
from enginecast.trial import Trial, try_engine


@dataclass(frozen=True)
class Workshop:
    """Where the engines of one export are made."""

    prepared: Prepared
    plan: Plan
    threads: int | None
    staging: Staging
    steps: Steps

    def lower(self, rewritten: Rewritten) -> tuple[Lowered, ...]:
        """Write the files of every engine of the plan, in its order."""
        made = []
        for plan in self.plan.engines:
            order = order_of(self.prepared, plan, rewritten.program, self.staging.folder)
            order = replace(order, tell=self.steps.tell, say=self.steps.say)
            with self.steps(_step("lower", plan, self.plan)):
                lowered = target_of(plan.target).lower(order)
            self.steps.log(f"lowered: {lowered.nodes} nodes, {dict(lowered.ops)}")
            for note in lowered.notes:
                self.steps.say(note)
            made.append(lowered)
        return tuple(made)

    def try_all(
        self, manifest: Manifest, rewritten: Rewritten, problems: Sequence[str]
    ) -> tuple[Trial, ...]:
        """Run and judge every engine, in the order of the plan.

        Args:
            manifest: as it will be published, but for verdicts and digests.
            rewritten: the program that they were made from, and what it is judged by.
            problems: reasons to reject that were found before.
        """
        trials = []
        for plan, record in zip(self.plan.engines, manifest.engines, strict=True):
            with self.steps(_step("verify", plan, self.plan)):
                measure = judged_for(self.prepared, rewritten, self.plan.target, plan.target)
                trial = try_engine(
                    self.staging, manifest, record, plan, measure, problems, self.threads
                )
            trials.append(trial)
        return tuple(trials)


def order_of(prepared: Prepared, plan: Plan, program: ExportedProgram, folder: Path) -> Order:
    """What a target is asked for.

    Args:
        program: after the passes.
        folder: where the files go.
    """
    captured = prepared.captured
    given = prepared.source.given_program() is not None
    names = {} if given else symbol_names(captured.program, captured.inputs)
    return Order(
        program,
        folder,
        outputs=prepared.output_names,
        symbols={str(symbol): name for symbol, name in names.items()},
        shapes=[spec.dims for spec in captured.outputs],
        device=plan.device,
        arch=plan.arch,
        inputs=describe_inputs(captured.inputs),
        ranges=dict(captured.symbols),
        tensorrt=plan.tensorrt,
    )


def together(plan: Plan, trials: Sequence[Trial]) -> Verdict:
    """The verdict on a bundle: that of its first engine, unless another one is rejected."""
    first = trials[0].verdict
    wrong = [
        f"the {other.target} engine: {reason}"
        for other, trial in zip(plan.engines[1:], trials[1:], strict=True)
        if trial.verdict.outcome == "rejected"
        for reason in trial.verdict.reasons
    ]
    if not wrong:
        return first
    reasons = (*first.reasons, *wrong) if first.outcome == "rejected" else tuple(wrong)
    return msgspec.structs.replace(first, outcome="rejected", reasons=reasons)


def _step(name: str, plan: Plan, first: Plan) -> str:
    return name if plan is first else f"{name} for {plan.target}"
