"""Faults: each campaign in full, in a child of its own; its counts are a row.

It ends with 1 where a fault did harm, or did not fire.
"""

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness

from faults.campaign import Campaign, Tally, require
from faults.campaigns import CAMPAIGNS
from faults.page import BEGIN, END, PAGE, STORE, table


@dataclass
class Row:
    """What a campaign counted."""

    name: str
    promise: str
    injected: int = 0
    fired: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """On the clock."""
    machine: str = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    python: str = platform.python_version()
    commit: str = ""


class Faults(harness.Campaign[Campaign, Row]):
    """A row for each campaign."""

    row, store, page, markers = Row, STORE, PAGE, (BEGIN, END)
    seconds = 3600
    jobs = 1
    """Races, loads and kills take their moments from the clock."""

    def items(self) -> Sequence[Campaign]:
        return [campaign for campaign in CAMPAIGNS if campaign.sizes.full]

    def labels(self, item: Campaign) -> tuple[str, ...]:
        return item.name.partition(",")[0], item.name

    def lacks(self, item: Campaign) -> str:
        return item.lacks()

    def examine(self, item: Campaign, folder: Path) -> Row:
        began, row = time.monotonic(), self.blank(item)
        place = folder / "place"
        place.mkdir()
        tally = item.run(item.sizes.full, place)
        row.injected, row.fired, row.defects = tally.injected, tally.fired, tally.defects
        row.outcomes = dict(tally.outcomes.most_common())
        row.seconds = round(time.monotonic() - began, 1)
        return row

    def blank(self, item: Campaign) -> Row:
        return Row(item.name, item.promise)

    def ended(self, row: Row, child: harness.Ended[Campaign]) -> None:
        row.commit = harness.commit()
        if child.status:
            row.defects.append(f"the campaign itself: {child.outcome}: {child.reason}")

    def said(self, row: Row) -> str:
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in row.outcomes.items())
        return f"{row.name}: {row.injected} injected: {outcomes} ({row.seconds} s)"

    def render(self, found: Mapping[str, Any]) -> str:
        return table(found)

    def finish(self, rows: Sequence[Row]) -> int:
        super().finish(rows)
        campaigns, wrong = {campaign.name: campaign for campaign in CAMPAIGNS}, 0
        for row in rows:
            tally = Tally(row.injected, row.fired, Counter(row.outcomes), row.defects)
            try:
                require(campaigns[row.name], tally, campaigns[row.name].sizes.full)
            except AssertionError as error:
                print(error)
                wrong = 1
        return wrong


CAMPAIGN = Faults()
