"""The page of passes, from the registry."""

import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from enginecast.passes.ir.options import describe, option_fields
from enginecast.passes.presets import CAPTURED, JUDGED, QUANTIZED, preset
from enginecast.passes.registry import known_passes, pass_class

PRECISIONS = ("fp32", "fp16", "bf16", "mixed", *QUANTIZED)
HEAD = """# Passes

A pipeline is text: `'unify-dtype{to=bf16 keep=lm_head},canonicalize,fuse-rms-norm'`. Quote it in a shell. The
manifest stores it; the same text makes the same engine again. [How it works](../how-it-works/passes.md) explains what each
pass rewrites, and when it does not.

A pass *promises* how much it may change numbers, and every run is checked against the promise: `exact` keeps
every bit of the outputs; `reordered` may change rounding; `precision` changes the compute dtype.

| pass | promise | what it does |
|---|---|---|
"""


def pass_page() -> str:
    """The page."""
    known = sorted(known_passes())
    lines = [
        f"| [`{name}`](#{name}) | {pass_class(name).promise} | {first(name)} |" for name in known
    ]
    lines += [
        "",
        "## Presets",
        "",
        "For ONNX Runtime on a CPU; other targets and devices have their own.",
        "",
    ]
    lines += ["| `--precision` | pipeline |", "|---|---|"]
    lines += [f"| `{name}` | `{preset(name)}` |" for name in PRECISIONS]
    lines += ["", f"Before it, every capture runs `{JUDGED},{CAPTURED}`, and more where needed."]
    for name in known:
        lines += section(name)
    return HEAD + "\n".join(lines) + "\n"


def first(name: str) -> str:
    """What it does, in a sentence."""
    paragraph = " ".join((pass_class(name).__doc__ or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0].replace("|", "\\|")


def section(name: str) -> Iterator[str]:
    """Order, options and defaults of a pass."""
    found: Any = pass_class(name)
    yield f"\n## {name}\n"
    yield first(name).replace("\\|", "|")
    if found.after:
        yield f"\nComes after {', '.join(f'`{one}`' for one in sorted(found.after))}.\n"
    defaults = {field.name: field.default for field in fields(found)}
    options = option_fields(found)
    if options:
        yield "\n| option | value | default |"
        yield "|---|---|---|"
        for option, (annotation, _) in options.items():
            value = describe(annotation).replace("|", "\\|")
            yield f"| `{option}` | `{value}` | `{defaults[option]!r}` |"
