"""Versions as libraries write them: "2.13.0+cu130", "11.0.0.114", "1.32.0.dev3"."""

import re
from contextlib import suppress
from importlib import metadata


def numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: (1, 32, 0) of "1.32.0.dev3"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def short_version(version: str) -> str:
    """MAJOR.MINOR: "11.0" of "11.0.0.114"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def library_of(kind: type) -> str:
    """The package that a class is from and its version: "diffusers 0.42.1"; empty where its code is
    not that of an installed package.
    """
    package = kind.__module__.partition(".")[0]
    return "".join(f"{name} {version}" for name, version in installed(package).items())


def installed(*packages: str) -> dict[str, str]:
    """The versions of those distributions that are installed."""
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
