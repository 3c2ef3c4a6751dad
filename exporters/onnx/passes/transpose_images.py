"""Write each step between tokens and an image that a convolution takes or gives as one transpose of
four dims.

    before:  %t = aten.transpose(%x, 1, 2)             after:  %r = aten.reshape(%x, [b, h, w, c])
             %i = aten.reshape(%t, [b, c, h, w])               %i = aten.permute(%r, [0, 3, 1, 2])
             %y = aten.conv2d(%i, ...)                         %y = aten.conv2d(%i, ...)
             %f = aten.flatten(%y, 2)                          %p = aten.permute(%y, [0, 2, 3, 1])
             %z = aten.transpose(%f, 1, 2)                     %z = aten.flatten(%p, 1, 2)

ONNX Runtime's convolutions on a CPU take images in blocks of channels, and it brings an image into
blocks and back: from channels first, or, where it finds one of these transposes beside it, from
channels last in the same step.

Left alone, with the reason: a transpose that something else reads as well.

Promises `reordered`: elements are moved, but a convolution of torch's adds in another order when
its input has other strides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from enginecast.passes.ir.base import GraphPass, PassContext, ProgramView, Promise, Site
from enginecast.passes.ir.edit import (
    arguments,
    aten,
    erase_dead,
    first_input,
    insert,
    same_shape,
    shape_of,
)
from enginecast.passes.ir.match import is_call
from enginecast.passes.ir.sites import SiteLog

_TO_IMAGE, _TO_TOKENS = [0, 3, 1, 2], [0, 2, 3, 1]
_RESHAPES = (aten.reshape.default, aten.view.default)


@dataclass(frozen=True)
class TransposeImages(GraphPass):
    """Merge a transpose of tokens and a reshape next to a convolution into one of the image."""

    name: ClassVar[str] = "transpose-images"
    promise: ClassVar[Promise] = "reordered"

    def run(self, program: ProgramView, context: PassContext) -> list[Site]:
        log = SiteLog(context)
        for node in list(program.graph.nodes):
            rewrite = _rewrite_of(node)
            if rewrite is None or log.skipped(node):
                continue
            first = first_input(node)
            if len(first.users) > 1:
                log.refused(node, f"{first.name} is read elsewhere as well")
                continue
            with program.graph.inserting_before(node):
                node.replace_all_uses_with(rewrite(program, node))
            log.done(node)
        erase_dead(program.graph)
        return log.sites


def _rewrite_of(node: Node) -> Callable[[ProgramView, Node], Node] | None:
    """What stands for the second of two steps; None where it is none."""
    if not node.args or not isinstance(node.args[0], Node):
        return None
    first = node.args[0]
    if _swaps(first) and any(is_call(user, aten.conv2d.default) for user in node.users):
        keeps = len(shape_of(first)) == 3 and _keeps_channels(first, node, 4)
        return _to_image if keeps else None
    if _swaps(node) and first.args and is_call(first.args[0], aten.conv2d.default):
        source = first_input(first)
        return _to_tokens if _keeps_channels(source, first, 3) else None
    return None


def _swaps(node: Node) -> bool:
    """Whether it swaps the last two of three dims."""
    if is_call(node, aten.transpose.int):
        dims = {dim % 3 for dim in arguments(node)[1:3]}
        return len(shape_of(node)) == 3 and dims == {1, 2}
    return is_call(node, aten.permute.default) and arguments(node)[1] == [0, 2, 1]


def _keeps_channels(source: Node, node: Node, rank: int) -> bool:
    """Whether a reshape leaves batch and channels as they are."""
    if not is_call(node, *_RESHAPES, aten.flatten.using_ints, aten.unflatten.int):
        return False
    found = shape_of(node)
    return len(found) == rank and same_shape(found[:2], shape_of(source)[:2])


def _to_image(program: ProgramView, node: Node) -> Node:
    graph, tokens = program.graph, first_input(first_input(node))
    if is_call(node, aten.unflatten.int):
        rows = insert(graph, node.target, (tokens, 1, node.args[2]), like=node)  # type: ignore[arg-type]
    else:
        batch, channels, height, width = arguments(node)[1]
        sizes = [batch, height, width, channels]
        rows = insert(graph, aten.reshape.default, (tokens, sizes), like=node)
    return insert(graph, aten.permute.default, (rows, _TO_IMAGE), like=node, replaces=True)


def _to_tokens(program: ProgramView, node: Node) -> Node:
    graph, reshape = program.graph, first_input(node)
    image = first_input(reshape)
    rows = insert(graph, aten.permute.default, (image, _TO_TOKENS), like=node)
    if is_call(reshape, aten.flatten.using_ints):
        return insert(graph, aten.flatten.using_ints, (rows, 1, 2), like=node)
    batch, channels, tokens = arguments(reshape)[1]
    sizes = [batch, tokens, channels]
    return insert(graph, aten.reshape.default, (rows, sizes), like=node)
