"""Signed bundles, and bundles that are trusted: who may have code run, and whose verdicts count."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import bundles
import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from signing_keys import keys

from enginecast.cli.app import main
from enginecast.errors import BundleError, UsageError
from enginecast.runtime.bundle import signature, trusted
from enginecast.runtime.bundle.manifest_json import decode, encode
from enginecast.runtime.bundle.reader import open_bundle
from enginecast.runtime.bundle.signature import Signer, sign
from enginecast.runtime.load import load


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return bundles.make_bundle(tmp_path / "out")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A list of trusted bundles of the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "enginecast" / "trusted.json"


def certified(
    folder: Path,
    *,
    days: tuple[int, int] = (-1, 1),
    purpose: x509.ObjectIdentifier = ExtendedKeyUsageOID.CODE_SIGNING,
) -> tuple[Signer, Path]:
    """Who signs with a certificate, and the root that vouches for it.

    Args:
        days: from which day and to which the certificate is valid; today is 0.
        purpose: what it is for.
    """
    folder.mkdir(exist_ok=True)
    now, made = datetime.now(UTC), []
    root_key = key = ec.generate_private_key(ec.SECP256R1())
    for name in ("root", "leaf"):
        key = root_key if name == "root" else ec.generate_private_key(ec.SECP256R1())
        is_root = name == "root"
        usage = x509.KeyUsage(
            digital_signature=not is_root,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=is_root,
            crl_sign=is_root,
            encipher_only=False,
            decipher_only=False,
        )
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=-999 if is_root else days[0]))
            .not_valid_after(now + timedelta(days=999 if is_root else days[1]))
            .add_extension(x509.BasicConstraints(is_root, None), critical=True)
            .add_extension(usage, critical=True)
        )
        if not is_root:
            purposes = x509.ExtendedKeyUsage([purpose])
            builder = builder.add_extension(purposes, critical=False)
        file = folder / f"{name}.crt"
        file.write_bytes(builder.sign(root_key, hashes.SHA256()).public_bytes(Encoding.PEM))
        made.append(file)
    private = folder / "leaf.pem"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return Signer(private, None, made[1], (made[0],)), made[0]


def upgraded(root: Path) -> None:
    """Edit a verdict, and make all digests right again."""
    path = root / "manifest.json"
    content = decode(path.read_bytes())
    engines = tuple(
        msgspec.structs.replace(one, verdict=bundles.verdict()) for one in content.engines
    )
    path.write_bytes(encode(msgspec.structs.replace(content, engines=engines, notes=("safe",))))


def test_a_signed_bundle_loads_with_the_key_and_without(root: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    assert sign(root, Signer(private)) == root / "model.sig"
    assert {path.name for path in tmp_path.iterdir()} == {"out", "key.pem", "key.pub"}
    load(root, public_key=public).close()
    load(root, public_key=str(public), check="full").close()
    load(root).close()
    sign(root, Signer(private))  # again, in place of the old one
    load(root, public_key=public).close()


def test_the_library_s_own_command_agrees(root: Path, tmp_path: Path) -> None:
    private, public = keys(tmp_path)
    sign(root, Signer(private))
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(root)]
    command += ["--signature", str(root / "model.sig"), "--public_key", str(public)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (root / "model.sig").unlink()
    command[3:5] = ["sign", "key"]
    command[6:] = ["--signature", str(root / "model.sig"), "--private_key", str(private)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    load(root, public_key=public).close()


def test_a_certificate_speaks_for_the_key(root: Path, tmp_path: Path) -> None:
    signer, authority = certified(tmp_path)
    sign(root, signer)
    load(root, public_key=authority).close()
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(BundleError, match=r"model\.sig: not a valid signature by .*root\.crt"):
        load(root, public_key=certified(other)[1])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"days": (-90, -30)}, "is valid from .* to .*, and today is"),
        ({"days": (30, 90)}, "is valid from .* to .*, and today is"),
        ({"purpose": ExtendedKeyUsageOID.SERVER_AUTH}, "for signing code, .* is for serverAuth"),
    ],
)
def test_a_certificate_has_to_be_valid_now_and_for_code(
    root: Path,
    tmp_path: Path,
    options: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signer, authority = certified(tmp_path / "ca", **options)
    with pytest.raises(UsageError, match=rf"leaf\.crt: .*{said}"):
        sign(root, signer)
    with monkeypatch.context() as another_program:
        another_program.setattr(signature, "unfit", lambda certificate: "")
        sign(root, signer)
    with pytest.raises(BundleError, match=rf"model\.sig: .*{said}"):
        load(root, public_key=authority)


def test_what_is_not_signed_by_the_key_is_refused(root: Path, tmp_path: Path) -> None:
    private, _ = keys(tmp_path)
    _, other = keys(tmp_path, "other")
    with pytest.raises(BundleError, match=r"there is no model\.sig"):
        load(root, public_key=other)
    sign(root, Signer(private))
    with pytest.raises(BundleError, match=r"not a valid signature by .*other\.pub"):
        load(root, public_key=other)


def test_a_verdict_is_not_upgraded_where_a_signature_is_asked_for(
    root: Path, tmp_path: Path
) -> None:
    private, public = keys(tmp_path)
    sign(root, Signer(private))
    upgraded(root)
    load(root).close()  # digests alone cannot tell
    with pytest.raises(BundleError, match=r"not a valid signature.*mismatch for \W*manifest"):
        load(root, public_key=public)


def test_files_that_a_signature_leaves_out_are_refused(root: Path, tmp_path: Path) -> None:
    """The library lets a signer leave files out; an engine that is left out is anybody's."""
    import model_signing

    private, public = keys(tmp_path)
    hashing = model_signing.hashing.Config().set_ignored_paths(
        paths=["engine.onnx", "model.sig"], ignore_git_paths=False
    )
    config = model_signing.signing.Config().use_elliptic_key_signer(private_key=private)
    config.set_hashing_config(hashing).sign(root, root / "model.sig")
    with pytest.raises(BundleError, match=r"model\.sig: (not a valid|signed for different files)"):
        load(root, public_key=public)


CODE = bundles.engine(target="torchscript", providers=("torch-cpu",))
LOADED = r"torch\.jit\.load refuses it"  # the file of these bundles is not one: it was tried


def test_code_needs_a_signature_or_trust_or_consent(tmp_path: Path, home: Path) -> None:
    root = bundles.make_bundle(tmp_path / "code", bundles.manifest(engines=(CODE,)))
    with pytest.raises(BundleError, match="runs code when it is loaded") as caught:
        load(root)
    assert open_bundle(root).sha256 in caught.value.hint
    with pytest.raises(BundleError, match=LOADED):
        load(root, allow_code=True)
    private, public = keys(tmp_path)
    sign(root, Signer(private))
    with pytest.raises(BundleError, match=LOADED):
        load(root, public_key=public)
    with pytest.raises(BundleError, match="runs code"):
        load(root)  # signed by whom?
    trusted.trust(open_bundle(root))
    assert home.stat().st_mode & 0o777 == 0o600
    for check in ("full", "size"):
        with pytest.raises(BundleError, match=LOADED):
            load(root, check=check)
    upgraded(root)
    with pytest.raises(BundleError, match="runs code"):
        load(root)  # it is another bundle now


def command(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, Any]:
    with pytest.raises(SystemExit) as caught:
        main([*map(str, words), "--json"])
    said = capsys.readouterr()
    return int(caught.value.code or 0), json.loads(said.out)


def test_the_commands(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    private, public = keys(tmp_path, password=b"secret")
    monkeypatch.setenv("ENGINECAST_KEY_PASSWORD", "secret")
    assert command(capsys, "sign", root, "--key", private) == (
        0,
        {"schema_version": 1, "signature": str(root / "model.sig")},
    )
    (tmp_path / "prompts.txt").write_text("red fox\n")
    run = ["run", root, "--prompts", tmp_path / "prompts.txt", "-o", tmp_path / "o.safetensors"]
    assert command(capsys, *run, "--public-key", public)[0] == 0
    assert command(capsys, *run, "--no-digests")[0] == 0
    assert command(capsys, *run, "--public-key", keys(tmp_path, "other")[1])[0] == 2
    digest = open_bundle(root).sha256
    code, found = command(capsys, "trust", root)
    assert (code, found["trusted"]) == (0, [{"sha256": digest, "folder": str(root)}])
    assert command(capsys, "trust")[1]["trusted"] == found["trusted"]
    assert command(capsys, "trust", digest, "--remove")[1]["trusted"] == []
    assert command(capsys, "trust", digest, "--remove")[0] == 2
