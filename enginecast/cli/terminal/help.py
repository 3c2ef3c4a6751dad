"""How `--help` is laid out: options in groups, and two examples of every command.

typer's own groups are tables, which cut the names of options on narrow terminals.
"""

from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

EXAMPLES: Mapping[str, tuple[str, str]] = {
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
        "cache fill t5.bundle --texts captions.txt -o captions.cache",
        "cache fill ./t5 --texts data.parquet --column caption -o my.cache",
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


class HelpCommand(TyperCommand):
    """A command whose help has groups of options, in the order in which they are declared."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, options, groups of options, and examples."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name = getattr(parameter, "rich_help_panel", None) or "Options"
            if parameter.param_type_name == "argument":
                name = "Arguments"
            sections.setdefault(name, []).append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        path = ctx.command_path.split(maxsplit=1)[1:]
        examples = EXAMPLES.get(path[0], ()) if path else ()
        if examples:
            with formatter.section("Examples"):
                for example in examples:
                    formatter.write(f"  enginecast {example}\n")


class WorkOrder(TyperGroup):
    """Commands in the order of work: first look, then make, check and use."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, as `--help` and completion show them."""
        path = ctx.command_path.split()[1:]
        named = [name.split() for name in EXAMPLES]
        inner = [words for words in named if words[: len(path)] == path and words != path]
        wanted = [words[len(path)] for words in inner]
        return sorted(self.commands, key=wanted.index)
