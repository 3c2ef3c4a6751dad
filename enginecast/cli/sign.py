"""`enginecast sign` and `enginecast trust`: which bundles may be loaded, and whose."""

import os
from pathlib import Path
from typing import Annotated

import typer

from enginecast.cli.options.from_fields import AsJson, BundleDir
from enginecast.cli.terminal.output import print_json, results, say
from enginecast.errors import UsageError

PASSWORD = "ENGINECAST_KEY_PASSWORD"


def sign(
    bundle: BundleDir,
    key: Annotated[
        Path, typer.Option("--key", metavar="FILE", help="Private key (elliptic curve, PEM).")
    ],
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Certificate of the key, PEM; stored with the signature."
        ),
    ] = None,
    chain: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Certificates that vouch for it, PEM; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a bundle and sign it.

    Uses OpenSSF model signing. The password of an encrypted key is read from
    ENGINECAST_KEY_PASSWORD, or asked for.
    """
    from enginecast.runtime.bundle import signature

    if chain and certificate is None:
        raise UsageError("--chain: expected only with --certificate")
    signer = signature.Signer(key, _password(key), certificate, tuple(chain or ()))
    file = signature.sign(bundle, signer)
    if as_json:
        print_json({"signature": str(file)})
    else:
        say(results(), f"{file}")


def trust(
    bundle: Annotated[
        str | None, typer.Argument(metavar="DIR", help="A bundle; with --remove, also a digest.")
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Stop trusting this bundle.")] = False,
    as_json: AsJson = False,
) -> None:
    """Trust a bundle and its code on this machine.

    Without DIR, list trusted bundles.
    """
    from enginecast.runtime.bundle import trusted
    from enginecast.runtime.bundle.reader import open_bundle

    if bundle is None:
        if remove:
            raise UsageError("--remove: expected the folder or the digest of a bundle")
    elif remove:
        is_digest = len(bundle) == 64 and set(bundle) <= set("0123456789abcdef")
        digest = bundle if is_digest else open_bundle(bundle, check="size").sha256
        if not trusted.distrust(digest):
            raise UsageError(f"{bundle}: was not trusted: {trusted.store_path()} does not list it")
    else:
        trusted.trust(open_bundle(bundle))
    found = trusted.trusted()
    if as_json:
        listed = [{"sha256": one.sha256, "folder": one.folder} for one in found]
        print_json({"store": str(trusted.store_path()), "trusted": listed})
        return
    console = results()
    for one in found:
        say(console, f"{one.sha256} {one.folder}")
    if not found:
        say(console, f"no bundle is trusted ({trusted.store_path()})")


def _password(key: Path) -> bytes | None:
    """Of a key that is encrypted."""
    try:
        is_encrypted = b"ENCRYPTED" in key.read_bytes()
    except OSError as error:
        raise UsageError(f"--key {key}: {error.strerror}") from error
    if not is_encrypted:
        return None
    given = os.environ.get(PASSWORD)
    return (
        typer.prompt(f"password of {key}", hide_input=True, err=True) if given is None else given
    ).encode()
