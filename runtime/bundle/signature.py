"""Signatures of bundles: OpenSSF model signing, https://github.com/sigstore/model-transparency.

A signature is the file `model.sig` in the bundle's folder, as that project's own command writes and
checks it: a statement of in-toto with the sha256 of every file, in an envelope that is signed with
an elliptic-curve key, or with one that a certificate speaks for.  The signed digests are compared
with those that the reader computed itself, so that no file is opened twice.

The library is imported when a signature is made or checked (extra `signing`).  It looks at a chain
as of the day on which its certificate began to be valid, so that an expired one passes, and takes a
certificate for any purpose, such as that of a web server, if its key may sign at all.  A signature
says nothing of when it was made.  So certificates have to be valid now, and for signing code where
they say what they are for.
"""

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from enginecast.errors import BundleError, EnginecastError, UsageError, first_line
from enginecast.installation import required
from enginecast.runtime.bundle.manifest import MANIFEST_NAME, SIGNATURE_NAME, TUNED_SUFFIX
from enginecast.runtime.bundle.reader import Bundle, open_bundle
from enginecast.runtime.bundle.staging import beside, outermost, write_file

MAX_BYTES = 16 << 20
_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_PUBLIC_KEY = b"-----BEGIN PUBLIC KEY-----"
_FIT = "Sign the bundle with a certificate that is valid now, and for signing code."


@dataclass(frozen=True)
class Signer:
    """Who signs.

    Args:
        key: the private key: an elliptic-curve key in PEM.
        password: password of an encrypted key.
        certificate: certificate of the key; None: verification needs the public key.
        chain: intermediate certificates, with or without the root.
    """

    key: Path
    password: bytes | None = None
    certificate: Path | None = None
    chain: tuple[Path, ...] = ()


def sign(path: str | os.PathLike[str], signer: Signer) -> Path:
    """Check all files of a bundle and sign it, replacing an older signature, whose file is
    returned.

    Raises:
        BundleError: the bundle is damaged, or the disk failed.
        UsageError: the key or a certificate cannot be used.
        MissingError: the library is not installed.
    """
    bundle = open_bundle(path)
    library = _library()
    target = bundle.root / SIGNATURE_NAME
    # Readers refuse a file that is not listed: what is unfinished stays outside.
    temporary = beside(outermost(bundle.root), "tmp")
    hashing = library.hashing.Config().set_ignored_paths(
        paths=list(_unsigned(bundle)), ignore_git_paths=False
    )
    try:
        config = _signing(library, signer).set_hashing_config(hashing)
        config.sign(bundle.root, temporary)
        data = temporary.read_bytes()
        if _listed(data) != _digests(bundle):
            raise BundleError(
                f"{bundle.root}: was changed while it was being signed", hint="Sign it again."
            )
        write_file(temporary, data)
        temporary.replace(target)
    except OSError as error:
        raise BundleError(f"{target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return target


def require_signature(bundle: Bundle, trust: str | os.PathLike[str]) -> None:
    """Refuse a bundle without a valid signature of a trusted signer.

    Args:
        bundle: the bundle; its digests may still be being computed.
        trust: a file with a public key, or with certificates, in PEM.

    Raises:
        BundleError: the signature is missing, of another signer, or of other files.
        UsageError: the file holds neither a key nor a certificate.
        MissingError: the library is not installed.
    """
    library = _library()
    place = bundle.root / SIGNATURE_NAME
    trust, config = Path(trust), library.verifying.Config()
    trusted = _pem(trust)
    by_certificate = _CERTIFICATE in trusted
    if not by_certificate and _PUBLIC_KEY not in trusted:
        raise UsageError(
            f"{trust}: expected a public key or certificates in PEM",
            hint="`openssl ec -in key.pem -pubout -out key.pub` writes the public key of a key.",
        )
    try:
        if by_certificate:
            config.use_certificate_verifier(certificate_chain=[trust])
        else:
            config.use_elliptic_key_verifier(public_key=trust)
    except Exception as error:  # cryptography's, which have no base
        raise UsageError(f"{trust}: cannot be used: {first_line(error)}") from error
    data = _read(bundle)
    listed = _listed(data)
    config.set_hashing_config(_Computed(library, bundle))
    try:
        with tempfile.NamedTemporaryFile(prefix="enginecast-", suffix=".sig") as file:
            file.write(data)  # the bytes that were read, whatever becomes of the bundle's file
            file.flush()
            config.verify(bundle.root, Path(file.name))
        if by_certificate:
            _require_fit(data, trust, place)
    except EnginecastError:
        raise
    except Exception as error:  # the library's, cryptography's, protobuf's: they have no base
        raise BundleError(
            f"{place}: not a valid signature by {trust}: {first_line(error)}",
            hint="Nothing was loaded; get the bundle from a source you trust.",
        ) from error
    if listed != _digests(bundle):
        raise BundleError(f"{place}: signed for different files than the bundle has")


def _require_fit(data: bytes, trust: Path, place: Path) -> None:
    """Refuse the certificates of a signature that are not fit to speak for it today.

    Args:
        data: the signature, as OpenSSF model signing writes it and has verified it.
        trust: the file with the certificates of those who are trusted.
        place: the file of the signature, for messages.
    """
    from cryptography import x509
    from OpenSSL import crypto

    material = json.loads(data)["verificationMaterial"]["x509CertificateChain"]["certificates"]
    chain = [x509.load_der_x509_certificate(base64.b64decode(one["rawBytes"])) for one in material]
    if problem := unfit(chain[0]):
        raise BundleError(f"{place}: {problem}", hint=_FIT)
    store = crypto.X509Store()  # its time is now
    for one in x509.load_pem_x509_certificates(trust.read_bytes()):
        store.add_cert(crypto.X509.from_cryptography(one))
    leaf, *others = map(crypto.X509.from_cryptography, chain)
    try:
        crypto.X509StoreContext(store, leaf, others).verify_certificate()
    except crypto.X509StoreContextError as error:
        raise BundleError(
            f"{place}: its certificates are not valid now by {trust}: {error}", hint=_FIT
        ) from error


def unfit(certificate: Any) -> str:
    """Why a certificate may not sign a bundle today; empty: it may."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    now, name = datetime.now(UTC), certificate.subject.rfc4514_string()
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not begin <= now <= end:
        return (
            f"the certificate of {name} is valid from {begin:%Y-%m-%d} to {end:%Y-%m-%d}, and today"
            f" is {now:%Y-%m-%d}"
        )
    try:
        purposes = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return ""
    code = {ExtendedKeyUsageOID.CODE_SIGNING, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE}
    if code & set(purposes):
        return ""
    others = ", ".join(one._name for one in purposes)
    return f"expected a certificate for signing code, but that of {name} is for {others}"


class _Computed:
    """Replaces the library's hashing by the reader's digests."""

    def __init__(self, library: Any, bundle: Bundle) -> None:
        self._library, self._bundle = library, bundle

    def add_ignored_paths(self, **_: Any) -> None:
        """Accept the signature file itself; the caller checks that nothing else was ignored."""

    def hash(self, model_path: Path, files_to_hash: Any = None) -> Any:
        kinds = self._library.manifest
        how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
        serialization = kinds.SerializationType.from_args(how)
        digest = kinds.hashing.Digest
        items = [
            serialization.new_item(name, digest("sha256", bytes.fromhex(value)))
            for name, value in _digests(self._bundle).items()
        ]
        return kinds.Manifest(self._bundle.root.name, items, serialization)


def _digests(bundle: Bundle) -> dict[str, str]:
    """The digest of every file, those of bundles within it included."""
    listed = {file.name: file.sha256 for file in bundle.manifest.files}
    inner = {
        f"{name}/{file}": value
        for name, part in bundle.parts.items()
        for file, value in _digests(part).items()
    }
    return {**listed, **inner, MANIFEST_NAME: bundle.sha256}


def _unsigned(bundle: Bundle) -> Iterator[str]:
    """The files of a bundle that no manifest lists."""
    yield SIGNATURE_NAME
    for name, part in bundle.parts.items():
        yield f"{name}{TUNED_SUFFIX}"
        yield from (f"{name}/{file}" for file in _unsigned(part))


def _listed(data: bytes) -> dict[str, str]:
    """The signed digests. The library verifies the signer."""
    try:
        envelope = json.loads(data)["dsseEnvelope"]
        predicate = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
        method = predicate["serialization"]["method"], predicate["serialization"]["hash_type"]
        found = {one["name"]: one["digest"] for one in predicate["resources"]}
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise BundleError(f"{SIGNATURE_NAME}: not a signature of a model: {error!r}") from error
    if method != ("files", "sha256"):
        raise BundleError(
            f"{SIGNATURE_NAME}: expected the sha256 of files, got {'/'.join(map(str, method))}",
            hint="Sign it with `enginecast sign`.",
        )
    return found


def _read(bundle: Bundle) -> bytes:
    try:
        with bundle.opened_signature() as path, path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise BundleError(
            f"{bundle.root}: expected a signature, but there is no {SIGNATURE_NAME} in it",
            hint="`enginecast sign DIR --key FILE` signs a bundle.",
        ) from error
    except OSError as error:
        raise BundleError(f"{bundle.root / SIGNATURE_NAME}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise BundleError(f"{SIGNATURE_NAME}: expected at most {MAX_BYTES} bytes")
    return data


def _signing(library: Any, signer: Signer) -> Any:
    config = library.signing.Config()
    given = [signer.key, signer.certificate, *signer.chain]
    for file in filter(None, given):
        _pem(file)
    try:
        if signer.certificate is None:
            return config.use_elliptic_key_signer(private_key=signer.key, password=signer.password)
        from cryptography import x509

        certificate = x509.load_pem_x509_certificate(_pem(signer.certificate))
        if problem := unfit(certificate):
            raise UsageError(f"{signer.certificate}: {problem}")
        return config.use_certificate_signer(
            private_key=signer.key,
            signing_certificate=signer.certificate,
            certificate_chain=signer.chain,
        )
    except EnginecastError:
        raise
    except Exception as error:  # cryptography's, which have no base
        raise UsageError(
            f"{signer.key}: cannot sign with it: {first_line(error)}",
            hint="Expected an elliptic-curve key in PEM: `openssl ecparam -name prime256v1 -genkey"
            " -noout -out key.pem`, and `openssl ec -in key.pem -pubout -out key.pub`.",
        ) from error


def _pem(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES)
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from error


def _library() -> Any:
    with required("model_signing", "a signature", "signing"):
        import model_signing
        import model_signing.hashing
        import model_signing.manifest
        import model_signing.signing
        import model_signing.verifying
    return model_signing
