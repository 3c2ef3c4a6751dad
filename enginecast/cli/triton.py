"""`enginecast triton`: a bundle as a model repository of Triton Inference Server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from enginecast.cli.options.groups import AsJson, BundleDir, Device, Trust
from enginecast.cli.terminal.output import print_json, progress, results, say

if TYPE_CHECKING:
    from enginecast.serving.repository import Repository

MaxBatch = Annotated[
    int | None,
    typer.Option(
        "--max-batch",
        metavar="N",
        min=0,
        help="Largest batch; 0: requests run alone. Default: as many as the engine takes.",
        show_default=False,
    ),
]


def triton(
    bundle: BundleDir,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="REPO", help="New model repository.")
    ],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model; default: the bundle's.")
    ] = None,
    max_batch: MaxBatch = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which engine to serve, if the bundle has several."),
    ] = None,
    device: Device = None,
    trust: Trust = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing repository.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model repository for Triton Inference Server.

    It holds the engine, and for a text model the tokenizer and an ensemble of both. Its README.md
    lists the checks that Triton does not make.
    """
    from enginecast.runtime.bundle.reader import open_bundle
    from enginecast.runtime.bundle.signature import require_signature
    from enginecast.serving.repository import write_repository

    opened = open_bundle(bundle)
    if trust is not None:
        require_signature(opened, trust)
    done = write_repository(
        opened,
        output,
        name=name,
        max_batch=max_batch,
        engine=target,
        device=device,
        overwrite=overwrite,
    )
    if as_json:
        print_json(as_content(done))
    else:
        show(done)


def show(done: "Repository") -> None:
    """What was written on standard output, and what Triton does not check beside it."""
    say(results(), f"{done.folder}: {', '.join(done.models)}")
    for note in done.notes:
        say(progress(), f"note: {note}")


def as_content(done: "Repository") -> dict[str, Any]:
    """What `--json` has of a repository."""
    return {
        "repository": str(done.folder),
        "models": list(done.models),
        "target": done.engine.target,
        "backend": done.backend.name,
        "max_batch_size": done.batching.most,
        "preferred_batch_size": list(done.batching.preferred),
        "notes": list(done.notes),
    }
