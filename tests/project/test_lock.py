"""requirements.lock has what pyproject.toml and constraints.txt ask for, file by file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"^([\w.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M)
BUILDS_OF_TORCH = 2


def _locked() -> dict[str, tuple[str, int]]:
    text = (ROOT / "requirements.lock").read_text("utf-8")
    return {
        canonicalize_name(name): (version, lines.count("--hash="))
        for name, version, lines in PIN.findall(text)
    }


def test_every_package_has_digests() -> None:
    text = (ROOT / "requirements.lock").read_text("utf-8")
    assert len(_locked()) == len(re.findall(r"^[\w.-]+==", text, re.M))
    assert _locked()["torch"][1] >= BUILDS_OF_TORCH, (
        "of the CPU build alone: nobody else can set up"
    )


def test_it_has_the_constrained_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    constraints = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    locked = _locked()
    pinned = {canonicalize_name(name): version for name, version in constraints.items()}
    assert {name: locked.get(name, ("",))[0] for name in pinned} == pinned, "run `make lock`"


def test_it_has_what_the_project_and_its_tools_require() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    locked = _locked()
    waiting = [Requirement(text) for text in [*project["dependencies"], "enginecast[dev]"]]
    while waiting:
        asked = waiting.pop()
        if asked.name == "enginecast":
            extras = project["optional-dependencies"]
            waiting += [Requirement(text) for extra in asked.extras for text in extras[extra]]
            continue
        version = locked.get(canonicalize_name(asked.name), ("",))[0]
        assert version, f"{asked}: not in the lock; run `make lock`"
        assert asked.specifier.contains(version, prereleases=True), f"{asked}: run `make lock`"
