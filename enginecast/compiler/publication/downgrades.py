"""What an engine lacks: collected from the notes of an export, and whether the user accepts it.

What was asked for and is not given needs consent: `--allow-fallback`, or the option that asks for
just that.  What an export offers by default, as a batch that varies, and the model does not allow
is only said.
"""

from collections.abc import Iterable, Iterator

from enginecast.capture.inputs.downgraded import Downgraded
from enginecast.compiler.engines.lower_and_run import dtype_name
from enginecast.compiler.prepare.cases import UNVERIFIED
from enginecast.compiler.prepare.program import Prepared
from enginecast.compiler.request import ExportRequest
from enginecast.runtime.bundle.manifest import Downgrade, Manifest


def downgrades_of(notes: Iterable[str], request: ExportRequest) -> tuple[Downgrade, ...]:
    """The notes that tell of something that an engine lacks, one for each such thing."""
    options = request.options
    given = {f"--fallback {options.fallback}"} if options.fallback else set[str]()
    if options.allow_unverified_branches:
        given.add(UNVERIFIED)
    found: dict[tuple[str, str], Downgrade] = {}
    for note in notes:
        if not isinstance(note, Downgraded):
            continue
        is_accepted = request.allow_fallback or note.option in given
        # A size that is narrowed again counts once, and so do passes, the user's last.
        about = {"sizes": note.option.partition("=")[0], "passes": "all"}.get(note.kind)
        key = note.kind, about or str(note)
        earlier = found.get(key)
        was_asked = earlier is not None and earlier.consent != "not needed"
        is_asked = note.is_asked or was_asked
        found[key] = Downgrade(
            kind=note.kind,
            text=str(note),
            option=note.option,
            consent="not needed" if not is_asked else "given" if is_accepted else "missing",
        )
    return tuple(found.values())


def other_dtypes(model: Prepared, manifest: Manifest) -> Iterator[Downgraded]:
    """Outputs that an fp32 engine gives in another dtype than the model."""
    given = {spec.name: dtype_name(spec.dtype) for spec in model.captured.outputs}
    for output in manifest.outputs if manifest.precision == "fp32" else ():
        if given[output.name] != output.dtype:
            yield Downgraded(
                f"output {output.name!r} is {given[output.name]} in the model, and {output.dtype}"
                " in the engine",
                "precision",
            )
