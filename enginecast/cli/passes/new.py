"""`enginecast passes new`: a package with one pass that works, and its tests."""

import keyword
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from enginecast.cli.terminal.output import results, say
from enginecast.errors import UsageError
from enginecast.passes.registry import REGISTRY
from enginecast.plugins import package_of

FILES = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "README.md.template",
    ".gitignore": "gitignore.template",
    "${module}/__init__.py": "init.py.template",
    "${module}/py.typed": "py.typed.template",
    "${module}/${file}.py": "pass.py.template",
    "tests/test_${file}.py": "test.py.template",
    "tests/golden/${file}.diff": "golden.diff.template",
}
"""What is written: path in the package, and its template."""
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
LONGEST = 60
TAKEN = frozenset(
    {"ClassVar", "GraphPass", "Match", "Pattern", "Promise", "Site", "Value"}
    | {"PassContext", "ProgramView", "NoMatch", "SiteLog"}
)
"""Names that the file of the pass imports."""


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the pass, such as fuse-silu.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="New package folder; default: NAME."),
    ] = None,
) -> None:
    """Write a package with a pass of your own and its tests."""
    if not NAME.fullmatch(name) or len(name) > LONGEST:
        raise UsageError(
            f"NAME: expected lower-case words joined by '-', at most {LONGEST} characters, such as"
            f" fuse-silu; got {name!r}"
        )
    known = REGISTRY.known()
    claimed = {one.name: one.where for one in REGISTRY.clashes()}
    if name in known or name in claimed:
        where = known.get(name) or claimed[name]
        raise UsageError(
            f"NAME: a pass is called '{name}' already: {where} of {package_of(where)}",
            hint="Choose another name, or uninstall that package.",
        )
    folder = Path(name) if output is None else output
    if folder.exists() or folder.is_symlink():
        raise UsageError(
            f"{folder}: exists already", hint="Remove it, or name another folder with -o."
        )
    if not folder.parent.is_dir():
        raise UsageError(f"{folder}: there is no folder {folder.parent}")
    file = name.replace("-", "_")
    words = {"name": name, "file": file, "class_": class_name(name)}
    words |= {"distribution": f"enginecast-{name}", "module": f"enginecast_{file}"}
    templates = files(__package__) / "template"
    try:  # whole or not at all
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
            package = Path(made) / "package"
            for path, template in FILES.items():
                target = package / Template(path).substitute(words)
                target.parent.mkdir(parents=True, exist_ok=True)
                text = (templates / template).read_text(encoding="utf-8")
                target.write_text(Template(text).substitute(words), encoding="utf-8")
            package.rename(folder)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from error
    for line in (
        f"{folder}: a package with the pass '{name}', which replaces x * sigmoid(x) by silu",
        f"  cd {folder} && pip install --no-deps --no-build-isolation -e .",
        "  python -m pytest                       # its tests, which pass as they stand",
        f"  enginecast opt MODEL --pipeline {name} --watch",
    ):
        say(results(), line)


def class_name(name: str) -> str:
    """The class of a pass: "fuse-silu" -> "FuseSilu"."""
    made = "".join(part.capitalize() for part in name.split("-"))
    return f"{made}Pass" if keyword.iskeyword(made) or made in TAKEN else made
