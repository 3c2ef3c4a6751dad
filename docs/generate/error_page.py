"""The page of errors and exit codes, from the tree of errors."""

from collections.abc import Iterator

from enginecast import errors
from enginecast.cli.app import CRASHED, INTERRUPTED
from enginecast.errors import EnginecastError

HEAD = f"""# Errors and exit codes

| exit code | meaning |
|---|---|
| 0 | done; verified, or verified by emulation |
| 1 | the result does not agree with eager: nothing was published, the report is in `DIR.rejected`; or a check found damage or a culprit |
| 2 | bad input or usage |
| 3 | this machine lacks a package, a GPU or a provider, or has too little disk or memory; a run was stopped |
| {CRASHED} | a defect of enginecast; the traceback is on stderr |
| {INTERRUPTED}, 143, 129 | ended by Ctrl-C, SIGTERM or SIGHUP; what was begun is removed |

With `--json` an error is one JSON object on stdout, and the exit code is the same.

An error names the file or field, what was expected and what was found; its `hint` says what to do. All errors
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
