"""`opt --reduce`: a program on which a pass fails, as small as it can be, with its script."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from enginecast.cli.terminal.output import print_json, progress, results, say
from enginecast.compiler.prepare import Prepared
from enginecast.errors import UsageError
from enginecast.reduce.script import SCRIPT, write
from enginecast.reduce.shrink import reduce

if TYPE_CHECKING:
    from enginecast.passes.ir.base import Pass


def reduce_program(
    prepared: Prepared, passes: Sequence["Pass"], folder: Path, seconds: float, as_json: bool
) -> None:
    """Write the smallest program on which the passes fail as they do on the model.

    Raises:
        UsageError: they do not fail.
    """
    console = progress()
    found = reduce(
        prepared.captured.program,
        passes,
        [case.inputs for case in prepared.observed],
        seconds=seconds,
        say=lambda line: say(console, line),
    )
    if found is None:
        names = ", ".join(one.name for one in passes)
        raise UsageError(
            f"--reduce: nothing to reduce: {names or 'no pass'} ran and kept the promises",
            hint="Where an export fails, give --target and what else that export takes.",
        )
    shown = write(found, folder)
    left = len(found.specimen.calls)
    if as_json:
        print_json(
            {
                "script": str(folder / SCRIPT),
                "pass": found.failure.pass_name,
                "failure": found.failure.message,
                "nodes": found.nodes,
                "left": left,
                "trials": found.trials,
                "finished": found.finished,
                "shown": shown,
            }
        )
        return
    say(results(), shown)
    more = "" if found.finished else "; the time was up, --seconds gives it more"
    say(
        results(),
        f"{folder / SCRIPT}: {left} of {found.nodes} nodes, and it fails in the same way{more}",
    )
