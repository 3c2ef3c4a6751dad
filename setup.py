"""Lists the packages: each folder with code in the folders that pyproject.toml maps.

It does not follow the links in enginecast/, which are for type checkers: a file is packaged once.
"""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

from setuptools import setup


def packages() -> Iterator[str]:
    settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    for package, root in settings["tool"]["setuptools"]["package-dir"].items():
        for folder, _, files in os.walk(root):
            if any(name.endswith(".py") for name in files):
                yield ".".join([package, *Path(folder).relative_to(root).parts])


setup(packages=sorted(packages()))
