"""Which layers a plan keeps because somebody said so, or because it never pays: by exact name, then
by pattern, then by class, then by default.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.errors import PassError
from enginecast.passes.graph_edit import aten, weight_expressions
from enginecast.passes.match import CASTS, is_call
from enginecast.passes.plan_options import PlanOptions
from enginecast.passes.quantizable import Layer
from enginecast.passes.source import module_classes

_MOVES = frozenset(
    {
        *CASTS,
        aten.view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.flatten.using_ints,
        aten.select.int,
        aten.slice.Tensor,
        aten.clone.default,
        aten.contiguous.default,
    }
)
"""Ops that hand values on as they are."""
_SCALINGS = frozenset({aten.mul.Tensor, aten.div.Tensor, aten.sub.Tensor, aten.add.Tensor})
"""Ops that normalise an image before the first layer."""


def skip_reasons(
    program: ExportedProgram, layers: Sequence[Layer], options: PlanOptions
) -> dict[Node, str]:
    """Layer -> why it is kept; layers that may be quantised are not among them.

    Raises:
        PassError: a name, pattern or class that no layer has, named; or a pattern that is no
            regular expression.
    """
    _check_names(layers, options)
    patterns = _patterns(layers, options.skip_modules_pattern)
    _check_classes(layers, options.skip_modules_classes)
    weights = weight_expressions(program)
    found = {}
    for layer in layers:
        if layer.module in options.include_modules:
            continue
        reasons = (
            *_by_name(layer, options),
            *(f"skip_modules_pattern={p.pattern!r}" for p in patterns if p.search(layer.module)),
            *_by_class(layer, options),
            *_by_default(layer, options, weights),
        )
        if reasons:
            found[layer.node] = reasons[0]
    return found | _tied(layers, found)


def _by_name(layer: Layer, options: PlanOptions) -> Iterator[str]:
    if layer.module in options.skip_modules:
        yield f"skip_modules={layer.module!r}"


def _by_class(layer: Layer, options: PlanOptions) -> Iterator[str]:
    around = module_classes(layer.node)
    yield from (f"skip_modules_classes={n!r}" for n in options.skip_modules_classes if n in around)


def _by_default(layer: Layer, options: PlanOptions, weights: set[Node]) -> Iterator[str]:
    if layer.kind == "embedding" and options.format == "fp8":
        yield "an embedding: fp8 rounds its few bits away and saves no time; int8 stores it"
    if layer.kind != "embedding" and not options.heads and _reaches_output(layer.node):
        yield "a head: its error is the output's error (heads=true quantises it)"
    if layer.kind == "conv" and _reads_input(layer.node, weights):
        yield "the first convolution: it reads the input itself, and is small"


def _reaches_output(node: Node) -> bool:
    """Whether the value, moved about at most, is an output of the program."""
    return any(
        user.op == "output" or (is_call(user, *_MOVES) and _reaches_output(user))
        for user in node.users
    )


def _reads_input(node: Node, weights: set[Node]) -> bool:
    """Whether the first argument is an input of the program, cast or normalised at most."""
    source = node.args[0]
    while isinstance(source, Node) and is_call(source, *_MOVES, *_SCALINGS):
        others = [found for found in source.all_input_nodes if found not in weights]
        if len(others) != 1:
            return False
        source = others[0]
    return isinstance(source, Node) and source.op == "placeholder"


def _tied(layers: Sequence[Layer], kept: dict[Node, str]) -> dict[Node, str]:
    """Embeddings whose weight a kept layer reads as well: two copies are larger than one."""
    whole = {layer.weight: layer for layer in reversed(layers) if layer.node in kept}
    return {
        layer.node: f"shares its weight with {whole[layer.weight].module!r}, which is kept"
        for layer in layers
        if layer.kind == "embedding" and layer.node not in kept and layer.weight in whole
    }


def _check_names(layers: Sequence[Layer], options: PlanOptions) -> None:
    known = {layer.module for layer in layers}
    for field in ("skip_modules", "include_modules"):
        for name in getattr(options, field):
            if name not in known:
                raise _nothing(f"{field}={name!r}", "no layer has this name", name, known)


def _patterns(layers: Sequence[Layer], texts: Sequence[str]) -> list[re.Pattern[str]]:
    found = []
    for text in texts:
        try:
            pattern = re.compile(text)
        except re.error as error:
            message = f"skip_modules_pattern={text!r} is not a regular expression: {error}"
            raise PassError(message) from error
        _require_match(layers, f"skip_modules_pattern={text!r}", _searches(pattern))
        found.append(pattern)
    return found


def _searches(pattern: re.Pattern[str]) -> Callable[[Layer], bool]:
    return lambda layer: pattern.search(layer.module) is not None


def _require_match(layers: Sequence[Layer], what: str, fits: Callable[[Layer], bool]) -> None:
    if not any(map(fits, layers)):
        raise _nothing(what, "it matches no layer", "", {layer.module for layer in layers})


def _check_classes(layers: Sequence[Layer], names: Sequence[str]) -> None:
    known = {name for layer in layers for name in module_classes(layer.node)}
    for name in names:
        if name not in known:
            raise _nothing(f"skip_modules_classes={name!r}", "it is around no layer", name, known)


def _nothing(what: str, fault: str, name: str, known: set[str]) -> PassError:
    close = difflib.get_close_matches(name, known, n=3) or sorted(known)[:3]
    shown = ", ".join(map(repr, close)) or "the program has none"
    return PassError(f"{what}: {fault}", hint=f"There are {len(known)}, such as {shown}.")
