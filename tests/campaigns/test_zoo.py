"""The whole zoo, and what is asked of it.  Takes an hour on two cores; `make zoo` is the same.

ZOO=bert,t5 limits it; ZOO=results judges the results that there are.
"""

import os
from pathlib import Path

import pytest
from harness import without_folders
from zoo.run import CAMPAIGN
from zoo.table import counts, merge, read, share_verified
from zoo.tiny import model_types

VERIFIED = 0.9


def test_rows_hold_no_folder_of_the_machine() -> None:
    note = "sequence is fixed at 16: this code (/home/me/.venv/lib/modeling_mamba.py:70) says so"
    assert without_folders(note).count("/") == 0
    assert "(modeling_mamba.py:70)" in without_folders(note)
    for row in read()["models"].values():
        assert [n for n in (row["reason"], *row["notes"]) if n != without_folders(n)] == []


@pytest.mark.slow
@pytest.mark.timeout(4 * 60 * 60)
def test_the_zoo(tmp_path: Path) -> None:
    chosen = os.environ.get("ZOO", "")
    if chosen == "results":
        models = read()["models"]
    else:
        types = chosen.split(",") if chosen else model_types()
        merge(CAMPAIGN.run(types, tmp_path / "work"), tmp_path / "results.json")
        models = read(tmp_path / "results.json")["models"]
    ended = counts(models)
    listed = {name: row["reason"] for name, row in models.items() if row["outcome"] != "verified"}
    assert ended["silently wrong"] == 0, listed
    assert ended["crashed"] == 0, listed
    assert share_verified(models) >= VERIFIED, listed
