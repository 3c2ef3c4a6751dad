"""`make dist`: the sdist of a commit, the wheel made from that sdist, and their digests, in dist/.

A commit is what is built: files that git does not know, and edits that nobody committed, are in no
release.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    commit = _git("rev-parse", "--verify", f"{arguments.commit}^{{commit}}").decode().strip()
    if _git("status", "--porcelain"):
        print("There are changes that are not committed; they are left out.")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree, built = Path(folder, "tree"), Path(folder, "built")
        tree.mkdir()
        built.mkdir()
        subprocess.run(["tar", "-x", "-C", tree], input=_git("archive", commit), check=True)
        sdist = build_sdist(tree, built)
        wheel = build_wheel(sdist, built)
        lines = []
        for archive in (sdist, wheel):
            content = archive.read_bytes()
            (out / archive.name).write_bytes(content)
            lines.append(f"{hashlib.sha256(content).hexdigest()}  {archive.name}\n")
    (out / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    print(f"commit {commit}\n{''.join(lines)}", end="")


def build_sdist(tree: Path, out: Path) -> Path:
    """Asks the tree's own backend, as an installer would."""
    code = "import sys, build_backend; print(build_backend.build_sdist(sys.argv[1]))"
    environment = os.environ | {"PYTHONPATH": str(tree / "release")}
    command = [sys.executable, "-c", code, str(out)]
    run = subprocess.run(command, cwd=tree, env=environment, check=True, stdout=subprocess.PIPE)
    return out / run.stdout.decode().splitlines()[-1]


def build_wheel(source: Path, out: Path) -> Path:
    """Has pip build a wheel of an sdist or a folder, with the setuptools that is installed here."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--no-cache-dir", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", *options]
    subprocess.run([*command, "--wheel-dir", out, source], check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    main()
