"""What requirements.lock says, for the tools here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
BLOCK = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=.*\n)+)", re.MULTILINE)
DIGEST = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True)
class Locked:
    """A package of the lock: its version, and the SHA-256 of each of its files."""

    name: str
    version: str
    digests: tuple[str, ...]


def read(text: str) -> dict[str, Locked]:
    """The packages of a lock by their normalized names."""
    return {
        normalized(name): Locked(normalized(name), version, tuple(DIGEST.findall(lines)))
        for name, version, lines in BLOCK.findall(text)
    }


def normalized(name: str) -> str:
    """A package's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()
