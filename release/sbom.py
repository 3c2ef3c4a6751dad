"""`make sbom`: writes dist/enginecast-VERSION.cdx.json, a CycloneDX bill of the locked packages.

cyclonedx-py reads licenses and links from the installed packages.  Added are the SHA-256 of each
package's files, from the lock, and which package needs which: cyclonedx-py counts what only extras
need that nobody asked for.  Scope `required` is what running engines needs, `optional` what extras
and tools need.  Packages that the lock does not name are left out; one that is missing, or has
another version, is an error.  The same lock, platform and Python give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections import defaultdict
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from locked import LOCK, ROOT, Locked, normalized, read
from packaging.requirements import Requirement

Json = dict[str, Any]
Needs = dict[str, set[str]]
PROJECT = "enginecast"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=Path, default=LOCK)
    parser.add_argument("--out", type=Path, help="the file, instead of the one in dist/")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locked = read(arguments.lock.read_text(encoding="utf-8"))
    # What cyclonedx-py says of the environment that runs this.
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", "pyproject.toml"]
    command += ["--output-reproducible", "--spec-version", "1.6", "--no-validate", sys.executable]
    bill = bill_of(json.loads(subprocess.check_output(command, cwd=ROOT)), locked)
    text = json.dumps(bill, indent=1, sort_keys=True) + "\n"
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"sbom: not CycloneDX 1.6: {error}")
    out = arguments.out or ROOT / "dist" / f"{project['name']}-{project['version']}.cdx.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    required = sum(component["scope"] == "required" for component in bill["components"])
    print(f"{out.name}: {len(locked)} packages, {required} of them required")


def bill_of(found: Json, locked: dict[str, Locked]) -> Json:
    """The bill of the locked packages: those of `found`, with what the lock knows."""
    components = {normalized(component["name"]): component for component in found["components"]}
    differences = []
    for name, package in locked.items():
        if name not in components:
            differences.append(f"{name} is missing, expected {package.version}")
            continue
        # A build of torch is of that version.
        version = str(components[name]["version"]).partition("+")[0]
        if version != package.version.partition("+")[0]:
            differences.append(f"{name} is {version}, expected {package.version}")
    if differences:
        raise SystemExit(
            f"sbom: the environment is not that of {LOCK.name}: {'; '.join(differences)}. "
            "Run `make setup`."
        )
    required, needs = needs_of(PROJECT), needs_of(f"{PROJECT}[dev]")
    if unlocked := sorted(set(needs) - set(locked) - {PROJECT, "pip"}):  # pip comes with Python
        raise SystemExit(f"sbom: {LOCK.name} lacks what is needed here: {', '.join(unlocked)}")
    root = found["metadata"]["component"]["bom-ref"]
    references = {name: f"{name}=={package.version}" for name, package in locked.items()}
    references[PROJECT] = root
    return found | {
        "components": [
            _component(components[name], package, required=name in required)
            for name, package in sorted(locked.items())
        ],
        "dependencies": [
            {
                "ref": reference,
                "dependsOn": sorted(references[need] for need in needs[name] if need in references),
            }
            for name, reference in sorted(references.items())
        ],
    }


def needs_of(asked: str) -> Needs:
    """The packages that a requirement brings here, and what each of them needs."""
    needs: Needs = defaultdict(set)
    waiting = [Requirement(asked)]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = normalized(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for need in map(Requirement, requires(name) or []):
                if need.marker is None or need.marker.evaluate({"extra": extra}):
                    needs[name] |= {normalized(need.name)} - {name}
                    waiting.append(need)
        needs[name] |= set()
    return needs


def _component(component: Json, package: Locked, *, required: bool) -> Json:
    files = {
        "type": "distribution",
        "url": f"https://pypi.org/project/{package.name}/{package.version}/#files",
        "hashes": [{"alg": "SHA-256", "content": digest} for digest in package.digests],
    }
    return component | {
        "bom-ref": f"{package.name}=={package.version}",
        "version": package.version,
        "purl": f"pkg:pypi/{package.name}@{package.version}",
        "scope": "required" if required else "optional",
        "externalReferences": [*component.get("externalReferences", []), files],
    }


if __name__ == "__main__":
    main()
