"""The HTML page of a report, one static file."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from enginecast.runtime.bundle.manifest import Verdict
from enginecast.verification.metrics import times
from enginecast.verification.report.data import Drawing, PassCheck, PassDetails, Profile, Report
from enginecast.verification.report.drawing import draw_graph
from enginecast.verification.report.html import Child, Html, join, tag
from enginecast.verification.report.plan_picture import draw_plan
from enginecast.verification.report.shell import document
from enginecast.verification.report.strip import block_of, draw_strip
from enginecast.verification.report.tables import (
    ReportTable,
    fusions_table,
    modules_table,
    outputs_table,
    passes_table,
    plan_table,
    size,
    weights_table,
)
from enginecast.verification.verdict import verdict_line

ROWS = 600
"""Most rows of a table; the rest is in report.json."""
LONG, BEGINNING = 110, 72
"""Length from which on a cell is folded, and the number of characters shown."""
SMALL = 14
"""Most nodes of a drawing that fits a screen."""
LOG = "build.log has all of it"


def page_of(report: Report) -> str:
    """The whole page."""
    sections = [one for one in _sections(report) if one[1] is not None]
    links = [tag("a", heading, href=f"#{_anchor(heading)}") for heading, _ in sections]
    shown = [
        tag("section", tag("h2", heading, id=_anchor(heading)), body) for heading, body in sections
    ]
    return document(
        f"{report.model}: {report.verdict.outcome}",
        _head(report),
        tag("nav", *links),
        *shown,
    )


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-")


def _head(report: Report) -> Html:
    verdict = report.verdict
    line = verdict_line(verdict, report.floor_dtype)
    is_rejected = verdict.outcome == "rejected"
    reasons = verdict.reasons[1:] if is_rejected else verdict.reasons
    return tag(
        "header",
        tag("h1", report.model, tag("small", f"{report.precision} for {report.target}")),
        tag(
            "div",
            tag("b", line),
            tag("ul", *(tag("li", reason) for reason in reasons)) if reasons else None,
            class_="verdict rejected" if is_rejected else "verdict",
        ),
        tag("dl", *_facts(report), class_="facts"),
    )


def _facts(report: Report) -> Iterator[Html]:
    def fact(name: str, value: str, note: str = "") -> Html:
        return tag("div", tag("dt", name), tag("dd", value, tag("small", note) if note else None))

    ratios = [o.ratio for o in report.verdict.outputs]
    if ratios:
        worst = None if None in ratios else max(r for r in ratios if r is not None)
        text = "not finite" if worst is None else times(worst)
        note = "" if worst is None else f"of eager {report.floor_dtype}'s own"
        yield fact("error", text, note)
    if report.size:
        yield fact("engine", size(report.size), f"{report.nodes:,} nodes")
    if report.speed:
        speed, _, rest = report.speed.partition(" ")
        yield fact("speed", speed, rest.partition(":")[0])
    if report.plan is not None:
        done = sum(layer.choice != "keep" for layer in report.plan.layers)
        yield fact("quantized", f"{done} of {len(report.plan.layers)} layers", report.plan.format)
    if report.passes:
        rewritten = sum(check.rewritten for check in report.passes)
        yield fact("passes", f"{len(report.passes)}", f"{rewritten:,} places rewritten")
    where = report.verdict.where
    provider = where.provider.removesuffix("ExecutionProvider") or "no engine"
    yield fact("judged on", provider, where.device)


def _sections(report: Report) -> Iterator[tuple[str, Html | None]]:
    """Headings with their contents; None: nothing to show."""
    strip = draw_strip(report)
    yield "Error by module", None if strip is None else join((_about_strip(), strip))
    yield "Outputs", table_of(outputs_table(report.verdict.outputs, report.floor_dtype))
    yield "Quantization", _plan(report)
    yield "Graph", _first_drawing(report)
    yield "Passes", _passes(report)
    yield "Fusions", table_of(fusions_table(report.fusions))
    yield "Time by layer", None if report.profile is None else _profile(report.profile)
    yield "Range", _emulation(report)
    yield "Engine", _engine(report)
    yield "Steps", _steps(report.seconds, report.memory)
    yield "Notes", _list(report.notes)
    yield "Made with", _origin(report)


def _about_strip() -> Html:
    return tag(
        "p",
        "Relative L2 error of what leaves each module, in order of execution, on a logarithmic"
        " axis; the last state of the program first. Point at a bar for its module.",
        class_="quiet",
    )


def table_of(table: ReportTable) -> Html | None:
    """A table whose columns sort; None without rows."""
    if not table.rows:
        return None
    first, *others = table.columns
    rows = []
    for row in table.rows[:ROWS]:
        cells = [tag("td", tag("code", first.cell(row)))]
        for column in others:
            kinds = ["bad"] * column.is_bad(row) + ["wide"] * column.is_wide
            kind = " ".join(kinds) or None
            text = _folded(column.cell(row)) if column.is_wide else column.cell(row)
            cells.append(tag("td", text, class_=kind, data_value=column.value(row)))
        rows.append(tag("tr", *cells))
    head = tag("tr", *(tag("th", column.title, scope="col") for column in table.columns))
    left = len(table.rows) - ROWS
    return join(
        (
            scrolling(tag("table", tag("thead", head), tag("tbody", *rows))),
            tag("p", f"{left} more rows are in report.json", class_="quiet") if left > 0 else None,
        )
    )


def _folded(text: str) -> Child:
    """A cell that shows only the beginning of a long text, and unfolds."""
    if len(text) <= LONG:
        return text
    return tag("details", tag("summary", f"{text[:BEGINNING].rstrip()}…"), text)


def scrolling(child: Html) -> Html:
    """The element in a box that scrolls sideways."""
    return tag("div", child, class_="scroll", tabindex=0)


def _list(items: Sequence[str]) -> Html | None:
    return tag("ul", *(tag("li", item) for item in items)) if items else None


def _plan(report: Report) -> Html | None:
    plan = report.plan
    if plan is None:
        return None
    before, after = (
        sum(getattr(x, name) for x in plan.layers) for name in ("bytes_before", "bytes")
    )
    predicted = "not predicted" if plan.predicted_error is None else f"{plan.predicted_error:.2g}"
    about = (
        f"{plan.format} for {plan.arch}: weights take {size(after)} instead of {size(before)};"
        f" predicted error {predicted}, allowed {plan.max_error:.2g}."
    )
    return join((tag("p", about), draw_plan(plan), table_of(plan_table(plan.layers))))


def _first_drawing(report: Report) -> Html | None:
    """A drawing of the pass that fused the most ops, in one module."""
    drawn = [
        (check, drawing)
        for check in report.passes
        if check.details is not None
        for drawing in check.details.drawings[:1]
        if drawing.before and drawing.after
    ]
    if not drawn:
        return None
    check, drawing = max(drawn, key=lambda each: _telling(each[1]))
    others = [
        tag("a", one.name, href=f"#pass-{index}")
        for index, one in enumerate(report.passes)
        if one is not check and one.details is not None and one.details.drawings
    ]
    links = [join((", " if index else "", link)) for index, link in enumerate(others)]
    return join(
        (
            tag("p", "What ", tag("b", check.name), " makes of one module.", class_="quiet"),
            _drawing(drawing),
            tag("p", "Other passes: ", *links) if links else None,
        )
    )


def _telling(drawing: Drawing) -> tuple[bool, int]:
    """Sort key of drawings: those that fit a screen first, then those with the fewest remaining
    nodes.
    """
    nodes = max(len(drawing.before), len(drawing.after))
    return nodes <= SMALL, len(drawing.before) - len(drawing.after)


def _drawing(drawing: Drawing) -> Html:
    name = drawing.module or "the model itself"
    many = f", one of {drawing.similar} of its kind" if drawing.similar > 1 else ""
    left = f"; {drawing.left_out} more nodes are not drawn" if drawing.left_out else ""
    sides = [
        tag(
            "div",
            tag("h3", title),
            scrolling(draw_graph(nodes, f"{name} {title}")) if nodes else none,
        )
        for title, nodes in (("before", drawing.before), ("after", drawing.after))
        for none in (tag("p", "No node of it is left.", class_="quiet"),)
    ]
    keys = (("gone", "gone after"), ("new", "new"), ("edited", "reads or gives something else"))
    legend = [
        tag("span", tag("i", class_=f"key {kind}"), text, class_="entry") for kind, text in keys
    ]
    return tag(
        "div",
        tag("p", tag("code", name), f"{many}{left}"),
        tag("p", *legend, class_="legend"),
        tag("div", *sides, class_="sides"),
    )


def _passes(report: Report) -> Html | None:
    if not report.passes:
        return None
    table = table_of(passes_table(report.passes))
    shown = [_pass(index, check) for index, check in enumerate(report.passes)]
    pipeline = tag("p", "Pipeline ", tag("code", report.pipeline or "none"), class_="quiet")
    return join((pipeline, table, tag("h3", "Sites, IR and graph of each pass"), *shown))


def _pass(index: int, check: PassCheck) -> Html | None:
    details = check.details
    if details is None or not (details.sites or details.diff):
        return None
    count = f" {check.rewritten} rewritten, {check.left_alone} left alone"
    return tag(
        "details",
        tag("summary", tag("b", check.name), tag("span", count)),
        tag("p", check.failure, class_="bad") if check.failure else None,
        *_details(details),
        id=f"pass-{index}",
    )


def _details(details: PassDetails) -> Iterator[Child]:
    if details.sites:
        left = details.sites_left_out
        yield tag("h3", "Sites")
        for group in details.sites:
            what = group.reason or f"rewritten{f': {group.note}' if group.note else ''}"
            more = group.count - len(group.places)
            yield tag(
                "details",
                tag("summary", f"{group.count}x {what}"),
                tag("p", "\n".join(group.places), class_="mono", style="white-space:pre-line"),
                tag("p", f"and {more} more; {LOG}", class_="quiet") if more > 0 else None,
            )
        yield tag("p", f"{left} more sites; {LOG}", class_="quiet") if left else None
    if details.drawings:
        yield tag("h3", "Graph")
        for position, drawing in enumerate(details.drawings):
            title = tag("summary", tag("code", drawing.module or "the model itself"))
            yield tag("details", title, _drawing(drawing), open=position == 0)
        if details.drawings_left_out:
            text = f"{details.drawings_left_out} more kinds of modules are not drawn"
            yield tag("p", text, class_="quiet")
    if details.diff or details.diff_left_out:
        lines = [tag("span", line, class_=_kind_of(line)) for line in details.diff.splitlines()]
        left = details.diff_left_out
        rest = f"{left:,} more lines; `enginecast opt MODEL --pipeline SPEC --print-ir` prints all"
        yield tag(
            "details",
            tag("summary", "IR diff ", tag("span", f"{len(lines) + left:,} lines")),
            tag("pre", *lines, tabindex=0) if lines else None,
            tag("p", rest, class_="quiet") if left else None,
        )


def _kind_of(line: str) -> str | None:
    return {"+": "add", "-": "del", "@": "hunk"}.get(line[:1])


def _profile(profile: Profile) -> Html:
    """The profile by block and by op as bars, and in full as a table."""
    total = sum(layer.microseconds for layer in profile.layers) or 1.0
    blocks: dict[str, float] = {}
    ops: dict[str, tuple[int, float]] = {}
    for layer in profile.layers:
        block = block_of(layer.module) or "no module"
        blocks[block] = blocks.get(block, 0.0) + layer.microseconds
        count, spent = ops.get(layer.op, (0, 0.0))
        ops[layer.op] = count + layer.nodes, spent + layer.microseconds
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in profile.shapes.items())
    about = (
        f"{total / 1000:.2f} ms in {sum(count for count, _ in ops.values())} nodes on"
        f" {profile.provider}, median of {profile.runs} runs under the profiler: {shapes}."
    )
    by_op = sorted(ops.items(), key=lambda each: -each[1][1])
    widest = sorted(profile.layers, key=lambda layer: -layer.microseconds)
    return join(
        (
            tag("p", about),
            tag(
                "div",
                tag(
                    "div", tag("h3", "Block"), _bars([(n, t, "") for n, t in blocks.items()], total)
                ),
                tag("div", tag("h3", "Op"), _bars([(n, t, f"{c}x") for n, (c, t) in by_op], total)),
                class_="sides",
            ),
            tag(
                "details",
                tag("summary", f"Every module and op ({len(profile.layers)})"),
                _bars([(x.module or "no module", x.microseconds, x.op) for x in widest], total),
            ),
        )
    )


def _bars(rows: Sequence[tuple[str, float, str]], total: float) -> Html:
    """Names with their times, remarks and bars."""
    most = max((spent for _, spent, _ in rows), default=1.0) or 1.0
    cells = [
        tag(
            "tr",
            tag("td", tag("code", name)),
            tag("td", note) if any(note for *_, note in rows) else None,
            tag("td", f"{spent:,.0f}"),
            tag("td", f"{spent / total:.1%}"),
            tag(
                "td",
                tag("i", style=f"width:{100 * spent / most:.1f}%"),
                class_="bar",
                data_value=spent,
            ),
        )
        for name, spent, note in rows[:ROWS]
    ]
    titles = ["name", *(["of it"] if any(note for *_, note in rows) else []), "µs", "share", ""]
    head = tag("tr", *(tag("th", title, scope="col") for title in titles))
    return scrolling(tag("table", tag("thead", head), tag("tbody", *cells)))


def _emulation(report: Report) -> Html | None:
    found = report.emulation
    if found is None:
        return None
    weights = table_of(weights_table(found.weights))
    return join(
        (
            tag("p", f"In {report.precision} as {found.profile} computes: {found.about}."),
            tag("p", tag("b", found.summary)),
            table_of(modules_table(found.modules, "module")),
            tag("h3", "Weights that lose values") if weights is not None else None,
            weights,
        )
    )


def _engine(report: Report) -> Html | None:
    others = [_other(name, verdict) for name, verdict in report.others.items()]
    lines = _list(report.layers)
    if lines is None and not others:
        return None
    return join((lines, *others))


def _other(name: str, verdict: Verdict) -> Html:
    return tag(
        "p",
        tag("b", f"{name}: {verdict.outcome}"),
        *chain.from_iterable((" ", r) for r in verdict.reasons),
    )


def _steps(seconds: Mapping[str, float], memory: Mapping[str, int]) -> Html | None:
    if not seconds:
        return None
    most = max(seconds.values()) or 1.0
    rows = [
        tag(
            "tr",
            tag("td", step),
            tag("td", f"{spent:.2f}"),
            tag(
                "td",
                tag("i", style=f"width:{100 * spent / most:.1f}%"),
                class_="bar",
                data_value=spent,
            ),
            tag(
                "td",
                size(memory[step]) if memory.get(step) else "-",
                data_value=memory.get(step, 0),
            ),
        )
        for step, spent in seconds.items()
    ]
    titles = ("step", "seconds", "", "memory")
    head = tag("tr", *(tag("th", title, scope="col") for title in titles))
    return scrolling(tag("table", tag("thead", head), tag("tbody", *rows)))


def _origin(report: Report) -> Html:
    where = report.verdict.where
    found = dict(where.versions) | dict(report.origin.packages if report.origin else {})
    versions = ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
    facts: list[tuple[str, Child]] = []
    if report.origin is not None:
        made = report.origin
        command = (
            tag("code", made.command)
            if made.command
            else "none: made from Python, or as part of a pipeline"
        )
        facts += [("enginecast", made.enginecast), ("date", made.date), ("command", command)]
        facts += [("machine", f"Python {made.python} on {made.platform}")]
        facts += [
            (f"{name} of the model", tag("code", value)) for name, value in made.fingerprint.items()
        ]
    facts += [
        ("versions", versions or "none"),
        ("cases", ", ".join(report.verdict.cases) or "none"),
    ]
    if report.left_out:
        facts.append(("verified but not stored", ", ".join(report.left_out)))
    if report.speed:
        facts.append(("speed", report.speed))
    pairs = chain.from_iterable((tag("dt", name), tag("dd", value)) for name, value in facts)
    return tag("dl", *pairs, class_="made")
