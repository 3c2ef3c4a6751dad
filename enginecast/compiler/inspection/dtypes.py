"""A model's dtypes: a census of the program, what its classes say of it, and notes in words."""

import ast
import inspect
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import PurePath
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from enginecast.passes.precision.census import MODEL, Census, Meeting, take_census
from enginecast.passes.precision.inf_clamps import MEANING

KEEPS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""What a class of transformers names as to be kept in float32 when it is loaded in float16; the
strict one counts for bfloat16, too."""
INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
"""The number of a layer in a module path."""
SHOWN = 3


@dataclass(frozen=True)
class Kept:
    """Modules that a model's class keeps in float32."""

    attribute: str
    """Class and attribute: "T5EncoderModel._keep_in_fp32_modules"."""
    pattern: str
    modules: tuple[str, ...]
    dtypes: tuple[str, ...]
    """What their weights are stored in."""


@dataclass(frozen=True)
class SourceClamp:
    """The clamps for fp16 alone in the code of a class."""

    owner: str
    """Name of the class."""
    sources: tuple[str, ...]
    """file:line of each condition."""
    modules: int
    """How many modules of that class the program has."""


@dataclass(frozen=True)
class Dtypes:
    """All that is said of a model's dtypes."""

    census: Census
    kept_in_fp32: tuple[Kept, ...]
    source_clamps: tuple[SourceClamp, ...]
    """Empty where the program has them itself."""
    notes: tuple[str, ...]


def dtypes_of(
    program: ExportedProgram,
    model_class: type[nn.Module] | None,
    fates: Mapping[str, str],
    autocast: Sequence[str] = (),
) -> Dtypes:
    """Take the census of a captured program, and read its classes where they are known.

    Args:
        fates: what becomes of the model's casts, by the name of their node.
        autocast: its regions of torch.autocast, as `Captured` has them.
    """
    census = take_census(program, fates)
    regions = (text.partition(" at ") for text in autocast)
    off = tuple(
        Meeting(f"torch.autocast to {dtype}", MODEL, line, 1, ("",), "off: --precision decides")
        for dtype, _, line in regions
    )
    census = replace(census, meetings=(*off, *census.meetings))
    kept = kept_modules(census, model_class)
    clamps = () if census.clamps else source_clamps(program)
    return Dtypes(census, kept, clamps, tuple(_notes(census, kept, clamps)))


def _notes(census: Census, kept: Sequence[Kept], clamps: Sequence[SourceClamp]) -> Iterator[str]:
    """Of weights stored in another float dtype than most, of what is kept in fp32, of clamps."""
    weights = [h for h in census.held if h.kind == "parameter" and h.dtype.startswith(("f", "bf"))]
    elements: Counter[str] = Counter()
    for held in weights:
        elements[held.dtype] += held.elements
    named = {module for each in kept for module in each.modules}
    ranked = [dtype for dtype, _ in elements.most_common()]
    for dtype in ranked[1:]:
        unnamed = [h.module for h in weights if h.dtype == dtype and h.module not in named]
        if unnamed:
            yield (
                f"{len(unnamed)} modules store {dtype} where most weights are {ranked[0]}, and no"
                f" attribute of the class says why: {some(unnamed)}"
            )
    for each in kept:
        low = "float16 or bfloat16" if each.attribute.endswith("strict") else "float16"
        stored = " and ".join(each.dtypes)
        yield (
            f"{each.attribute} names {each.pattern!r}: transformers keeps {some(each.modules)} in"
            f" float32 when it loads {low}; stored here as {stored}"
        )
    if census.clamps:
        places = ", ".join(dict.fromkeys(clamp.source for clamp in census.clamps))
        yield (
            f"{len(census.clamps)} inf-clamps at {places} were baked in because the model was"
            f" captured in fp16 ({some(clamp.module for clamp in census.clamps)}): {MEANING};"
            " unify-dtype drops them"
        )
    for clamp in clamps:
        yield (
            f"{clamp.owner} ({clamp.modules} modules) clamps values in fp16 alone, on the paths"
            f" that it takes of {', '.join(clamp.sources)}: eager fp16 does, this capture does not;"
            f" {MEANING}"
        )


def kept_modules(census: Census, model_class: type[nn.Module] | None) -> tuple[Kept, ...]:
    """Modules that the class keeps in float32, by a pattern in the names of weights."""
    found = []
    for attribute in KEEPS:
        for pattern in sorted(getattr(model_class, attribute, None) or ()):
            search = re.compile(re.escape(pattern).replace(r"\*", ".*")).search
            held = [h for h in census.held if h.kind == "parameter" and search(h.module)]
            if held and model_class is not None:
                modules = tuple(dict.fromkeys(h.module for h in held))
                dtypes = tuple(sorted({h.dtype for h in held}))
                found.append(Kept(f"{model_class.__name__}.{attribute}", pattern, modules, dtypes))
    return tuple(found)


def source_clamps(program: ExportedProgram) -> tuple[SourceClamp, ...]:
    """Clamps in a model's code that only run in fp16, so that a capture in another dtype has none.

        if hidden_states.dtype == torch.float16:
            ...
            hidden_states = torch.clamp(hidden_states, min=-clamp_value, max=clamp_value)

    They are found by reading the `forward` of each class that made the program, where Python has
    it. Which of the lines run for a given model is not decided, and a clamp that is written in
    another form is not found.
    """
    modules: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        for path, kind in (node.meta.get("nn_module_stack") or {}).values():
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            modules.setdefault(name, set()).add(str(path))
    return tuple(
        SourceClamp(name.rpartition(".")[2], places, len(paths))
        for name, paths in modules.items()
        if (places := tuple(_clamps_of(name)))
    )


def _clamps_of(class_name: str) -> Iterator[str]:
    """file:line of each condition on fp16 under which the class clamps."""
    module, _, name = class_name.rpartition(".")
    forward: Any = getattr(getattr(sys.modules.get(module), name, None), "forward", None)
    try:
        plain = inspect.unwrap(forward)
        lines, first = inspect.getsourcelines(plain)
        file = PurePath(inspect.getsourcefile(plain) or "").name
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (TypeError, OSError, SyntaxError):  # no Python source behind it
        return

    def names(nodes: Iterable[ast.AST], *wanted: str) -> bool:
        return any(isinstance(node, ast.Attribute) and node.attr in wanted for node in nodes)

    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    for node in sorted(branches, key=lambda branch: branch.lineno):
        inside = chain.from_iterable(map(ast.walk, node.body))
        calls = (each.func for each in inside if isinstance(each, ast.Call))
        if names(ast.walk(node.test), "float16") and names(calls, "clamp", "clamp_"):
            yield f"{file}:{first + node.lineno - 1}"


def some(modules: Iterable[str]) -> str:
    """Modules in words, layers of one kind as one."""
    patterns = list(dict.fromkeys(INDEX.sub("*", module) or "the model" for module in modules))
    more = f" and {len(patterns) - SHOWN} more" if len(patterns) > SHOWN else ""
    return ", ".join(patterns[:SHOWN]) + more
