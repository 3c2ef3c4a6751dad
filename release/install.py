"""`make installed`: installs the wheel of this tree, built from its sdist, as users get it.

It does so where something else is installed: nothing, the wheel of other sources, or an editable
install.  So what the tests import is what a user would import.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from build_backend import sources
from dist import ROOT, build_sdist, build_wheel

FOLDER = Path(sys.prefix) / "wheel"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extras", default="", help="such as dev; brings what they need, too")
    extras = parser.parse_args().extras
    read, kept = hashlib.sha256(), FOLDER / "sources.sha256"  # all that a build reads
    for name in sources(ROOT):
        read.update(f"{name}\n".encode() + hashlib.sha256((ROOT / name).read_bytes()).digest())
    digest = read.hexdigest()
    if not extras and _is_wheel() and kept.exists() and kept.read_text() == digest:
        return
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(build_sdist(ROOT, Path(folder)), FOLDER)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    if extras:
        needed = ["-c", str(ROOT / "constraints.txt"), f"{wheel}[{extras}]"]
        subprocess.run([*pip, *needed], check=True)
    subprocess.run([*pip, "--no-index", "--no-deps", "--force-reinstall", wheel], check=True)
    kept.write_text(digest)


def _is_wheel() -> bool:
    """Whether what is installed is a file that this script built."""
    try:
        record = metadata.distribution("enginecast").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    url = json.loads(record or "{}")
    return "archive_info" in url and str(url["url"]).startswith(FOLDER.as_uri())


if __name__ == "__main__":
    main()
