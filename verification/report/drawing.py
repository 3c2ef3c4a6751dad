"""Draw a small graph in layers, as inline SVG; values flow from top to bottom.

The method is Sugiyama's: layers by longest path, order by the mean place of the neighbors, edges
that cross layers bent around what stands there.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from enginecast.verification.report.data import GraphNode
from enginecast.verification.report.html import Html, tag

CHARACTER, PADDING, GAP = 6.6, 10.0, 14.0
"""Width of a character of the font, room within a box, and between boxes."""
HEIGHT, STUB, BETWEEN = 38.0, 20.0, 24.0
"""Height of a box, of a value from elsewhere, and room between layers."""
LONGEST = 26
"""Characters of a line in a box."""
SWEEPS = 8


@dataclass(eq=False)
class _Box:
    """A node, or a bend of an edge that crosses its layer."""

    width: float
    height: float
    node: GraphNode | None = None
    layer: int = 0
    place: int = 0
    """In its layer, from the left."""
    x: float = 0.0
    """Of the middle."""
    y: float = 0.0
    above: list["_Box"] = field(default_factory=list)
    below: list["_Box"] = field(default_factory=list)


def draw_graph(nodes: Sequence[GraphNode], about: str) -> Html:
    """The drawing; its own size, which the page may scroll."""
    boxes = [_box(node) for node in nodes]
    edges = _in_layers(nodes, boxes)
    layers = _layers(boxes, edges)
    _order(layers)
    _place(layers)
    every = [box for layer in layers for box in layer]
    left = min((box.x - box.width / 2 for box in every), default=0.0) - 6
    width = max((box.x + box.width / 2 for box in every), default=0.0) + 6 - left
    height = max((box.y + box.height for box in every), default=0.0) + 18
    lines = [_edge(path) for path in edges]
    return tag(
        "svg",
        *lines,
        *(_drawn(box) for box in boxes),
        class_="graph",
        viewBox=f"{left:.0f} 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}",
        height=f"{height:.0f}",
        role="img",
        aria_label=about,
    )


def _lines(node: GraphNode) -> tuple[str, str]:
    if node.op == "input":
        return (_cut(f"%{node.name}"), "")
    weights = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in node.weights))
    return _cut(f"{node.op} · {weights}" if weights else node.op), _cut(node.value)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _box(node: GraphNode) -> _Box:
    longest = max(map(len, _lines(node)))
    width = longest * CHARACTER + 2 * PADDING
    return _Box(width, STUB if node.op == "input" else HEIGHT, node)


def _in_layers(nodes: Sequence[GraphNode], boxes: list[_Box]) -> list[list[_Box]]:
    """Give each box its layer; return the edges, each from its source to what reads it."""
    for node, box in zip(nodes, boxes, strict=True):  # nodes stand in order of execution
        box.layer = max((boxes[i].layer + 1 for i in node.inputs), default=0)
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for each in node.inputs:
            readers.setdefault(each, []).append(index)
    for index, node in reversed([*enumerate(nodes)]):  # beside what reads it, and not far above
        if not node.inputs and index in readers:
            boxes[index].layer = min(boxes[reader].layer for reader in readers[index]) - 1
    edges = []
    for node, box in zip(nodes, boxes, strict=True):
        for each in node.inputs:
            bends = [_Box(8.0, HEIGHT, layer=at) for at in range(boxes[each].layer + 1, box.layer)]
            path = [boxes[each], *bends, box]
            for upper, lower in itertools.pairwise(path):
                upper.below.append(lower)
                lower.above.append(upper)
            edges.append(path)
    return edges


def _layers(boxes: Sequence[_Box], edges: Sequence[Sequence[_Box]]) -> list[list[_Box]]:
    every = dict.fromkeys([*boxes, *(box for path in edges for box in path)])
    count = max((box.layer for box in every), default=-1) + 1
    layers: list[list[_Box]] = [[] for _ in range(count)]
    for box in every:
        layers[box.layer].append(box)
    return layers


def _order(layers: list[list[_Box]]) -> None:
    """Sort each layer by where its neighbors stand, down and up again."""
    for layer in layers:
        _number(layer)
    for sweep in range(SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            wanted = {box: _mean_place(box, is_down=is_down) for box in layer}
            layer.sort(key=wanted.__getitem__)
            _number(layer)


def _number(layer: Sequence[_Box]) -> None:
    for index, box in enumerate(layer):
        box.place = index


def _mean_place(box: _Box, *, is_down: bool) -> float:
    """Of what a box reads, or of what reads it; its own without any."""
    near = box.above if is_down else box.below
    return sum(each.place for each in near) / len(near) if near else float(box.place)


def _place(layers: list[list[_Box]]) -> None:
    y = 6.0
    for layer in layers:
        height = max(box.height for box in layer)
        x = 0.0
        for box in layer:
            box.x, box.y = x + box.width / 2, y + (height - box.height) / 2
            x += box.width + GAP
        for box in layer:
            box.x -= (x - GAP) / 2
        y += height + BETWEEN
    for sweep in range(SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            for box in layer:
                near = box.above if is_down else box.below
                if near:
                    box.x = sum(n.x for n in near) / len(near)
            _spread(layer)


def _spread(layer: Sequence[_Box]) -> None:
    """Move boxes apart until none overlaps, half of it to each side."""
    for _ in range(4):
        for one, other in itertools.pairwise(layer):
            lacking = (one.width + other.width) / 2 + GAP - (other.x - one.x)
            if lacking > 0:
                one.x -= lacking / 2
                other.x += lacking / 2
    for one, other in itertools.pairwise(layer):  # whatever is left
        other.x = max(other.x, one.x + (one.width + other.width) / 2 + GAP)


def _edge(path: Sequence[_Box]) -> Html:
    points = [(path[0].x, path[0].y + path[0].height)]
    for bend in path[1:-1]:
        points += [(bend.x, bend.y), (bend.x, bend.y + bend.height)]
    points.append((path[-1].x, path[-1].y))
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        half = (y1 - y0) / 2
        text += f"C{x0:.1f} {y0 + half:.1f} {x1:.1f} {y1 - half:.1f} {x1:.1f} {y1:.1f}"
    return tag("path", d=text)


def _drawn(box: _Box) -> Html:
    node = box.node
    assert node is not None
    first, second = _lines(node)
    about = [f"%{node.name}: {node.value}", f"{node.module or 'the model itself'} {node.source}"]
    about += [f"reads {name}" for name in node.weights]
    x, y = box.x - box.width / 2, box.y
    leaves = None
    if node.is_read_elsewhere:
        leaves = tag(
            "path", d=f"M{box.x:.1f} {y + box.height:.1f}v12m-4 -5l4 5l4 -5", class_="leaves"
        )
    texts = [tag("text", first, x=box.x, y=y + (16 if second else 14), class_="op")]
    if second:
        texts.append(tag("text", second, x=box.x, y=y + 31))
    return tag(
        "g",
        tag("title", "\n".join(about)),
        leaves,
        tag("rect", x=x, y=y, width=box.width, height=box.height, rx=5),
        *texts,
        class_="input" if node.op == "input" else node.state,
    )
