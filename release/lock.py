"""`make lock`: writes requirements.lock, the packages that the checks run with and the SHA-256 of
each of their files.

uv resolves `constraints.txt` and the extra `dev` with the indexes of pip's configuration, and keeps
what the lock has where that still fits; `--upgrade` takes the newest.  The digests are those of all
files of a version that the indexes list, so the lock serves other platforms and Pythons as well.

torch is the one package with several builds of a version.  Its CPU build (`2.13.0+cpu`) is what is
resolved: the CUDA build needs gigabytes of other packages.  Written is the version without the
build, with the files of every build at hand.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from locked import LOCK, ROOT, Locked, read

OLDEST_PYTHON = "3.11"
HEADER = """\
# Written by `make lock`: what constraints.txt and the extra `dev` come to, with the SHA-256 of all
# files of each version.  `make setup` installs these files or none (pip install --require-hashes).
"""
BUILD = re.compile(r"^([\w.-]+)==([^+\s]+)\+\S+ \\\n(?:    --hash=.*\n)+", re.MULTILINE)
CONFIGURED = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    arguments = parser.parse_args()
    before = LOCK.read_text(encoding="utf-8") if LOCK.exists() else ""
    # Without torch, whose version would be read as that of the CUDA build.
    kept = re.sub(r"^torch==.*\n(?:    .*\n)*", "", before, flags=re.MULTILINE)
    kept = "" if arguments.upgrade else kept
    source = ["pyproject.toml", "--extra", "dev", "--constraints", "constraints.txt"]
    options = [*configured_places(), "--index-strategy", "unsafe-best-match"]
    text = compiled([*source, *options], kept)
    if cuda := next((name for name in read(text) if name.startswith("nvidia-")), None):
        raise SystemExit(
            f"lock: expected torch's CPU build, got its CUDA build, which needs {cuda}; name a "
            "place that has the CPU build: PIP_FIND_LINKS=FOLDER or PIP_EXTRA_INDEX_URL=URL"
        )
    text = BUILD.sub(lambda found: of_all_builds(found, before), text)
    LOCK.write_text(HEADER + text, encoding="utf-8")
    packages = read(text).values()
    print(f"{LOCK.name}: {len(packages)} packages, {sum(len(it.digests) for it in packages)} files")


def configured_places() -> list[str]:
    """pip's configured indexes and folders, as options of uv."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    options: list[str] = []
    for line in subprocess.check_output(command, cwd=ROOT, text=True).splitlines():
        setting, _, value = line.partition("=")
        option = CONFIGURED.get(setting.rpartition(".")[2])
        if option is not None:
            for place in ast.literal_eval(value).split():
                options += [option, place]
    return options


def compiled(arguments: list[str], kept: str, *, given: str = "") -> str:
    """What uv writes, with the versions of `kept` where they fit."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "lock.txt")
        out.write_text(kept, encoding="utf-8")
        command = [sys.executable, "-m", "uv", "pip", "compile", *arguments]
        command += ["--python-version", OLDEST_PYTHON, "--generate-hashes", "--no-header"]
        command += ["--no-emit-package", "pip"]  # pip is what installs the rest
        command += ["--quiet", "--output-file", str(out)]
        subprocess.run(command, cwd=ROOT, input=given.encode(), check=True)
        return out.read_text(encoding="utf-8")


def of_all_builds(found: re.Match[str], before: str) -> str:
    """A package's lines without the build, with the files of other builds and of the last lock."""
    name, version = found.group(1), found.group(2)
    pin = f"{name}=={version}"
    others = [compiled(["-", "--no-deps"], "", given=pin), before]
    digests = set(read(found.group(0))[name].digests)
    for text in others:
        other = read(text).get(name, Locked(name, version, ()))
        if other.version == version:
            digests |= set(other.digests)
    lines = [pin, *(f"    --hash=sha256:{digest}" for digest in sorted(digests))]
    return " \\\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
