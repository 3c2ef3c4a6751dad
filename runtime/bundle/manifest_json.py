"""Write and read `manifest.json`.

A manifest is written the same, byte for byte, whenever its content is the same: keys are sorted,
and nothing in it depends on when or how fast it was made.  Reading is strict, because a manifest
decides which files are handed to a native library: unknown fields, repeated keys and names that
could leave the folder are refused.  A line of it is the digest of all the others, so that damage
to a version or a verdict is noticed, too.  That is not a signature: `runtime.bundle.signature`.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from enginecast.errors import BundleError, shortened
from enginecast.runtime.bundle.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    OLDEST_VERSION,
    SCHEMA_VERSION,
    SIGNATURE_NAME,
    Input,
    Manifest,
    Output,
    is_file_name,
)

_CONTROL = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that no text of a manifest needs; line breaks and tabs are not among them."""
_DIGEST = re.compile(rb'^ "digest": "([0-9a-f]{64})",\n', re.MULTILINE)
"""The line of the digest.  A text within the manifest cannot look like it: JSON writes no line
breaks in texts, and what is in an object within it begins with two spaces.
"""


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON: sorted, indented, the same bytes for the same content.

    Raises:
        BundleError: a value that `decode` would refuse, so that nothing unreadable is published.
    """
    content = _printable(msgspec.to_builtins(manifest)) | {"schema_version": SCHEMA_VERSION}
    for path, value in _leaves(content, "$"):
        if isinstance(value, float) and not math.isfinite(value):  # JSON has no such number
            raise BundleError(f"{MANIFEST_NAME}: {path}: expected a finite number or null")
    data = seal(content)
    decode(data)
    return data


def seal(content: Mapping[str, Any]) -> bytes:
    """The text of a manifest without a digest, with the line of its digest."""
    return _text({**content, "digest": hashlib.sha256(_text(content)).hexdigest()})


def _text(content: Any) -> bytes:
    return f"{json.dumps(content, sort_keys=True, indent=1, ensure_ascii=False)}\n".encode()


def decode(data: bytes) -> Manifest:
    """Read a manifest strictly.

    Raises:
        BundleError: names `manifest.json` and the JSON path of the fault.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(
            f"{MANIFEST_NAME}: expected at most {MAX_MANIFEST_BYTES} bytes, got {len(data)}"
        )
    try:  # what msgspec ignores: repeated keys, and the version before the rest
        content = json.loads(data.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{MANIFEST_NAME}: not JSON: {error}") from error
    try:
        for path, text in _leaves(content, "$"):
            # Terminal control sequences move, color, hide or reverse text.
            if isinstance(text, str) and _CONTROL.search(text):
                raise BundleError(
                    f"{MANIFEST_NAME}: {path}: expected text without control characters, got"
                    f" {shortened(text)!a}"
                )
        version = content.get("schema_version") if isinstance(content, dict) else None
        if type(version) is not int:
            what = f"expected a number, got {version!r}"
            raise BundleError(f"{MANIFEST_NAME}: $.schema_version: {what}")
        if not OLDEST_VERSION <= version <= SCHEMA_VERSION:
            newer = version > SCHEMA_VERSION
            raise BundleError(
                f"{MANIFEST_NAME}: bundle schema {version}, this build reads {OLDEST_VERSION} to"
                f" {SCHEMA_VERSION}",
                hint="Upgrade enginecast." if newer else "Export the model again.",
            )
        if version > OLDEST_VERSION:
            data = _without_digest(data)
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BundleError(f"{MANIFEST_NAME}: {error}") from error
    for path, problem in _problems(manifest):
        raise BundleError(f"{MANIFEST_NAME}: {path}: {problem}")
    return manifest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise BundleError(f"{MANIFEST_NAME}: key {key!r} appears twice in one object")
        content[key] = value
    return content


def _without_digest(data: bytes) -> bytes:
    """The manifest without its digest line; the digest must be that of the returned bytes."""
    found = _DIGEST.findall(data)
    if len(found) != 1:
        raise BundleError(
            f"{MANIFEST_NAME}: $.digest: expected one line with the sha256 of the rest, got"
            f" {len(found)}"
        )
    rest = _DIGEST.sub(b"", data)
    actual = hashlib.sha256(rest).hexdigest()
    if actual != found[0].decode():
        raise BundleError(
            f"{MANIFEST_NAME}: has sha256 {actual} without its line $.digest, expected"
            f" {found[0].decode()}",
            hint="It was damaged or edited after it was published: copy or export it again.",
        )
    return rest


def _printable(content: Any) -> Any:
    """The same with control characters in texts escaped, as they come in what libraries say."""
    if isinstance(content, str):
        return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], content)
    if isinstance(content, dict):
        return {_printable(key): _printable(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_printable(one) for one in content]
    return content


def _leaves(content: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The values in JSON content, and the keys of its objects, each with its JSON path."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield path, key
            yield from _leaves(value, f"{path}.{key}")
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, content


def _problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (JSON path, problem) for constraints that the types do not express."""
    seen = {MANIFEST_NAME, SIGNATURE_NAME}
    for index, file in enumerate(manifest.files):
        if not is_file_name(file.name):
            expected = "a file name of [A-Za-z0-9._-] without a leading dot"
            yield f"$.files[{index}].name", f"expected {expected}, got {file.name!r}"
        if file.name.lower() in seen:  # some file systems do not tell upper case from lower
            yield f"$.files[{index}].name", f"{file.name!r} is listed twice"
        seen.add(file.name.lower())
    names = {file.name for file in manifest.files}
    taken = {*names, MANIFEST_NAME, SIGNATURE_NAME}
    for index, part in enumerate(manifest.parts):
        if not is_file_name(part.name) or part.name in taken:
            yield f"$.parts[{index}].name", f"no part may be called {shortened(part.name)!r}"
        taken.add(part.name)
    encoder = manifest.generation.encoder if manifest.generation is not None else ""
    if encoder and all(part.name != encoder for part in manifest.parts):
        yield "$.generation.encoder", f"expected a part in $.parts, got {shortened(encoder)!r}"
    fields: dict[str, tuple[Input | Output, ...]]
    fields = {"inputs": manifest.inputs, "outputs": manifest.outputs}
    for field, tensors in fields.items():
        seen = set()
        for index, tensor in enumerate(tensors):
            path = f"$.{field}[{index}]"
            if tensor.name in seen:
                yield f"{path}.name", f"{tensor.name!r} is listed twice"
            seen.add(tensor.name)
            for axis, size in enumerate(tensor.shape):
                where = f"{path}.shape[{axis}]"
                if isinstance(size, int) and size < 0:
                    yield where, f"expected a size, got {size}"
                elif field == "inputs" and isinstance(size, str) and size not in manifest.symbols:
                    yield where, f"symbol {size!r} is not listed in $.symbols"
    for symbol, (least, greatest) in manifest.symbols.items():
        if not 0 <= least <= greatest:
            expected = "expected 0 <= minimum <= maximum"
            yield f"$.symbols.{symbol}", f"{expected}, got {least}, {greatest}"
    for symbol, step in manifest.steps.items():
        if symbol not in manifest.symbols or step < 1:
            yield f"$.steps.{symbol}", f"expected a step of a symbol in $.symbols, got {step}"
    for index, engine in enumerate(manifest.engines):
        for field in ("file", "weights", "network"):
            name = getattr(engine, field)
            if names and name is not None and name not in names:
                yield f"$.engines[{index}].{field}", f"{name!r} is not listed in $.files"
