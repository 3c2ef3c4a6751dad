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
    accepted = []
    for line in arguments.accepted.read_text(encoding="utf-8").splitlines():
        name, _, reason = line.strip().partition(" ")
        if name and not name.startswith("#"):
            if not reason.strip():
                file = arguments.accepted.name
                raise SystemExit(f"audit: {file}: {name}: expected a reason after the name")
            accepted.append(name)
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(arguments.lock)]
    command += ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    command += ["--vulnerability-service", "osv", "--osv-url", arguments.url, "--timeout", "10"]
    for name in accepted:
        command += ["--ignore-vuln", name]
    first, answers = next(iter(locked.values())), None
    if not (unreached := why_unreachable(arguments.url, first)):
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_IN_ALL)
            answers = json.loads(run.stdout)["dependencies"]
        except subprocess.TimeoutExpired:
            unreached = f"no end after {SECONDS_IN_ALL} s"
        except ValueError:
            unreached = why_unreachable(arguments.url, first)
            if not unreached:
                said = run.stderr[-2000:]
                print(f"audit: pip-audit failed with exit code {run.returncode}:\n{said}")
                return 2
    if answers is None:
        print(f"audit: {arguments.url} was not reached ({unreached}): nothing was audited")
        return 0
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


if __name__ == "__main__":
    sys.exit(main())
