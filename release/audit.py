"""`make audit`: asks a database of vulnerabilities (OSV) about every package of the lock.

Exit code 0: nothing was found, or the database was not reached, which is said in as many words.
1: something was found that `accepted.txt` does not name.  2: pip-audit failed for another reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from locked import LOCK, Locked, read

ACCEPTED = Path(__file__).with_name("accepted.txt")
SECONDS_TO_ANSWER = 5
SECONDS_IN_ALL = 300


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=Path, default=LOCK)
    parser.add_argument("--accepted", type=Path, default=ACCEPTED)
    parser.add_argument("--url", default="https://api.osv.dev/v1/query")
    arguments = parser.parse_args()
    locked = read(arguments.lock.read_text(encoding="utf-8"))
    if not locked:
        print(f"audit: {arguments.lock} names no package")
        return 2
    accepted = _accepted(arguments.accepted)
    first = next(iter(locked.values()))
    if reason := why_unreachable(arguments.url, first):
        return _not_reached(arguments.url, reason)
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(arguments.lock)]
    command += ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    command += ["--vulnerability-service", "osv", "--osv-url", arguments.url, "--timeout", "10"]
    for name in accepted:
        command += ["--ignore-vuln", name]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_IN_ALL)
    except subprocess.TimeoutExpired:
        return _not_reached(arguments.url, f"no end after {SECONDS_IN_ALL} s")
    try:
        answers = json.loads(run.stdout)["dependencies"]
    except ValueError:
        if reason := why_unreachable(arguments.url, first):
            return _not_reached(arguments.url, reason)
        print(f"audit: pip-audit failed with exit code {run.returncode}:\n{run.stderr[-2000:]}")
        return 2
    return report(answers, locked, accepted)


def why_unreachable(url: str, package: Locked) -> str:
    """Why the database does not answer about a package, or nothing."""
    question = {"package": {"name": package.name, "ecosystem": "PyPI"}, "version": package.version}
    body, kind = json.dumps(question).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, kind)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS_TO_ANSWER) as answer:
            answered = isinstance(json.load(answer), dict)
    except (OSError, ValueError) as error:  # no network, a refusal, or a page of a proxy
        return str(error) or type(error).__name__
    return "" if answered else "the answer is not one of OSV"


def report(answers: list[dict[str, Any]], locked: dict[str, Locked], accepted: list[str]) -> int:
    """Prints what was found in the packages that were asked about."""
    found = [
        f"{answer['name']} {answer['version']}: {flaw['id']} "
        f"(fixed in {', '.join(flaw['fix_versions']) or 'no version'}) {flaw['description'][:200]}"
        for answer in answers
        for flaw in answer.get("vulns", [])
    ]
    skipped = [f"{answer['name']}: {it}" for answer in answers if (it := answer.get("skip_reason"))]
    asked = len(answers) - len(skipped)
    print(
        f"audit: {asked} of {len(locked)} packages asked about, {len(found)} vulnerabilities, "
        f"{len(accepted)} accepted in {ACCEPTED.name}"
    )
    for line in [*found, *skipped]:
        print(f"  {line}")
    return 1 if found or asked != len(locked) else 0


def _accepted(path: Path) -> list[str]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    entries = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    for name, _, reason in entries:
        if not reason.strip():
            raise SystemExit(f"audit: {path.name}: {name}: expected a reason after the name")
    return [name for name, _, _ in entries]


def _not_reached(url: str, reason: str) -> int:
    print(f"audit: {url} was not reached ({reason}): nothing was audited")
    return 0


if __name__ == "__main__":
    sys.exit(main())
