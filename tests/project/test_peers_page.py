"""The table of peers in docs/results/speed.md is that of the measured results."""

import importlib.util
import json
from pathlib import Path

PAGE_SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers_page.py"


def test_the_page_shows_what_was_measured() -> None:
    spec = importlib.util.spec_from_file_location("peers_page", PAGE_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    for name in script.TABLES:
        assert "".join(script.shown(name)) in page
        result = json.loads((script.RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        assert all(row["rounds"] >= 15 for row in result["rows"].values())
