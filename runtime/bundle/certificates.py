"""Checks of a certificate beyond those of OpenSSF model signing.

That library looks at a chain as of the day on which its certificate began to be valid, so that an
expired one passes, and takes a certificate for any purpose, such as that of a web server, if its
key may sign at all.  A signature says nothing of when it was made.  So certificates have to be
valid now, and for signing code where they say what they are for.
"""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from enginecast.errors import EnginecastError

_HINT = "Sign the bundle with a certificate that is valid now, and for signing code."


def require_fit(data: bytes, trust: Path, place: Path, refusal: type[EnginecastError]) -> None:
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
        raise refusal(f"{place}: {problem}", hint=_HINT)
    store = crypto.X509Store()  # its time is now
    for one in x509.load_pem_x509_certificates(trust.read_bytes()):
        store.add_cert(crypto.X509.from_cryptography(one))
    leaf, *others = map(crypto.X509.from_cryptography, chain)
    try:
        crypto.X509StoreContext(store, leaf, others).verify_certificate()
    except crypto.X509StoreContextError as error:
        raise refusal(
            f"{place}: its certificates are not valid now by {trust}: {error}", hint=_HINT
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
