"""The whole zoo, and what is asked of it.  Takes an hour on two cores; `make zoo` is the same.

ZOO=bert,t5 limits it; ZOO=results judges the results that there are.
"""

import os
from pathlib import Path

import pytest

from zoo.run import run
from zoo.table import RESULTS, counts, merge, read, share_verified
from zoo.tiny import model_types

VERIFIED = 0.9


@pytest.mark.slow
@pytest.mark.timeout(4 * 60 * 60)
def test_the_zoo(tmp_path: Path) -> None:
    chosen = os.environ.get("ZOO", "")
    if chosen == "results":
        models = read(RESULTS)["models"]
    else:
        types = chosen.split(",") if chosen else model_types()
        merge(run(types, tmp_path / "work"), tmp_path / "results.json")
        models = read(tmp_path / "results.json")["models"]
    ended = counts(models)
    listed = {name: row["reason"] for name, row in models.items() if row["outcome"] != "verified"}
    assert ended["silently wrong"] == 0, listed
    assert ended["crashed"] == 0, listed
    assert share_verified(models) >= VERIFIED, listed
