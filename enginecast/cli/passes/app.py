"""`enginecast passes` and `enginecast passes new`."""

import typer

from enginecast.cli.options.groups import AsJson
from enginecast.cli.passes.listing import listed
from enginecast.cli.passes.new import new

app = typer.Typer()


@app.callback(invoke_without_command=True)
def passes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the passes; `passes new` starts your own."""
    if context.invoked_subcommand is None:
        listed(as_json)


app.command()(new)
