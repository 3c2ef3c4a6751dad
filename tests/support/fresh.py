"""Environments of their own, made from what is installed here: nothing needs a network."""

import os
import sys
import venv
from importlib import metadata
from pathlib import Path

OFFLINE = {
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_NO_INDEX": "1",
    "PIP_FIND_LINKS": "",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to switch isolation off
    "PIP_NO_DEPS": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_COMPILE": "1",  # a test imports a tenth of the files
    "PYTHONPATH": "",
}
"""pip takes what is there, and builds with the setuptools that is there."""
PIP = "#!{}\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
LIBRARIES = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def bare(folder: Path) -> Path:
    """An environment with nothing in it; where its packages go."""
    venv.EnvBuilder(symlinks=True).create(folder)
    return folder / LIBRARIES


def with_everything(folder: Path) -> Path:
    """An environment that sees all that is installed here, below what is installed in itself."""
    packages = bare(folder)
    here = Path(str(metadata.distribution("numpy").locate_file(""))).resolve()
    (packages / "everything.pth").write_text(f"{here}\n")
    pip = folder / "bin" / "pip"
    pip.write_text(PIP.format(folder / "bin" / "python"))
    pip.chmod(0o755)
    return packages
