"""The code blocks of a page: read from Markdown, and run in a folder of their own.

A block is run unless `<!-- not run: REASON -->` stands on the line before it. One with
`title="FILE"` becomes that file. A `console` block has `$ commands` with their output, which has
to come again: numbers may differ, the folder is left out, and `...` stands for any lines. A command
may fail only where `$ echo $?` follows it.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^`]*)$")
NOT_RUN = re.compile(r"^\s*<!-- not run(?: here)?: (?P<reason>.+) -->\s*$")
NUMBER = re.compile(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?")
DATA = {"text", "json", "toml", "yaml", "cpp", "cmake", "protobuf", "diff"}
"""Languages of blocks that nothing runs."""
END = "@@ended"


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: Path
    line: int
    language: str
    title: str
    text: str
    reason: str
    """Why it is not run; empty: it is."""

    @property
    def place(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page
        return f"{page}:{self.line}"


class PageError(AssertionError):
    """A block that is not as it should be, with its place."""


def pages() -> list[Path]:
    """Every page for readers: the README and all of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        opening = FENCE.match(lines[at])
        at += 1
        if opening is None:
            continue
        start = at
        while at < len(lines) and lines[at].strip() != "```":
            at += 1
        text = "\n".join(line.removeprefix(opening["indent"]) for line in lines[start:at])
        at += 1
        before = NOT_RUN.match(lines[start - 2]) if start > 1 else None
        language, _, rest = opening["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        yield Block(
            page,
            start,
            language,
            title[1] if title else "",
            text,
            before["reason"] if before else "",
        )


def check(block: Block) -> None:
    """Refuse a block whose language hides what it is, and Python that does not compile."""
    if block.language not in {*DATA, "sh", "console", "python"}:
        raise PageError(f"{block.place}: unknown language {block.language!r}")
    if block.language == "text" and re.search(r"^(\$ |pip |make )", block.text, re.MULTILINE):
        raise PageError(f"{block.place}: commands in a block of text")
    if block.language == "python":
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        compile(block.text, block.place, "exec", flags=flags)


@dataclass(frozen=True)
class Place:
    """Where blocks run."""

    folder: Path
    bin: Path = Path(sys.executable).parent
    """Of the environment, whose commands come first."""
    variables: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 900.0
    """How long a block may take."""


def run_page(page: Path, folder: Path) -> int:
    """Run the blocks of a page in order; how many ran."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    return sum(run(block, Place(folder)) for block in blocks(page))


def run(block: Block, place: Place) -> bool:
    """Run one block, or write its file; False: it is not to be run."""
    if block.reason or (block.language in DATA and not block.title):
        return False
    if block.title:
        (place.folder / block.title).write_text(block.text + "\n", encoding="utf-8")
    elif block.language == "python":
        (place.folder / "block.py").write_text(block.text + "\n", encoding="utf-8")
        shell(block, "python block.py", place)
    elif block.language == "sh":
        shell(block, f"set -e\n{block.text}", place)
    else:
        converse(block, place)
    return True


def shell(block: Block, script: str, place: Place) -> str:
    """What a script prints; a PageError where it fails."""
    folder = place.folder
    # `make test` sets PYTHONSAFEPATH for itself; a reader's Python imports from its folder, too.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment = inherited | {
        "PATH": f"{place.bin}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
        "XDG_CONFIG_HOME": str(folder / ".config"),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        **place.variables,
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=place.seconds,
    )
    if done.returncode:
        raise PageError(f"{block.place}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


def converse(block: Block, place: Place) -> None:
    """Run the commands of a console block, and compare what each prints."""
    asked = list(turns(block))
    script = "".join(
        f'{command}\ncode=$?; echo "{END} $code"; (exit $code)\n' for command, _ in asked
    )
    spoken = shell(block, script + "true", place).replace(f"{place.folder}/", "")
    answers = spoken.split(f"{END} ")
    printed = answers[0]
    for number, ((command, wanted), rest) in enumerate(zip(asked, answers[1:], strict=True)):
        code, _, after = rest.partition("\n")
        following = asked[number + 1][0] if number + 1 < len(asked) else ""
        if code != "0" and following != "echo $?":
            raise PageError(f"{block.place}: exit code {code} of {command}\n{printed}")
        if not shows(wanted, printed.splitlines()):
            raise PageError(
                f"{block.place}: {command}\nprinted\n{printed}\nexpected\n" + "\n".join(wanted)
            )
        printed = after


def turns(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Commands of a console block with the output that is shown."""
    command, wanted = "", list[str]()
    for line in block.text.splitlines():
        if command.endswith("\\"):
            command = f"{command[:-1]} {line.strip()}"
        elif line.startswith("$ "):
            if command:
                yield command, wanted
            command, wanted = line[2:], []
        else:
            wanted.append(line)
    if command:
        yield command, wanted


def shows(wanted: list[str], printed: list[str]) -> bool:
    """Whether all lines were printed in this order, without others between but at `...`."""
    if not wanted:
        return True
    if wanted[0] == "...":
        return any(shows(wanted[1:], printed[at:]) for at in range(len(printed) + 1))
    return bool(printed) and alike(wanted[0], printed[0]) and shows(wanted[1:], printed[1:])


def alike(wanted: str, printed: str) -> bool:
    """Whether two lines are the same but for numbers and blanks."""
    return NUMBER.sub("#", wanted).split() == NUMBER.sub("#", printed).split()


def main() -> None:
    """`python tests/support/docs_blocks.py PAGE ENVIRONMENT`: run a page in a clone."""
    page, environment = (Path(word).resolve() for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "enginecast"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        place = Place(clone, environment / "bin", {"PYTHONSAFEPATH": "1"}, seconds=7200.0)
        for block in blocks(page):
            print(block.place, "ran" if run(block, place) else "is not to be run", flush=True)


if __name__ == "__main__":
    main()
