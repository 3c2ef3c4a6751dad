"""The engines of a bundle: lowering requests to their targets, and the first run of each engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from torch.export import ExportedProgram

from enginecast.capture.tracing.sizes.shapes import named_sizes
from enginecast.compiler.manifest import describe_inputs
from enginecast.compiler.prepare import Prepared
from enginecast.compiler.request import EngineConfig
from enginecast.compiler.rewrite import Rewritten
from enginecast.errors import (
    BundleError,
    InputError,
    LoweringError,
    MissingError,
    VerificationError,
)
from enginecast.exporters.registry import target_of
from enginecast.exporters.target import LoweringRequest
from enginecast.runtime.bundle.manifest import (
    EngineRecord,
    FileRecord,
    GenerationCheck,
    Manifest,
    StepCheck,
    Verdict,
)
from enginecast.runtime.bundle.reader import Bundle, unpublished
from enginecast.runtime.engine import Engine
from enginecast.runtime.sessions.registry import session_class
from enginecast.verification.choices import TieReference
from enginecast.verification.eager import FEW
from enginecast.verification.emulate.run import TrueDtypeRun
from enginecast.verification.engine import (
    compare_edges,
    edges_of,
    measure_engine,
    translation_failures,
    trimming_failures,
    verify_engine,
    where_it_ran,
)
from enginecast.verification.floor import KERNELS, LIMIT
from enginecast.verification.metrics import Comparison
from enginecast.verification.reference import Reference, ReferenceCase
from enginecast.verification.verdict import judge

LOW = ("float16", "bfloat16")
NOT_FOLLOWED = (
    "no consecutive calls were compared: this machine runs neither the engine nor its file in"
    " fp32: export it where the engine runs"
)
Follows = Callable[[Engine], tuple[GenerationCheck | StepCheck, tuple[str, ...]]]
"""Compares an engine with the model over consecutive calls; returns the result and what is
wrong."""

AtTies = Callable[[Reference], TieReference]
"""Computes a reference again with the engine's choices at ties."""

WithKernels = Callable[[Reference], Reference]
"""Adds the error of other kernels in large cases to a reference."""

PlaceOfLoss = Callable[[str, str], str]
"""Names the op in which most of an output's error arises in a case; empty if it is not known."""


@dataclass(frozen=True)
class Twin:
    """The result of running an engine file that cannot run here with its 16-bit values in fp32."""

    measured: Comparison | None = None
    """Metrics against the reference; None if it did not run."""
    problems: tuple[str, ...] = ()
    note: str = ""
    """A note on what was run, for the verdict."""
    edges: tuple[str, ...] = ()
    """Names of the edge cases that it was compared on."""
    followed: GenerationCheck | StepCheck | None = None


@dataclass(frozen=True)
class Criteria:
    """The evidence that engines made from one program, or module, are judged by."""

    reference: Reference
    emulated: TrueDtypeRun | None = None
    """The run of the program in the arithmetic of the engine's target; None for fp32, or without a
    program."""
    problems: tuple[str, ...] = ()
    """Reasons to reject, found before the engine ran."""

    def judge(
        self,
        engine: Engine | None = None,
        more: Sequence[str] = (),
        twin: Twin | None = None,
    ) -> Verdict:
        """Run an engine over all cases and judge it.

        Without an engine, judge the program and the engine file as run in fp32.

        Args:
            more: additional reasons to reject it.
            twin: the fp32 run of an engine that does not run here.
        """
        emulated = self.emulated.measured if self.emulated is not None else None
        twin = twin or Twin()
        problems = (*self.problems, *more, *twin.problems)
        if engine is not None:
            verdict = verify_engine(engine, self.reference, emulated=emulated, problems=problems)
        else:
            verdict = judge(
                twin.measured,
                self.reference.floor,
                where=where_it_ran(),
                engine_ran=False,
                emulated=emulated,
                problems=problems,
                edges=twin.edges,
            )
        if twin.note and verdict.outcome != "rejected":
            verdict = msgspec.structs.replace(verdict, reasons=(*verdict.reasons, twin.note))
        if self.emulated is None:
            return verdict
        return msgspec.structs.replace(verdict, arithmetic=self.emulated.emulation.profile)


def criteria_of(rewritten: Rewritten, *problems: str) -> Criteria:
    """The criteria for engines made from a rewritten program, with `problems` added."""
    problems = (*problems, *rewritten.problems)
    return Criteria(rewritten.reference, rewritten.emulated, problems)


@dataclass(frozen=True)
class EngineRun:
    """The result of the first run of an engine."""

    verdict: Verdict
    executed: tuple[str, ...] | None = None
    """Op types as the runtime executed them; None if it did not run or does not report them."""
    layers: tuple[str, ...] = ()
    """A description of the engine's layers, if its runtime reports them."""
    leaks: Mapping[str, str] = field(default_factory=dict)
    """Outputs that were proved independent of padding but change with it, and how."""
    followed: GenerationCheck | StepCheck | None = None
    """The comparison over consecutive calls; None for an engine without state."""
    reference: Reference | None = None
    """The reference with its choices at ties, if it was judged by that one."""


def lowering_request(
    prepared: Prepared, config: EngineConfig, program: ExportedProgram, folder: Path
) -> LoweringRequest:
    """The lowering request for a target, with the program as the lowering passes left it."""
    captured = prepared.captured
    given = prepared.source.given_program() is not None
    names = {} if given else named_sizes(captured.program, captured.inputs)
    return LoweringRequest(
        program,
        folder,
        outputs=prepared.output_names,
        symbols={str(symbol): str(size) for symbol, size in names.items()},
        shapes=[spec.dims for spec in captured.outputs],
        device=config.device,
        arch=config.arch,
        inputs=describe_inputs(prepared.inputs),
        ranges=dict(prepared.symbols),
        options=config.options,
    )


def run_engine(
    bundle: Bundle,
    record: EngineRecord,
    config: EngineConfig,
    criteria: Criteria,
    threads: int | None,
    *,
    counts_ops: bool = True,
    widened: Callable[[], Iterable[Sequence[ReferenceCase]]] = tuple,
    follows: Follows | None = None,
    at_ties: AtTies | None = None,
    with_kernels: WithKernels | None = None,
    place_of_loss: PlaceOfLoss | None = None,
    also: Callable[[Engine], tuple[str, ...]] | None = None,
) -> EngineRun:
    """Run the engine if this machine can, else its fp32 twin, and judge it.

    Args:
        widened: returns the outputs of the engine's program with 16-bit values widened to fp32, in
            each correct way.
        follows: compares it with the model over consecutive calls.
        at_ties: computes the reference of a rejected engine again, with its choices.
        with_kernels: adds the error of other kernels, for an engine that was rejected by little.
        place_of_loss: names the op in which an error beyond its limit may arise.
        also: further checks of an engine that runs here; returns what is wrong with it.
    """
    if not config.runs_here:
        twin = run_twin(bundle, record, criteria.reference, threads, widened, follows)
        if follows is not None and twin.followed is None:
            twin = replace(twin, problems=(*twin.problems, NOT_FOLLOWED))
        return EngineRun(criteria.judge(twin=twin), followed=twin.followed)
    try:
        opened = session_class(config.target).open(
            bundle, record, config.providers, threads, counts_ops=counts_ops
        )
        with Engine(bundle, record, opened) as engine:
            checked, wrong = follows(engine) if follows is not None else (None, ())
            wrong = (*wrong, *(also(engine) if also is not None else ()))
            verdict, layers = criteria.judge(engine, wrong), engine.layers()
            remade = None
            is_beyond = verdict.outcome == "rejected" or bool(verdict.accepted)
            may_differ = is_beyond and not criteria.problems and not wrong
            if may_differ and with_kernels is not None and is_near(verdict, criteria.reference):
                wider = replace(criteria, reference=with_kernels(criteria.reference))
                again = wider.judge(engine)
                if again.outcome != "rejected" and len(again.excesses) <= len(verdict.excesses):
                    verdict, remade = again, wider.reference
            if verdict.outcome == "rejected" and at_ties is not None and not criteria.problems:
                verdict, remade = _judge_at_ties(engine, verdict, criteria, wrong, at_ties)
            if place_of_loss is not None:
                verdict = _with_places(verdict, place_of_loss)
            leaks = trimming_failures(engine, remade or criteria.reference)
    except (BundleError, InputError) as error:
        # We made the engine, so its errors are a rejection and not bad input.
        return EngineRun(criteria.judge(more=[f"the engine does not run: {error.message}"]))
    except MissingError as error:
        if "NOT_IMPLEMENTED" not in error.message:
            raise
        raise LoweringError(
            f"the lowering made an operator without a kernel: {error.message}",
            hint="Replace the op of torch that it stands for.",
        ) from error
    return EngineRun(verdict, opened.executed_ops(), layers, leaks, checked, remade)


def _with_places(verdict: Verdict, place_of_loss: PlaceOfLoss) -> Verdict:
    """The verdict with the ops in which its errors beyond their limits may arise."""
    places: dict[str, str] = {}
    for excess in verdict.excesses:
        if excess.output not in places:
            places[excess.output] = place_of_loss(excess.output, excess.case)
    notes = [
        f"output {output!r}: kernels lose most digits in {place}"
        for output, place in places.items()
        if place
    ]
    return msgspec.structs.replace(
        verdict,
        excesses=tuple(
            msgspec.structs.replace(excess, place=places[excess.output])
            for excess in verdict.excesses
        ),
        reasons=(*verdict.reasons, *notes),
    )


def is_near(verdict: Verdict, reference: Reference) -> bool:
    """Whether the error of an fp32 engine is small enough to come from other kernels."""
    floor, cases = reference.floor, reference.cases
    if floor.dtype != "fp32" or floor.rounding:
        return False
    return all(
        (found.error or 0.0) <= LIMIT * max(found.floor or 0.0, KERNELS)
        or all(case.outputs[found.name].size < FEW for case in cases)
        for found in verdict.outputs
    )


def _judge_at_ties(
    engine: Engine,
    rejected: Verdict,
    criteria: Criteria,
    wrong: Sequence[str],
    at_ties: AtTies,
) -> tuple[Verdict, Reference | None]:
    """Judge a rejected engine by a reference with the engine's own choices at ties.

    Returns:
        The verdict, and the new reference if ties explain the rejection.
    """
    found = at_ties(criteria.reference)
    if found.reference is None:
        reasons = (*rejected.reasons, *found.notes)
        return msgspec.structs.replace(rejected, reasons=reasons), None
    verdict = replace(criteria, reference=found.reference).judge(engine, wrong)
    if verdict.outcome == "rejected":
        more = (*found.notes, f"with these, too: {verdict.reasons[0]}")
        return msgspec.structs.replace(rejected, reasons=(*rejected.reasons, *more)), None
    reasons = (*verdict.reasons, *found.notes)
    return msgspec.structs.replace(verdict, reasons=reasons), found.reference


def open_part(bundle: Bundle, config: EngineConfig, threads: int | None) -> Engine:
    """The engine of a part whose outputs another engine reads; its twin if the other has one.

    Raises:
        BundleError: the engine does not run.
        MissingError: this machine cannot run it.
    """
    record = next(one for one in bundle.manifest.engines if one.target == config.target)
    if config.runs_here:
        opened = session_class(config.target).open(bundle, record, config.providers, threads)
        return Engine(bundle, record, opened)
    twin = target_of(record.target).open_twin(bundle.path(record.file), threads)
    if twin is None:
        raise MissingError(f"{bundle.root}: nothing here runs the file of {record.target} in fp32")
    return Engine(replace(bundle, manifest=_in_fp32(bundle.manifest)), record, twin)


def run_twin(
    bundle: Bundle,
    record: EngineRecord,
    reference: Reference,
    threads: int | None,
    widened: Callable[[], Iterable[Sequence[ReferenceCase]]],
    follows: Follows | None = None,
) -> Twin:
    """Run an engine file with its 16-bit values in fp32, if this machine can."""
    widened_bundle = replace(bundle, manifest=_in_fp32(bundle.manifest))
    try:
        session = target_of(record.target).open_twin(bundle.path(record.file), threads)
        if session is None:
            return Twin()
        with Engine(widened_bundle, record, session) as engine:
            measured, problems = measure_engine(engine, reference)
            problems = (*problems, *compare_edges(engine, reference))
            if not problems and not reference.floor.rounding:
                for cases in widened():
                    problems = translation_failures(engine, cases, reference)
                    if not problems:
                        break
            checked, wrong = follows(engine) if follows is not None else (None, ())
            problems = (*problems, *wrong)
            provider = engine.provider
    except MissingError as error:
        return Twin(note=f"the engine file did not run in fp32, either: {error.message}")
    except (BundleError, InputError, VerificationError) as error:
        return Twin(problems=(f"the engine file does not run in fp32: {error.message}",))
    return Twin(
        measured,
        tuple(f"the engine file, run in fp32: {problem}" for problem in problems),
        f"the engine file ran on {provider} with its 16-bit values in fp32",
        tuple(case.name for case in edges_of(reference)),
        checked,
    )


def _in_fp32(manifest: Manifest) -> Manifest:
    """The manifest of a bundle as if its 16-bit inputs and outputs were fp32."""
    inputs, outputs = (
        tuple(msgspec.structs.replace(t, dtype="float32") if t.dtype in LOW else t for t in tensors)
        for tensors in (manifest.inputs, manifest.outputs)
    )
    return msgspec.structs.replace(manifest, inputs=inputs, outputs=outputs)


def unsealed(folder: Path, manifest: Manifest, names: Iterable[str]) -> Bundle:
    """A bundle without digests, which are computed when it is published."""
    files = tuple(FileRecord(name=name, size=0, sha256="0" * 64) for name in names)
    return unpublished(folder, msgspec.structs.replace(manifest, files=files))
