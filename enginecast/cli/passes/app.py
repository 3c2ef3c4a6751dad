"""`enginecast passes`: every pass with its options, order and promise; and `passes new`."""

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import typer

from enginecast.cli.options.from_fields import AsJson
from enginecast.cli.passes.new import new
from enginecast.cli.terminal.output import errors, print_json, results, say
from enginecast.passes.registry import PASSES, all_passes
from enginecast.plugins import Broken, defect_of, package_of
from enginecast.verification.report.layout import print_table

if TYPE_CHECKING:
    from enginecast.passes.ir.base import Pass


app = typer.Typer()
app.command()(new)


@app.callback(invoke_without_command=True)
def passes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the passes; `passes new` starts your own."""
    if context.invoked_subcommand is not None:
        return
    found, left_out = all_passes()
    rows, broken = [], list(left_out)
    for name in sorted(found):
        module = found[name].__module__
        try:
            rows.append(_row(name, found[name]))
        except Exception as error:  # no dataclass, or options of a kind that no spec can have
            if name in PASSES:
                raise
            reason = defect_of(module, "its options cannot be listed", error).message
            where = f"{module}:{found[name].__name__}"
            broken.append(Broken(name, where, package_of(module), reason))
    if as_json:
        print_json({"passes": rows, "broken": [asdict(one) for one in broken]})
        return
    shown = []
    for row in rows:
        options = "\n".join(f"{name}: {text}" for name, text in row["options"].items())
        shown.append(
            (row["name"], row["summary"], row["promise"], "\n".join(row["after"]), options)
        )
    print_table(results(), ("pass", "what it does", "promise", "after", "options"), shown)
    for one in broken:
        say(errors(), f"warning: pass {one}")


def _row(name: str, found: type["Pass"]) -> dict[str, Any]:
    from enginecast.passes.ir.options import describe, option_fields

    defaults = {f.name: f.default for f in fields(found)}
    return {
        "name": name,
        "package": package_of(found.__module__),
        "summary": _summary(found.__doc__ or ""),
        "promise": found.promise,
        "after": sorted(found.after),
        "options": {
            option: f"{describe(annotation)} = {defaults[option]!r}"
            for option, (annotation, _) in option_fields(found).items()
        },
    }


def _summary(text: str) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return f"{paragraph.partition('. ')[0].rstrip('.:')}."
