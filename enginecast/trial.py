"""The first run of an engine, before it is published: outputs against eager, ops against the
contract.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from enginecast.errors import BundleError, InputError
from enginecast.exporters.targets import target_of
from enginecast.plan import Plan
from enginecast.rewrite import Rewritten
from enginecast.runtime.bundle import Bundle
from enginecast.runtime.load import opener_of
from enginecast.runtime.manifest import EngineRecord, FileRecord, Manifest, Verdict
from enginecast.runtime.ort_profile import profile_ops
from enginecast.runtime.session import Engine
from enginecast.runtime.staging import Staging
from enginecast.verify.engine import verify_engine, where_it_ran
from enginecast.verify.verdict import judge


@dataclass(frozen=True)
class Trial:
    """How an engine did."""

    verdict: Verdict
    executed: tuple[str, ...] | None
    """Op types as the runtime executed them; None when it did not run, or does not tell."""
    layers: tuple[str, ...] = ()
    """What the engine consists of, in words, where its runtime tells."""


def try_engine(
    staging: Staging,
    manifest: Manifest,
    record: EngineRecord,
    plan: Plan,
    rewritten: Rewritten,
    problems: Sequence[str],
    threads: int | None,
) -> Trial:
    """Run the engine where this machine can, and judge it.

    Args:
        staging: holds the engine's files.
        manifest: as it will be published, but for verdict and digests.
        record: the engine, one of the manifest's.
        plan: says where the engine runs.
        rewritten: the program that the engine was made from, and what it is judged by.
        problems: reasons to reject that were found before.
        threads: threads within one operator.
    """
    problems = (*problems, *rewritten.problems)
    reference = rewritten.reference
    if not plan.runs_here:
        return Trial(by_emulation(rewritten, problems), None)
    files = unsealed([n for n in (record.file, record.weights, record.network) if n])
    bundle = Bundle(staging.folder, msgspec.structs.replace(manifest, files=files))
    emulated = rewritten.emulated.measured if rewritten.emulated is not None else None
    try:
        session = opener_of(plan.target)(bundle, record, plan.providers, threads)
        with Engine(bundle, record, session) as engine:
            verdict = verify_engine(engine, reference, emulated=emulated, problems=problems)
            verdict = _name_arithmetic(verdict, rewritten)
            layers = engine.layers()
        if not target_of(plan.target).tells_ops:
            return Trial(verdict, None, layers)
        executed = profile_ops(
            bundle.path(record.file),
            reference.cases[0].inputs,
            providers=plan.providers,
            threads=threads,
            precision=record.precision,
            quantized=record.quantized,
        )
    except (BundleError, InputError) as error:
        # The engine is ours, and so is what is wrong with it: that is a rejection, not bad input.
        problems = (*problems, f"the engine does not run: {error.message}")
        return Trial(by_emulation(rewritten, problems), None)
    return Trial(verdict, tuple(node.op_type for node in executed))


def by_emulation(rewritten: Rewritten, problems: Sequence[str]) -> Verdict:
    """Judge by the program alone: the engine has not run."""
    verdict = judge(
        None,
        rewritten.reference.floor,
        where=where_it_ran(""),
        engine_ran=False,
        emulated=rewritten.emulated.measured if rewritten.emulated is not None else None,
        problems=tuple(problems),
    )
    return _name_arithmetic(verdict, rewritten)


def _name_arithmetic(verdict: Verdict, rewritten: Rewritten) -> Verdict:
    found = rewritten.emulation
    return verdict if found is None else msgspec.structs.replace(verdict, arithmetic=found.profile)


def unsealed(names: Sequence[str]) -> tuple[FileRecord, ...]:
    """Files of a bundle that is still being made: digests come when it is published."""
    return tuple(FileRecord(name=name, size=0, sha256="0" * 64) for name in names)
