"""`enginecast passes`: every pass with its options, order and promise."""

from dataclasses import fields
from typing import Any

from enginecast.cli.options.groups import AsJson
from enginecast.cli.terminal.output import print_json, results
from enginecast.passes.registry import known_passes, pass_class
from enginecast.verify.report.layout import print_table


def passes(as_json: AsJson = False) -> None:
    """List the passes with their options."""
    from enginecast.passes.ir.options import describe, option_fields

    rows: list[dict[str, Any]] = []
    for name in sorted(known_passes()):
        found = pass_class(name)
        defaults = {f.name: f.default for f in fields(found)}
        rows.append(
            {
                "name": name,
                "summary": _summary(found.__doc__ or ""),
                "promise": found.promise,
                "after": sorted(found.after),
                "options": {
                    option: f"{describe(annotation)} = {defaults[option]!r}"
                    for option, (annotation, _) in option_fields(found).items()
                },
            }
        )
    if as_json:
        print_json({"passes": rows})
        return
    shown = []
    for row in rows:
        options = "\n".join(f"{name}: {text}" for name, text in row["options"].items())
        shown.append(
            (row["name"], row["summary"], row["promise"], "\n".join(row["after"]), options)
        )
    print_table(results(), ("pass", "what it does", "promise", "after", "options"), shown)


def _summary(text: str) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join(text.strip().partition("\n\n")[0].split())
    return f"{paragraph.partition('. ')[0].rstrip('.:')}."
