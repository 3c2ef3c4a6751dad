"""docs/results/models.md is what the tests found, for every family."""

import json

from family_models import FAMILIES
from models_page import PAGE, ROWS, render

FOUND = json.loads(ROWS.read_text(encoding="utf-8"))


def test_the_page_is_what_the_results_render_to() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(FOUND), "run `make models`"


def test_every_family_has_its_row() -> None:
    assert list(FOUND) == [family.name for family in FAMILIES], "run `make models`"
    for family in FAMILIES:
        row = FOUND[family.name]
        assert row["class"] == family.model_class.__name__
        inputs = {name: tuple(sizes) for name, sizes in row["inputs"].items()}
        assert inputs == dict(family.inputs)
        assert row["weight"].endswith(family.weight)
        assert row["fp16"].startswith(family.half)
