"""The page of the command line, from the commands themselves."""

from collections.abc import Iterator
from typing import Any

import typer

from enginecast.cli.app import app
from enginecast.cli.terminal.help import EXAMPLES, HELP, target_option_rows
from enginecast.exporters.registry import OPTIONS

HEAD = """# Command line

Every command and option. `--help` shows the options that most people need, `--help-TOPIC` those of a topic, and `--help-all`
all of them, as here. A flag `--x` is turned off by `--no-x`. Results go to stdout; progress, logs and anything the model's
code prints go to stderr. With `--json`, stdout is one JSON object with a `schema_version`.
See [exit codes](exit-codes.md), too.

`MODEL` is one of these:

- a Hugging Face or sentence-transformers folder (`config.json` and safetensors), or one with only
  `config.json` and `--random-weights SEED`; from T5, mT5 or UMT5, the encoder is exported
- a component's folder in a diffusion pipeline ([how-to](../how-to/diffusion.md))
- `package.module:factory`: the factory returns a module, or `(module, example)`
- a `.pt2` program; needs `--allow-code`, because loading one can run code
- a file of TorchScript (`.pt`), scripted or traced; needs `--allow-code` too, and `--inputs`

`--config FILE.toml` sets options by name; the command line overrides it:

```toml
[export]
model = "./t5-base"
output = "t5.bundle"
precision = "fp16"
dynamic = ["input_ids:0=1..16", "input_ids:1=1..128"]

[cache.fill]
prompts = "captions.txt"
```

An unknown key is an error that suggests similar options. Paths are relative to the current folder.
`enginecast --install-completion` sets up shell completion.
"""


def command_page() -> str:
    """The page."""
    root = typer.main.get_group(app)
    context = root.make_context("enginecast", [], resilient_parsing=True)
    lines = [HEAD, "| command | what it does |", "|---|---|"]
    order = {name: place for place, name in enumerate(EXAMPLES)}
    found = sorted(commands(root, context, ""), key=lambda one: order.get(one[0], len(order)))
    for path, command, _ in found:
        anchor = path.replace(" ", "-")
        lines.append(f"| [`{path}`](#{anchor}) | {summary(command)} |")
    for path, command, inner in found:
        lines += ["", *section(path, command, inner)]
    return "\n".join(lines) + "\n"


def commands(group: Any, context: Any, before: str) -> Iterator[tuple[str, Any, Any]]:
    """Every command by its path, such as "cache fill"."""
    for name in group.list_commands(context):
        command = group.commands[name]
        inner = type(context)(command, info_name=name, parent=context)
        path = f"{before} {name}".strip()
        inner_commands = getattr(command, "commands", {})
        if not inner_commands or command.invoke_without_command:
            yield path, command, inner
        if inner_commands:
            yield from commands(command, inner, path)


def summary(command: Any) -> str:
    """The first line of a command's help."""
    return str(command.help or "").strip().splitlines()[0]


def section(path: str, command: Any, context: Any) -> Iterator[str]:
    """One command: usage, what it does, its options by group, examples."""
    yield f"## {path}"
    yield ""
    yield str(command.help or "").strip()
    yield ""
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"```text\nenginecast {path} {pieces}\n```"
    groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
    for parameter in command.get_params(context):
        if parameter.get_help_record(context) is not None and group_of(parameter) != HELP:
            groups.setdefault(group_of(parameter), []).append(parameter)
    for name, parameters in groups.items():
        if parameters:
            yield f"\n**{name}**\n"
            yield "| | | default |"
            yield "|---|---|---|"
            for parameter in parameters:
                yield row(parameter, context)
            if any("--target-option" in parameter.opts for parameter in parameters):
                yield from target_options()
    if path in EXAMPLES:
        yield "\n**Examples**\n"
        yield "```text"
        for example in EXAMPLES[path]:
            yield f"enginecast {example}"
        yield "```"


def target_options() -> Iterator[str]:
    """What `--target-option` takes, by target."""
    for target in OPTIONS:
        yield f"\n`--target-option` of `--target {target}`:\n"
        yield "| | |"
        yield "|---|---|"
        for spelled, text in target_option_rows(target):
            yield f"| {code(spelled)} | {text} |"


def group_of(parameter: Any) -> str:
    """The heading under which `--help` shows it."""
    if parameter.param_type_name == "argument":
        return "Arguments"
    return getattr(parameter, "rich_help_panel", None) or "Options"


def row(parameter: Any, context: Any) -> str:
    """One line of a table: spelling, help, default."""
    if parameter.param_type_name == "argument":
        spelled = parameter.metavar or parameter.name.upper()
    else:
        spelled = parameter.get_help_record(context)[0]
    text = (getattr(parameter, "help", None) or "").replace("|", "\\|").replace("<", "&lt;")
    return f"| {code(spelled)} | {text} | {default(parameter)} |"


def takes_value(parameter: Any) -> bool:
    """Whether a value follows its name."""
    return not (getattr(parameter, "is_flag", False) or getattr(parameter, "count", False))


def default(parameter: Any) -> str:
    """What holds when it is not given; empty: nothing, or off."""
    if parameter.required:
        return "required"
    value = parameter.default
    if value is None or value is False or value == () or callable(value):
        return ""
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return code(shown) if takes_value(parameter) and shown else ""


def code(text: str) -> str:
    """Text as code within a table."""
    return "`" + text.replace("|", "\\|") + "`"
