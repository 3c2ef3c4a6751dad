"""Place a small graph in layers; values flow from top to bottom.

The method is Sugiyama's: layers by longest path, order by the mean place of the neighbors, edges
that cross layers bent around what stands there.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from enginecast.verification.report.data import GraphNode

CHARACTER, PADDING, GAP = 6.6, 10.0, 14.0
"""Width of a character of the font, room within a box, and between boxes."""
HEIGHT, STUB, BETWEEN = 38.0, 20.0, 24.0
"""Height of a box, of a value from elsewhere, and room between layers."""
LONGEST = 26
"""Characters of a line in a box."""
SWEEPS = 8


@dataclass(eq=False)
class Box:
    """A node, or a bend of an edge that crosses its layer."""

    width: float
    height: float
    node: GraphNode | None = None
    lines: tuple[str, str] = ("", "")
    layer: int = 0
    place: int = 0
    """In its layer, from the left."""
    x: float = 0.0
    """Of the middle."""
    y: float = 0.0
    above: list["Box"] = field(default_factory=list)
    below: list["Box"] = field(default_factory=list)

    @property
    def about(self) -> str:
        """All that is known of the node."""
        node = self.node
        assert node is not None
        place = f"{node.module or 'the model itself'} {node.source}"
        return "\n".join(
            [f"%{node.name}: {node.value}", place, *(f"reads {name}" for name in node.weights)]
        )


@dataclass(frozen=True)
class Graph:
    """A graph as SVG draws it."""

    boxes: Sequence[Box]
    edges: Sequence[str]
    """Paths."""
    view: str
    """The box in which all of it is."""
    width: str
    height: str


def in_layers(nodes: Sequence[GraphNode]) -> Graph:
    """Place the nodes, which stand in order of execution."""
    boxes = [_box(node) for node in nodes]
    edges = _in_layers(nodes, boxes)
    every = list(dict.fromkeys([*boxes, *(box for path in edges for box in path)]))
    layers: list[list[Box]] = [[] for _ in range(max((b.layer for b in every), default=-1) + 1)]
    for box in every:
        layers[box.layer].append(box)
    _order(layers)
    _place(layers)
    left = min((box.x - box.width / 2 for box in every), default=0.0) - 6
    width = max((box.x + box.width / 2 for box in every), default=0.0) + 6 - left
    height = max((box.y + box.height for box in every), default=0.0) + 18
    return Graph(
        boxes,
        [_path(edge) for edge in edges],
        f"{left:.0f} 0 {width:.0f} {height:.0f}",
        f"{width:.0f}",
        f"{height:.0f}",
    )


def _box(node: GraphNode) -> Box:
    if node.op == "input":
        lines = (f"%{node.name}", "")
    else:
        weights = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in node.weights))
        lines = (f"{node.op} · {weights}" if weights else node.op, node.value)
    one, two = (t if len(t) <= LONGEST else f"{t[: LONGEST - 1]}…" for t in lines)
    width = max(len(one), len(two)) * CHARACTER + 2 * PADDING
    return Box(width, STUB if node.op == "input" else HEIGHT, node, (one, two))


def _in_layers(nodes: Sequence[GraphNode], boxes: list[Box]) -> list[list[Box]]:
    """Give each box its layer; return the edges, each from its source to what reads it."""
    for node, box in zip(nodes, boxes, strict=True):
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
            bends = [Box(8.0, HEIGHT, layer=at) for at in range(boxes[each].layer + 1, box.layer)]
            path = [boxes[each], *bends, box]
            for upper, lower in itertools.pairwise(path):
                upper.below.append(lower)
                lower.above.append(upper)
            edges.append(path)
    return edges


def _order(layers: list[list[Box]]) -> None:
    """Sort each layer by the mean place of its neighbors, down and up again."""
    for layer in layers:
        _number(layer)
    for sweep in range(SWEEPS):
        is_down = sweep % 2 == 0
        for layer in layers if is_down else reversed(layers):
            means = {}
            for box in layer:
                near = box.above if is_down else box.below
                means[box] = sum(n.place for n in near) / len(near) if near else float(box.place)
            layer.sort(key=means.__getitem__)
            _number(layer)


def _number(layer: Sequence[Box]) -> None:
    for index, box in enumerate(layer):
        box.place = index


def _place(layers: list[list[Box]]) -> None:
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
            # Move boxes apart until none overlaps, half of it to each side.
            for _ in range(4):
                for one, other in itertools.pairwise(layer):
                    lacking = (one.width + other.width) / 2 + GAP - (other.x - one.x)
                    if lacking > 0:
                        one.x -= lacking / 2
                        other.x += lacking / 2
            for one, other in itertools.pairwise(layer):  # whatever is left
                other.x = max(other.x, one.x + (one.width + other.width) / 2 + GAP)


def _path(edge: Sequence[Box]) -> str:
    points = [(edge[0].x, edge[0].y + edge[0].height)]
    for bend in edge[1:-1]:
        points += [(bend.x, bend.y), (bend.x, bend.y + bend.height)]
    points.append((edge[-1].x, edge[-1].y))
    text = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        half = (y1 - y0) / 2
        text += f"C{x0:.1f} {y0 + half:.1f} {x1:.1f} {y1 - half:.1f} {x1:.1f} {y1:.1f}"
    return text
