"""The page of errors and exit codes, from the tree of errors."""

from collections.abc import Iterator

from enginecast import errors
from enginecast.cli.app import CRASHED, INTERRUPTED
from enginecast.errors import EnginecastError

HEAD = f"""# Errors and exit codes

| exit code | meaning |
|---|---|
| 0 | done; verified, or verified by emulation |
| 1 | the result does not match eager, or [lacks what you asked for](downgrades.md): nothing was published, and the report, or the bundle, is in `DIR.rejected`; or a check found damage or a culprit |
| 2 | bad input or usage |
| 3 | this machine lacks a package, GPU, provider, disk space or memory; or a run was stopped |
| {CRASHED} | a bug in enginecast; the traceback is on stderr |
| {INTERRUPTED}, 143, 129 | stopped by Ctrl-C, SIGTERM or SIGHUP; partial files are removed |

With `--json`, an error is one JSON object on stdout; the exit code is the same.

An error names the file or field, the expected and the actual value; its `hint` says what to do. All errors
are in `enginecast.errors` and derive from `EnginecastError`:

| class | exit code | raised when |
|---|---|---|
"""


def error_page() -> str:
    """The page."""
    return HEAD + "\n".join(rows(EnginecastError, 0)) + "\n"


def rows(kind: type[EnginecastError], depth: int) -> Iterator[str]:
    """A row for a class, and for each of those derived from it."""
    if kind.__module__ == errors.__name__:
        text = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
        indent = "&nbsp;&nbsp;" * depth
        yield f"| {indent}`{kind.__name__}` | {kind.exit_code} | {text} |"
        for derived in kind.__subclasses__():
            yield from rows(derived, depth + 1)
