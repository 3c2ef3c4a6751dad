"""The command: run campaigns in full, and write their counts to docs/how-it-works/reliability.md.

    python campaigns/faults/run.py [--only "damaged files,kills"] [--quick]

`--only` takes the beginnings of names.  `--quick` runs as few as the tests do, and writes nothing.
It ends with 1 where a fault did harm, or did not fire.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / place) for place in ("campaigns", "tests/support", "tests/cache")]

from faults.campaign import Campaign, require
from faults.campaigns import CAMPAIGNS
from faults.page import read, write


def examine(campaign: Campaign, count: int) -> tuple[dict[str, Any], str]:
    """Run a campaign; its row, and what is wrong with it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tally = campaign.run(count, Path(folder))
    row = {
        "promise": campaign.promise,
        "injected": tally.injected,
        "fired": tally.fired,
        "outcomes": dict(tally.outcomes.most_common()),
        "defects": tally.defects,
        "seconds": round(time.monotonic() - began, 1),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "commit": _commit(),
    }
    try:
        require(campaign, tally, count)
    except AssertionError as error:
        return row, str(error)
    return row, ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    wanted = tuple(name for name in options.only.split(",") if name) or ("",)
    rows, wrong = read(), 0
    for campaign in CAMPAIGNS:
        if not campaign.name.startswith(wanted):
            continue
        if lacks := campaign.lacks():
            print(f"{campaign.name}: not run: {lacks}")
            continue
        count = campaign.sizes.quick if options.quick else campaign.sizes.full
        if not count:
            continue
        row, problem = examine(campaign, count)
        wrong += bool(problem)
        outcomes = ", ".join(f"{number} {outcome}" for outcome, number in row["outcomes"].items())
        print(f"{campaign.name}: {row['injected']} injected: {outcomes} ({row['seconds']} s)")
        if problem:
            print(problem)
        if not options.quick:
            rows[campaign.name] = row
            write({one.name: rows[one.name] for one in CAMPAIGNS if one.name in rows})
    return int(wrong > 0)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
