"""The HTML page of a comparison."""

from collections.abc import Sequence

from enginecast.verification.report.comparison import Comparison, Line, Side
from enginecast.verification.report.data import Report
from enginecast.verification.report.html import Html, join, tag
from enginecast.verification.report.page import scrolling
from enginecast.verification.report.shell import document
from enginecast.verification.report.strip import draw_strip

LONG = 44
"""Characters from which on a cell may break."""


def comparison_page_of(found: Comparison) -> str:
    """The whole page."""
    tables = [
        tag("section", tag("h2", heading), _table(lines, found))
        for heading, lines in found.groups.items()
    ]
    sides = (found.one, found.other)
    reports = [side.report for side in sides]
    strips = tag("div", *(_strip(side, reports) for side in sides), class_="sides")
    return document(
        f"{found.one.path} and {found.other.path}",
        tag("h1", f"{found.one.path} → {found.other.path}", tag("small", _about(found))),
        *(tag("p", line, class_="verdict note") for line in found.warnings),
        tag("div", *(_verdict(side, found) for side in sides), class_="sides"),
        tag("section", tag("h2", "Error by module"), strips),
        *tables,
    )


def _about(found: Comparison) -> str:
    one, other = found.one.report, found.other.report
    both = (f"{each.model} in {each.precision} for {each.target}" for each in (one, other))
    return "; ".join(both)


def _verdict(side: Side, found: Comparison) -> Html:
    line = next(line for line in found.groups["Engine"] if line.name == "verdict")
    text = line.one if side is found.one else line.other
    is_rejected = side.report.verdict.outcome == "rejected"
    return tag(
        "div",
        tag("h3", side.path),
        tag("p", text, class_="verdict rejected" if is_rejected else "verdict"),
    )


def _strip(side: Side, reports: Sequence[Report]) -> Html:
    strip = draw_strip(side.report, reports)
    shown = strip if strip is not None else tag("p", "No pass changed a value.", class_="quiet")
    return tag("div", tag("h3", side.path), shown)


def _table(lines: tuple[Line, ...], found: Comparison) -> Html:
    rows = [
        tag(
            "tr",
            tag("td", tag("code", line.name)),
            _cell(line.one, line.values[0]),
            _cell(line.other, line.values[1], is_bad=line.is_worse),
            tag("td", line.change or ("differs" if line.differs else "")),
        )
        for line in lines
    ]
    titles = ("", found.one.path, found.other.path, "change")
    head = tag("tr", *(tag("th", title or "what", scope="col") for title in titles))
    same = sum(not line.differs for line in lines)
    return join(
        (
            scrolling(tag("table", tag("thead", head), tag("tbody", *rows))),
            tag("p", f"{same} of {len(lines)} are equal", class_="quiet"),
        )
    )


def _cell(text: str, value: object, *, is_bad: bool = False) -> Html:
    kinds = ["bad"] * is_bad + ["wide"] * (len(text) > LONG)
    return tag("td", text, class_=" ".join(kinds) or None, data_value=_number(value))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
