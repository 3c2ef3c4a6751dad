"""docs/results/control-flow.md is what was found, for every case that there is."""

import pytest
from flow.cases import cases
from flow.page import BEGIN, END, PAGE, TITLES, read, tables

FOUND = read()


def test_the_page_is_what_the_results_render_to() -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = page.partition(BEGIN)[2].partition(END)[0]
    assert found == f"\n{tables(FOUND)}", "run `make control-flow`"


@pytest.mark.parametrize("group", TITLES)
def test_every_case_has_its_row(group: str) -> None:
    names = [case.name for case in cases() if case.group == group]
    assert names
    assert sorted(FOUND["rows"][group]) == sorted(names), "run `make control-flow`"


def test_nothing_crashed_and_nothing_was_silently_wrong() -> None:
    ended = {
        f"{group}: {name}": row["outcome"]
        for group, rows in FOUND["rows"].items()
        for name, row in rows.items()
    }
    wrong = {name: how for name, how in ended.items() if how not in ("verified", "refused")}
    assert {n for n, how in wrong.items() if how != "rejected" or n.startswith("db")} == set()


@pytest.mark.parametrize("group", ["db", "fixtures"])
def test_every_refusal_names_a_line(group: str) -> None:
    rows = FOUND["rows"][group].items()
    refused = {name: row["place"] for name, row in rows if row["outcome"] == "refused"}
    assert refused
    places = {case.name: case.place() for case in cases() if case.group == group}
    for name, place in refused.items():
        assert place == (places[name] or place), name
        assert place.startswith("control_flow.py:" if group == "fixtures" else f"{name}.py:"), name
