"""`enginecast verify`: compare the engine of a bundle with eager again, on this machine's hardware.

Without the model the bundle's stored reference is used; that needs neither the model nor torch.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from enginecast.errors import BundleError, UsageError
from enginecast.installation import needing
from enginecast.option_fields import takes_old_names
from enginecast.runtime.bundle.manifest import (
    MANIFEST_NAME,
    SIGNATURE_NAME,
    Manifest,
    Part,
    Verdict,
)
from enginecast.runtime.bundle.manifest_json import encode
from enginecast.runtime.bundle.reader import digest
from enginecast.runtime.bundle.staging import bundle_around, write_file
from enginecast.runtime.engine import Engine
from enginecast.runtime.load import load
from enginecast.verification.accepted_excess import accepted_before
from enginecast.verification.engine import runs_natively, verify_engine
from enginecast.verification.generation import follow, read_continued, read_encoded
from enginecast.verification.reference import (
    REFERENCE_NAME,
    Reference,
    read_reference,
    within_profiles,
)
from enginecast.verification.rows import PARTS
from enginecast.verification.stepping import step_failures
from enginecast.verification.verdict import verdict_line

if TYPE_CHECKING:
    from enginecast.compiler.engines.checks import Check

NOT_NATIVE = (
    "true {0} arithmetic was judged on the inputs of the export{2}; {1} computes it in fp32"
)

NOT_STORED = (
    "the stored reference does not include: {0}.  With --model they are compared, too, and a"
    " verdict by emulation becomes one of the engine"
)

NAMES_BLOCK = "with --model MODEL, it names the block in which rows part, and what helps"

SIGNED = "the bundle is signed and stays as it is: its verdict by emulation was not completed"


@dataclass(frozen=True)
class Verification:
    """The result of verifying a bundle."""

    verdict: Verdict
    floor_dtype: str
    against: str
    """What it was compared with: "the stored reference", or the given model."""
    completed: bool = False
    """Whether the manifest's verdict by emulation was replaced by one on the engine itself."""
    notes: tuple[str, ...] = ()
    backend: str = ""
    """What ran the engine, such as "onnxruntime-cpu"."""
    layers: tuple[str, ...] = ()
    """A description of the engine's layers, if its runtime reports them."""

    def __repr__(self) -> str:
        """The verdict, and what was compared."""
        return f"Verification({self.verdict}, {self.backend} against {self.against})"


@takes_old_names
def verify_bundle(
    path: str | os.PathLike[str],
    *,
    model: str | None = None,
    device: str | None = None,
    providers: Sequence[str] | None = None,
    prefer: Sequence[str] | None = None,
    threads: int | None = None,
    allow_code: bool = False,
    public_key: str | os.PathLike[str] | None = None,
    check: Literal["full", "size"] = "full",
    random_weights: int | None = None,
    inputs: Path | None = None,
    dynamic: Sequence[str] = (),
    values: Sequence[str] = (),
    tuned: bool = True,
    download: bool = False,
) -> Verification:
    """Run a bundle's engine on its test inputs, and compare it with eager.

    Args:
        path: the bundle, as `load` takes it.
        model: the model to compare with: a folder, `package.module:factory` or a file. None: the
            reference in the bundle, which needs neither the model nor torch.
        device: "cpu" or "cuda"; None: "cpu".
        providers: ONNX Runtime execution providers in order of preference; None: those of `device`.
        prefer: backends in order of preference, as in `load`.
        threads: threads within one operator; None: the tuned number, or all cores.
        allow_code: open engines that run code when they are loaded, and load such a model.
        public_key: a file with the public key or certificates (PEM) that the bundle was signed
            with.
        check: "full" compares the digest of every file, "size" only the sizes.
        random_weights: seed of the weights, for a model that is only a config.
        inputs: with `model`, a safetensors file of inputs by name to compare on.
        dynamic: with `model`, dimensions that vary, "NAME:DIM=MIN..MAX" each.
        values: with `model`, ranges of integer inputs, "NAME=MIN..MAX" each.
        tuned: use the settings that `enginecast tune` found here, if any.
        download: fetch a bundle or model OWNER/NAME from the Hugging Face Hub, if there is no such
            folder. False: use no network.

    Returns:
        The verdict, and what was compared. In the bundle, it replaces a verdict by emulation.

    Raises:
        BundleError: the bundle is damaged, or has no reference and no model was given.
        UsageError: inputs were described without a model.
        MissingError: this machine cannot run the engine.

    Examples:
        >>> import enginecast
        >>> check = enginecast.verify("linear.bundle")
        >>> check.verdict.outcome
        'verified'
    """
    if model is not None and download:
        from enginecast.capture.sources.huggingface.hub import fetch, is_hub_name

        model = str(fetch(model)) if is_hub_name(model) else model
    if model is None and (inputs or dynamic or values):
        raise UsageError("--inputs, --dynamic and --values go with --model MODEL")
    # Emulation is not a reason to warn here: this command is what completes such a verdict.
    with load(
        path,
        device=device,
        providers=providers,
        prefer=prefer,
        require="verified-by-emulation",
        threads=threads,
        allow_code=allow_code,
        public_key=public_key,
        check=check,
        tuned=tuned,
        download=download,
    ) as engine:
        asked: dict[str, Any] = {"allow_code": allow_code, "random_weights": random_weights}
        asked |= {"inputs": inputs, "dynamic": dynamic, "values": values}
        reference, notes, problems, checks = _reference(engine, model, **asked)
        against = "the stored reference" if model is None else model
        parts = {}
        for name, part in engine.parts.items():
            known, more, wrong, _ = _reference(part, model, **asked)
            parts[name] = verify_engine(part, known, problems=wrong)
            notes = (*notes, f"{name}: {verdict_line(parts[name], known.floor.label)}")
            notes = (*notes, *(f"{name}: {note}" for note in more))
            if parts[name].outcome == "rejected":
                problems = (*problems, *(f"{name}: {why}" for why in parts[name].reasons))
            elif known.left_out:
                reference = replace(
                    reference,
                    left_out=(*reference.left_out, *(f"{name}: {n}" for n in known.left_out)),
                )
        if engine.manifest.generation is not None:
            model_run = read_continued(engine.folder)
            followed = follow(engine, model_run, read_encoded(engine.folder))
            problems = (*problems, *followed.failures)
        if engine.manifest.stepped is not None:
            problems = (*problems, *step_failures(engine, reference))
        reference, unreached = within_profiles(reference, engine.record.profile)
        verdict, reference = _judged(engine, reference, problems, checks)
        notes = (*notes, *unreached)
        if not runs_natively(engine.record.precision, engine.provider):
            precision = engine.record.precision
            has_range = precision == "fp16" and engine.manifest.quantization is None
            looked = ", and its range on these" if model is not None and has_range else ""
            notes = (*notes, NOT_NATIVE.format(precision, engine.provider, looked))
        completed = not reference.left_out and _complete(engine, verdict, parts)
        if _is_signed(engine) and engine.verdict.outcome != verdict.outcome == "verified":
            notes = (*notes, SIGNED)
        if model is None and any(PARTS in reason for reason in verdict.reasons):
            notes = (*notes, NAMES_BLOCK)
        if reference.left_out:
            notes = (*notes, NOT_STORED.format(", ".join(reference.left_out)))
        layers, backend = engine.layers(), engine.backend
    return Verification(verdict, reference.floor.label, against, completed, notes, backend, layers)


def _reference(
    engine: Engine, model: str | None, **asked: Any
) -> tuple[Reference, tuple[str, ...], tuple[str, ...], "tuple[Check, ...]"]:
    """The reference for an engine, notes, problems with the reference, and what reconsiders a
    verdict.

    Args:
        asked: options for `reference_of_model`.
    """
    if model is not None:
        with needing("a comparison with MODEL"):
            from enginecast.compiler.verify.recompare import reference_of_model

        made = reference_of_model(model, engine.manifest, engine.folder, **asked)
        reference = _accepting(made.reference, engine)
        return reference, made.notes, made.problems, made.checks_of(engine)
    stored = engine.folder / REFERENCE_NAME
    if not stored.is_file():
        hint = "Give the model: --model MODEL."
        raise BundleError(f"{engine.folder} has no {REFERENCE_NAME}", hint=hint)
    return _accepting(read_reference(stored), engine), (), (), ()


def _accepting(reference: Reference, engine: Engine) -> Reference:
    """The reference with what was accepted and asked of this engine: others of the bundle share the
    file.
    """
    verdict, floor = engine.verdict, reference.floor
    asked = floor.max_error if floor.rounding else verdict.max_error
    floor = replace(floor, accept=accepted_before(verdict), max_error=asked)
    return replace(reference, floor=floor)


def _judged(
    engine: Engine, reference: Reference, problems: tuple[str, ...], checks: "tuple[Check, ...]"
) -> tuple[Verdict, Reference]:
    """The verdict, and the reference that it was reached by."""
    verdict = verify_engine(engine, reference, problems=problems)
    if not checks:  # no model was given, and torch need not be there
        return verdict, reference
    from enginecast.compiler.engines.checks import Criteria, Judged, Running

    judged = Judged(verdict)
    for check in checks:
        judged = check.reconsider(Running(engine, Criteria(reference, problems=problems)), judged)
    return judged.verdict, judged.reference or reference


def _is_signed(engine: Engine) -> bool:
    """Whether a bundle, or one of its parts, is signed."""
    inner = any(_is_signed(part) for part in engine.parts.values())
    return inner or (engine.folder / SIGNATURE_NAME).exists()


def _complete(engine: Engine, verdict: Verdict, parts: Mapping[str, Verdict]) -> bool:
    """Replace a verdict by emulation with one on the engine itself, in an unsigned bundle and its
    parts.

    A part by itself stays as it is: the bundle around it holds its digest.
    """
    stood = engine.verdict.outcome
    if verdict.outcome != "verified" or stood != "verified-by-emulation":
        return False
    if _is_signed(engine) or bundle_around(engine.folder) is not None:
        return False
    inner = {
        name: _with_verdict(engine.parts[name], found, engine.parts[name].manifest.parts)
        for name, found in parts.items()
    }
    after = tuple(
        Part(name=name, sha256=hashlib.sha256(data).hexdigest()) for name, data in inner.items()
    )
    if inner:  # a kill between two writes leaves a bundle that loads: it names both digests
        between = tuple(
            Part(
                name=part.name,
                sha256=digest(engine.parts[part.name].folder / MANIFEST_NAME),
                becomes=part.sha256,
            )
            for part in after
        )
        data = encode(msgspec.structs.replace(engine.manifest, parts=between))
        write_file(engine.folder / MANIFEST_NAME, data)
    for name, data in inner.items():
        write_file(engine.parts[name].folder / MANIFEST_NAME, data)
    write_file(engine.folder / MANIFEST_NAME, _with_verdict(engine, verdict, after))
    return True


def _with_verdict(engine: Engine, verdict: Verdict, parts: tuple[Part, ...]) -> bytes:
    """The encoded manifest of an engine with another verdict."""
    manifest: Manifest = engine.manifest
    engines = tuple(
        msgspec.structs.replace(record, verdict=verdict) if record is engine.record else record
        for record in manifest.engines
    )
    return encode(msgspec.structs.replace(manifest, engines=engines, parts=parts))
