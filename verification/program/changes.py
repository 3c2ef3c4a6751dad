"""Record what each pass changed in the program: its sites, the text diff, drawings.

A report shows these; they are capped here, so that a large model makes no large report.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.export import ExportedProgram
from torch.fx import Node

from enginecast.passes.ir.base import Pass, Site
from enginecast.passes.ir.pipeline import PassRun
from enginecast.passes.ir.source import module_path, source_line
from enginecast.passes.ir.text import diff_ir, print_ir
from enginecast.verification.report.data import Drawing, GraphNode, PassDetails, SiteGroup

GROUPS, PLACES = 40, 24
"""Most groups of sites of a pass, and most places listed for each."""
DIFF_LINES, LINE = 160, 240
"""Most lines of a diff, and most characters of a line."""
DRAWINGS, NODES = 2, 36
"""Most modules of a pass that are drawn, and nodes on each side."""
LARGEST = 12_000
"""Lines of a program above which no diff is made: it would take longer than the pass."""

_HEAD = re.compile(r"%(?P<name>\w+)(?:: (?P<value>.*?))? = ")
_WEIGHTS = ('= parameter "', '= buffer "', '= constant "', '= deferred "')


@dataclass(frozen=True)
class _Text:
    """A program as text, and the ops that may be drawn."""

    whole: str
    lines: Mapping[str, str]
    """Lines by node name, without those of nested graphs."""
    nodes: Mapping[str, "_Op"]

    @classmethod
    def of(cls, program: ExportedProgram) -> "_Text":
        whole = print_ir(program)
        heads = (
            (match["name"], line) for line in whole.splitlines() if (match := _HEAD.match(line))
        )
        return cls(whole, dict(heads), {node.name: _Op.of(node) for node in program.graph.nodes})


@dataclass(frozen=True)
class _Op:
    """A snapshot of a node, since later passes may change the node itself."""

    name: str
    kind: str
    op: str
    inputs: tuple[str, ...]
    users: tuple[str, ...]
    module: str
    source: str

    @classmethod
    def of(cls, node: Node) -> "_Op":
        return cls(
            node.name,
            node.op,
            _short(node),
            tuple(dict.fromkeys(each.name for each in node.all_input_nodes)),
            tuple(user.name for user in node.users if user.op != "output"),
            module_path(node),
            source_line(node),
        )


class Changes:
    """Records changes after every pass; pass it to `run_pipeline`.

    Args:
        program: the program before the first pass.
    """

    def __init__(self, program: ExportedProgram) -> None:
        self._before = _Text.of(program)
        self.found: list[PassDetails] = []

    def __call__(self, pass_: Pass, program: ExportedProgram, run: PassRun) -> None:
        """Record the changes of a pass."""
        before, after = self._before, _Text.of(program)
        details = details_of_sites(run.sites)
        if before.whole != after.whole:
            rest, drawings, left_out = after.whole.count("\n"), *_drawings(before, after)
            if max(before.whole.count("\n"), rest) <= LARGEST:
                lines = diff_ir(before.whole, after.whole).splitlines()[2:]
                shown = [f"{line[:LINE]}…" if len(line) > LINE else line for line in lines]
                details = replace(details, diff="\n".join(shown[:DIFF_LINES]))
                rest = max(0, len(lines) - DIFF_LINES)
            details = replace(
                details, diff_left_out=rest, drawings=drawings, drawings_left_out=left_out
            )
        self.found.append(details)
        self._before = after

    def fork(self) -> "Changes":
        """An independent copy that continues from here, without records."""
        other = Changes.__new__(Changes)
        other._before, other.found = self._before, []
        return other


def details_of_sites(sites: Sequence[Site]) -> PassDetails:
    """The sites of a pass, grouped by outcome, the most frequent first."""
    counts = Counter((site.reason, site.note) for site in sites)
    groups = []
    for (reason, note), count in counts.most_common(GROUPS):
        same = (site for site in sites if (site.reason, site.note) == (reason, note))
        places = dict.fromkeys(f"{site.module} {site.source}".strip() for site in same)
        groups.append(SiteGroup(reason, note, count, tuple(places)[:PLACES]))
    shown = sum(group.count for group in groups)
    return PassDetails(sites=tuple(groups), sites_left_out=len(sites) - shown)


def _drawings(before: _Text, after: _Text) -> tuple[tuple[Drawing, ...], int]:
    """Drawings of modules with ops that exist on one side only or differ, and how many kinds of
    them have none.
    """
    kinds: dict[str, dict[str, None]] = {}
    weight: Counter[str] = Counter()
    for one, other in ((before, after), (after, before)):
        for op in one.nodes.values():
            state = _state(op.name, one, other, "new")
            if op.kind == "call_function" and state != "same":
                kind = re.sub(r"\b\d+\b", "*", op.module)
                kinds.setdefault(kind, {})[op.module] = None
                weight[kind] += NODES if state == "new" else 1
    # The kind with the most ops that came or went says most of the pass; the model itself least.
    ranked = sorted(kinds, key=lambda kind: (kind == "", -weight[kind]))
    drawings = []
    for kind in ranked[:DRAWINGS]:
        module = next(iter(kinds[kind]))
        old, left = _drawn(before, after, module, "gone")
        new, more = _drawn(after, before, module, "new")
        drawings.append(Drawing(module, old, new, len(kinds[kind]), max(left, more)))
    return tuple(drawings), max(0, len(ranked) - DRAWINGS)


def _state(name: str, here: _Text, there: _Text, alone: str) -> str:
    if name not in there.lines:
        return alone
    return "same" if here.lines.get(name) == there.lines[name] else "edited"


def _drawn(here: _Text, there: _Text, module: str, alone: str) -> tuple[tuple[GraphNode, ...], int]:
    """The ops of a module with their inputs, and adjacent changed ops of other modules."""
    ops = [op for op in here.nodes.values() if op.kind == "call_function"]
    # An assertion computes no value.
    own = [
        op
        for op in ops
        if op.module == module and (op.users or _value(here.lines.get(op.name, "")))
    ]
    near = {name for op in own for name in (*op.inputs, *op.users)}
    beside = [
        op
        for op in ops
        if op.name in near
        and op.module != module
        and op.name in here.lines
        and op.name not in there.lines
    ]
    chosen = {op.name for op in (*own, *beside)}
    if len(chosen) > NODES:  # what changed, and what stands beside it
        changed = {name for name in chosen if _state(name, here, there, alone) != "same"}
        around = {
            n for name in changed for n in (*here.nodes[name].inputs, *here.nodes[name].users)
        }
        chosen &= changed | around
    kept = [name for name in here.nodes if name in chosen][:NODES]
    left_out = len({op.name for op in (*own, *beside)}) - len(kept)
    # Nodes for ops, after those for values that come from elsewhere.
    inside = set(kept)
    outside = dict.fromkeys(
        each
        for name in kept
        for each in here.nodes[name].inputs
        if each not in inside
        and not _is_weight(each, here)
        and _value(here.lines.get(each, "")) != "sym"
    )
    places = {name: index for index, name in enumerate((*outside, *kept))}
    made = []
    for name in places:
        op = here.nodes[name]
        drawn = GraphNode(
            name=name,
            op="input" if name in outside else op.op,
            value=_value(here.lines.get(name, "")),
            inputs=() if name in outside else tuple(places[n] for n in op.inputs if n in places),
            weights=tuple(here.lines[n].split('"')[1] for n in op.inputs if _is_weight(n, here)),
            module=op.module,
            source=op.source,
            state="same" if name in outside else _state(name, here, there, alone),  # type: ignore[arg-type]
            is_read_elsewhere=name in inside and not inside.issuperset(op.users),
        )
        made.append(drawn)
    return tuple(made), left_out


def _is_weight(name: str, text: _Text) -> bool:
    line = text.lines.get(name, "")
    return any(word in line for word in _WEIGHTS)


def _value(line: str) -> str:
    match = _HEAD.match(line)
    return (match["value"] or "") if match else ""


def _short(node: Node) -> str:
    """ "rms_norm" for aten.rms_norm.default."""
    if node.op != "call_function":
        return node.op
    target = node.target
    name = getattr(target, "_opname", None) or getattr(target, "__name__", str(target))
    return str(name)
