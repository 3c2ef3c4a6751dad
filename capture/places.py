"""Places in a model's code."""

import os

Place = tuple[str, int]
"""File and line."""


def real_path(file: str) -> str:
    """A file without links, so that two names of one are equal; what exec named is no file."""
    return file if file.startswith("<") else os.path.realpath(file)
