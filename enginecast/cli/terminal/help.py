"""How commands read options and lay out `--help`: first what most need, then topics, then all.

typer's own groups are tables, which cut the names of options on narrow terminals.
"""

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

from enginecast.cli.terminal.output import errors, say
from enginecast.errors import UsageError
from enginecast.exporters.registry import OPTIONS, options_of
from enginecast.option_fields import RENAMED, TOPICS, described, target_option_keys

MANY = 15
"""Options of a command from which on its help comes in parts."""
FIRST = (
    *("--precision", "--output", "--pipeline", "--target", "--prompt", "--prompts", "--inputs"),
    *("--dynamic", "--device", "--steps", "--seed", "--allow-fallback", "--model"),
)
"""The options that come first in the help of every command, though their topics have them, too."""
INDENT = " " * 6
INDENTED: Any = {"initial_indent": INDENT, "subsequent_indent": INDENT, "break_on_hyphens": False}
HELP = "Help"
"""The heading of the options that show it."""
ALL = "all"

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "inspect": (
        "inspect intfloat/e5-small-v2 --download --precision fp16",
        "inspect t5.bundle",
    ),
    "export": (
        "export ./t5-base -o t5.bundle --precision fp16",
        "export my_package.models:make -o my.bundle --dynamic x:0=1..16",
    ),
    "verify": (
        "verify t5.bundle",
        "verify t5.bundle --model ./t5-base --json",
    ),
    "report": (
        "report t5.bundle",
        "report fp32.bundle fp16.bundle -o comparison.html",
    ),
    "run": (
        "run t5.bundle --prompts prompts.txt -o embeddings.safetensors",
        "run my.bundle --inputs x.safetensors -o y.safetensors --timeout 5",
    ),
    "generate": (
        "generate llama.bundle --prompt 'a red fox'",
        "generate llama.bundle --prompts prompts.txt --json",
    ),
    "bench": (
        "bench t5.bundle",
        "bench t5.bundle --against eager,compile --model ./t5-base",
    ),
    "tune": (
        "tune t5.bundle",
        "tune t5.bundle --seconds 30",
    ),
    "opt": (
        "opt ./t5-base --pipeline fuse-rms-norm,unify-dtype{to=fp16}",
        "opt ./t5-base --target onnxruntime --precision bf16",
    ),
    "bisect": (
        "bisect ./t5-base --precision fp16",
        "bisect my_package.models:make --pipeline my-pass",
    ),
    "passes": ("passes", "passes --json"),
    "passes new": ("passes new fuse-silu", "passes new fuse-silu -o plugins/silu"),
    "diffusers export": (
        "diffusers export ./stable-diffusion -o sd.engines",
        "diffusers export ./flux -o flux.engines --precision bf16",
    ),
    "diffusers run": (
        "diffusers run sd.engines --prompt 'a red fox' -o fox.png",
        "diffusers run sd.engines --prompt 'a red fox' -o fox.png --seed 7",
    ),
    "cache fill": (
        "cache fill t5.bundle --prompts captions.txt -o captions.cache",
        "cache fill ./t5 --prompts data.parquet --column caption -o my.cache",
    ),
    "cache info": ("cache info captions.cache", "cache info captions.cache --json"),
    "cache verify": (
        "cache verify captions.cache",
        "cache verify captions.cache --name text_encoder",
    ),
    "cache prune": (
        "cache prune captions.cache --dry-run",
        "cache prune captions.cache --keep captions.txt",
    ),
    "cache merge": (
        "cache merge one.cache other.cache -o both.cache",
        "cache merge new.cache -o all.cache",
    ),
    "cache export": (
        "cache export captions.cache -o captions.parquet",
        "cache export captions.cache -o captions --format npz",
        "cache export wan.cache -o te --format musubi:wan --items a.jsonl",
    ),
    "cache compare": (
        "cache compare fp32.cache fp16.cache",
        "cache compare fp32.cache fp16.cache --json",
    ),
    "sign": (
        "sign t5.bundle --key key.pem",
        "sign t5.bundle --key key.pem --certificate our.crt --chain root.crt",
    ),
    "trust": ("trust t5.bundle", "trust t5.bundle --remove"),
    "doctor": ("doctor", "doctor bundles --clean"),
}
"""Of every command; the tests parse them."""


class ReadsOptions:
    """A command or group that takes the older names of its options, and each flag's opposite:
    `--no-x` for `--x`, and the other way round.
    """

    params: list[Any]

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the command line."""
        parser = super().make_parser(ctx)  # type: ignore[misc]
        known = {name for one in self.params for name in (*one.opts, *one.secondary_opts)}
        for one in self.params:
            if getattr(one, "is_bool_flag", False) and one.expose_value:
                names = [_opposite(name) for name in one.opts if name.startswith("--")]
                if not one.secondary_opts and not known & set(names):
                    more: Any = {"dest": one.name, "action": "store_const", "const": False}
                    parser.add_option(obj=one, opts=names, **more)
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line, with older names of options."""
        words = list(self._renamed(args, tell=not ctx.resilient_parsing))
        left: list[str] = super().parse_args(ctx, words)  # type: ignore[misc]
        return left

    def _renamed(self, args: Sequence[str], *, tell: bool) -> Iterator[str]:
        known = {name: one for one in self.params for name in (*one.opts, *one.secondary_opts)}
        told: set[str] = set()
        words = iter(args)
        for word in words:
            name, equals, text = word.partition("=")
            old = RENAMED.get(name[2:]) if name.startswith("--") and name not in known else None
            if old is None or f"--{old.now}" not in known:
                yield word
                if word == "--":
                    yield from words
                elif not equals and _takes_value(known.get(name)):
                    yield from itertools.islice(words, 1)
                continue
            if tell and not old.is_short and name not in told:
                say(errors(), f"warning: {name} is now {old}")
            told.add(name)
            if old.is_flag and equals:
                raise UsageError(f"{word}: {name} takes no value")
            given = True if old.is_flag else text if equals else next(words, None)
            value = True if given is None else old.takes(name[2:], given)
            now = f"--{old.now}"
            yield f"{now}={value}" if isinstance(value, str) else now if value else _opposite(now)


class HelpCommand(ReadsOptions, TyperCommand):
    """A command whose help has groups of options, in the order in which they are declared."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write what was asked for: what most need, a topic, or all."""
        topic, groups = ctx.meta.get(HELP), self.groups(ctx)
        first = self.first(groups) if topic is None else []
        if first:
            shown = {"Arguments": groups["Arguments"], "Options": first}
        else:
            shown = groups if topic in (None, ALL) else {topic: groups[topic]}
        for name, parameters in shown.items():
            with formatter.section(name):
                formatter.write_dl([one.get_help_record(ctx) for one in parameters])
            if not first and any("--target-option" in one.opts for one in parameters):
                for target in OPTIONS:
                    with formatter.section(f"--target-option KEY=VALUE of --target {target}"):
                        formatter.write_dl(target_option_rows(target))
        path = ctx.command_path.split(maxsplit=1)[1:]
        if topic in (None, ALL) and path and path[0] in EXAMPLES:
            with formatter.section("Examples"):
                formatter.write("".join(f"  enginecast {each}\n" for each in EXAMPLES[path[0]]))
        if first:
            with formatter.section("More options"):
                for name, parameters in groups.items():
                    rest = [max(one.opts, key=len) for one in parameters if one not in first]
                    if "--target-option" in rest:
                        rest += _short_names(ctx.info_name)
                    if rest and name in TOPICS:
                        formatter.write(f"  --help-{TOPICS[name]}\n")
                        formatter.write(f"{textwrap.fill(', '.join(rest), 76, **INDENTED)}\n")
                formatter.write(f"  --help-{ALL}\n{INDENT}All options, and what they do.\n")
        if topic == ALL:
            formatter.write("\n--no-x turns a flag --x off, such as one of a file of options.\n")

    def groups(self, ctx: Any) -> dict[str, list[Any]]:
        """Its arguments, its options without a heading, and those of each heading."""
        groups: dict[str, list[Any]] = {"Arguments": [], "Options": []}
        for one in self.get_params(ctx):
            name = getattr(one, "rich_help_panel", None) or "Options"
            name = "Arguments" if one.param_type_name == "argument" else name
            if name != HELP and one.get_help_record(ctx) is not None:
                groups.setdefault(name, []).append(one)
        return {name: found for name, found in groups.items() if found}

    @staticmethod
    def first(groups: Mapping[str, Sequence[Any]]) -> list[Any]:
        """The options that most need, of a command that has many; empty: it has few."""
        options = [one for name in groups if name != "Arguments" for one in groups[name]]
        places = {one: min(map(_place, one.opts)) for one in options}
        found = [one for one in options if one in groups["Options"] or places[one] < len(FIRST)]
        return sorted(found, key=places.__getitem__) if len(options) > MANY else []


def _place(name: str) -> int:
    return FIRST.index(name) if name in FIRST else len(FIRST)


def target_option_rows(target: str) -> list[tuple[str, str]]:
    """The options of one of our targets, as users write them, and what each is."""
    owner = options_of(target)
    rows = []
    for key, (each, said) in target_option_keys(owner).items():
        default = str(each.default) if isinstance(each.default, str) else ""
        value = described(get_args(each.type)[0], said).replace("true or false", "true|false")
        text = said.help if said is not None else ""
        rows.append((f"{key}={value}", f"{text}{f'  [default: {default}]' * bool(default)}"))
    return rows


def _short_names(command: str) -> list[str]:
    """Of options of our targets that a command has."""
    every = [each for name in OPTIONS for each in target_option_keys(options_of(name)).items()]
    fits = {
        key
        for key, (_, said) in every
        if said is not None and (not said.commands or command in said.commands)
    }
    return [f"--{name}" for name, one in RENAMED.items() if one.is_short and name in fits]


def _opposite(name: str) -> str:
    return f"--{name[5:]}" if name.startswith("--no-") else f"--no-{name[2:]}"


def _takes_value(option: Any) -> bool:
    flags = ("is_flag", "count")
    return option is not None and not any(getattr(option, name, False) for name in flags)


class WorkOrder(ReadsOptions, TyperGroup):
    """Commands in the order of work: first look, then make, check and use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, as `--help` and completion show them."""
        path = ctx.command_path.split()[1:]
        named = [name.split() for name in EXAMPLES]
        inner = [words for words in named if words[: len(path)] == path and words != path]
        wanted = [words[len(path)] for words in inner]
        return sorted(self.commands, key=wanted.index)
